// What moves over the still picture of a timeline. Everything is in the pixels of that picture: time is x.
//
//   places: left, width     where its time begins, and how long all of it is
//           length, unit    the same as it is said
//           rows, row       where each rank's row begins; heights of its bars and of its background lane
//           sheet, beside   how wide the picture is (added here), and the room for what ranks hold
//           bars, held

const RUN = 8000; // milliseconds that a run takes to play
const LONG_ENOUGH = 600; // milliseconds on each event where nothing may move
const NEAR = 0.5; // pixels between two events that are one to the eye
const EXACT = 1e-6; // two sums of the same pieces may differ by this
const BOX = 64; // pixels of the fullest rank's box

const COLOR = "#0072b2"; // of what moves and of what is held

const SVG = "http://www.w3.org/2000/svg";

function drawn(name, attributes = {}) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}

function made(name, properties = {}) {
  const element = Object.assign(document.createElement(name), properties);
  // On whatever has the focus, or JupyterLab would take keys for its own.
  element.dataset.lmSuppressShortcuts = "true";
  return element;
}

// Where something begins or ends, from the left; of what lies close together the last.
function events({ left, width, bars, says = [] }) {
  const all = [...bars.flatMap(bar => [bar.x, bar.x + bar.width]), ...says.map(([x]) => x)].sort((a, b) => a - b);
  const apart = all.filter((x, i) => i === all.length - 1 || all[i + 1] - x > NEAR);
  return [left, ...apart.filter(x => x > left + NEAR && x < left + width - NEAR), left + width];
}

function microBatches(bars) {
  return [...new Set(bars.map(bar => bar.microBatch).filter(one => one !== null))].sort((a, b) => a - b);
}

// What a rank does at x: of bars over each other the one that is seen.
function doing(bars, x) {
  const now = bars.filter(bar => bar.x <= x + EXACT && x + EXACT < bar.x + bar.width);
  return (now.find(bar => bar.kind === "wait") ?? now.at(-1))?.does ?? "nothing";
}

function holds(steps, x) {
  return Number((steps.findLast(([when]) => when <= x + EXACT)?.[1] ?? 0).toFixed(2));
}

function size(bytes) {
  const power = Math.min(4, Math.floor(Math.log10(Math.max(bytes, 1)) / 3));
  return `${Number((bytes / 1000 ** power).toPrecision(3))} ${["B", "kB", "MB", "GB", "TB"][power]}`;
}

function middle({ rows, row }, rank) {
  return rows[rank] + row.bar / 2;
}

// All that is handed on by micro-batches; without any, what the trace has.
function messagesAmong(bars) {
  const ways = microBatches(bars).flatMap(one => waysOf(one, bars));
  return ways.length ? ways : bars.filter(bar => bar.isMessage).map(bar => ({ ...bar, source: bar.peer, target: bar.rank }));
}

// From where each result of a micro-batch was computed and sent to where another rank needed it. Where several ranks
// have its stage (replicas, tensor ranks), it came from the one that is talked to.
function waysOf(microBatch, bars) {
  const next = { forward: 1, backward: -1 };
  const own = bars.filter(bar => bar.microBatch === microBatch && bar.stage !== null && next[bar.kind]);
  return own.flatMap(to => {
    const before = own.filter(one => one.kind === to.kind && one.stage === to.stage - next[to.kind]);
    const talksTo = rank => bars.some(bar => bar.rank === to.rank && bar.peer === rank);
    const from = before.filter(one => one.rank !== to.rank && (before.length === 1 || talksTo(one.rank)));
    return from.map(one => ({ source: one.rank, target: to.rank, x: one.x + one.width, width: to.x - one.x - one.width }));
  });
}

// Lines from rank to rank, from where something was sent to where it was needed.
function arrows(places) {
  const group = drawn("g", { stroke: "var(--jp-layout-color0, #fff)" });
  const arrow = ({ source, target, x, width }) => {
    const [from, to] = [middle(places, source), middle(places, target)];
    const path = { x1: x, y1: from, x2: x + width, y2: to };
    const turn = (Math.atan2(to - from, width) * 180) / Math.PI;
    return [
      drawn("line", { ...path, "stroke-width": 5 }),
      drawn("line", { ...path, stroke: "currentColor", "stroke-width": 2, class: "course-arrow" }),
      drawn("path", { d: "M1,0l-11,-6v12z", fill: "currentColor", transform: `translate(${x + width},${to}) rotate(${turn})` }),
    ];
  };
  return { group, point: chosen => group.replaceChildren(...chosen.flatMap(arrow)) };
}

