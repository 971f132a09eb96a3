// The five numbers at the top.

import { slotsOf, sums } from "./charts.js";
import { $, count, duration, percent, plural, short } from "./dom.js";

const RECENT = 30; // requests whose first tokens are compared

const quantile = (sorted, share) => sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))];

export function showOverview({ snapshot, finished, history }) {
  const { totals, memory, server } = snapshot;
  const recent = sums(slotsOf(history, snapshot.now, 600, snapshot.bucket_seconds));
  $("tile-rate").textContent = recent.prompt ? percent(recent.cached / recent.prompt) : "–";
  $("note-rate").textContent = totals.prompt_tokens ? `in ten minutes; ${percent(totals.cached_tokens / totals.prompt_tokens)} since the start` : "of prompt tokens";
  $("tile-saved").textContent = short(totals.cached_tokens);
  $("note-saved").textContent = `of ${short(totals.prompt_tokens)}, in ${plural(totals.requests, "request")}`;
  $("tile-running").textContent = count(snapshot.num_running);
  $("note-running").textContent = snapshot.num_waiting ? `${count(snapshot.num_waiting)} waiting` : "nobody waits";
  const firsts = finished.slice(0, RECENT).map((request) => request.first_token_seconds).filter((first) => first !== null).sort((a, b) => a - b);
  $("tile-first").textContent = firsts.length ? duration(quantile(firsts, 0.5)) : "–";
  $("note-first").textContent = firsts.length ? `median of ${firsts.length}; 95 %: ${duration(quantile(firsts, 0.95))}` : "median of the last requests";
  $("tile-filled").textContent = percent(1 - memory.free / server.num_pages);
  $("note-filled").textContent = `of ${short(server.num_pages * server.page_size)} tokens`;
}
