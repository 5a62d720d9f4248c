function render({ model, el }) {
  const bar = document.createElement("progress");
  const text = document.createElement("span");
  const stop = document.createElement("button");
  let began = 0, timer = 0;
  stop.textContent = "Stop";
  stop.dataset.lmSuppressShortcuts = "true";

  const show = () => {
    const whole = model.get("seconds");
    const left = whole - (performance.now() - began) / 1000;
    const time = whole && left >= 0.5 ? `, about ${Math.round(left)} s left` : "";
    text.textContent = model.get("words") + time;
    bar.setAttribute("aria-label", text.textContent);
    if (whole && left > 0) bar.value = 1 - left / whole;
    else bar.removeAttribute("value");
  };
  const change = () => {
    const runs = model.get("words") !== "";
    clearInterval(timer);
    el.classList.toggle("course-runs", runs);
    // A button that is really disabled loses the focus, and a keyboard its place on the page.
    stop.setAttribute("aria-disabled", !runs);
    if (!runs) return void (text.textContent = "");
    began = performance.now();
    timer = setInterval(show, 500);
    show();
  };
  stop.addEventListener("click", async () => {
    if (stop.getAttribute("aria-disabled") === "true") return;
    // A kernel ignores an interrupt that comes while it is between two things, so one that was not heard is repeated.
    const run = began;
    setTimeout(() => began === run && el.isConnected && stop.click(), 5000);
    // Before the interrupt: it frees the kernel for the moves kept back meanwhile, which must find that this came later.
    model.set("stopped", Date.now());
    model.save_changes();
    await model.widget_manager?.kernel?.interrupt?.();
  });
  for (const trait of ["words", "seconds"]) model.on(`change:${trait}`, change);
  change();
  el.classList.add("course-running");
  el.append(bar, text, stop);
  return () => clearInterval(timer);
}
export default { render };
