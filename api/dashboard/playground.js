// The playground: a conversation with the model, and under each answer what of its prompt was cached, and why not more.

import { stream } from "./api.js";
import { $, count, duration, el, percent, plural } from "./dom.js";
import { SCHEMA, TOOLS } from "./examples.js";
import { meter } from "./requests.js";
import { sideBySide } from "./why.js";

let messages = []; // without the system message
let stopping = null; // of the answer that is being written
let feed;

const mode = () => document.querySelector("#answer-as input:checked").value;

function json(id, what) {
  try {
    return JSON.parse($(id).value);
  } catch (error) {
    throw new Error(`${what}: this is no JSON: ${error.message}.`);
  }
}

// The messages and tools as they would be sent; with what is typed, if `typed`.
function prompt({ typed }) {
  const system = $("play-system").value.trim();
  const said = $("play-message").value.trim();
  const body = { messages: [...(system ? [{ role: "system", content: system }] : []), ...messages] };
  if (typed && said) body.messages.push({ role: "user", content: said });
  if (mode() === "tools") body.tools = json("play-tools", "Tools");
  return body;
}

// What "Why did it miss?" takes over: the conversation up to the last question.
export function conversation() {
  const body = prompt({ typed: true });
  while (body.messages.length && !["user", "tool"].includes(body.messages.at(-1).role)) body.messages.pop();
  if (!body.messages.some((message) => message.role === "user")) body.messages.push({ role: "user", content: "" });
  return body;
}

function request() {
  const body = { ...prompt({ typed: false }), stream: true, stream_options: { include_usage: true }, cache_report: true };
  body.temperature = Number($("play-temperature").value);
  body.max_tokens = Number($("play-tokens").value);
  if (mode() === "schema") {
    body.response_format = { type: "json_schema", json_schema: { name: "answer", schema: json("play-schema", "Schema"), strict: true } };
  }
  if (mode() === "tools") body.tool_choice = messages.at(-1)?.role === "tool" ? "auto" : $("play-choice").value;
  return body;
}

function turn(role, ...children) {
  const element = el("div", { class: `turn ${role}` }, el("span", { class: "role" }, role), ...children);
  $("conversation").append(element);
  $("conversation").scrollTop = $("conversation").scrollHeight;
  return element;
}

async function send(event) {
  event?.preventDefault();
  const said = $("play-message").value.trim() || (messages.length ? "" : $("play-message").placeholder);
  if (stopping || !said) return;
  try {
    prompt({ typed: false }); // refuses JSON that is none before anything is taken from the box
  } catch (error) {
    turn("error", el("p", { class: "error" }, error.message));
    return;
  }
  messages.push({ role: "user", content: said });
  $("play-message").value = "";
  turn("user", el("p", { class: "said" }, said));
  await answer();
}

async function answer() {
  const text = el("p", { class: "said" });
  const calls = el("div", { class: "calls" });
  const facts = el("div", { class: "facts" });
  const element = turn("assistant", text, calls, facts);
  element.setAttribute("aria-busy", "true");
  stopping = new AbortController();
  setBusy(true);
  const state = { content: "", calls: [], started: performance.now(), first: null, finish: null };
  try {
    const body = request();
    state.body = body;
    for await (const chunk of stream("v1/chat/completions", body, stopping.signal)) take(chunk, state, text, calls);
    finish(state, text, calls, facts);
  } catch (error) {
    if (error.name !== "AbortError") element.append(el("p", { class: "error" }, error.message));
    if (state.content || state.calls.length) remember(state);
    else messages.pop(); // it can be sent again, changed
  } finally {
    element.removeAttribute("aria-busy");
    stopping = null;
    setBusy(false);
    feed.soon();
  }
}

