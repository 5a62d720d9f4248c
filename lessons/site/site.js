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

course.kinds = {
  async chart(el) {
    const [{ data, layout }] = await Promise.all([course.pack(el.dataset.pack), (course.plotly ??= course.load("plotly.min.js"))]);
    const place = made("div");
    el.replaceChildren(place);
    Plotly.newPlot(place, data, layout, { displaylogo: false, responsive: true });
  },
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
    course.kinds[target.dataset.kind](target);
  }), { rootMargin: "600px" });
  document.querySelectorAll(".live").forEach(one => come.observe(one));
  const [box, hits, button] = ["search", "hits", "theme"].map(id => document.getElementById(id));
  course.search(box, hits);
  course.theme(button);
  course.follow([...document.querySelectorAll("#inside a")]);
};
