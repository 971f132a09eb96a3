// Whose the memory is: pages by what they are for, tokens by tenant, pins, tiers, and what other sizes would bring.

import { $, count, duration, el, oneLine, percent, plural, short, tenantName } from "./dom.js";
import { meter } from "./requests.js";

const PARTS = [
  ["held", "cached, in use or pinned"],
  ["evictable", "cached, free to go"],
  ["own", "running requests' own"],
  ["free", "free"],
];

export function showMemory({ server, memory, owners }) {
  const all = server.num_pages;
  const tokens = (pages) => pages * server.page_size;
  const words = PARTS.map(([name, label]) => `${label} ${percent(memory[name] / all)}`).join(", ");
  $("memory-bar").setAttribute("aria-label", words);
  $("memory-bar").replaceChildren(...PARTS.map(([name]) => el("i", { class: name, style: { width: `${(100 * memory[name]) / all}%` } })));
  $("memory-note").textContent = `${count(tokens(all))} tokens in ${count(all)} pages of ${server.page_size}, on ${server.device}`;
  rows("memory-table", [
    ...PARTS.map(([name, label]) => [el("span", {}, el("i", { class: `swatch ${name}` }), label), plural(tokens(memory[name]), "token"), percent(memory[name] / all)]),
    ...(memory.pinned ? [["of these, pinned", plural(tokens(memory.pinned), "token"), percent(memory.pinned / all)]] : []),
    ...Object.entries(memory.tier_usage).filter(([tier]) => tier !== "device").map(([tier, usage]) => [`tier: ${tier}`, "", percent(usage)]),
    ...Object.entries(memory.evicted).filter(([, pages]) => pages).map(([tier, pages]) => [`evicted so far, ${tier}`, plural(tokens(pages), "token"), ""]),
  ]);
  const sorted = [...owners].sort((a, b) => b.cached_tokens - a.cached_tokens).slice(0, 20);
  rows("owner-table", sorted.map((owner) => [
    el("span", { title: owner.keys.join(", ") }, tenantName(owner.tenant), owner.is_own && owner.tenant ? el("em", {}, " yours") : null),
    el("span", {}, meter(owner.cached_tokens, tokens(all)), plural(owner.cached_tokens, "token")),
    owner.requests ? plural(owner.requests, "request") : "idle",
  ]));
}

export function showReuse(curve) {
  $("more-table").hidden = !curve.length;
  rows("more-table", curve.filter(({ times }) => times >= 0.5 && times <= 16).map(({ times, num_tokens: tokens, hit_rate: rate }) => [
    times === 1 ? el("b", {}, "as it is") : `× ${times}`,
    `${short(tokens)} tokens`,
    el("span", {}, meter(rate, 1), percent(rate)),
  ]));
}

export function showPins(pins) {
  $("pin-table").hidden = !pins.length;
  rows("pin-table", pins.slice(0, 20).map((pin) => [
    el("code", { class: "cut", title: pin.text }, oneLine(pin.text)),
    plural(pin.pinned_tokens, "token"),
    `${duration(pin.expires_in_seconds)} left`,
  ]));
}

function rows(id, lines) {
  $(id).tBodies[0].replaceChildren(...lines.map(([first, ...rest]) => el("tr", {}, el("th", { scope: "row" }, first), rest.map((cell) => el("td", {}, cell)))));
}
