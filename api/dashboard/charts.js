// Hit rate and prompt tokens over time, from the sums that the server keeps of each ten seconds.

import { $, clock, count, percent, plural, short, svg } from "./dom.js";

const HEIGHT = 132;
const MARGIN = { left: 38, right: 6, top: 10, bottom: 20 };

let span = 600; // seconds shown
let slots = []; // oldest first
let pointed = null; // index of a slot

// One slot per bar; of an hour each holds a minute.
export function slotsOf(history, now, seconds, bucketSeconds) {
  const width = seconds > 600 ? 60 : bucketSeconds;
  const last = Math.floor(now / width) * width;
  const made = [];
  for (let start = last - seconds + width; start <= last; start += width) {
    made.push({ start, width, prompt: 0, cached: 0, requests: 0 });
  }
  for (const bucket of history.values()) {
    const slot = made[Math.floor((bucket.start - made[0].start) / width)];
    if (!slot || bucket.start < made[0].start) continue;
    slot.prompt += bucket.prompt_tokens;
    slot.cached += bucket.cached_tokens;
    slot.requests += bucket.requests;
  }
  return made;
}

export function sums(list) {
  const total = { prompt: 0, cached: 0, requests: 0 };
  for (const slot of list) for (const name of Object.keys(total)) total[name] += slot[name];
  return total;
}

export function showCharts(feed) {
  slots = slotsOf(feed.history, feed.snapshot.now, span, feed.snapshot.bucket_seconds);
  draw();
}

function draw() {
  const { prompt, cached, requests } = sums(slots);
  const overall = prompt ? cached / prompt : null;
  const past = span === 600 ? "the last ten minutes" : "the last hour";
  drawChart("rate-chart", 1, percent, `Hit rate over ${past}: ${overall === null ? "no requests" : percent(overall)}.`, drawRates);
  const most = niceCeiling(Math.max(10, ...slots.map((slot) => slot.prompt)));
  drawChart("saved-chart", most, short, `Prompt tokens over ${past}: ${count(cached)} found in the cache, ${count(prompt - cached)} computed.`, drawBars);
  const slot = slots[pointed];
  if (slot) {
    const when = clock(slot.start);
    $("rate-reading").textContent = slot.prompt ? `${when}: ${percent(slot.cached / slot.prompt)} of ${plural(slot.requests, "request")}` : `${when}: no request ended`;
    $("saved-reading").textContent = `${when}: ${count(slot.cached)} + ${count(slot.prompt - slot.cached)}`;
  } else {
    $("rate-reading").textContent = overall === null ? "" : `${percent(overall)} in ${past}`;
    $("saved-reading").textContent = requests ? `${count(cached)} of ${count(prompt)}` : "";
  }
}

function niceCeiling(number) {
  const power = 10 ** Math.floor(Math.log10(number));
  return [1, 2, 4, 5, 10].map((digit) => digit * power).find((nice) => nice >= number);
}

function drawChart(id, most, told, words, drawData) {
  const place = $(id);
  const width = Math.max(160, place.clientWidth);
  const inner = { width: width - MARGIN.left - MARGIN.right, height: HEIGHT - MARGIN.top - MARGIN.bottom };
  const x = (i) => MARGIN.left + (i / slots.length) * inner.width;
  const y = (value) => MARGIN.top + inner.height * (1 - value / most);
  const parts = [];
  for (const share of [0, 0.5, 1]) {
    parts.push(svg("line", { class: share ? "grid" : "base", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(share * most), y2: y(share * most) }));
    const text = svg("text", { class: "tick", x: MARGIN.left - 6, y: y(share * most) + 4, "text-anchor": "end" });
    text.textContent = told(share * most);
    parts.push(text);
  }
  for (const [at, anchor] of [[0, "start"], [slots.length / 2, "middle"], [slots.length, "end"]]) {
    const text = svg("text", { class: "tick", x: x(at), y: HEIGHT - 4, "text-anchor": anchor });
    text.textContent = at === slots.length ? "now" : clock(slots[Math.floor(at)].start).slice(0, 5);
    parts.push(text);
  }
  if (slots[pointed]) parts.push(svg("rect", { class: "pointed", x: x(pointed), width: inner.width / slots.length, y: MARGIN.top, height: inner.height }));
  parts.push(...drawData(x, y, inner.width / slots.length));
  const chart = svg("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT, role: "img", "aria-label": words });
  chart.append(...parts);
  place.replaceChildren(chart);
}

function drawBars(x, y, width) {
  return slots.flatMap((slot, i) => {
    if (!slot.prompt) return [];
    const bar = (name, from, to) => svg("rect", { class: name, x: x(i) + 0.5, width: Math.max(1, width - 1), y: y(to), height: Math.max(0, y(from) - y(to)) });
    return [bar("saved", 0, slot.cached), bar("computed", slot.cached, slot.prompt)];
  });
}

// Where no request ended there is no rate: the line is drawn between neighbours only, and every value has a dot.
function drawRates(x, y, width) {
  const points = slots.map((slot, i) => (slot.prompt ? [x(i) + width / 2, y(slot.cached / slot.prompt)] : null));
  const path = points.map((point, i) => (point ? `${points[i - 1] ? "L" : "M"}${point[0].toFixed(1)} ${point[1].toFixed(1)}` : "")).join("");
  const dots = points.filter(Boolean).map(([cx, cy]) => svg("circle", { class: "dot", cx, cy, r: 2.5 }));
  return [svg("path", { class: "rate", d: path, fill: "none" }), ...dots];
}

function point(index) {
  pointed = index === null ? null : Math.max(0, Math.min(slots.length - 1, index));
  draw();
}

export function startCharts(onRange) {
  for (const id of ["rate-chart", "saved-chart"]) {
    const place = $(id);
    place.tabIndex = 0;
    place.setAttribute("role", "group");
    place.setAttribute("aria-label", id === "rate-chart" ? "Hit rate; arrow keys read values" : "Prompt tokens; arrow keys read values");
    place.addEventListener("pointermove", (event) => {
      const { left, width } = place.getBoundingClientRect();
      const share = (event.clientX - left - MARGIN.left) / (width - MARGIN.left - MARGIN.right);
      if (slots.length) point(Math.floor(share * slots.length));
    });
    place.addEventListener("pointerleave", () => slots.length && point(null));
    place.addEventListener("blur", () => slots.length && point(null));
    place.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!step || !slots.length) return;
      event.preventDefault();
      point((pointed ?? slots.length) + step);
    });
  }
  $("range").addEventListener("change", (event) => {
    span = Number(event.target.value);
    onRange();
  });
  new ResizeObserver(() => slots.length && draw()).observe($("rate-chart"));
}
