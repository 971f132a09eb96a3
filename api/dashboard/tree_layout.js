// Where each box of the prefix tree stands. Plain data in, plain data out; no page.
//
//   const items = layout(namespaces, { focus: [], maxRows: 36, order })
//
// A lying icicle: to the right goes the position in the prompt, in tokens, and what continues a prefix stands to its right,
// in the rows that the prefix takes. So a box is as wide as its run of tokens and as high as the leaves that share it: its
// area is what those leaves would hold without sharing.
//
//   {kind: "node", key, parent, level, start, end, row, rows, node, isOpen, index, of}      a run of cached tokens
//   {kind: "more", …, hidden}       children for which there are no rows: those that saved most are shown first
//   {kind: "root", …}               a namespace, if there are several: a row of its own above its tree

const SEPARATOR = "\u0000";

export const keyOf = (parent, node) => `${parent}${SEPARATOR}${node.text}`;

// What a namespace is called.
export function rootName(root, many) {
  const parts = [];
  if (root.tenant || !many) parts.push(`tenant ${root.tenant.slice(0, 8)}`);
  else parts.push("everybody");
  if (root.cache_salt) parts.push(`salt ${root.cache_salt}`);
  if (root.adapter) parts.push(`adapter ${root.adapter}`);
  return parts.join(", ");
}

class Entry {
  constructor(node, parent, start, key) {
    this.node = node;
    this.parent = parent;
    this.key = key;
    this.start = start;
    this.end = start + (node.num_tokens ?? 0);
    this.children = node.children.map((child) => new Entry(child, this, this.end, keyOf(key, child)));
    this.saved = (node.tokens_saved ?? 0) + sum(this.children, (child) => child.saved);
    this.tokens = (node.num_tokens ?? 0) + sum(this.children, (child) => child.tokens);
    this.shown = [];
  }

  get hidden() {
    return this.children.length - this.shown.length + this.node.left_out;
  }
}

const sum = (items, of) => items.reduce((total, item) => total + of(item), 0);

export const forest = (namespaces) =>
  namespaces.filter((root) => root.children.length).map((root) => new Entry(root, null, 0, [root.tenant, root.cache_salt, root.adapter].join("/")));

export function find(entries, key) {
  for (const entry of entries) {
    if (entry.key === key) return entry;
    if (key.startsWith(entry.key)) {
      const found = find(entry.children, key);
      if (found) return found;
    }
  }
  return null;
}

// focus: the entry whose children are to fill the picture; null: everything.
// order: key → when it was first seen, so that boxes keep their places while others come.
export function layout(entries, { focus = null, maxRows, order }) {
  const tops = focus ? [focus] : entries;
  choose(tops, maxRows);
  const items = [];
  const named = !focus && tops.length > 1;
  let row = 0;
  for (const top of tops) {
    let level = 1;
    if (named) {
      items.push(item("root", top, { level, row, rows: 1, isOpen: true, index: tops.indexOf(top) + 1, of: tops.length }));
      row += 1;
      level = 2;
    }
    row = place(top, items, { row, level, order });
  }
  return items;
}

// Give the rows to what has saved most, a child after its parent.
function choose(tops, maxRows) {
  const waiting = [];
  let rows = tops.length;
  const push = (entry) => waiting.push(...entry.children);
  for (const top of tops) {
    reset(top);
    push(top);
  }
  while (waiting.length) {
    let best = 0;
    for (let i = 1; i < waiting.length; i += 1) if (isWorthMore(waiting[i], waiting[best])) best = i;
    const [entry] = waiting.splice(best, 1);
    const left = entry.parent.hidden - 1;
    if (rows + (left > 0 ? 1 : 0) > maxRows) continue;
    rows += left > 0 ? 1 : 0;
    entry.parent.shown.push(entry);
    push(entry);
  }
}

function reset(entry) {
  entry.shown = [];
  entry.children.forEach(reset);
}

const isWorthMore = (a, b) => a.saved > b.saved || (a.saved === b.saved && a.tokens > b.tokens);

function place(parent, items, { row, level, order }) {
  const shown = [...parent.shown].sort((a, b) => order(a.key) - order(b.key));
  const of = shown.length + (parent.hidden ? 1 : 0);
  let next = row;
  shown.forEach((entry, at) => {
    const placed = item("node", entry, { level, row: next, rows: 1, isOpen: entry.shown.length > 0, index: at + 1, of });
    items.push(placed);
    const end = place(entry, items, { row: next, level: level + 1, order });
    placed.rows = Math.max(1, end - next);
    next += placed.rows;
  });
  if (parent.hidden && shown.length) {
    items.push({ ...item("more", parent, { level, row: next, rows: 1, isOpen: false, index: of, of }), key: `${parent.key}${SEPARATOR}…`, start: parent.end, end: parent.end, parent: parent.key, hidden: parent.hidden });
    next += 1;
  }
  return next;
}

const item = (kind, entry, rest) => ({ kind, entry, key: entry.key, parent: entry.parent?.key ?? null, start: entry.start, end: entry.end, ...rest });

// From tokens to 0 … 1. Where most prompts are far shorter than the longest, a square root gives them room.
export function scale(items, from) {
  const ends = items.filter((one) => one.kind === "node" && !one.isOpen).map((one) => one.end - from).sort((a, b) => a - b);
  const longest = Math.max(16, ends.at(-1) ?? 0);
  const isRoot = longest > 6 * (ends[Math.floor(ends.length / 2)] ?? longest);
  const place = isRoot ? (tokens) => Math.sqrt(Math.max(0, tokens - from) / longest) : (tokens) => Math.max(0, tokens - from) / longest;
  return { place, longest, isRoot };
}

// Round positions for the axis, about `wanted` of them.
export function ticks({ place, longest }, from, wanted) {
  const steps = [1, 2, 5].flatMap((digit) => [16, 160, 1600, 16000].map((size) => digit * size)).sort((a, b) => a - b);
  const step = steps.find((size) => longest / size <= wanted) ?? steps.at(-1);
  const found = [];
  for (let at = 0; at <= longest; at += step) found.push({ tokens: from + at, at: place(from + at) });
  const spaced = [];
  for (const tick of found) if (!spaced.length || tick.at - spaced.at(-1).at > 0.6 / wanted) spaced.push(tick);
  return spaced;
}
