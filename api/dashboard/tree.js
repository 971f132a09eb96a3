// The picture of the prefix tree: boxes, what the one that is pointed at holds, zoom, and the keyboard.

import { $, ago, count, el, oneLine, plural, tenantName } from "./dom.js";
import { find, forest, layout, rootName, scale, ticks } from "./tree_layout.js";

const ROW = 28; // px, with the gap
const LINE = 20; // px, of its text
const MAX_ROWS = 36;
const HEATS = [[10, 4], [90, 3], [900, 2]]; // found again so many seconds ago at most → how warm; older: 1

let entries = [];
let items = [];
let focusKey = null; // zoomed in on
let activeKey = null; // the box that the keyboard is at
let shownKey = null; // the box that the card is about
let tappedKey = null; // the last box that was clicked or tapped
let hitsBefore = new Map(); // key → hits when it was last drawn, to see new ones
let hitsNow = new Map();
let seen = new Map();

const order = (key) => {
  if (!seen.has(key)) seen.set(key, seen.size);
  return seen.get(key);
};

export function heat(node) {
  if (!node.hits) return 0;
  return HEATS.find(([seconds]) => node.last_use_seconds_ago <= seconds)?.[1] ?? 1;
}

export function showTree(tree) {
  entries = forest(tree.namespaces);
  if (seen.size > 20_000) seen = new Map(); // boxes may change places then
  remember(entries);
  draw();
}

function remember(list) {
  for (const entry of list) {
    order(entry.key);
    remember(entry.children);
  }
}

function draw() {
  const focus = focusKey === null ? null : find(entries, focusKey);
  if (!focus) focusKey = null;
  items = layout(entries, { focus, maxRows: MAX_ROWS, order });
  if (focus && !items.length) items = [{ kind: "node", entry: focus, key: focus.key, parent: focus.parent?.key ?? null, start: focus.start, end: focus.end, level: 1, row: 0, rows: 1, isOpen: false, index: 1, of: 1 }];
  const from = items.length && focus ? items[0].start : 0;
  const across = scale(items, from);
  drawCrumbs(focus);
  drawAxis(across, from);
  const hadFocus = $("tree-items").contains(document.activeElement);
  if (!items.some((one) => one.key === activeKey)) activeKey = items[0]?.key ?? null;
  const rows = Math.max(0, ...items.map((one) => one.row + one.rows));
  $("tree-items").style.height = `${rows * ROW}px`;
  [hitsBefore, hitsNow] = [hitsNow, new Map()];
  reconcile(items.map((one) => [one, across]));
  $("tree-empty").hidden = items.length > 0;
  $("axis").hidden = $("tree-keys").hidden = !items.length;
  $("tree-note").textContent = summary() + (across.isRoot && items.length ? "; short ones are drawn wider" : "");
  if (hadFocus) box(activeKey)?.focus({ preventScroll: true });
  showCard(items.find((one) => one.key === shownKey) ?? null);
}

function summary() {
  const nodes = items.filter((one) => one.kind === "node");
  if (!nodes.length) return "";
  const more = items.filter((one) => one.kind === "more").reduce((total, one) => total + one.hidden, 0);
  return `${plural(nodes.length, "run")} of tokens${more ? `, ${count(more)} more not drawn` : ""}`;
}

const boxes = new Map();
const box = (key) => boxes.get(key);

// Boxes that stay keep their elements: the keyboard's place, and soft moves.
function reconcile(wanted) {
  const keys = new Set(wanted.map(([one]) => one.key));
  for (const [key, element] of boxes) {
    if (!keys.has(key)) {
      element.remove();
      boxes.delete(key);
    }
  }
  let before = null;
  for (const [one, across] of wanted) {
    let element = box(one.key);
    if (!element) {
      element = el("div", { role: "treeitem" }, el("span", { class: "text" }), el("span", { class: "size" }));
      element.dataset.key = one.key;
      boxes.set(one.key, element);
    }
    dress(element, one, across);
    const next = before ? before.nextSibling : $("tree-items").firstChild;
    if (next !== element) $("tree-items").insertBefore(element, next);
    before = element;
  }
}

