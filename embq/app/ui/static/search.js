"use strict";
(() => {
  const form = document.getElementById("query");
  const text = document.getElementById("q");

  async function searchImage(file) {
    if (!file || !file.type.startsWith("image/")) return;
    const answer = await fetch("/ui/image", { method: "POST", body: file });
    const said = await answer.json();
    if (!answer.ok) return failed(said.message, said.next);
    const index = document.getElementById("index");
    location.assign("/?" + new URLSearchParams({ ...(index && { index: index.value }), image: said.image }));
  }

  function failed(message, next) {
    const notice = document.createElement("div");
    notice.className = "notice error";
    notice.setAttribute("role", "alert");
    for (const [name, line] of [["h2", message], ["p", next]]) {
      notice.appendChild(document.createElement(name)).textContent = line;
    }
    document.getElementById("results").prepend(notice);
  }

  document.getElementById("file").addEventListener("change", (event) => searchImage(event.target.files[0]));
  document.addEventListener("paste", (event) => searchImage([...event.clipboardData.files][0]));
  for (const name of ["dragover", "dragleave", "drop"]) {
    document.addEventListener(name, (event) => {
      if (![...event.dataTransfer.types].includes("Files")) return;
      event.preventDefault();
      form.classList.toggle("drop", name === "dragover");
      if (name === "drop") searchImage(event.dataTransfer.files[0]);
    });
  }

  // An image that cannot be had says so in its place; "error" does not bubble, so it is caught on its way down.
  document.addEventListener("error", (event) => {
    if (event.target.matches?.(".picture img")) event.target.parentElement.classList.add("none");
  }, true);

  document.addEventListener("change", (event) => {
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
    const all = [...document.querySelectorAll(".result")];
    const here = document.activeElement.closest?.(".result");
    const move = { j: 1, ArrowRight: 1, k: -1, ArrowLeft: -1 }[event.key];
    if (event.key === "/") {
      event.preventDefault();
      text.focus();
      text.select();
    } else if (move && all.length) {
      event.preventDefault();
      const at = here ? all.indexOf(here) + move : 0;
      all[Math.max(0, Math.min(all.length - 1, at))].focus();
    } else if (here && { m: 1, "+": 1, "-": 1 }[event.key]) {
      location.assign({ m: here.dataset.more, "+": here.dataset.like, "-": here.dataset.unlike }[event.key]);
    } else if (here === event.target && event.key === "Enter") {
      const details = here.querySelector(".more");
      details.open = !details.open;
    }
  });
})();
