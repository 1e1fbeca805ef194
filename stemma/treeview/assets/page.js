// The page: which moment is shown, how large, what is unfolded; and what keys and buttons do.

const $ = (id) => document.getElementById(id);
const MARKS = ["hit", "new", "kept", "evicted"];

const MOVING = 300; // a larger tree stands still: moving it would not be smooth
const SOON = { duration: 300, easing: "ease-out" };

const state = {
  at: 0,
  scale: 1,
  opened: new Set(), // names of edges that are shown though they were not at first
  folded: new Set(), // names of edges whose children are hidden
  pinned: false, // whether the detail stays when the pointer goes
  waiting: 0, // the timer of a detail that is about to show
};
const cards = new Map(); // name of an edge -> its card, which moves when the moment changes

function show(at) {
  state.at = Math.max(0, Math.min(moments.length - 1, at));
  const moment = moments[state.at];
  $("moment").querySelector("h2").textContent = moment.title && `${state.at + 1}. ${moment.title}`;
  $("moment").querySelector(".caption").textContent = moment.caption;
  $("moment").querySelector(".numbers").textContent = numbersOf(moment);
  $("moment").querySelector(".legend").replaceChildren(...MARKS.map((m) => legendOf(moment, m)));
  [...$("steps").children].forEach((step, i) => {
    step.setAttribute("aria-current", i === state.at ? "step" : "false");
  });
  $("steps").children[state.at]?.scrollIntoView({ block: "nearest", inline: "nearest" });
  $("back").disabled = state.at === 0;
  $("next").disabled = state.at === moments.length - 1;
  history.replaceState(null, "", `#${state.at + 1}`);
  draw({ moving: cards.size > 0 });
  bringChangesIntoView();
}

// Where nothing that the window shows has changed, go to what has.
function bringChangesIntoView() {
  const window = $("view").getBoundingClientRect();
  const changed = [...$("cards").querySelectorAll(".card:is(.hit, .new, .evicted)")];
  const isSeen = (card) => {
    const at = card.getBoundingClientRect();
    return at.top < window.bottom && at.bottom > window.top && at.left < window.right;
  };
  if (!changed.some(isSeen)) changed[0]?.scrollIntoView({ block: "center" });
}

function numbersOf({ counts, nodes }) {
  const there = nodes.filter((node) => node.mark !== "evicted");
  const tokens = there.reduce((sum, node) => sum + node.tokens, 0);
  const held = `${count(tokens, "token")} in ${count(there.length, "edge")}`;
  if (!counts) return held;
  const [reused, evicted] = [counts.reused, counts.evicted].map((n) => n.toLocaleString("en"));
  const computed = count(counts.computed, "token");
  return `${computed} computed · ${reused} reused · ${evicted} evicted · ${held}`;
}

function legendOf(moment, mark) {
  const { edges, tokens } = amount(moment, mark);
  const item = element("li", edges ? mark : `${mark} none`, element("i", `swatch ${mark}`));
  item.append(element("b", "", mark), element("span", "", edges ? count(tokens, "token") : "none"));
  item.title = `${MEANING[mark]}; ${count(edges, "edge")}`;
  return item;
}

// A column for each moment: a box that stands for the whole cache, what is in it, and on top of
// that what has just gone.
function drawSteps() {
  const most = Math.max(1, ...moments.map(full));
  const capacity = Math.max(...moments.map((moment) => moment.pool));
  // A cache that is hardly used would make all columns flat.
  const box = capacity > 3 * most ? 0 : capacity;
  const scale = 100 / Math.max(most, box);
  $("steps").replaceChildren(
    ...moments.map((moment, i) => {
      const column = element("span", "column");
      column.style.setProperty("--pool", `${box * scale}%`);
      for (const mark of ["kept", "hit", "new", "evicted"]) {
        const part = element("i", mark);
        part.style.height = `${amount(moment, mark).tokens * scale}%`;
        column.append(part);
      }
      const step = element("button", "", column, element("b", "", `${i + 1}`));
      step.append(element("span", "title", moment.title));
      step.title = `${i + 1}. ${moment.title}`;
      step.onclick = () => show(i);
      return step;
    }),
  );
}

const full = (moment) => MARKS.reduce((sum, mark) => sum + amount(moment, mark).tokens, 0);