function dress(element, one, across) {
  const { node } = one.entry;
  const left = one.kind === "root" ? 0 : across.place(one.start);
  const width = one.kind === "root" ? 1 : one.kind === "more" ? 1 - left : across.place(one.end) - left;
  const classes = [one.kind, `rows-${one.rows > 1 ? "many" : "one"}`];
  if (one.kind === "node") {
    classes.push(`heat-${heat(node)}`);
    if (node.pinned) classes.push("pinned");
    if (node.tier !== "device" || node.copies?.length) classes.push("copied");
    if (node.references) classes.push("in-use");
    if (node.hits > (hitsBefore.get(one.key) ?? Infinity)) flash(element);
    hitsNow.set(one.key, node.hits);
  }
  element.className = `${classes.join(" ")}${element.classList.contains("flash") ? " flash" : ""}`;
  Object.assign(element.style, {
    left: `${100 * Math.min(left, 0.99)}%`,
    width: `max(5px, calc(${100 * width}% - 2px))`,
    top: `${one.row * ROW}px`,
    height: `${one.rows * ROW - 2}px`,
  });
  const text = element.querySelector(".text");
  text.textContent = label(one);
  text.style.height = `${LINE * Math.max(1, Math.floor((one.rows * ROW - 8) / LINE))}px`; // no line is cut in two
  element.querySelector(".size").textContent = one.kind === "node" ? sizes(one) : "";
  element.tabIndex = one.key === activeKey ? 0 : -1;
  element.setAttribute("aria-level", one.level);
  element.setAttribute("aria-posinset", one.index);
  element.setAttribute("aria-setsize", one.of);
  element.setAttribute("aria-selected", String(one.key === shownKey));
  if (one.isOpen) element.setAttribute("aria-expanded", "true");
  else element.removeAttribute("aria-expanded");
  element.setAttribute("aria-label", spoken(one));
}

function sizes(one) {
  const more = one.isOpen ? 0 : one.entry.hidden;
  return `${count(one.entry.node.num_tokens)} · ${count(one.entry.node.hits)}×${more ? ` · +${count(more)}` : ""}`;
}

function flash(element) {
  element.classList.add("flash");
  element.addEventListener("animationend", () => element.classList.remove("flash"), { once: true });
}

function label(one) {
  if (one.kind === "root") return rootName(one.entry.node, true);
  if (one.kind === "more") return `+ ${count(one.hidden)} more`;
  return oneLine(one.entry.node.text);
}

function spoken(one) {
  if (one.kind === "root") return `${label(one)}, a tree of its own`;
  if (one.kind === "more") return `${plural(one.hidden, "continuation")} not drawn`;
  const { node } = one.entry;
  return `${node.text} – ${plural(node.num_tokens, "token")}, ${plural(node.hits, "hit")}${node.pinned ? ", pinned" : ""}`;
}

function drawCrumbs(focus) {
  const crumbs = $("crumbs");
  crumbs.hidden = !focus;
  if (!focus) return crumbs.replaceChildren();
  const path = [];
  for (let entry = focus; entry && (entry.parent || entries.length > 1); entry = entry.parent) path.unshift(entry);
  const parts = path.map((entry) => el("button", { type: "button", class: "crumb", onclick: () => zoom(entry === focus ? above(entry) : entry.key), title: entry.node.text ?? "", "aria-current": entry === focus ? "location" : null }, entry.parent ? oneLine(entry.node.text) : rootName(entry.node, true)));
  crumbs.replaceChildren(el("button", { type: "button", class: "crumb all", onclick: () => zoom(null) }, "Whole tree"), ...parts);
}

function drawAxis(across, from) {
  const room = $("axis").clientWidth || 600;
  const marks = ticks(across, from, Math.max(3, Math.floor(room / 90)));
  $("axis").replaceChildren(...marks.map(({ tokens, at }, i) => el("span", { style: { left: `${100 * at}%` }, class: at > 0.94 ? "last" : null }, i ? count(tokens) : `${count(tokens)} tokens`)));
}