// A line over the rows at the time that is shown.
function cursor({ rows, row }) {
  const ends = { y1: rows[0] - 3, y2: rows.at(-1) + row.bar + row.lane + 3 };
  const group = drawn("g");
  group.append(
    drawn("line", { ...ends, stroke: "var(--jp-layout-color0, #fff)", "stroke-width": 5 }),
    drawn("line", { ...ends, stroke: "currentColor", "stroke-width": 2, class: "course-cursor" }),
  );
  return { group, move: x => group.setAttribute("transform", `translate(${x},0)`) };
}

// What is on its way: a dot on the line from the sender's row to the receiver's.
function flights(places) {
  const messages = messagesAmong(places.bars);
  const group = drawn("g", { "font-size": 11, stroke: "var(--jp-layout-color0, #fff)" });
  const flight = (message, x) => {
    const [from, to] = [middle(places, message.source), middle(places, message.target)];
    const y = from + (to - from) * Math.min(1, (x - message.x) / message.width);
    const path = { x1: message.x, y1: from, x2: message.x + message.width, y2: to };
    const text = drawn("text", { x: x + 9, y: y + 4, fill: "currentColor", "stroke-width": 4, "paint-order": "stroke" });
    text.textContent = message.bytes ? size(message.bytes) : "";
    return [
      drawn("line", { ...path, "stroke-width": 5 }),
      drawn("line", { ...path, stroke: COLOR, "stroke-width": 2 }),
      drawn("circle", { cx: x, cy: y, r: 6, fill: COLOR, "stroke-width": 2, class: "course-message" }),
      text,
    ];
  };
  const isOnItsWay = (message, x) => message.x <= x + EXACT && x + EXACT < message.x + message.width;
  const move = x => {
    const now = messages.filter(message => isOnItsWay(message, x));
    group.replaceChildren(...now.flatMap(message => flight(message, x)));
  };
  return { group, move };
}

// A box for each rank beside its row, as full as it holds micro-batches.
function boxes({ held, rows, row, sheet }) {
  const group = drawn("g", { "font-size": 11, fill: "currentColor" });
  const most = Math.max(...held.flatMap(steps => steps.map(([, count]) => count)));
  if (!(most > 0)) return { group, move: () => {} };
  const heading = drawn("text", { x: sheet, y: rows[0] - 10, "font-weight": "bold" });
  heading.textContent = "micro-batches held";
  group.append(heading);
  const parts = held.map((steps, rank) => {
    const top = Math.max(...steps.map(([, count]) => count));
    const place = { x: sheet, y: rows[rank], height: row.bar };
    const full = drawn("rect", { ...place, fill: COLOR, class: "course-held" });
    const edge = drawn("rect", { ...place, width: (BOX * top) / most, fill: "none", stroke: "currentColor" });
    const text = drawn("text", { x: sheet + BOX + 6, y: rows[rank] + row.bar / 2 + 4 });
    group.append(full, edge, text);
    return { steps, full, text };
  });
  const move = x => {
    for (const { steps, full, text } of parts) {
      const count = holds(steps, x);
      full.setAttribute("width", (BOX * count) / most);
      text.textContent = count;
    }
  };
  return { group, move };
}

// A veil over the rows with holes where the bars of one micro-batch are.
function veil({ bars, left, width, rows, row }) {
  const group = drawn("g");
  const outline = ({ x, y, width, height }) => `M${x},${y}h${width}v${height}h${-width}z`;
  const whole = { x: left, y: rows[0] - 1, width, height: rows.at(-1) + row.bar + row.lane + 2 - rows[0] };
  const look = { fill: "var(--jp-layout-color0, #fff)", "fill-opacity": 0.8, "fill-rule": "evenodd", class: "course-veil" };
  const light = microBatch => {
    const lit = microBatch === null ? [] : bars.filter(bar => bar.microBatch === microBatch);
    const d = [whole, ...lit].map(outline).join("");
    group.replaceChildren(...(lit.length ? [drawn("path", { ...look, d })] : []));
  };
  return { group, light };
}

