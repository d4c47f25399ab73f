"use strict";
(() => {
  const form = document.getElementById("query");
  const text = document.getElementById("q");

  const LOST = "The server of this page does not answer", REPEAT_MS = 2000;
  let repeat = 0;

  // No answer at all, as from a server that has ended: say so, and repeat the request until one comes.
  document.addEventListener("htmx:sendError", ({ detail: { elt } }) => {
    failed(LOST, `The search is repeated every ${REPEAT_MS / 1000} s until it does.`);
    clearTimeout(repeat);
    repeat = setTimeout(() => elt.isConnected && (elt === form ? form.requestSubmit() : elt.click()), REPEAT_MS);
  });
  document.addEventListener("htmx:beforeRequest", () => clearTimeout(repeat));
  document.addEventListener("htmx:beforeSwap", () => document.querySelector(".notice.error")?.remove());

  async function searchImage(file) {
    if (!file) return;
    if (!document.getElementById("file")) {
      return failed("The model of this index embeds no images", "Choose an index of images, or type a text.");
    }
    if (file.type && !file.type.startsWith("image/")) {
      return failed(`${file.name} is no image`, "Choose a JPEG, a PNG or another picture.");
    }
    const answer = await fetch("/ui/image", { method: "POST", body: file }).catch(() => null);
    if (!answer) return failed(LOST, "Start it again, and then choose the picture once more.");
    const said = await answer.json();
    if (!answer.ok) return failed(said.message, said.next);
    const index = document.getElementById("index");
    location.assign("/?" + new URLSearchParams({ ...(index && { index: index.value }), image: said.image }));
  }

  function failed(message, next) {
    const notice = document.createElement("div");
    notice.className = "notice error";
    notice.setAttribute("role", "alert");
    document.querySelector(".notice.error")?.remove();
    for (const [name, line] of [["h2", message], ["p", next]]) {
      notice.appendChild(document.createElement(name)).textContent = line;
    }
    document.getElementById("results").prepend(notice);
  }

  document.getElementById("file")?.addEventListener("change", (event) => searchImage(event.target.files[0]));
  document.addEventListener("paste", (event) => searchImage([...event.clipboardData.files][0]));
  for (const name of ["dragover", "dragleave", "drop"]) {
    document.addEventListener(name, (event) => {
      if (![...event.dataTransfer.types].includes("Files")) return;
      event.preventDefault();
      form.classList.toggle("drop", name === "dragover");
      if (name === "drop") searchImage(event.dataTransfer.files[0]);
    });
  }

  // A picture is loading, shown, busy (asked for again: a shard that failed slowly is not read for a minute) or gone.
  const RETRY_S = [1, 2, 4, 8, 16, 32, 64];
  const asking = new WeakSet();

  async function ask(image) {
    const place = image.parentElement, tries = Number(image.dataset.tries || 0);
    place.dataset.state ??= "loading";
    image.dataset.tries = tries + 1;
    const answer = await fetch(image.src).catch(() => null);
    const again = !answer || answer.ok || answer.status >= 500;
    if (again && tries < RETRY_S.length) {
      if (answer?.ok) {
        asking.delete(image);
        return void (image.src = image.src);
      }
      place.dataset.state = "busy";
      return void setTimeout(() => image.isConnected && ask(image), 1_000 * RETRY_S[tries]);
    }
    place.title = answer?.ok ? "the browser cannot draw it" : (await answer?.json().catch(() => null))?.message ?? "no answer";
    place.dataset.state = "gone";
  }

  function settle(image) {
    if (image.naturalWidth) return void (image.parentElement.dataset.state = "shown");
    if (!asking.has(image)) ask(image);
    asking.add(image);
  }

  for (const name of ["load", "error"]) {  // they do not bubble, so they are caught on their way down
    document.addEventListener(name, (event) => event.target.matches?.(".picture img") && settle(event.target), true);
  }
  for (const image of document.querySelectorAll(".picture img")) if (image.complete) settle(image);

  // The details of a row have an address: that of the results, and `row`.
  const dialog = document.getElementById("row");
  const rowOf = (address) => new URL(address).searchParams.get("row");
  const links = () => [...document.querySelectorAll("#results .details")];
  const at = () => links().findIndex((link) => rowOf(link.href) === rowOf(location.href));
  let searched = bare();

  function bare(row = "") {
    const address = new URL(location);
    address.searchParams.delete("row");
    if (row) address.searchParams.set("row", row);
    return address.pathname + address.search;
  }

  function opened() {
    if (!dialog.matches(":modal")) {
      dialog.removeAttribute("open");
      dialog.showModal();
    }
    const here = at(), last = links().length - 1;
    document.getElementById("previous").ariaDisabled = here <= 0;
    document.getElementById("next").ariaDisabled = here < 0 || here >= last;
  }

  async function follow() {
    if (!rowOf(location.href)) return dialog.close();
    await htmx.ajax("GET", location.href, { target: "#row", swap: "innerHTML" });
    if (!rowOf(location.href)) return;  // closed meanwhile
    dialog.scrollTop = 0;
    opened();
  }

  function step(move) {
    const link = at() >= 0 && links()[at() + move];
    if (!link) return;
    history.replaceState(history.state, "", bare(rowOf(link.href)));
    follow();
  }

  if (dialog.open) opened();
  dialog.addEventListener("close", () => {
    links()[at()]?.focus();
    if (!rowOf(location.href)) return;
    if (history.state?.row) history.back();
    else history.replaceState(null, "", bare());
  });
  document.addEventListener("htmx:pushedIntoHistory", () => { searched = bare(); });
  addEventListener("popstate", (event) => {
    event.stopImmediatePropagation();  // htmx would draw the whole page anew
    if (bare() === searched) follow();
    else location.reload();
  }, true);

  document.addEventListener("click", (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return;
    const link = event.target.closest(".details, #close, [data-step]");
    if (!link && !(event.target === dialog && event.offsetX < 0)) return;  // the backdrop is left of the dialog
    event.preventDefault();
    if (link?.dataset.step) return step(Number(link.dataset.step));
    if (!link?.matches(".details")) return dialog.close();
    history.pushState({ row: true }, "", bare(rowOf(link.href)));
    follow();
  });

  document.addEventListener("change", (event) => {
    if (event.target.id === "index") location.assign("/?" + new URLSearchParams({ index: event.target.value, q: text.value }));
    if (event.target.id !== "column") return;
    for (const option of document.querySelectorAll("#values option")) {
      option.disabled = option.dataset.column !== event.target.value;
    }
  });

  document.addEventListener("click", (event) => {
    for (const menu of document.querySelectorAll(".menu[open]")) if (!menu.contains(event.target)) menu.open = false;
  });

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const typing = event.target.matches("input, select, textarea");
    if (event.key === "Escape") {
      for (const menu of document.querySelectorAll(".menu[open]")) menu.open = false;
      if (typing) event.target.blur();
      return;
    }
    if (typing) return;
    const all = [...document.querySelectorAll(".result")].filter((one) => one.checkVisibility());
    const here = dialog.open ? dialog : document.activeElement.closest?.(".result");
    const link = here?.querySelector(`[data-key="${CSS.escape(event.key)}"]`);
    const move = { j: 1, ArrowRight: 1, k: -1, ArrowLeft: -1 }[event.key];
    if (move && dialog.open) {
      event.preventDefault();
      step(move);
    } else if (event.key === "/" && !dialog.open) {
      event.preventDefault();
      text.focus();
      text.select();
    } else if (move && all.length) {
      event.preventDefault();
      const at = here ? all.indexOf(here) + move : 0;
      all[Math.max(0, Math.min(all.length - 1, at))].focus();
    } else if (link && (event.key !== "Enter" || here === event.target)) {
      link.click();
    }
  });
})();