function showCard(one) {
  const card = $("node-card");
  if (!one || one.kind !== "node") return card.replaceChildren();
  const { node } = one.entry;
  const facts = [
    ["tokens", `${count(node.num_tokens)}, from ${count(one.start)} to ${count(one.end)}`],
    ["hits", `${count(node.hits)}`],
    ["saved", `${plural(node.tokens_saved, "token")}`],
    ["last use", ago(node.last_use_seconds_ago)],
    ["in use by", plural(node.references, "request")],
    ["where", [node.tier, ...(node.copies ?? [])].join(", ") + (node.pinned ? ", pinned" : "")],
  ];
  let root = one.entry;
  while (root.parent) root = root.parent;
  if (root.node.tenant) facts.push(["tenant", tenantName(root.node.tenant)]);
  if (root.node.cache_salt) facts.push(["salt", root.node.cache_salt]);
  card.replaceChildren(
    el("pre", { class: "text" }, node.text),
    el("dl", {}, facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))),
  );
}

function show(key) {
  if (key === shownKey) return;
  box(shownKey)?.setAttribute("aria-selected", "false");
  shownKey = key;
  box(key)?.setAttribute("aria-selected", "true");
  showCard(items.find((one) => one.key === key) ?? null);
}

function zoom(key) {
  focusKey = key;
  draw();
  (box(activeKey) ?? $("tree-items")).focus?.({ preventScroll: true });
}

// What to zoom out to: the one above; of a lone tree's first runs everything.
function above(entry) {
  const parent = entry?.parent;
  return parent && (parent.parent || entries.length > 1) ? parent.key : null;
}

function moveTo(one) {
  if (!one) return;
  const old = box(activeKey);
  if (old) old.tabIndex = -1;
  activeKey = one.key;
  box(activeKey).tabIndex = 0;
  box(activeKey).focus();
}

// What a key leads to: up and down among all boxes as they are read, right to the first continuation, left to what is continued.
function target(pressed) {
  const at = items.findIndex((one) => one.key === activeKey);
  const active = items[at];
  switch (pressed) {
    case "ArrowDown":
      return items[at + 1];
    case "ArrowUp":
      return items[at - 1];
    case "ArrowRight":
      return active.isOpen ? items[at + 1] : null;
    case "ArrowLeft":
      return items.slice(0, at).findLast((one) => one.level === active.level - 1);
    case "Home":
      return items[0];
    case "End":
      return items.at(-1);
    default:
      return undefined;
  }
}

function enter(one) {
  if (one.kind === "more") zoom(one.entry.key);
  else if (one.key !== focusKey) zoom(one.key);
}

export function startTree() {
  const tree = $("tree-items");
  const itemAt = (event) => {
    const element = event.target.closest("[role=treeitem]");
    return element && items.find((one) => one.key === element.dataset.key);
  };
  tree.addEventListener("pointerover", (event) => itemAt(event) && show(itemAt(event).key));
  tree.addEventListener("focusin", (event) => {
    const one = itemAt(event);
    if (one) {
      activeKey = one.key;
      show(one.key);
    }
  });
  tree.addEventListener("click", (event) => {
    const one = itemAt(event);
    if (!one) return;
    const isSecond = tappedKey === one.key;
    tappedKey = one.key;
    moveTo(one);
    if (isSecond || matchMedia("(hover: hover)").matches) enter(one); // with a finger a first tap reads, a second zooms
  });
  tree.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !items.length) return;
    const active = items.find((one) => one.key === activeKey);
    const next = target(event.key);
    if (next !== undefined || event.key.startsWith("Arrow")) moveTo(next);
    else if (event.key === "Enter" || event.key === " ") enter(active);
    else if (event.key === "Escape" && focusKey !== null) zoom(above(find(entries, focusKey)));
    else return;
    event.preventDefault();
  });
  new ResizeObserver(() => items.length && draw()).observe($("axis"));
}