function draw({ moving = false } = {}) {
  const moment = moments[state.at];
  const isOpen = (node) => state.opened.has(node.name);
  const isFolded = (node) => state.folded.has(node.name);
  const room = $("view").clientWidth - 2 * parseFloat(getComputedStyle($("view")).paddingLeft);
  const layout = layOut(moment.root, room, isOpen, isFolded);
  $("canvas").style.width = `${layout.width}px`;
  $("canvas").style.height = `${layout.height}px`;
  const moves = moving && layout.boxes.length < MOVING;
  drawLinks(layout, moves);
  drawCards(layout, moment, moves);
  $("view").classList.toggle("empty", moment.nodes.length === 0);
  rescale(state.scale);
}

function drawLinks({ boxes, width, height, size }, moves) {
  const order = ["kept", "evicted", "new", "hit"];
  const lines = boxes.filter((box) => box.parent >= 0);
  const markOf = (box) => box.node?.mark ?? "kept";
  lines.sort((a, b) => order.indexOf(markOf(a)) - order.indexOf(markOf(b)));
  $("links").setAttribute("viewBox", `0 0 ${width} ${height}`);
  $("links").innerHTML = lines
    .map((box) => `<path class="${markOf(box)}" d="${link(boxes[box.parent], box, size)}"/>`)
    .join("");
  if (moves) $("links").animate([{ opacity: 0 }, { opacity: 1 }], SOON);
}

function drawCards({ boxes, size }, moment, moves) {
  const before = new Map(cards);
  cards.clear();
  for (const box of boxes) {
    const name = box.node ? box.node.name : `more below ${box.owner.name}`;
    const old = before.get(name);
    const card = cardOf(box, size);
    const place = `translate(${box.x}px, ${box.y}px)`;
    card.style.width = `${box.width}px`;
    card.style.height = `${box.height}px`;
    card.style.transform = place;
    if (moves) {
      const came = [{ opacity: 0 }, { opacity: 1 }];
      card.animate(old ? [{ transform: old.style.transform }, { transform: place }] : came, SOON);
    }
    cards.set(name, card);
    bind(card, box, moment);
  }
  $("cards").replaceChildren(...cards.values());
  mark($("find").value);
}

function bind(card, box, moment) {
  const node = box.node;
  if (!node) {
    card.onclick = () => {
      state.folded.delete(box.owner.name);
      for (const hidden of box.hidden.slice(0, 50)) state.opened.add(hidden.name);
      draw();
    };
    return;
  }
  if (node.isRoot || node.isNamespace) return;
  const showIt = () => showDetail(node, card, moment);
  card.onpointerenter = () => {
    if (!state.pinned) state.waiting = setTimeout(showIt, 200);
  };
  card.onpointerleave = () => state.pinned || hideDetail();
  card.onfocus = showIt;
  card.onblur = () => state.pinned || hideDetail();
  card.onclick = () => {
    showIt();
    state.pinned = true;
  };
  const toggle = card.querySelector(".toggle");
  if (toggle) {
    const isFolded = state.folded.has(node.name);
    toggle.textContent = isFolded ? "+" : "−";
    card.classList.toggle("folded", isFolded);
    toggle.onclick = (event) => {
      event.stopPropagation();
      if (isFolded) state.folded.delete(node.name);
      else state.folded.add(node.name);
      draw();
    };
  }
}

function showDetail(node, card, moment) {
  const detail = $("detail");
  detail.replaceChildren(...detailOf(node, moment));
  detail.hidden = false;
  const [at, own] = [card.getBoundingClientRect(), detail.getBoundingClientRect()];
  const below = at.bottom + 8 + own.height < innerHeight ? at.bottom + 8 : at.top - own.height - 8;
  detail.style.left = `${Math.max(8, Math.min(at.left, innerWidth - own.width - 8))}px`;
  detail.style.top = `${Math.max(8, below)}px`;
}

function hideDetail() {
  clearTimeout(state.waiting);
  state.pinned = false;
  $("detail").hidden = true;
}