// What every rank does at x, in words. It is read aloud where nothing moves.
function words({ bars, rows, held, left, width, length, unit, says = [] }) {
  const line = made("p", { className: "course-doing" });
  line.setAttribute("aria-atomic", "true");
  const ofRank = rows.map((_, rank) => bars.filter(bar => bar.rank === rank && !bar.isBackground));
  const when = x => `${Number(((length * (x - left)) / (width || 1)).toPrecision(3))} ${unit}`;
  const part = (name, textContent) => Object.assign(document.createElement(name), { textContent });
  const say = (x, isPlaying) => {
    line.setAttribute("aria-live", isPlaying ? "off" : "polite");
    const ranks = ofRank.map((bars, rank) => {
      const count = holds(held[rank], x);
      const holding = held[rank].length > 1 ? ` (holds ${count})` : "";
      return part("span", `rank ${rank}: ${doing(bars, x)}${holding}. `);
    });
    const now = says.findLast(([start]) => start <= x + EXACT)?.[1] ?? "";
    line.replaceChildren(part("b", `At ${when(x)}: `), ...(says.length ? [part("span", now)] : ranks));
  };
  return { line, say, when };
}

// Where the mouse is in the picture, which may be drawn smaller than it is.
function under(event, svg) {
  return new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
}

// What follows the time in the pictures around: data-when says in which shares of it something is seen, data-fly how
// many pixels it goes right and down meanwhile.
function followers({ left, width }, el) {
  const all = () => [...(el.closest(".course-live") ?? el).querySelectorAll("[data-when]")];
  const look = (part, now) => {
    const times = part.dataset.when.split(" ").map(Number);
    const at = times.findIndex((when, i) => i % 2 === 0 && when <= now + EXACT && now + EXACT < times[i + 1]);
    const isOn = at >= 0;
    part.classList.toggle("course-on", isOn);
    part.classList.toggle("course-off", !isOn);
    if (!isOn || !part.dataset.fly) return;
    const share = (now - times[at]) / (times[at + 1] - times[at]);
    part.setAttribute("transform", `translate(${part.dataset.fly.split(" ").map(pixels => pixels * share)})`);
  };
  const move = x => all().forEach(part => look(part, (x - left) / (width || 1)));
  const rest = () => all().forEach(part => part.classList.remove("course-on", "course-off"));
  return { move, rest };
}

// A choice of what to light up.
function menu(entries) {
  const label = document.createElement("label");
  const select = made("select");
  const option = ([textContent, value]) => Object.assign(document.createElement("option"), { textContent, value });
  select.append(...[["nothing", ""], ...entries].map(option));
  label.append("Light up ", select);
  label.hidden = select.length === 1;
  return { label, select };
}

// What to light up in a timeline, by its name or by the mouse: a micro-batch with its arrows, a message, or all messages.
function chooser({ bars, follow }, svg, light, point) {
  const messages = messagesAmong(bars);
  const names = microBatches(bars).map(name => [`micro-batch ${name}`, name]);
  const { label, select } = menu([...names, ...(messages.length ? [["all messages", "messages"]] : [])]);
  select.value = follow ?? "";
  const show = (microBatch, some) => {
    light(microBatch);
    point(microBatch === null ? some : waysOf(microBatch, bars));
  };
  const showChosen = () => {
    const name = select.value;
    Number.isNaN(parseInt(name)) ? show(null, name ? messages : []) : show(Number(name));
  };
  select.addEventListener("change", showChosen);
  svg.addEventListener("pointermove", event => {
    const { x, y } = under(event, svg);
    const isThere = bar => bar.x <= x && x < bar.x + bar.width && bar.y <= y && y < bar.y + bar.height;
    const received = bar => messages.filter(message => message.target === bar.rank && Math.abs(message.x - bar.x) < NEAR);
    const bar = bars.findLast(bar => isThere(bar) && (bar.microBatch !== null || received(bar).length));
    bar ? show(bar.microBatch, received(bar)) : showChosen();
  });
  svg.addEventListener("pointerleave", showChosen);
  showChosen();
  return label;
}

// What to light up in a picture without rows, by its name or by a click on it, while other things fade.
function picker({ lights = [] }, svg) {
  const { label, select } = menu(svg ? lights.map(name => [name, name]) : []);
  const show = () => {
    for (const part of svg.querySelectorAll("[data-light]")) {
      part.setAttribute("visibility", part.dataset.light === select.value ? "visible" : "hidden");
    }
    svg.classList.toggle("course-chosen", select.value !== "");
  };
  select.addEventListener("change", show);
  svg?.addEventListener("click", event => {
    const name = event.target.closest("[data-name]")?.dataset.name ?? "";
    select.value = name === select.value ? "" : name;
    show();
  });
  return label;
}

