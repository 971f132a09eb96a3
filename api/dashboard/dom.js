// Making elements, and numbers as people read them. Text only ever becomes text nodes: no string is parsed as HTML.

export const $ = (id) => document.getElementById(id);

// el("p", { class: "note", "aria-label": "…", hidden: true, onclick: f }, "text", child, …); null children are left out.
export function el(name, props = {}, ...children) {
  const element = document.createElement(name);
  set(element, props);
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

export function svg(name, props = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  set(element, props);
  element.append(...children.flat());
  return element;
}

function set(element, props) {
  for (const [name, value] of Object.entries(props)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(element.style, value); // by CSSOM: the policy forbids style attributes
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
}

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
export const count = (number) => whole.format(number);
export const plural = (number, one, many = `${one}s`) => `${count(number)} ${number === 1 ? one : many}`;
export function percent(share) {
  if (share > 0 && share < 0.001) return "< 0.1 %";
  if (share > 0.999 && share < 1) return "> 99.9 %";
  return `${(share > 0 && share < 0.01) || (share > 0.99 && share < 1) ? (100 * share).toFixed(1) : Math.round(100 * share)} %`;
}

// 1,284,000 → "1.28 M"; for where there is no room.
export function short(number) {
  for (const [unit, size] of [["G", 1e9], ["M", 1e6], ["k", 1e4]]) {
    if (number >= size) {
      const scaled = number / (unit === "k" ? 1e3 : size);
      return `${scaled.toPrecision(3).replace(/\.?0+$/, "")} ${unit}`;
    }
  }
  return count(number);
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 1) return `${Math.round(1000 * seconds)} ms`;
  if (seconds < 10) return `${seconds.toFixed(2)} s`;
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
  return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
}

export function ago(seconds) {
  if (seconds < 2) return "just now";
  if (seconds < 60) return `${Math.floor(seconds)} s ago`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ago`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ago`;
  return `${Math.floor(seconds / 86400)} d ago`;
}

export const clock = (unix) => new Date(1000 * unix).toTimeString().slice(0, 8);
export const tenantName = (tenant) => (tenant ? tenant.slice(0, 8) : "everybody");

// A prompt's text in one line: line ends and special tokens as signs.
export const oneLine = (text) => text.replace(/<\|[^|<>]*\|>/g, "▸").replace(/\n/g, "⏎").replace(/\s+/g, " ");
