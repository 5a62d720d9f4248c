function render({ model, el }) {
  const label = document.createElement("label");
  const box = document.createElement("textarea");
  box.rows = 6;
  box.dataset.lmSuppressShortcuts = "true";
  let timer = 0;
  const save = () => {
    clearTimeout(timer);
    timer = 0;
    if (box.value === model.get("value")) return;
    model.set("value", box.value);
    model.save_changes();
  };
  const show = () => {
    if (!timer) box.value = model.get("value");
    box.disabled = model.get("disabled");
  };
  box.addEventListener("input", () => { timer ||= setTimeout(save, 1000); });
  box.addEventListener("change", save);
  window.addEventListener("pagehide", save);
  for (const trait of ["value", "disabled"]) model.on(`change:${trait}`, show);
  show();
  label.textContent = model.get("label");
  label.append(box);
  el.classList.add("course-answer", "course-sentences");
  el.append(label);
  return () => {
    if (timer) save();
    window.removeEventListener("pagehide", save);
  };
}
export default { render };
