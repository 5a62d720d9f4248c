// What makes a page alive: the widgets' own scripts (parts), and in place of a kernel all that it said (packs).
const course = { parts: {}, packs: {} };

course.unpack = async (name, text) => {
  const bytes = Uint8Array.from(atob(text), one => one.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  course.packs[name].resolve(JSON.parse(await new Response(stream).text()));
};

course.load = src => new Promise((resolve, reject) => {
  document.head.append(Object.assign(document.createElement("script"), { src, onload: resolve, onerror: reject }));
});

// A pack is a script, since a page that is opened from a disk may fetch nothing.
course.pack = name => {
  if (!course.packs[name]) {
    const one = (course.packs[name] = {});
    one.promise = new Promise((resolve, reject) => Object.assign(one, { resolve, reject }));
    course.load(`packs/${name}.js`).catch(one.reject);
  }
  return course.packs[name].promise;
};

const made = (name, given = {}, ...inside) => {
  const element = Object.assign(document.createElement(name), given);
  element.append(...inside);
  return element;
};

// Answers are kept in this browser.
course.kept = () => { try { return JSON.parse(localStorage["course-answers"] ?? "{}"); } catch { return {}; } };
course.keep = (question, note) => {
  const all = course.kept();
  all[question] = { ...all[question], ...note, done: Boolean(all[question]?.done || note.done) };
  try { localStorage["course-answers"] = JSON.stringify(all); } catch { /* they are kept for this page alone */ }
};

// What anywidget gives a script: something that keeps values and says when they change.
course.model = (state, changed = () => {}) => {
  const heard = {};
  return {
    get: name => state[name],
    set(name, value) {
      state[name] = value;
      for (const one of heard[`change:${name}`] ?? []) one();
    },
    on: (name, one) => (heard[name] ??= []).push(one),
    off: () => {},
    save_changes: changed,
    send: changed,
  };
};

course.mount = (part, state, changed) => {
  const el = document.createElement("div");
  const model = course.model(state, changed);
  return { el, model, end: course.parts[part].render({ model, el }) };
};

const button = (textContent, onclick) => made("button", { textContent, onclick });
const status = () => { const one = made("p"); one.setAttribute("role", "status"); return one; };
const scrolling = label => { const one = made("div", { className: "scroll", tabIndex: 0 }); one.setAttribute("role", "group"); one.ariaLabel = label; return one; };
const drawn = (name, attributes, text = "") => {
  const one = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) one.setAttribute(key, value);
  one.textContent = text;
  return one;
};

// Draws a timeline narrower, from where its time begins.
function squeeze(svg, { left, rows }, share) {
  for (const one of svg.querySelectorAll("rect, line, path, text")) {
    const start = one.getAttribute("d")?.match(/^M([\d.]+),([\d.]+)/)?.slice(1);
    const [x, y] = start ?? ["x", "y"].map(name => one.getAttribute(name) ?? one.getAttribute(`${name}1`));
    if (x < left - 0.5 || y < rows[0] - 4) continue;
    if (one.tagName === "text") one.setAttribute("x", left + (x - left) * share);
    else one.setAttribute("transform", `translate(${left * (1 - share)},0) scale(${share},1)`);
  }
}

