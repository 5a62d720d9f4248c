// Keys for whatever is touched or played in a cell, heard once for the page.

// A space opens what is folded in the selected cell; else it starts and stops what is played there, or opens what there
// is to play.
globalThis.coursePlays ??= document.addEventListener("keydown", event => {
  const cell = document.querySelector(".jp-mod-commandMode .jp-Cell.jp-mod-active");
  if (event.key !== " " || !cell || !event.target.contains(cell)) return;
  const folded = [...cell.querySelectorAll(".jp-Placeholder-content")];
  const buttons = [...cell.querySelectorAll(".course-player button, .course-answer button")];
  const button = buttons.findLast(button => ["Play", "Pause"].includes(button.textContent));
  if (!button && !folded.length) return;
  event.preventDefault();
  for (const one of folded.length ? folded : [button]) one.click();
}, true) ?? true;

// JupyterLab leaves all keys to what is marked as having keys of its own; but saving works everywhere.
globalThis.courseSaves ??= document.addEventListener("keydown", event => {
  const ours = event.target.closest?.(".course-live");
  if (!ours || event.target === ours || event.defaultPrevented) return;
  if (!(event.ctrlKey || event.metaKey) || event.key !== "s") return;
  event.preventDefault();
  ours.dispatchEvent(new KeyboardEvent("keydown", event));
}, true) ?? true;

// Escape leads from what is touched back to its cell, as it does from a cell's text.
globalThis.courseLeaves ??= document.addEventListener("keydown", event => {
  if (event.key === "Escape" && event.target.closest?.(".course-live")) event.target.closest(".jp-Cell")?.focus();
}) ?? true;
