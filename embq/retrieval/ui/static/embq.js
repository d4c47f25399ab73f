"use strict";
// Only what a page of embq is made of is inserted as HTML: no file and no picture; of what a proxy says, its text. Answers
// with an error status hold a message for people, so they are shown like any other.
document.addEventListener("htmx:beforeSwap", (event) => {
  const { xhr } = event.detail, isPage = xhr.getResponseHeader("X-Embq-Page") !== null;
  if (isPage && xhr.status < 400) return;
  if (!isPage) {
    const notice = document.createElement("div"), said = new DOMParser().parseFromString(xhr.responseText, "text/html");
    notice.className = "notice error";
    notice.setAttribute("role", "alert");
    notice.textContent = `No page of embq, status ${xhr.status}${xhr.status < 400 ? "" : `: ${said.body.textContent.slice(0, 500)}`}`;
    event.detail.serverResponse = notice.outerHTML;
  }
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
