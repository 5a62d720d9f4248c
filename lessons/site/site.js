// What makes a page alive: the widgets' own scripts (parts), and in place of a kernel all that it said (packs).
const course = { parts: {}, packs: {} };

course.load = src => new Promise((resolve, reject) => {
  document.head.append(Object.assign(document.createElement("script"), { src, onload: resolve, onerror: reject }));
});

// A pack is a script, since a page that is opened from a disk may fetch nothing.
course.pack = async name => {
  course.packs[name] ??= course.load(`packs/${name}.js`);
  await course.packs[name];
  return course.packs[name];
};

course.unpack = (name, text) => {
  const bytes = Uint8Array.from(atob(text), one => one.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  course.packs[name] = new Response(stream).json();
};

const made = (name, given = {}, ...inside) => {
  const element = Object.assign(document.createElement(name), given);
  element.append(...inside);
  return element;
};
const button = (textContent, onclick) => made("button", { textContent, onclick });
const status = () => made("p", { role: "status" });
const scrolling = ariaLabel => made("div", { className: "scroll", tabIndex: 0, role: "group", ariaLabel });
const live = (...inside) => made("div", { className: "course-live" }, ...inside);

// Answers are kept in this browser, or for this page alone if it keeps nothing.
const store = (() => { try { return localStorage; } catch { return {}; } })();
course.kept = () => JSON.parse(store["course-answers"] ?? "{}");
course.keep = (question, answer, isDone) => {
  const all = course.kept(), done = isDone || Boolean(all[question]?.done);
  store["course-answers"] = JSON.stringify({ ...all, [question]: { answer, done } });
};

// A widget's own script, with what anywidget would give it: something that keeps values and says when they change.
course.mount = (part, state, changed = () => {}) => {
  const el = made("div"), heard = {};
  const set = (name, value) => {
    state[name] = value;
    heard[`change:${name}`]?.forEach(one => one());
  };
  const on = (name, one) => (heard[name] ??= []).push(one);
  const model = { get: name => state[name], set, on, save_changes: changed, send: () => {} };
  return { el, state, set, end: course.parts[part].render({ model, el }) };
};

// Draws another run in thin bars under those of the same ranks, on the same axis, if need be beyond its end.
function drawUnder(svg, { seconds, places: { left, width, rows, row } }, other, fill) {
  const long = (other.seconds / seconds) * width, scale = long / other.places.width, height = svg.getAttribute("height");
  const wide = Math.max(svg.getAttribute("width"), left + long + 16), thin = row.pitch - row.bar - row.lane - 1;
  const bars = other.places.bars.filter(one => !one.isBackground && one.rank < rows.length);
  svg.setAttribute("viewBox", `0 0 ${wide} ${height}`);
  svg.style.width = `calc(${wide} * var(--course-pixel))`;
  svg.insertAdjacentHTML("beforeend", bars.map(({ x, width, rank, kind }) =>
    `<rect class="thin" x="${left + (x - other.places.left) * scale}" y="${rows[rank] + row.bar + row.lane + 0.5}"
      width="${width * scale}" height="${thin}" fill="${fill(kind)}"/>`).join(""));
}

course.kinds = {
  async chart({ key }) {
    const [{ data, layout }] = await Promise.all([course.pack(key), (course.plotly ??= course.load("plotly.min.js"))]);
    const place = made("div");
    requestAnimationFrame(() => Plotly.newPlot(place, data, layout, { displaylogo: false, responsive: true }));
    return place;
  },

  async player({ key }) {
    return course.mount("player", await course.pack(key)).el;
  },

  async explorer({ key, controls, fills }) {
    const says = status(), stage = made("div"), left = made("div", { className: "left" });
    const shown = ["Beside the controls", "Below the controls"].map(scrolling);
    let view, before, pinned, player;
    const mounted = controls.map(({ part, ...state }) => course.mount(part, state, () => show()));
    const at = () => mounted.map(({ state }) => state.index);
    const words = () => mounted.map(({ state: { label, texts, index } }) => `${label} ${texts[index]}`).join(", ");
    const draw = () => {
      player?.end?.();
      stage.replaceChildren();
      says.innerHTML = view.texts[view.says];
      shown.forEach((one, place) => {
        one.innerHTML = view.texts[view.pictures[place]] ?? "";
        one.hidden = !one.innerHTML;
      });
      play.hidden = !view.places;
      pin.hidden = !view.seconds;
      pin.textContent = pinned ? "Unpin" : "Pin";
      const other = pinned ?? before;
      if (pin.hidden || !other?.seconds) return;
      const share = ((100 * view.seconds) / other.seconds).toPrecision(3);
      says.append(` It takes ${share}% of the time of the ${pinned ? "pinned" : "last"} one, in thin bars: ${other.words}.`);
      const fill = kind => `url(#${key}-${view.played}-${kind}) ${fills[kind]}`; // its pattern, or else its color
      drawUnder(shown[view.played].querySelector("svg"), view, other, fill);
    };
    const show = async () => {
      const now = at(), { texts, views } = await course.pack(`${key}-${now[0]}`);
      if (now.join() !== at().join()) return;
      [before, view] = [view, { texts, ...views[now.join()], words: words() }];
      draw();
    };
    const play = button("Play", () => {
      draw();
      const name = `${key}-${view.played}`, isTimeline = Boolean(view.seconds);
      if (isTimeline) shown[1].hidden = true;
      // Of two patterns with one name, the one out of sight would leave the other blank.
      const picture = isTimeline ? view.texts[view.pictures[view.played]].replaceAll(name, `${key}-played`) : "";
      player = course.mount("player", { picture, places: view.places });
      stage.append(player.el);
    });
    const pin = button("Pin", () => {
      pinned = pinned ? null : view;
      draw();
    });
    left.append(...mounted.map(({ el }) => el), play, pin, says);
    await show();
    return live(made("div", { className: "row" }, left, shown[0]), shown[1], stage);
  },

  async card({ key, question, title, text, part, state, ...card }) {
    const { trait, refuses, name } = forms[card.is];
    const says = status(), found = made("div"), before = course.kept()[question];
    if (before) says.textContent = `You have ${before.done ? "answered" : "tried"} this before.`;
    const answered = before ? { [trait]: before.answer } : {};
    const field = course.mount(part, { several: false, disabled: false, ...state, ...answered });
    const main = button("Commit to this answer", async () => {
      const isNew = !found.hasChildNodes(), pack = await course.pack(key);
      field.el.querySelector("textarea")?.dispatchEvent(new Event("change"));
      const answer = field.state[trait], outcome = pack.told[pack.which[name(answer, { ...card, ...pack })]];
      says.textContent = outcome ? "" : refuses;
      if (!outcome) return;
      const words = made("span", { textContent: [answer].flat().join(" → ") }).innerHTML, [html, right] = outcome;
      found.innerHTML = isNew ? html.replace("\ue000", words) : "";
      if (isNew) course.keep(question, answer, right !== false);
      field.set("disabled", isNew);
      main.textContent = isNew ? "Try another answer" : "Commit to this answer";
    });
    return live(made("div", { innerHTML: `<p><b>${title}</b></p>${text}` }), field.el, main, says, found);
  },
};

// How a question is answered: the field's value, an answer's short name, by which its outcome is kept, and what to say
// if it is none.
const forms = {
  choice: { trait: "chosen", refuses: "Decide on an answer first, even if it is a guess.", name: ([place]) => place },
  text: {
    trait: "value",
    refuses: "Write a sentence or two first, then compare.",
    name: answer => (answer.trim() ? 0 : undefined),
  },
  order: {
    trait: "order",
    name: (answer, { workers }) => workers.flatMap(own => answer.filter(one => own.includes(one))).join(" "),
  },
  number: {
    trait: "value",
    refuses: "That is no number with a unit that fits here.",
    name: (answer, { units, factors, measured, tolerance }) => {
      const found = answer.match(/^\s*((?:\d{1,3}(?:[,_]\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?)\s*([^\d\s,.].*?)?\s*$/);
      const given = found ? Number(found[1].replace(/[,_]/g, "")) * units[found[2] ?? ""] : NaN;
      const isNear = factor => Math.abs(given - measured * factor) <= tolerance * Math.abs(measured * factor);
      return Number.isNaN(given) ? undefined : [...factors, given / measured].findIndex(isNear);
    },
  },
};

// The map is colored by what was answered in this browser.
course.color = () => {
  const kept = course.kept();
  for (const idea of document.querySelectorAll("[data-asks]")) {
    const asked = idea.dataset.asks.split(" "), count = asked.filter(one => kept[one]?.done).length;
    idea.dataset.state = count === asked.length ? "done" : asked.some(one => kept[one]) ? "begun" : "new";
    idea.querySelector("span").textContent = `${count} of ${asked.length} answered`;
  }
};

course.search = (box, hits) => box.addEventListener("input", async () => {
  const asked = box.value.toLowerCase().split(/\s+/).filter(Boolean);
  const count = (text, word) => text.toLowerCase().split(word).length - 1;
  const points = ([title, , , heading, text]) =>
    Math.min(...asked.map(word => count(text, word) + 20 * count(`${title} ${heading}`, word)));
  const scored = (await course.pack("search")).map(one => [points(one), one]).filter(([one]) => 0 < one && one < Infinity);
  hits.replaceChildren(...scored.sort(([a], [b]) => b - a).slice(0, 12).map(([, [title, address, at, heading]]) =>
    made("li", {}, made("a", { href: `${address}#${at}`, textContent: heading === title ? title : `${title}: ${heading}` }))));
});

// The table of contents follows the page.
course.follow = links => addEventListener("scroll", () => {
  const isAbove = link => document.getElementById(link.hash.slice(1)).getBoundingClientRect().top < 0.3 * innerHeight;
  const here = links.findLast(isAbove);
  links.forEach(link => { link.ariaCurrent = link === here ? "location" : null; });
}, { passive: true });

course.start = () => {
  const come = new IntersectionObserver(changes => changes.filter(one => one.isIntersecting).forEach(async ({ target }) => {
    come.unobserve(target);
    const record = JSON.parse(target.querySelector("script").textContent);
    target.replaceChildren(await course.kinds[record.kind](record));
  }), { rootMargin: "600px" });
  document.querySelectorAll(".live").forEach(one => come.observe(one));
  course.search(document.getElementById("search"), document.getElementById("hits"));
  course.color();
  course.follow([...document.querySelectorAll("#inside a")]);
};
