"use strict";
// Answers with an error status hold a message for people, so they are shown like any other, a proxy's too.
document.addEventListener("htmx:beforeSwap", (event) => {
  if (event.detail.xhr.status < 400) return;
  event.detail.shouldSwap = true;
  if (event.detail.target.id) event.detail.swapOverride = "innerHTML";
});

document.addEventListener("click", async (event) => {
  const button = event.target.closest("[data-copy]");
  if (!button) return;
  const label = button.textContent;
  try {
    await navigator.clipboard.writeText(document.getElementById(button.dataset.copy).textContent);
    button.textContent = "Copied";
  } catch {
    button.textContent = button.dataset.refused ?? "Select the text and copy it";
  }
  setTimeout(() => { button.textContent = label; }, 1500);
});