// Moves x to the right: evenly, or where nothing may move from event to event.
function clock(places, marks, seek) {
  const still = matchMedia("(prefers-reduced-motion: reduce)");
  const end = places.left + places.width;
  let timer = 0, frame = 0, isPlaying = false;
  const halt = () => {
    isPlaying = false;
    clearInterval(timer);
    cancelAnimationFrame(frame);
  };
  const advance = x => {
    if (x >= end - EXACT) halt();
    seek(Math.min(x, end));
  };
  const glide = (x, before) => {
    frame = requestAnimationFrame(now => {
      const next = x + (places.width * (now - before)) / RUN;
      advance(next);
      if (isPlaying) glide(next, now);
    });
  };
  const jump = x => {
    let place = marks.findIndex(mark => mark > x + EXACT);
    timer = setInterval(() => advance(marks[place++]), Math.max(LONG_ENOUGH, RUN / marks.length));
  };
  const start = x => {
    isPlaying = true;
    const from = x >= end - EXACT ? places.left : x;
    seek(from);
    still.matches ? jump(from) : glide(from, performance.now());
  };
  return { start, halt, isPlaying: () => isPlaying };
}

const layers = [veil, arrows, cursor, flights, boxes];

function render({ model, el }) {
  const picture = document.createElement("div");
  picture.innerHTML = model.get("picture");
  const svg = picture.querySelector("svg");
  const places = { ...model.get("places"), sheet: Number(svg?.getAttribute("width")) };
  const marks = events(places);
  const end = places.left + places.width;
  let x = places.left;

  const over = drawn("g", { class: "course-over" });
  const around = followers(places, el);
  const [shade, way, line, sent, full] = places.rows.length ? layers.map(part => part(places)) : [];
  const moving = [line, sent, full, around].filter(Boolean);
  if (full?.group.childElementCount) {
    const width = places.sheet + places.beside;
    svg.setAttribute("viewBox", `0 0 ${width} ${svg.getAttribute("height")}`);
    svg.style.width = `calc(${width} * var(--course-pixel))`;
  }
  if (line) over.append(...[shade, way, line, sent, full].map(layer => layer.group));
  svg?.append(over);

  const text = words(places);
  const button = made("button", { textContent: "Play" });
  const slider = made("input", { type: "range", min: places.left, max: end, step: "any" });
  slider.setAttribute("aria-label", "Time");
  const show = () => {
    button.textContent = time.isPlaying() ? "Pause" : "Play";
    slider.value = x;
    slider.setAttribute("aria-valuetext", text.when(x));
    for (const part of moving) part.move(x);
    text.say(x, time.isPlaying());
  };
  const seek = to => {
    x = to;
    show();
  };
  const time = clock(places, marks, seek);
  let begins = 0;
  const toggle = () => {
    cancelAnimationFrame(begins);
    if (!time.isPlaying()) return time.start(x);
    time.halt();
    show();
  };
  const go = to => {
    cancelAnimationFrame(begins); // a key was faster
    time.halt();
    seek(to);
  };
  const later = () => marks.find(mark => mark > x + EXACT) ?? end;
  const earlier = () => marks.findLast(mark => mark < x - EXACT) ?? places.left;
  const keys = {
    " ": toggle,
    ArrowRight: () => go(later()),
    ArrowUp: () => go(later()),
    ArrowLeft: () => go(earlier()),
    ArrowDown: () => go(earlier()),
    Home: () => go(places.left),
    End: () => go(end),
  };
  button.addEventListener("click", toggle);
  slider.addEventListener("input", () => go(Number(slider.value)));
  if (line) {
    svg.addEventListener("click", event => {
      const { x } = under(event, svg);
      if (places.left <= x && x <= end) go(x);
    });
  }

  const controls = document.createElement("div");
  controls.className = "course-controls";
  controls.append(button, slider, line ? chooser(places, svg, shade.light, way.point) : picker(places, svg));
  controls.addEventListener("keydown", event => {
    const isNative = event.target.tagName === "SELECT" || (event.key === " " && event.target === button);
    if (isNative || event.altKey || event.ctrlKey || event.metaKey || !keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  });
  show();
  // By then it stands on the page, among the pictures around it. In an explorer somebody has just pressed Play, and
  // the next keys are for what plays.
  begins = requestAnimationFrame(() => {
    if (el.closest(".course-live")) button.focus({ preventScroll: true });
    el.closest(".course-live") || "follow" in places ? toggle() : show();
  });
  el.classList.add("course-player");
  el.setAttribute("role", "group");
  el.setAttribute("aria-label", line ? "Player of a timeline" : "Player of a picture");
  svg ? svg.after(controls, text.line) : picture.append(controls, text.line);
  el.append(picture);
  requestAnimationFrame(() => el.closest(".course-live")?.scrollIntoView({ block: "nearest" }));
  return () => {
    time.halt();
    around.rest();
  };
}
export default { render };
