function render({ model, el }) {
  const list = document.createElement("ol");
  const said = document.createElement("p");
  const hint = document.createElement("p");
  const buttons = document.createElement("div");
  list.setAttribute("role", "listbox");
  said.setAttribute("aria-live", "assertive");
  said.className = "course-unseen";
  hint.textContent = "Drag an event with the mouse. With the keyboard: arrows choose, Alt and arrows move.";
  let current = 0;

  const rows = () => [...list.children];
  const select = (index, focus = true) => {
    current = Math.max(0, Math.min(index, rows().length - 1));
    rows().forEach((row, place) => {
      row.tabIndex = place === current ? 0 : -1;
      row.setAttribute("aria-selected", place === current);
    });
    if (focus) rows()[current].focus();
  };
  const move = (from, to, focus = true) => {
    if (model.get("disabled") || to < 0 || to >= rows().length || to === from) return;
    const order = [...model.get("order")];
    order.splice(to, 0, ...order.splice(from, 1));
    model.set("order", order);
    model.send({ order });
    select(to, focus);
    said.textContent = `${model.get("texts")[order[to]]}: now ${to + 1} of ${order.length}`;
  };
  const show = () => {
    const focused = list.contains(document.activeElement);
    list.setAttribute("aria-label", model.get("label"));
    list.setAttribute("aria-disabled", model.get("disabled"));
    list.replaceChildren(...model.get("order").map(name => {
      const row = document.createElement("li");
      row.setAttribute("role", "option");
      row.dataset.lmSuppressShortcuts = "true";
      row.textContent = model.get("texts")[name];
      return row;
    }));
    select(current, focused);
  };

  list.addEventListener("keydown", event => {
    const step = { ArrowUp: -1, ArrowDown: 1, Home: -current, End: rows().length - 1 - current }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    event.altKey ? move(current, current + step) : select(current + step);
  });
  list.addEventListener("pointerdown", event => {
    const index = rows().indexOf(event.target);
    if (index < 0) return;
    select(index);
    event.preventDefault();
    list.setPointerCapture(event.pointerId);
  });
  list.addEventListener("pointermove", event => {
    if (!list.hasPointerCapture(event.pointerId)) return;
    const over = rows().findIndex(row => {
      const box = row.getBoundingClientRect();
      return event.clientY >= box.top && event.clientY < box.bottom;
    });
    if (over >= 0) move(current, over);
  });
  for (const [name, step] of [["Move up", -1], ["Move down", 1]]) {
    const button = document.createElement("button");
    button.textContent = name;
    button.dataset.lmSuppressShortcuts = "true";
    button.addEventListener("click", () => move(current, current + step, false));
    buttons.append(button);
  }
  const lock = () => {
    show();
    for (const button of buttons.children) button.disabled = model.get("disabled");
  };
  for (const trait of ["label", "texts", "order"]) model.on(`change:${trait}`, show);
  model.on("change:disabled", lock);
  lock();
  el.classList.add("course-answer");
  el.append(list, buttons, hint, said);
}
export default { render };
