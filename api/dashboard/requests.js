// Requests that run, wait and have ended, each with its stages as a bar.
//
//   read     from its arrival in the server to the engine: template, tokenizer, schema
//   queue    until it is admitted
//   prefill  until its first token
//   write    until its end

import { $, clock, count, duration, el, plural, tenantName } from "./dom.js";

const FEW = 8;
let isAll = false;
let newestSeen = 0;

export function stagesOfFinished(request) {
  const { queue_seconds: queue, prefill_seconds: prefill, first_token_seconds: first, seconds } = request;
  if (queue === null || first === null) return [[request.error ? "read" : "prefill", seconds]]; // warmed, or failed before
  const read = Math.max(0, first - queue - prefill);
  return [["read", read], ["queue", queue], ["prefill", prefill], ["write", Math.max(0, seconds - first)]];
}

export function stagesOfRunning(request) {
  const { queue_seconds: queue, prefill_seconds: prefill, seconds } = request;
  const since = Math.max(0, seconds - queue);
  return prefill === null ? [["queue", queue], ["prefill", since]] : [["queue", queue], ["prefill", prefill], ["write", Math.max(0, since - prefill)]];
}

const NAMES = { read: "read in", queue: "queued", prefill: "prefill", write: "writing" };

export function showRequests(feed) {
  const { running, waiting, num_running: numRunning, num_waiting: numWaiting } = feed.snapshot;
  const finished = isAll ? feed.finished : feed.finished.slice(0, FEW);
  const rows = [
    ...running.slice(0, isAll ? 100 : FEW).map(ofRunning),
    ...waiting.slice(0, isAll ? 100 : FEW).map(ofWaiting),
    ...finished.map(ofFinished),
  ];
  const { is_admin: isAdmin, server } = feed.snapshot;
  const showsTenants = isAdmin && server.has_keys && !feed.tenant;
  const longest = Math.max(0.001, ...rows.map((row) => row.total));
  $("request-list").replaceChildren(...rows.map((row) => draw(row, longest, showsTenants)));
  $("requests-empty").hidden = rows.length > 0;
  $("requests-note").textContent = `${count(numRunning)} running, ${count(numWaiting)} waiting`;
  const left = feed.finished.length - finished.length + (isAll ? 0 : Math.max(0, running.length - FEW) + Math.max(0, waiting.length - FEW));
  $("more-requests").hidden = !isAll && left <= 0;
  $("more-requests").textContent = isAll ? "Show fewer" : `Show ${count(left)} more`;
  newestSeen = Math.max(newestSeen, feed.newest);
}

const total = (stages) => stages.reduce((sum, [, seconds]) => sum + seconds, 0);
const kindOf = (id) => ({ chatcmpl: "chat", cmpl: "completion", warm: "warm", resp: "response", msg: "message", embd: "embedding", rerank: "rerank", score: "score" })[id.split(/[-_]/)[0]] ?? "request";

function ofWaiting(request) {
  const stages = [["queue", request.seconds]];
  return { state: "waiting", id: request.request_id, tenant: request.tenant, stages, total: request.seconds, cached: request.cached_tokens, prompt: request.prompt_tokens, told: request.why };
}

function ofRunning(request) {
  const stages = stagesOfRunning(request);
  const reading = request.prefill_seconds === null;
  const told = reading ? `prompt read up to token ${count(request.prompt_tokens_computed)}` : `${plural(request.generated_tokens, "token")} so far`;
  return { state: "running", id: request.request_id, tenant: request.tenant, stages, total: total(stages), cached: request.cached_tokens, prompt: request.prompt_tokens, told };
}

function ofFinished(request) {
  const ends = Object.entries(request.finish_reasons).map(([name, number]) => (number > 1 ? `${name} ×${number}` : name));
  const stages = stagesOfFinished(request);
  const told = request.error ?? `${plural(request.completion_tokens, "token")}, ${ends.join(", ")}`;
  return {
    state: request.error ? "failed" : "done", id: request.id, tenant: request.tenant, stages, total: total(stages), cached: request.cached_tokens, prompt: request.prompt_tokens, told,
    at: request.arrived_at, first: request.first_token_seconds, seconds: request.seconds, reasons: Object.keys(request.cache_reasons).filter((reason) => reason !== "complete"), isNew: request.number > newestSeen && newestSeen > 0,
  };
}

function draw(row, longest, showsTenant) {
  const words = row.stages.map(([name, seconds]) => `${NAMES[name]} ${duration(seconds)}`).join(", ");
  const bar = el("div", { class: "timeline", role: "img", "aria-label": words, title: words }, row.stages.map(([name, seconds]) =>
    el("i", { class: `stage ${name}`, style: { width: `${(100 * seconds) / longest}%` } })));
  const times = row.state === "waiting" || row.state === "running" ? duration(row.total) : row.first === null ? duration(row.seconds) : `${duration(row.first)} → ${duration(row.seconds)}`;
  return el("li", { class: `request ${row.state}${row.isNew ? " new" : ""}` },
    el("span", { class: "what" }, el("b", {}, row.state === "done" || row.state === "failed" ? kindOf(row.id) : row.state), " ", el("code", { title: row.id }, shortId(row.id))),
    el("span", { class: "prompt", title: "prompt tokens found in the cache, of all" }, meter(row.cached, row.prompt), `${count(row.cached)} / ${count(row.prompt)}`),
    bar,
    el("span", { class: "times" }, times),
    el("span", { class: "told" }, row.told, row.reasons?.length ? el("span", {}, `cache: ${row.reasons.join(", ")}`) : null, showsTenant ? el("span", {}, `tenant ${tenantName(row.tenant)}`) : null, row.at ? el("time", {}, clock(row.at)) : null));
}

export function meter(part, whole) {
  return el("span", { class: "meter", "aria-hidden": "true" }, el("i", { style: { width: `${whole ? (100 * part) / whole : 0}%` } }));
}

function shortId(id) {
  const [, name] = id.match(/^[a-z]+[-_](.+)$/i) ?? [null, id];
  return name.slice(0, 6);
}

export function startRequests(redraw) {
  $("more-requests").addEventListener("click", () => {
    isAll = !isAll;
    redraw();
  });
}
