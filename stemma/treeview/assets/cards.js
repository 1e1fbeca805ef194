// What is drawn: a card for each edge, a line to it, and the whole of an edge on hover.

function element(tag, className, ...content) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...content);
  return made;
}

const pen = document.createElement("canvas").getContext("2d");
pen.font = `12.5px ${getComputedStyle(document.body).fontFamily}`;

const widthOf = (text) => pen.measureText(text).width;

// The longest beginning of the characters, or their longest end, that is not wider than `width`.
function fitting(characters, width, { end = false } = {}) {
  let [fits, beyond] = [0, characters.length + 1];
  const part = (n) => (end ? characters.slice(characters.length - n) : characters.slice(0, n));
  while (beyond - fits > 1) {
    const half = (fits + beyond) >> 1;
    if (widthOf(part(half).join("")) <= width) fits = half;
    else beyond = half;
  }
  return part(fits).join("");
}

// Control tokens of chat templates; a card has a mark in place of their names.
const CONTROL = /<\|[^|<>]*\|>/gu;

// A text as lines of at most `width` pixels: whole if it fits, or else its beginning and its end.
function linesOf(whole, width, most) {
  if (whole === "") return ["part of a character"];
  const text = whole.trim() === "" ? whole.replaceAll(" ", "␣") : whole.replace(CONTROL, "◆");
  const long = text.length > 1000;
  const characters = Array.from(long ? text.slice(0, 500) + text.slice(-500) : text, (c) =>
    c === "\n" ? "⏎" : c,
  );
  const first = fitting(characters, width);
  if (!long && first.length === characters.join("").length) return [text];
  if (most === 1) {
    const head = fitting(characters, width * 0.6);
    return [`${head.trimEnd()}…${fitting(characters, width * 0.35, { end: true }).trimStart()}`];
  }
  const words = first.replace(/(?<=[\s⏎])[^\s⏎]{1,14}$/u, "");
  const rest = characters.slice(Array.from(words).length);
  if (!long && widthOf(rest.join("")) <= width) return [words, rest.join("").trimStart()];
  const room = width - widthOf("…");
  return [
    `${fitting(characters, room).trimEnd()}…`,
    `…${fitting(characters, room, { end: true }).trimStart()}`,
  ];
}

// Text with its control tokens, line ends and control characters set apart.
function spelled(text, { lines = false } = {}) {
  return text.split(/(<\|[^|<>]*\|>|[\p{Cc}\ufffd◆⏎␣])/u).map((part, i) => {
    if (i % 2 === 0) return part;
    if (part === "\n") return element("span", "sign", lines ? "⏎\n" : "⏎");
    if (/^[◆⏎␣\ufffd<]/.test(part)) return element("span", "sign", part);
    return element("span", "sign", `\\x${part.codePointAt(0).toString(16).padStart(2, "0")}`);
  });
}

function cardOf(box, size) {
  const node = box.node;
  if (!node) return chipOf(box);
  if (node.isRoot) return element("div", "root");
  const card = element("div", `card ${node.mark} ${size.name}`);
  card.tabIndex = 0;
  const small = factsOf(node, size);
  const beside = Math.max(11, widthOf(node.name ?? "")) + (size.lines === 1 ? widthOf(small) : 0);
  const lines = linesOf(node.text, size.width - size.margin - beside, size.lines);
  const text = element("span", "text", ...lines.map((l) => element("span", "", ...spelled(l))));
  if (node.isNamespace) {
    card.classList.add("namespace");
    card.append(text);
    return card;
  }
  card.append(element("b", "name", node.name), text, element("span", "facts", small));
  if (node.children.length) {
    const toggle = element("button", "toggle");
    toggle.title = "Fold or unfold what is below";
    toggle.setAttribute("aria-label", toggle.title);
    card.append(toggle);
  }
  return card;
}

// What a card tells of an edge besides its text; all of it is in the detail.
function factsOf(node, size) {
  if (node.isNamespace) return "";
  if (size.lines === 1) return node.tokens.toLocaleString("en");
  const facts = [count(node.tokens, "token")];
  if (node.hits) facts.push(count(node.hits, "hit"));
  if (node.state !== "idle") facts.push(node.state);
  return facts.join(" · ");
}

function chipOf(box) {
  const edges = box.hidden.reduce((sum, node) => sum + node.allEdges, 0);
  const tokens = box.hidden.reduce((sum, node) => sum + node.allTokens, 0);
  const marks = new Set(box.hidden.flatMap((node) => [...marksOf(node)]));
  const told = `${count(edges, "edge")} more · ${count(tokens, "token")}`;
  const chip = element("button", "chip", told);
  for (const mark of ["hit", "new", "evicted"]) {
    if (marks.has(mark)) chip.prepend(element("i", `dot ${mark}`));
  }
  return chip;
}

function marksOf(top) {
  const found = new Set();
  const stack = [top];
  while (stack.length) {
    const node = stack.pop();
    found.add(node.mark);
    stack.push(...node.children);
  }
  return found;
}

const MEANING = {
  hit: "hit: it was there and was used",
  new: "new: computed since the moment before",
  kept: "kept: it was there and was not used",
  evicted: "evicted: it was there and is gone",
};

// Everything about an edge.
function detailOf(node, moment) {
  const facts = [
    `tokens ${node.start + 1} to ${node.start + node.tokens} of what leads here` +
      (node.sampled ? `, ${node.sampled} of them sampled` : ""),
    `${count(node.hits, "hit")}, last used at ${node.lastUse}, and now it is ${moment.clock} ` +
      "by the cache's clock",
  ];
  if (node.mark !== "evicted") {
    facts.push(node.locks ? `${node.state}, ${count(node.locks, "lock")}` : node.state);
    const idle = count(node.held, "idle branch", "idle branches");
    if (node.held) facts.push(`${idle} can go on from it`);
  }
  facts.push(data.namespaces[node.namespace]);
  return [
    element("p", `meaning ${node.mark}`, element("b", "name", node.name), ` ${MEANING[node.mark]}`),
    element("pre", "", ...spelled(node.text, { lines: true })),
    ...facts.map((fact) => element("p", "fact", fact)),
  ];
}
