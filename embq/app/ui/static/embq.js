"use strict";
// Only what a page of embq is made of is inserted as HTML: no file, no picture, and not what a proxy says. Answers with
// an error status hold a message for people, so they are shown like any other.
document.addEventListener("htmx:beforeSwap", (event) => {
  const { xhr } = event.detail, isPage = xhr.getResponseHeader("X-Embq-Page") !== null;
  if (isPage && xhr.status < 400) return;
  if (!isPage) event.detail.serverResponse = `<div class="notice error" role="alert">No page of embq came, but an answer with status ${Number(xhr.status)}.</div>`;
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