// Draws the pinned timeline small below another, both on one axis.
function drawBelow(svg, view, pinned, fill) {
  const longest = Math.max(view.seconds, pinned.seconds), share = pinned.seconds / longest, { places } = pinned;
  squeeze(svg, view.places, view.seconds / longest);
  const [width, top] = ["width", "height"].map(name => Number(svg.getAttribute(name)));
  const height = top + 24 + 9 * places.rows.length;
  svg.setAttribute("height", height);
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.querySelector(":scope > rect").setAttribute("height", height);
  svg.append(drawn("text", { x: 16, y: top + 12, "font-weight": "bold" }, `pinned: ${pinned.words}`));
  for (const { x, width, rank, kind, isBackground } of places.bars) {
    const place = { x: places.left + (x - places.left) * share, y: top + 20 + 9 * rank + 7 * isBackground };
    const size = { width: width * share, height: isBackground ? 1 : 6 };
    svg.append(drawn("rect", { ...place, ...size, fill: fill(kind), class: "pinned" }));
  }
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
    let view = null, pinned = null, player = null;
    const mounted = controls.map(one => course.mount(one.part, { ...one }, () => show()));
    const at = () => mounted.map(({ model }, i) => Number(model.get(controls[i].part === "slider" ? "index" : "value")));
    const words = () => at().map((n, i) => {
      const one = controls[i];
      return `${one.label} ${one.part === "slider" ? one.texts[n] : n ? "on" : "off"}`;
    }).join(", ");
    const close = () => {
      player?.end?.();
      player = null;
      stage.replaceChildren();
      shown[1].hidden = false;
    };
    const compared = () => {
      const off = view.seconds / pinned.seconds - 1;
      if (Math.abs(off) < 1e-9) return ` It takes exactly as long as the pinned one (${pinned.words}).`;
      return ` It is ${Number((100 * Math.abs(off)).toPrecision(2))}% ${off > 0 ? "longer" : "shorter"} than the pinned one (${pinned.words}).`;
    };
    const draw = () => {
      says.innerHTML = view.texts[view.says];
      shown.forEach((one, place) => { one.innerHTML = view.texts[view.pictures[place]]; });
      play.hidden = pin.hidden = view.seconds === undefined;
      pin.textContent = pinned ? "Unpin" : "Pin";
      if (!pinned || pin.hidden) return;
      says.append(compared());
      const fill = kind => `url(#${key}-${view.played}-${kind}) ${fills[kind]}`; // its pattern, or else its color
      drawBelow(shown[view.played].querySelector("svg"), view, pinned, fill);
    };
    const show = async () => {
      const now = at();
      const { texts, views } = await course.pack(`${key}-${now[0]}`);
      if (now.join() !== at().join()) return;
      close();
      view = { texts, ...views[now.join()], words: words() };
      draw();
    };
    const play = button("Play", () => {
      close();
      shown[1].hidden = true;
      // Of two patterns with one name, the one out of sight would leave the other blank.
      const picture = view.texts[view.pictures[view.played]].replaceAll(`${key}-${view.played}`, `${key}-played`);
      player = course.mount("player", { picture, places: view.places });
      stage.append(player.el);
    });
    const pin = button("Pin", () => {
      pinned = pinned ? null : view;
      close();
      draw();
    });
    left.append(...mounted.map(({ el }) => el), play, pin, says);
    const ahead = async () => { for (const n of Array(controls[0].texts?.length ?? 2).keys()) await course.pack(`${key}-${n}`); };
    left.addEventListener("pointerenter", ahead, { once: true });
    left.addEventListener("focusin", ahead, { once: true });
    await show();
    return made("div", { className: "course-live" }, made("div", { className: "row" }, left, shown[0]), shown[1], stage);
  },

  async measuring({ key, tools }) {
    const bill = status(), found = made("div"), used = new Map();
    const buttons = tools.map(([name, title, minutes]) => button(`${title}: ${minutes} minutes`, async () => {
      used.set(name, minutes);
      bill.textContent = `${[...used.values()].reduce((sum, one) => sum + one, 0)} minutes of the cluster so far.`;
      found.prepend(made("div", { innerHTML: (await course.pack(key))[name] }));
    }));
    return made("div", { className: "course-live" }, made("p", {}, ...buttons), bill, found);
  },

  async card({ key, question, title, text, ...card }) {
    const says = status(), found = made("div"), events = Object.keys(card.events ?? {});
    const [part, trait, state] = {
      choice: () => ["options", "chosen", { label: "Choose one:", texts: card.lines, chosen: [] }],
      order: () => ["order", "order", { label: "Events, the first at the top", texts: card.events, order: events }],
      number: () => ["sentences", "value", { label: `Your answer, with its unit, for instance ${card.example}:`, value: "" }],
      text: () => ["sentences", "value", { label: "Your answer:", value: "" }],
    }[card.is]();
    const before = course.kept()[question];
    if (before) state[trait] = before.answer;
    if (before) says.textContent = before.done ? "You have answered this before." : "You have tried this before.";
    const field = course.mount(part, { several: false, disabled: false, ...state });
    const outcome = course.outcomes[card.is];
    const steps = {
      async "Commit to this answer"() {
        field.el.querySelector("textarea")?.dispatchEvent(new Event("change"));
        const answer = field.model.get(trait);
        const reason = outcome.refuses(answer, await course.pack(key));
        says.textContent = reason || "You have decided. Now see what came of it when it was run.";
        if (reason) return;
        course.keep(question, { answer });
        field.model.set("disabled", true);
        main.textContent = "Run it";
      },
      async "Run it"() {
        const answer = field.model.get(trait);
        const { html, right } = outcome.of(answer, await course.pack(key), { ...card, events });
        course.keep(question, { answer, right, done: right });
        found.innerHTML = html;
        if (card.checklist) found.append(checklist());
        says.textContent = "";
        main.textContent = "Try another answer";
      },
      async "Try another answer"() {
        found.innerHTML = "";
        field.model.set("disabled", false);
        main.textContent = "Commit to this answer";
      },
    };
    const checklist = () => {
      const points = { label: "Tick what your answer says:", texts: card.checklist, several: true, disabled: false };
      const ticks = course.mount("options", { ...points, chosen: before?.checked ?? [] }, () =>
        course.keep(question, { checked: ticks.model.get("chosen"), done: true }));
      return ticks.el;
    };
    const main = button("Commit to this answer", () => steps[main.textContent]());
    const head = made("div", { innerHTML: `<p><b>${title}</b></p>${text}` });
    return made("div", { className: "course-live" }, head, field.el, main, says, found);
  },
};

