function render({ model, el }) {
  const label = document.createElement("label");
  const name = document.createElement("span");
  const slider = document.createElement("input");
  const output = document.createElement("output");
  slider.type = "range";
  // Else the arrow keys would also move the notebook's selected cell.
  slider.dataset.lmSuppressShortcuts = "true";
  const say = () => {
    const text = model.get("texts")[slider.value];
    slider.setAttribute("aria-valuetext", text);
    output.textContent = text;
  };
  const show = () => {
    name.textContent = model.get("label");
    slider.max = model.get("texts").length - 1;
    slider.value = model.get("index");
    say();
  };
  slider.addEventListener("input", say);
  slider.addEventListener("change", () => {
    model.send({ moved: Date.now(), index: Number(slider.value) });
    model.set("index", Number(slider.value));
    model.save_changes();
  });
  for (const trait of ["label", "texts", "index"]) model.on(`change:${trait}`, show);
  show();
  label.append(name, slider, output);
  el.classList.add("course-slider");
  el.append(label);
}
export default { render };
