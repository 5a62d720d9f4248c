function render({ model, el }) {
  const group = document.createElement("fieldset");
  const name = `options-${Math.random().toString(36).slice(2)}`;
  const show = () => {
    const legend = document.createElement("legend");
    legend.textContent = model.get("label");
    group.replaceChildren(legend, ...model.get("texts").map((text, index) => {
      const label = document.createElement("label");
      const input = document.createElement("input");
      const words = document.createElement("span");
      input.type = model.get("several") ? "checkbox" : "radio";
      input.name = name;
      input.value = index;
      input.dataset.lmSuppressShortcuts = "true";
      words.textContent = text;
      label.append(input, words);
      return label;
    }));
    mark();
  };
  const inputs = () => [...group.querySelectorAll("input")];
  const mark = () => {
    for (const input of inputs()) {
      input.checked = model.get("chosen").includes(Number(input.value));
      input.disabled = model.get("disabled");
    }
  };
  group.addEventListener("change", () => {
    model.set("chosen", inputs().filter(input => input.checked).map(input => Number(input.value)));
    model.send({ chosen: model.get("chosen") });
  });
  for (const trait of ["label", "texts"]) model.on(`change:${trait}`, show);
  for (const trait of ["chosen", "disabled"]) model.on(`change:${trait}`, mark);
  show();
  el.classList.add("course-answer");
  el.append(group);
}
export default { render };
