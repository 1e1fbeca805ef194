// Where the cards of a tree stand: a column for each depth, a row for each leaf, and a parent in
// the middle of its children, but never far below the first of them.

// A card's text has so many `lines`; beside them, the name and the facts there is `margin`. A
// parent stands at most `farthest` pixels below its first child.
const ROOMY = {
  name: "roomy",
  lines: 2,
  height: 62,
  chip: 26,
  margin: 44,
  gapX: 42,
  gapY: 14,
  farthest: 220,
};
const COMPACT = {
  name: "compact",
  lines: 1,
  height: 26,
  chip: 22,
  margin: 52,
  gapX: 36,
  gapY: 5,
  farthest: 40,
};
const ROOMY_UP_TO = 60; // cards
const [NARROWEST, WIDEST] = [230, 340];
const ROOT_WIDTH = 30;

// room: how wide the window is. isOpen(node): whether a node that is not shown at first is shown.
// isFolded(node): whether its children are hidden. Returns boxes {node, x, y, width, height,
// parent}; what is hidden below a node is one box without a node, but with `hidden`.
function layOut(root, room, isOpen, isFolded) {
  const boxes = [];
  const stack = [[root, -1, 0]];
  while (stack.length) {
    const [item, parent, depth] = stack.pop();
    const place = boxes.length;
    const node = item.box ? null : item;
    boxes.push({ ...item.box, node, parent, depth, first: null, last: null });
    if (item.box) continue;
    const shows = (child) => !isFolded(item) && (child.shown || isOpen(child));
    const below = item.children.filter(shows);
    const hidden = item.children.filter((child) => !shows(child));
    if (hidden.length) below.push({ box: { hidden, owner: item } });
    for (const child of below.reverse()) stack.push([child, place, depth + 1]);
  }
  const size = { ...(boxes.length > ROOMY_UP_TO ? COMPACT : ROOMY) };
  const columns = Math.max(...boxes.map((box) => box.depth), 1);
  size.width = (room - ROOT_WIDTH) / columns - size.gapX;
  size.width = Math.max(NARROWEST, Math.min(WIDEST, Math.floor(size.width)));
  return { ...arrange(boxes, size), size };
}

function arrange(boxes, size) {
  let bottom = 0;
  const isLeaf = boxes.map(() => true);
  for (const box of boxes) if (box.parent >= 0) isLeaf[box.parent] = false;
  boxes.forEach((box, i) => {
    box.width = box.node?.isRoot ? ROOT_WIDTH : size.width;
    box.height = box.node ? size.height : size.chip;
    const column = size.width + size.gapX;
    box.x = box.depth === 0 ? 0 : ROOT_WIDTH + size.gapX + (box.depth - 1) * column;
    if (isLeaf[i]) {
      box.y = bottom;
      bottom += box.height + size.gapY;
    }
  });
  for (let i = boxes.length - 1; i >= 0; i--) {
    const box = boxes[i];
    if (!isLeaf[i]) {
      const middle = (box.first + box.last) / 2 - box.height / 2;
      box.y = Math.min(middle, box.first - box.height / 2 + size.farthest);
    }
    const above = boxes[box.parent];
    if (above) {
      above.first = box.y + box.height / 2;
      above.last ??= box.y + box.height / 2;
    }
  }
  return {
    boxes,
    width: Math.max(...boxes.map((box) => box.x + box.width)),
    height: Math.max(bottom - size.gapY, size.height),
  };
}

// The line from the right edge of a box to the left edge of a box below it. In a roomy tree it
// swings; in a compact one it turns at right angles, so that the lines of many siblings are one.
function link(from, to, size) {
  const [x1, y1] = [from.x + from.width, from.y + from.height / 2];
  const [x2, y2] = [to.x, to.y + to.height / 2];
  const middle = (x1 + x2) / 2;
  if (size.lines > 1) return `M${x1} ${y1}C${middle} ${y1} ${middle} ${y2} ${x2} ${y2}`;
  const turn = Math.min(8, Math.abs(y2 - y1) / 2) * Math.sign(y2 - y1);
  const r = Math.abs(turn);
  return `M${x1} ${y1}H${middle - r}q${r} 0 ${r} ${turn}V${y2 - turn}q0 ${turn} ${r} ${turn}H${x2}`;
}
