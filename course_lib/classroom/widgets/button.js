function render({ model, el }) {
  const button = document.createElement("button");
  let isNext = false; // a key was pressed while something else was being done
  let rests = false; // for a moment after what leads on to nothing: a second press was meant for that
  let leadsOn = false; // whether such a key counts: what the button stood for when it was pressed says so
  button.dataset.lmSuppressShortcuts = "true";
  const show = () => {
    button.textContent = model.get("label");
    button.hidden = !model.get("label");
    // A button that is really disabled loses the focus, and a keyboard its place on the page.
    button.setAttribute("aria-disabled", !model.get("enabled") || rests);
  };
  const look = () => {
    const answer = el.closest(".course-live")?.querySelector("[role=group][aria-label]");
    if (!model.get("enabled") || !answer) return;
    answer.scrollIntoView({ block: "nearest" });
    el.scrollIntoView({ block: "nearest" }); // the focus is seen in any case, and as much of the answer as there is room
  };
  const press = () => {
    leadsOn = model.get("leads_on");
    model.set("enabled", false);
    model.set("clicks", model.get("clicks") + 1);
    model.save_changes();
  };
  button.addEventListener("click", event => {
    if (model.get("enabled") && !rests) press();
    else isNext ||= leadsOn && event.detail === 0; // by a key: the mouse may have been clicked twice
  });
  button.addEventListener("keydown", event => event.repeat && event.preventDefault()); // a key that is held down
  model.on("change:label", show);
  model.on("change:enabled", () => {
    rests = model.get("enabled") && !leadsOn && !model.get("leads_on");
    if (rests) setTimeout(() => { rests = false; show(); }, 500);
    show();
    look();
    if (!model.get("enabled") || !isNext) return;
    isNext = false;
    press();
  });
  show();
  el.classList.add("course-answer");
  el.append(button);
}
export default { render };
