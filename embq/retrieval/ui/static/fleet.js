"use strict";
(() => {
  const HIDDEN_MS = 20000, LOST_MS = 6000, CHART_MS = 10000, MORE_MS = 50;
  let live = document.getElementById("live");
  let source = null, lostTimer = 0, hiddenTimer = 0;

  // --- the stream: closed while the page is hidden, because a browser has six connections for all of its tabs ---
  document.addEventListener("htmx:sseOpen", (event) => {
    source = event.detail.source;
    clearTimeout(lostTimer);
    lostTimer = 0;
    document.body.classList.remove("lost");
  });
  document.addEventListener("htmx:sseError", () => {
    lostTimer ||= setTimeout(() => document.body.classList.add("lost"), LOST_MS);
  });
  document.addEventListener("visibilitychange", () => {
    clearTimeout(hiddenTimer);
    if (document.hidden) {
      hiddenTimer = setTimeout(() => { source?.close(); source = null; }, HIDDEN_MS);
    } else if (source === null && live) {
      const again = live.cloneNode(true);
      live.replaceWith(again);
      live = again;
      htmx.process(again);
    }
  });

  const read = {};  // log -> the place to which its reader has scrolled
  document.addEventListener("htmx:beforeSwap", (event) => {
    for (const log of event.detail.target.querySelectorAll(".log")) read[log.id] = log.scrollTop;
  });
  document.addEventListener("htmx:afterSwap", (event) => {
    for (const log of (event.detail.target ?? event.target).querySelectorAll(".log")) log.scrollTop = read[log.id] ?? 0;
  });

  document.querySelector(".runs-form")?.addEventListener("change", (event) => event.currentTarget.requestSubmit());

  // --- the map of units ---
  document.addEventListener("mousemove", (event) => {
    const map = event.target.closest?.("svg.units");
    const said = document.querySelector(".legend .at");
    if (!said) return;
    if (!map) { if (said.textContent) said.textContent = ""; return; }
    const box = map.getBoundingClientRect(), { columns, bin, units } = map.dataset;
    const lines = map.viewBox.baseVal.height;
    const line = Math.min(lines - 1, Math.floor((event.clientY - box.top) / box.height * lines));
    const cell = line * columns + Math.min(columns - 1, Math.floor((event.clientX - box.left) / box.width * columns));
    const first = cell * bin, last = Math.min(units - 1, first + Number(bin) - 1);
    said.textContent = first >= units ? "" : first === last ? `unit ${first}` : `units ${first} to ${last}`;
  });

  // --- charts ---
  const charts = document.querySelector("[data-history]");
  const plots = {}, plain = { points: { show: false } };

  function colour(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }

  function options(box, series) {
    // One form of times for all pages, as `moment` of Python has it.
    const day = "{YYYY}-{MM}-{DD}", date = `\n${day}`, nothing = Array(5).fill(null);
    const within = (step, text) => [step, text, date, null, date, null, null, null, 1];
    const times = [[864e2, day, ...nothing, null, 1], within(60, "{HH}:{mm}"), within(1, "{HH}:{mm}:{ss}"), within(1e-3, "{HH}:{mm}:{ss}.{fff}")];
    const axis = { stroke: colour("--muted"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, font: "12px system-ui" };
    const number = new Intl.NumberFormat(undefined, { notation: "compact", maximumFractionDigits: 1 });
    return {
      width: box.clientWidth, height: 200, cursor: { points: { size: 6 } }, legend: { live: true },
      tzDate: (at) => uPlot.tzDate(new Date(at * 1e3), "UTC"),
      axes: [{ ...axis, values: times, space: 90 }, { ...axis, size: 52, values: (_, ticks) => ticks.map((one) => number.format(one)) }],
      scales: { y: { range: (_, low, high) => [0, Math.max(1, high * 1.05)] } },
      series: [{ label: "time", value: `${day} {HH}:{mm} UTC` }, ...series],
    };
  }

  function draw(name, columns, series) {
    const box = document.querySelector(`[data-chart=${name}]`);
    if (columns[0].length < 2 || !columns.slice(1).flat().some(Boolean)) return;
    box.parentElement.hidden = false;
    if (plots[name]) plots[name].setData(columns);
    else plots[name] = new uPlot(options(box, series), columns, box);
  }

  async function load() {
    if (document.hidden) return setTimeout(load, CHART_MS);
    let wait = CHART_MS;
    try {
      const answer = await fetch(charts.dataset.history);
      const found = await answer.json();
      if (answer.ok) {
        const { commits, rate } = found;
        draw("commits", [commits.at, commits.rows, commits.failures], [
          { label: "rows", stroke: colour("--done"), width: 2, ...plain }, { label: "failures", stroke: colour("--bad"), width: 1.5, ...plain },
        ]);
        draw("rate", [rate.at, rate.rows_per_s], [{ label: "rows/s", stroke: colour("--flight"), width: 1.5, ...plain }]);
        if (!found.complete) wait = MORE_MS;
      }
    } catch { /* the server is away: the stream says so */ }
    setTimeout(load, wait);
  }

  if (charts) {
    load();
    new ResizeObserver(() => {
      for (const [name, plot] of Object.entries(plots)) {
        plot.setSize({ width: document.querySelector(`[data-chart=${name}]`).clientWidth, height: 200 });
      }
    }).observe(charts);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      for (const name of Object.keys(plots)) { plots[name].destroy(); delete plots[name]; }
      load();
    });
  }
})();
