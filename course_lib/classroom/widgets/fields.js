function render({ model, el }) {
  const group = document.createElement("fieldset");
  const said = document.createElement("p");
  said.setAttribute("role", "status");
  const lists = {};
  const show = () => {
    const focused = group.contains(document.activeElement) && document.activeElement.name;
    const legend = document.createElement("legend");
    legend.textContent = model.get("label");
    group.replaceChildren(legend, ...Object.entries(model.get("names")).map(([name, words]) => {
      const label = document.createElement("label");
      const text = document.createElement("span");
      const list = lists[name] = document.createElement("select");
      text.textContent = words;
      list.name = name;
      list.ariaLabel = words; // a label around a list would read all its options, too
      list.dataset.lmSuppressShortcuts = "true";
      list.append(...(model.get("texts")[name] ?? []).map(value => new Option(value, value)));
      list.addEventListener("change", () => {
        model.set("chosen", { ...model.get("chosen"), [name]: list.value });
        model.send({ chosen: model.get("chosen") });
      });
      label.append(text, list);
      return label;
    }), said);
    mark();
    if (focused) lists[focused].focus(); // a choice may bring other lists, and a keyboard keeps its place
  };
  const mark = () => {
    for (const [name, list] of Object.entries(lists)) {
      list.value = model.get("chosen")[name];
      list.disabled = model.get("disabled") || model.get("off").includes(name);
    }
    said.textContent = model.get("said");
  };
  for (const trait of ["label", "names", "texts"]) model.on(`change:${trait}`, show);
  for (const trait of ["chosen", "off", "said", "disabled"]) model.on(`change:${trait}`, mark);
  show();
  el.classList.add("course-answer", "course-fields");
  el.append(group);
}
export default { render };