// What came of an answer, and why it is none yet.
const written = text => made("span", { textContent: text }).innerHTML;
const isClose = (given, measured, tolerance) => Math.abs(given - measured) <= tolerance * Math.abs(measured);
course.outcomes = {
  choice: {
    refuses: answer => answer.length ? "" : "Decide on an answer first, even if it is a guess.",
    of: ([place], told, { right }) => ({ html: told[place], right: right[place] }),
  },
  order: {
    refuses: () => "",
    of: (answer, { told, right, which }, { events }) => {
      const place = which[rankOf(answer, events)];
      return { html: told[place].replace("\ue000", answer.join(" → ")), right: right[place] };
    },
  },
  number: {
    read: (answer, { units }) => {
      const found = answer.match(/^\s*((?:\d{1,3}(?:[,_]\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?)\s*([^\d\s,.].*?)?\s*$/);
      return found ? Number(found[1].replace(/[,_]/g, "")) * (units[found[2] ?? ""] ?? NaN) : NaN;
    },
    refuses: (answer, pack) => Number.isNaN(course.outcomes.number.read(answer, pack))
      ? `${answer.trim() || "Nothing"} is not ${pack.name}. It can be in ${Object.keys(pack.units).filter(Boolean).join(", ")}.` : "",
    of: (answer, pack) => {
      const { measured, tolerance, slips } = pack, given = course.outcomes.number.read(answer, pack);
      const right = isClose(given, measured, tolerance);
      const slip = slips.find(([factor]) => isClose(given, measured * factor, tolerance))?.[1] ?? "";
      return { html: pack[right ? "right" : "wrong"].replace("\ue000", written(answer)).replace("\ue001", written(slip)), right };
    },
  },
  text: {
    refuses: answer => answer.trim() ? "" : "Write a sentence or two first, then compare.",
    of: (answer, [html]) => ({ html, right: null }),
  },
};

// Which of all orders this is, as Python counts them.
function rankOf(order, names) {
  const left = [...names];
  return order.reduce((rank, name) => {
    const [place, count] = [left.indexOf(name), left.length];
    left.splice(place, 1);
    return rank * count + place;
  }, 0);
}

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
  const score = ([title, , , heading, text]) => {
    const [above, all] = [`${title} ${heading}`.toLowerCase(), `${title} ${heading} ${text}`.toLowerCase()];
    const count = word => all.split(word).length - 1 + 20 * above.includes(word);
    return asked.every(word => all.includes(word)) ? asked.reduce((sum, word) => sum + count(word), 0) : 0;
  };
  const scored = asked.length ? (await course.pack("search")).map(one => [score(one), one]) : [];
  const best = scored.filter(([points]) => points).sort(([a], [b]) => b - a).slice(0, 12);
  hits.replaceChildren(...best.map(([, [title, address, at, heading]]) =>
    made("li", {}, made("a", { href: `${address}#${at}`, textContent: heading === title ? title : `${title}: ${heading}` }))));
});

// The table of contents follows the page.
course.follow = links => {
  const headings = links.map(link => document.getElementById(link.hash.slice(1)));
  const look = () => {
    const here = headings.findLastIndex(one => one.getBoundingClientRect().top < 0.3 * innerHeight);
    links.forEach((link, place) => place === here ? link.setAttribute("aria-current", "location") : link.removeAttribute("aria-current"));
  };
  addEventListener("scroll", look, { passive: true });
  look();
};

course.theme = button => button.addEventListener("click", () => {
  const { dataset } = document.documentElement;
  const now = dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  dataset.theme = now === "dark" ? "light" : "dark";
  try { localStorage["course-theme"] = dataset.theme; } catch { /* it is kept for this page alone */ }
});

course.start = () => {
  const come = new IntersectionObserver(changes => changes.filter(one => one.isIntersecting).forEach(({ target }) => {
    come.unobserve(target);
    const record = JSON.parse(target.querySelector("script").textContent);
    course.kinds[record.kind](record).then(live => target.replaceChildren(live));
  }), { rootMargin: "600px" });
  document.querySelectorAll(".live").forEach(one => come.observe(one));
  const [box, hits, button] = ["search", "hits", "theme"].map(id => document.getElementById(id));
  course.search(box, hits);
  course.theme(button);
  course.color();
  course.follow([...document.querySelectorAll("#inside a")]);
};