function take(chunk, state, text, calls) {
  if (chunk.usage) state.usage = chunk.usage;
  if (chunk.cache_report) state.report = chunk.cache_report;
  const choice = chunk.choices?.[0];
  if (!choice) return;
  const { content, tool_calls: pieces, reasoning, reasoning_content: thoughts } = choice.delta;
  if (state.first === null && (content || pieces || reasoning || thoughts)) state.first = (performance.now() - state.started) / 1000;
  if (content) {
    state.content += content;
    text.textContent = state.content;
  }
  for (const piece of pieces ?? []) {
    const call = (state.calls[piece.index] ??= { id: piece.id, type: "function", function: { name: "", arguments: "" } });
    call.function.name += piece.function?.name ?? "";
    call.function.arguments += piece.function?.arguments ?? "";
    calls.replaceChildren(...state.calls.map(drawCall));
  }
  if (choice.finish_reason) state.finish = choice.finish_reason;
  const log = $("conversation");
  if (log.scrollHeight - log.scrollTop - log.clientHeight < 160) log.scrollTop = log.scrollHeight;
}

const drawCall = (call) => el("pre", { class: "call" }, el("b", {}, call.function.name), `(${call.function.arguments})`);

function remember(state) {
  const calls = state.calls.filter(Boolean);
  messages.push({ role: "assistant", content: state.content || null, ...(calls.length ? { tool_calls: calls } : {}) });
}

function finish(state, text, calls, facts) {
  remember(state);
  if (state.body.response_format) {
    try {
      text.replaceWith(el("pre", { class: "said json" }, JSON.stringify(JSON.parse(state.content), null, 2)));
    } catch {
      text.after(el("p", { class: "error" }, state.finish === "length" ? "The tokens were used up before the JSON was complete." : "This is no complete JSON."));
    }
  }
  if (!state.content) text.remove();
  for (const call of state.calls.filter(Boolean)) calls.append(resultForm(call));
  facts.append(...report(state));
  $("conversation").scrollTop = $("conversation").scrollHeight;
}

// What the tool said goes back as a message of its own, and the model goes on.
function resultForm(call) {
  const input = el("input", { type: "text", "aria-label": `Result of ${call.function.name}`, placeholder: "its result" });
  const form = el("form", { class: "row result" }, input, el("button", { type: "submit" }, "Give back"));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (stopping || !input.value) return;
    messages.push({ role: "tool", tool_call_id: call.id, content: input.value });
    form.replaceWith(el("p", { class: "note" }, `→ ${input.value}`));
    const open = messages.findLast((message) => message.tool_calls).tool_calls.filter(({ id }) => !messages.some((message) => message.tool_call_id === id));
    if (!open.length) answer();
  });
  return form;
}

function report(state) {
  const parts = [];
  if (state.usage) {
    const { prompt_tokens: all, completion_tokens: written } = state.usage;
    const cached = state.usage.prompt_tokens_details.cached_tokens;
    const rest = (performance.now() - state.started) / 1000 - (state.first ?? 0);
    const speed = written > 1 && rest > 0 ? `, ${((written - 1) / rest).toFixed(1)} a second` : "";
    parts.push(el("p", { class: "cached-line" }, meter(cached, all), el("b", {}, `${count(cached)} of ${count(all)}`), ` prompt tokens cached (${percent(cached / all)})`));
    parts.push(el("p", { class: "note" }, `first token after ${duration(state.first)}; ${plural(written, "token")}${speed}; ${state.finish}`));
  }
  if (state.report) {
    const difference = state.report.difference;
    parts.push(el("details", {}, el("summary", {}, `Cache report: ${state.report.reason}`), el("p", { class: "sentence" }, state.report.sentence), difference ? sideBySide(difference, state.body) : null));
  }
  return parts;
}

function setBusy(isBusy) {
  $("play-send").hidden = isBusy;
  $("play-stop").hidden = !isBusy;
}

export function startPlayground(itsFeed) {
  feed = itsFeed;
  $("play-schema").value = JSON.stringify(SCHEMA, null, 2);
  $("play-tools").value = JSON.stringify(TOOLS, null, 2);
  $("play-form").addEventListener("submit", send);
  $("play-message").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
  });
  $("play-stop").addEventListener("click", () => stopping?.abort());
  $("play-clear").addEventListener("click", () => {
    stopping?.abort();
    messages = [];
    $("conversation").replaceChildren();
  });
  const showParts = () => {
    $("schema-part").hidden = mode() !== "schema";
    $("tools-part").hidden = mode() !== "tools";
  };
  $("answer-as").addEventListener("change", showParts);
  showParts(); // browsers keep what was chosen over a reload
}
