function render({ model, el }) {
  const label = document.createElement("label");
  const name = document.createElement("span");
  const box = document.createElement("input");
  const words = document.createElement("span");
  box.type = "checkbox";
  box.dataset.lmSuppressShortcuts = "true";
  const show = () => {
    name.textContent = model.get("label");
    words.textContent = model.get("text");
    box.checked = model.get("value");
  };
  box.addEventListener("change", () => {
    model.send({ moved: Date.now(), value: box.checked });
    model.set("value", box.checked);
    model.save_changes();
  });
  for (const trait of ["label", "text", "value"]) model.on(`change:${trait}`, show);
  show();
  label.append(name, box, words);
  el.classList.add("course-slider");
  el.append(label);
}
export default { render };