// What is x and y pixels into the window stays there.
function rescale(scale, x = 0, y = 0) {
  const before = state.scale;
  state.scale = Math.max(0.05, Math.min(3, scale));
  $("canvas").style.transform = `scale(${state.scale})`;
  const [width, height] = ["width", "height"].map((side) => parseFloat($("canvas").style[side]));
  $("sizer").style.width = `${width * state.scale}px`;
  $("sizer").style.height = `${height * state.scale}px`;
  $("fit").textContent = `${Math.round(100 * state.scale)}%`;
  const [view, growth] = [$("view"), state.scale / before];
  view.scrollLeft = (view.scrollLeft + x) * growth - x;
  view.scrollTop = (view.scrollTop + y) * growth - y;
}

// The whole tree in the window, or, if it is that already, its natural size.
function fit() {
  const style = getComputedStyle($("view"));
  const [dx, dy] = [parseFloat(style.paddingLeft) * 2, parseFloat(style.paddingTop) * 2];
  const scale = Math.min(
    1,
    ($("view").clientWidth - dx) / parseFloat($("canvas").style.width),
    ($("view").clientHeight - dy) / parseFloat($("canvas").style.height),
  );
  rescale(Math.abs(scale - state.scale) < 0.01 ? 1 : scale);
}

// Sets apart the cards whose text contains what is looked for, and tells how many edges do.
function mark(wanted) {
  const isFound = (node) => wanted !== "" && node.text.toLowerCase().includes(wanted.toLowerCase());
  const found = moments[state.at].nodes.filter(isFound);
  $("found").textContent = wanted ? count(found.length, "edge") : "";
  const names = new Set(found.map((node) => node.name));
  for (const [name, card] of cards) card.classList.toggle("found", names.has(name));
  $("cards").classList.toggle("searching", wanted !== "");
  return found;
}

// Shows the first edges that are found, wherever they are hidden.
function find(wanted) {
  for (const node of mark(wanted).slice(0, 50)) {
    for (let at = node; at && !at.isRoot; at = at.above) {
      if (!at.shown) state.opened.add(at.name);
      if (at !== node) state.folded.delete(at.name);
    }
  }
  draw();
  $("cards").querySelector(".found")?.scrollIntoView({ block: "center", inline: "center" });
}

const KEYS = {
  ArrowLeft: () => show(state.at - 1),
  ArrowRight: () => show(state.at + 1),
  Home: () => show(0),
  End: () => show(moments.length - 1),
  "+": () => rescale(state.scale * 1.2),
  "-": () => rescale(state.scale / 1.2),
  0: fit,
  d: switchTheme,
  Escape: hideDetail,
  "/": () => $("find").focus(),
};

function switchTheme() {
  const chosen = document.documentElement.dataset;
  chosen.theme ??= matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  chosen.theme = chosen.theme === "dark" ? "light" : "dark";
}

document.addEventListener("keydown", (event) => {
  const key = event.key;
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target === $("find")) {
    if (key === "Enter") find($("find").value);
    if (key === "Escape") $("find").blur();
    return;
  }
  if (KEYS[key]) {
    event.preventDefault();
    KEYS[key]();
  }
});
$("view").addEventListener(
  "wheel",
  (event) => {
    if (!event.ctrlKey) return;
    event.preventDefault();
    const window = $("view").getBoundingClientRect();
    const factor = Math.exp(-event.deltaY / 300);
    rescale(state.scale * factor, event.clientX - window.left, event.clientY - window.top);
  },
  { passive: false },
);
document.addEventListener("pointerdown", (event) => {
  if (!event.target.closest(".card, #detail")) hideDetail();
});
window.addEventListener("resize", () => draw());
window.addEventListener("hashchange", () => show(Number(location.hash.slice(1)) - 1 || 0));
$("back").onclick = KEYS.ArrowLeft;
$("next").onclick = KEYS.ArrowRight;
$("smaller").onclick = KEYS["-"];
$("larger").onclick = KEYS["+"];
$("fit").onclick = fit;
$("theme").onclick = switchTheme;
$("find").oninput = () => mark($("find").value);
$("unfold").onclick = () => {
  state.folded.clear();
  for (const node of moments[state.at].nodes) state.opened.add(node.name);
  draw();
};
$("fold").onclick = () => {
  state.folded.clear();
  state.opened.clear();
  draw();
};

document.body.classList.toggle("single", moments.length === 1);
drawSteps();
show(Number(location.hash.slice(1)) - 1 || 0);
