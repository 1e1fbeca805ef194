// The recording that the page carries, as moments with trees of edges.

const data = JSON.parse(document.getElementById("data").textContent);
const moments = data.moments.map(readMoment);

function readMoment(moment) {
  const nodes = moment.nodes.map((row) => {
    const node = Object.fromEntries(data.fields.map((field, i) => [field, row[i]]));
    return { ...node, text: data.texts[node.text], children: [] };
  });
  const root = { name: "", children: [], shown: true, isRoot: true };
  for (const node of nodes) {
    node.above = node.parent < 0 ? topOf(node.namespace, root) : nodes[node.parent];
    node.above.children.push(node);
  }
  sumUp(nodes, root);
  return { ...moment, root, nodes };
}

// Where the edges of a namespace hang: below the root, or below its own node if there are several.
function topOf(number, root) {
  if (data.namespaces.length < 2) return root;
  const name = `namespace ${number}`;
  let top = root.children.find((node) => node.name === name);
  if (!top) {
    const text = data.namespaces[number];
    top = { name, text, isNamespace: true, mark: "kept", shown: true, above: root, children: [] };
    root.children.push(top);
  }
  return top;
}

// Tells every node how many edges and tokens are in it and below it.
function sumUp(nodes, root) {
  for (let i = nodes.length - 1; i >= 0; i--) {
    const node = nodes[i];
    node.allEdges = 1 + node.children.reduce((sum, child) => sum + child.allEdges, 0);
    node.allTokens = node.tokens + node.children.reduce((sum, child) => sum + child.allTokens, 0);
  }
  for (const top of root.children.filter((node) => node.isNamespace)) {
    top.allEdges = top.children.reduce((sum, child) => sum + child.allEdges, 0);
    top.allTokens = top.children.reduce((sum, child) => sum + child.allTokens, 0);
  }
}

// How many edges and tokens of a moment have a mark.
function amount(moment, mark) {
  const found = moment.nodes.filter((node) => node.mark === mark);
  return { edges: found.length, tokens: found.reduce((sum, node) => sum + node.tokens, 0) };
}

function count(number, unit, units = `${unit}s`) {
  return `${number.toLocaleString("en")} ${number === 1 ? unit : units}`;
}
