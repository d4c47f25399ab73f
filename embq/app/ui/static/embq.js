"use strict";
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
