"use strict";
(() => {
  const map = document.getElementById("map");
  const canvas = document.getElementById("points");
  const pen = canvas.getContext("2d");
  const tip = document.getElementById("tip");
  const selected = document.getElementById("ids");  // one id per line
  const { index, name, modality, thumbnails } = map.dataset;
  const NONE = 255, NEAR = 8, MOST_CORNERS = 400, HITS = 500, MOST_DISCS = 20_000;
  const RAMP = ["#46327e", "#3f5a9a", "#2f7d9b", "#229b8c", "#3fb56e", "#7ac550", "#b3c938", "#d9b528"];

  let ids, x, y, codes, legend = { kind: "category", entries: [] };
  let place = new Map();               // id -> number of the point
  let labels = [];                     // [x, y, text], the largest cluster first
  let view = { x: 0, y: 0, scale: 1 }; // centre, pixels per unit
  let home = view, near = 0;
  let chosen = null, hits = null;      // Set of ids
  let tool = "move", path = null, hover = -1, kept = -1, asked = 0;
  const rows = new Map();              // id -> metadata, of rows that were looked at

  // --- data ---

  async function fetched(path, options) {
    const answer = await fetch(path, options);
    if (answer.ok) return answer;
    const error = await answer.json().catch(() => ({ message: answer.statusText, next: "" }));
    throw new Error([error.message, error.next].filter(Boolean).join(": "));
  }

  async function framed(path) {
    const data = await (await fetched(path)).arrayBuffer();
    const length = new DataView(data).getUint32(0, true);
    return [JSON.parse(new TextDecoder().decode(new Uint8Array(data, 4, length))), data, 4 + length];
  }

  const address = (path, more = {}) => path + "?" + new URLSearchParams({ index, ...more });

  async function loadPoints() {
    const [{ points, labels: all }, data, at] = await framed(address("/map/points"));
    labels = all;
    ids = new Float64Array(data, at, points);
    x = new Float32Array(data, at + 8 * points, points);
    y = new Float32Array(data, at + 12 * points, points);
    place = new Map(Array.from(ids, (id, i) => [id, i]));
    codes = new Uint8Array(points).fill(NONE);
    mix();
    if (points < +map.dataset.rows) say(`${points.toLocaleString()} of the points are drawn; a selection is made among all.`);
  }

  async function loadColours() {
    const column = document.getElementById("column").value;
    const [head, data, at] = await framed(address("/map/colours", { column }));
    codes = new Uint8Array(data, at);
    legend = head;
    mix();
    showLegend(column);
    draw();
  }

  function say(text, bad = false) {
    const status = document.getElementById("status");
    status.textContent = text;
    status.classList.toggle("bad", bad);
  }

  const failed = (error) => say(error.message, true);

  // --- drawing ---

  const dark = matchMedia("(prefers-color-scheme: dark)");
  const style = (property) => getComputedStyle(document.documentElement).getPropertyValue(property).trim();

  function colour(code) {
    if (code >= legend.entries.length) return dark.matches ? "#5b6674" : "#aab3bd";
    if (legend.kind === "number") return RAMP[Math.round((code * 7) / Math.max(1, legend.entries.length - 1))];
    if (legend.entries[code].name === "other") return dark.matches ? "#7c8794" : "#8a949f";
    const light = (dark.matches ? 62 : 46) + [0, 8, -7][code % 3];
    return `hsl(${(212 + code * 137.5) % 360} ${code % 2 ? 58 : 68}% ${light}%)`;
  }

  let width = canvas.clientWidth, height = canvas.clientHeight, shades = [], inks = []; // of each code
  function mix() {
    shades = Array.from({ length: NONE + 1 }, (_, code) => colour(code));
    inks = shades.map(pixel);
  }
  const across = (value) => (value - view.x) * view.scale + width / 2;
  const down = (value) => height / 2 - (value - view.y) * view.scale;
  const back = (left, top) => [(left - width / 2) / view.scale + view.x, view.y - (top - height / 2) / view.scale];

  let waiting = false;
  function draw() {
    if (!waiting) requestAnimationFrame(() => { waiting = false; paint(); });
    waiting = true;
  }

  function paint() {
    const ratio = devicePixelRatio || 1, wide = Math.round(width * ratio), high = Math.round(height * ratio);
    if (canvas.width !== wide || canvas.height !== high) {
      canvas.width = wide;
      canvas.height = high;
    }
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    const zoom = Math.sqrt(view.scale / home.scale);
    const size = Math.min(9, Math.max(1.5, (160 / Math.sqrt(ids.length) + 1.2) * zoom));
    const isMarked = (i) => (chosen !== null && chosen.has(ids[i])) || (hits !== null && hits.has(ids[i]));
    // What is marked is drawn above the rest, which is faded then.
    const passes = chosen || hits ? [[true, (i) => !isMarked(i)], [false, isMarked]] : [[false, () => true]];
    if (ids.length > MOST_DISCS) paintPixels(passes, Math.round(size * ratio), ratio);
    else paintDiscs(passes, size / 2);
    for (const id of hits || []) if (place.has(id)) ring(place.get(id), size / 2 + 2, "--accent");
    if (hover >= 0) ring(hover, size / 2 + 3, "--ink");
    paintLabels();
    if (path) paintPath();
  }

  function paintDiscs(passes, radius) {
    const line = style("--line");
    pen.globalAlpha = 0.8;
    for (const [faded, belongs] of passes) {
      for (let i = 0; i < ids.length; i++) {
        if (!belongs(i)) continue;
        pen.fillStyle = faded ? line : shades[codes[i]];
        pen.beginPath();
        pen.arc(across(x[i]), down(y[i]), radius, 0, 7);
        pen.fill();
      }
    }
    pen.globalAlpha = 1;
  }

  // Squares of pixels: many times as fast as shapes where there are 200,000.
  function paintPixels(passes, side, ratio) {
    const { width: wide, height: high } = canvas, image = new ImageData(wide, high);
    const pixels = new Uint32Array(image.data.buffer), line = pixel(style("--line"));
    for (const [faded, belongs] of passes) {
      for (let i = 0; i < ids.length; i++) {
        const left = Math.round(across(x[i]) * ratio - side / 2), top = Math.round(down(y[i]) * ratio - side / 2);
        if (left < 0 || top < 0 || left + side > wide || top + side > high || !belongs(i)) continue;
        const ink = faded ? line : inks[codes[i]];
        for (let row = top; row < top + side; row++) pixels.fill(ink, row * wide + left, row * wide + left + side);
      }
    }
    pen.putImageData(image, 0, 0);
  }

  const dot = Object.assign(document.createElement("canvas"), { width: 1, height: 1 }).getContext("2d", { willReadFrequently: true });
  function pixel(shade) {
    dot.fillStyle = shade;
    dot.fillRect(0, 0, 1, 1);
    return new Uint32Array(dot.getImageData(0, 0, 1, 1).data.buffer)[0];
  }

  function ring(i, radius, property) {
    pen.strokeStyle = style(property);
    pen.lineWidth = 1.5;
    pen.beginPath();
    pen.arc(across(x[i]), down(y[i]), radius, 0, 7);
    pen.stroke();
  }

  function paintLabels() {
    const taken = [];
    pen.font = "600 12px system-ui, sans-serif";
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    pen.lineJoin = "round";
    for (const [atX, atY, text] of labels) {
      const half = pen.measureText(text).width / 2 + 4, top = down(atY);
      if (across(atX) < 0 || across(atX) > width || top < 0 || top > height) continue;
      const left = Math.max(half, Math.min(across(atX), width - half));  // whole, also beside an edge
      if (taken.some(([a, b, h]) => Math.abs(a - left) < h + half && Math.abs(b - top) < 18)) continue;
      taken.push([left, top, half]);
      pen.strokeStyle = style("--panel");
      pen.lineWidth = 4;
      pen.strokeText(text, left, top);
      pen.fillStyle = style("--ink");
      pen.fillText(text, left, top);
    }
  }

  function paintPath() {
    pen.strokeStyle = style("--accent");
    pen.lineWidth = 1.5;
    pen.beginPath();
    path.forEach(([left, top], i) => (i ? pen.lineTo(left, top) : pen.moveTo(left, top)));
    pen.closePath();
    pen.stroke();
    pen.globalAlpha = 0.12;
    pen.fillStyle = style("--accent");
    pen.fill();
    pen.globalAlpha = 1;
  }

  // --- view ---

  // The map without a few points on each side, beside which all others may be a dot.
  function whole(few = 0) {
    const some = (of) => { const sorted = Float32Array.from(of).sort(); return [sorted[few], sorted[sorted.length - 1 - few]]; };
    const [[left, right], [low, high]] = [some(x), some(y)];
    const scale = (few ? 0.75 : 0.92) * Math.min(width / (right - left || 1), height / (high - low || 1));
    home = { x: (left + right) / 2, y: (low + high) / 2, scale };
    view = { ...home };
    draw();
  }

  function zoom(factor, left = width / 2, top = height / 2) {
    const [atX, atY] = back(left, top);
    view.scale = Math.min(home.scale * 400, Math.max(home.scale / 4, view.scale * factor));
    const [newX, newY] = back(left, top);
    view.x += atX - newX;
    view.y += atY - newY;
    hideTip();
    draw();
  }

  function pan(left, top) {
    view.x -= left / view.scale;
    view.y += top / view.scale;
    draw();
  }

  // --- pointer and keys ---

  const pointers = new Map();
  const at = (event) => { const box = canvas.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
  const spread = () => { const [[a, b], [c, d]] = [...pointers.values()]; return Math.hypot(a - c, b - d); };

  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    pointers.set(event.pointerId, at(event));
    near = 0;
    path = pointers.size === 1 && (tool === "lasso" || event.shiftKey) ? [at(event)] : null;
  });

  canvas.addEventListener("pointermove", (event) => {
    const here = at(event), before = pointers.get(event.pointerId);
    if (!before) return look(here);
    const apart = pointers.size === 2 ? spread() : 0;
    pointers.set(event.pointerId, here);
    near += Math.hypot(here[0] - before[0], here[1] - before[1]);
    if (apart) zoom(spread() / (apart || 1), here[0], here[1]);
    else if (path) { path.push(here); draw(); }
    else if (near > 3) { hideTip(); pan(here[0] - before[0], here[1] - before[1]); }
  });

  canvas.addEventListener("pointerup", (event) => {
    pointers.delete(event.pointerId);
    if (near <= 3) keep(at(event));
    else if (path && path.length > 2) selectInside(path.map(([left, top]) => back(left, top)));
    path = null;
    draw();
  });
  canvas.addEventListener("pointercancel", (event) => { pointers.delete(event.pointerId); path = null; draw(); });
  canvas.addEventListener("pointerleave", () => { if (kept < 0) hideTip(); });
  canvas.addEventListener("wheel", (event) => { event.preventDefault(); zoom(Math.exp(-event.deltaY / 400), ...at(event)); }, { passive: false });

  const KEYS = {
    ArrowLeft: () => pan(60, 0), ArrowRight: () => pan(-60, 0), ArrowUp: () => pan(0, 60), ArrowDown: () => pan(0, -60),
    "+": () => zoom(1.4), "=": () => zoom(1.4), "-": () => zoom(1 / 1.4), 0: () => whole(), Escape: clear,
    Enter: () => selectInside([[0, 0], [width, 0], [width, height], [0, height]].map(([left, top]) => back(left, top))),
  };
  canvas.addEventListener("keydown", (event) => {
    if (!(event.key in KEYS)) return;
    event.preventDefault();
    KEYS[event.key]();
  });

  // --- one row ---

  function nearest([left, top]) {
    let best = -1, least = NEAR * NEAR;
    for (let i = 0; i < ids.length; i++) {
      const a = across(x[i]) - left, b = down(y[i]) - top, far = a * a + b * b;
      if (far < least) { least = far; best = i; }
    }
    return best;
  }

  function look(here) {
    if (kept >= 0 || !ids) return;
    const found = nearest(here);
    if (found === hover) return;
    hover = found;
    draw();
    tip.classList.add("gone");
    const turn = ++asked;
    if (found >= 0) setTimeout(() => { if (turn === asked) showTip(found); }, 60);
  }

  function keep(here) {
    kept = nearest(here);
    hover = kept;
    if (kept >= 0) showTip(kept); else hideTip();
  }

  function hideTip() {
    hover = kept = -1;
    asked++;
    tip.classList.add("gone");
    draw();
  }

  async function metadata(wanted) {
    const missing = wanted.filter((id) => !rows.has(id));
    if (missing.length) {
      const body = JSON.stringify({ ids: missing, indice_name: name, modality });
      for (const row of await (await fetched("/metadata", { method: "POST", body })).json()) rows.set(row.id, row.metadata);
      if (rows.size > 5_000) rows.clear();
    }
    return wanted.map((id) => rows.get(id) || {});
  }

  function element(tag, text, className = "") {
    const made = document.createElement(tag);
    made.textContent = text;
    made.className = className;
    return made;
  }

  const cut = (text, most) => (text.length > most ? text.slice(0, most) + "…" : text);

  async function showTip(i) {
    const id = ids[i], turn = asked;
    const [row] = await metadata([id]).catch(() => [{}]);
    if (turn !== asked || hover !== i) return;
    tip.replaceChildren();
    if (thumbnails) {
      const image = element("img", "");
      image.alt = "";
      image.onerror = () => image.remove();
      image.src = thumbnails + Number(id);
      tip.append(image);
    }
    if (row.caption) tip.append(element("p", cut(row.caption, 300)));
    tip.append(element("p", cut(String(row.key ?? id), 120), "muted"));
    if (codes[i] < legend.entries.length) tip.append(element("p", legend.entries[codes[i]].name, "muted"));
    if (kept === i) {
      const link = element("a", "More like this");
      link.href = "/?" + new URLSearchParams({ index, id });
      tip.append(link);
    }
    tip.classList.toggle("kept", kept === i);
    tip.classList.remove("gone");
    const left = across(x[i]), top = down(y[i]);
    tip.style.left = `${Math.max(4, Math.min(left + 12, width - tip.offsetWidth - 4))}px`;
    tip.style.top = `${top + tip.offsetHeight + 16 < height ? top + 12 : Math.max(4, top - tip.offsetHeight - 12)}px`;
  }

  // --- selection ---

  async function select(shape) {
    try {
      selected.textContent = await (await fetched(address("/map/select"), { method: "POST", body: JSON.stringify(shape) })).text();
      hits = null;
      say(selected.textContent ? "" : "No row lies in there.");
      showChosen();
    } catch (error) { failed(error); }
  }

  function selectInside(corners) {
    const every = Math.ceil(corners.length / MOST_CORNERS);
    return select({ polygon: corners.filter((_, i) => i % every === 0) });
  }

  let file = "";
  async function showChosen(results = null) {
    const found = selected.textContent.split("\n").filter(Boolean).map(Number);
    chosen = found.length ? new Set(found) : null;
    document.getElementById("chosen").classList.toggle("gone", !chosen);
    const count = `${found.length.toLocaleString()} ${results ? "hit" : "row"}${found.length === 1 ? "" : "s"}`;
    document.getElementById("count").textContent = count + (results ? "" : " selected");
    URL.revokeObjectURL(file);
    file = URL.createObjectURL(new Blob([selected.textContent], { type: "text/plain" }));
    document.getElementById("download").href = file;
    draw();
    const some = found.slice(0, 12), list = document.getElementById("examples");
    list.replaceChildren();
    const known = results ?? (await metadata(some).catch(() => [])).map((row, i) => ({ ...row, id: some[i], score: "" }));
    list.replaceChildren(...known.map(listed));
  }

  function listed({ id, key, caption, score }) {
    const item = document.createElement("li"), button = element("button", ""), i = place.get(id), drawn = i !== undefined;
    const title = drawn ? "Centre the map on it" : "Not among the points that are drawn";
    Object.assign(button, { type: "button", disabled: !drawn, title });
    button.append(element("bdi", cut(caption || "", 110)), element("bdi", cut(String(key ?? id), 60), "muted"));
    if (score !== "") button.prepend(element("span", score.toFixed(3), "good number"));
    button.addEventListener("click", () => {
      view = { x: x[i], y: y[i], scale: Math.max(view.scale, 2 * home.scale) };
      hideTip();
      showTip(hover = kept = i);
      canvas.scrollIntoView({ block: "nearest" });
    });
    item.append(button);
    return item;
  }

  function clear() {
    selected.textContent = "";
    hits = null;
    document.getElementById("q").value = "";
    say("");
    hideTip();
    showChosen();
  }

  function showLegend(column) {
    document.getElementById("legend").replaceChildren(...legend.entries.map((entry, code) => {
      const item = document.createElement("li"), button = element("button", "");
      button.type = "button";
      button.title = "Select these rows";
      const swatch = element("span", "", "swatch");
      swatch.style.background = shades[code];
      button.append(swatch, element("bdi", entry.name || "(empty)", "name"), element("span", entry.rows.toLocaleString(), "muted number"));
      button.addEventListener("click", () => select({ column, code }));
      item.append(button);
      return item;
    }));
  }

  // --- search ---

  async function find() {
    const text = document.getElementById("q").value.trim();
    hits = null;
    say(text ? "Searching…" : "");
    draw();
    if (!text) return;
    try {
      const body = JSON.stringify({ text, index: name, modality, k: Math.min(HITS, Math.max(10, Math.round(ids.length / 100))) });
      const { results } = await (await fetched("/search", { method: "POST", body })).json();
      hits = new Set(results.map((row) => row.id));
      say("");
      selected.textContent = results.map((row) => row.id + "\n").join("");
      await showChosen(results);
    } catch (error) { failed(error); }
    draw();
  }

  // --- controls ---

  const on = (id, event, act) => document.getElementById(id).addEventListener(event, act);
  function use(chosenTool) {
    tool = chosenTool;
    for (const one of ["move", "lasso"]) document.getElementById(one).setAttribute("aria-pressed", String(one === tool));
    canvas.classList.toggle("lasso", tool === "lasso");
  }
  on("move", "click", () => use("move"));
  on("lasso", "click", () => use("lasso"));
  on("in", "click", () => zoom(1.6));
  on("out", "click", () => zoom(1 / 1.6));
  on("all", "click", () => whole());
  on("clear", "click", clear);
  on("column", "change", () => loadColours().catch(failed));
  on("find", "submit", (event) => {
    event.preventDefault();
    history.replaceState(null, "", address("/map", { q: document.getElementById("q").value }));
    find();
  });
  dark.addEventListener("change", () => { mix(); showLegend(document.getElementById("column").value); draw(); });
  new ResizeObserver(() => {
    [width, height] = [canvas.clientWidth, canvas.clientHeight];
    if (ids) draw();
  }).observe(canvas);

  (async () => {
    await loadPoints();
    whole(ids.length >> 6);
    await loadColours();
    map.dataset.ready = "1";
    if (document.getElementById("q").value) find();
  })().catch(failed);
})();
