// "Why did it miss?": a prompt is pasted, the server explains, and the words that differ stand side by side.

import { postJSON } from "./api.js";
import { differing } from "./diff.js";
import { $, count, duration, el, percent } from "./dom.js";

const CONTEXT = 90; // characters before the difference that are shown

const REASONS = {
  complete: "All that can be is cached",
  short: "Too short to be cached",
  differs: "It differs from what is cached",
  evicted: "It was cached, and had to go",
  computing: "It is being computed right now",
  namespace: "It is cached under another salt",
  unseen: "It was never seen",
  prompt_logprobs: "Its own log-probabilities are wanted",
  pooling: "The mean of all hidden states is wanted",
  disabled: "Prefix caching is off",
};

// The request that the form stands for. Throws an Error in words.
function requestOf() {
  const kind = document.querySelector("#why-kind input:checked").value;
  if (kind === "raw") return { prompt: $("why-raw").value };
  if (kind === "chat") {
    const system = $("why-system").value;
    return { messages: [...(system ? [{ role: "system", content: system }] : []), { role: "user", content: $("why-user").value }] };
  }
  let given;
  try {
    given = JSON.parse($("why-json").value);
  } catch (error) {
    throw new Error(`This is no JSON: ${error.message}.`);
  }
  const body = Array.isArray(given) ? { messages: given } : { ...given };
  delete body.stream;
  delete body.stream_options;
  return body;
}

// The text in which the difference lies, and where in it; null if it lies in what the template wrote.
function placeOf(difference, body) {
  if (difference.message !== null && difference.character !== null) {
    const content = body.messages?.[difference.message]?.content;
    if (typeof content === "string") return [content, difference.character];
  }
  if (typeof body.prompt === "string") {
    const at = body.prompt.indexOf(difference.sent);
    if (at >= 0) return [body.prompt, at];
  }
  return null;
}

function side(title, before, parts, mark) {
  return el("div", { class: `side ${mark}` }, el("h4", {}, title),
    el("pre", {}, before ? el("span", { class: "before" }, before) : null, parts.map(([text, differs]) => (differs ? el("mark", {}, text) : text)), el("span", { class: "before" }, "…")));
}

export function sideBySide(difference, body) {
  const place = placeOf(difference, body);
  let before = "";
  if (place) {
    // Not [...text]: the server counts characters, as Python does, not UTF-16 units.
    const characters = Array.from(place[0].slice(0, 1_000_000)).slice(0, place[1]);
    before = `${characters.length > CONTEXT ? "…" : ""}${characters.slice(-CONTEXT).join("")}`;
  }
  const [cached, sent] = differing(difference.cached, difference.sent);
  return el("div", { class: "sides" }, side("In the cache", before, cached, "cached"), side("In this prompt", before, sent, "sent"));
}

export function explained(explanation, body) {
  const { prompt_tokens: all, cached_tokens: cached, difference } = explanation;
  return el("div", { class: "explanation" },
    el("h3", {}, REASONS[explanation.reason] ?? explanation.reason),
    el("div", { class: "bar prompt-bar", role: "img", "aria-label": `${cached} of ${all} prompt tokens are cached` }, el("i", { class: "cached", style: { width: `${(100 * cached) / all}%` } })),
    el("p", { class: "note" }, `${count(cached)} of ${count(all)} prompt tokens are cached (${percent(cached / all)})${difference ? `; the same up to token ${count(difference.token)}` : ""}`),
    difference ? sideBySide(difference, body) : null,
    el("p", { class: "sentence" }, explanation.sentence));
}

async function ask(event) {
  event.preventDefault();
  const answer = $("why-answer");
  answer.replaceChildren(el("p", { class: "note" }, "Asking …"));
  try {
    const body = requestOf();
    const explanation = await postJSON("v1/cache/explain", body);
    const plan = await postJSON("v1/cache/plan", body);
    const seconds = plan.expected_ttft_seconds;
    answer.replaceChildren(explained(explanation, body),
      el("p", { class: "note" }, `Sent now, it would compute ${count(plan.tokens_to_compute)} tokens${seconds === null ? "" : `; its first token would come in about ${duration(seconds)}`}.`));
  } catch (error) {
    answer.replaceChildren(el("p", { class: "error" }, error.message));
  }
}

export function startWhy(conversation) {
  $("why-form").addEventListener("submit", ask);
  $("why-kind").addEventListener("change", (event) => {
    for (const part of document.querySelectorAll("[data-why]")) part.hidden = part.dataset.why !== event.target.value;
  });
  $("why-take").addEventListener("click", () => {
    const body = conversation();
    const [first, second] = body.messages;
    const isPlain = !body.tools && body.messages.length <= 2 && body.messages.at(-1)?.role === "user" && (body.messages.length < 2 || first.role === "system");
    const kind = isPlain ? "chat" : "json";
    if (isPlain) {
      $("why-system").value = second ? first.content : "";
      $("why-user").value = (second ?? first).content;
    } else {
      $("why-json").value = JSON.stringify(body.tools ? body : body.messages, null, 2);
    }
    const radio = document.querySelector(`#why-kind input[value=${kind}]`);
    radio.checked = true;
    radio.dispatchEvent(new Event("change", { bubbles: true }));
  });
}
