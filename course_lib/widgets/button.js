function render({ model, el }) {
  const button = document.createElement("button");
  button.dataset.lmSuppressShortcuts = "true";
  const show = () => {
    button.textContent = model.get("label");
    button.hidden = !model.get("label");
    // A button that is really disabled loses the focus, and a keyboard its place on the page.
    button.setAttribute("aria-disabled", !model.get("enabled"));
  };
  const look = () => {
    const answer = el.closest(".course-live")?.querySelector("[role=group][aria-label]");
    if (!model.get("enabled") || !answer) return;
    answer.scrollIntoView({ block: answer.offsetHeight > 0.7 * window.innerHeight ? "start" : "nearest" });
  };
  button.addEventListener("click", () => {
    if (!model.get("enabled")) return;
    model.set("enabled", false);
    model.set("clicks", model.get("clicks") + 1);
    model.save_changes();
  });
  for (const trait of ["label", "enabled"]) model.on(`change:${trait}`, show);
  model.on("change:enabled", look);
  show();
  el.classList.add("course-answer");
  el.append(button);
}
export default { render };
