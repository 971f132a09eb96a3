// Asks for /v1/dashboard once a second while the page is seen, and for the tree when it has changed. Keeps what has ended.
//
//   feed.addEventListener("snapshot", …)   feed.snapshot, feed.finished (newest first), feed.history (by start)
//   feed.addEventListener("tree", …)       feed.tree, feed.pins
//   feed.addEventListener("trouble", …)    event.detail: {state, message}

import { ApiError, getJSON } from "./api.js";

const SECOND = 1000;
const TREE_SECONDS = 2; // the tree is asked for at most so often,
const TREE_AGES_SECONDS = 15; // and at least so often: what is in it grows older
const TREE_NODES = 400;
const MAX_FINISHED = 100;
const MAX_BUCKETS = 361;

export class Feed extends EventTarget {
  constructor() {
    super();
    this.tenant = "";
    this.snapshot = null;
    this.tree = null;
    this.pins = [];
    this.forget();
    this.locked = false; // no right key is known: asking again would only be refused again
    this.wake = () => {};
  }

  unlock() {
    this.locked = false;
    this.forget();
    this.soon();
  }

  forget() {
    this.finished = [];
    this.history = new Map();
    this.newest = 0;
    this.since = 0;
    this.treeChanges = null;
    this.treeAt = -Infinity;
  }

  // Whose things are shown; "" is all.
  choose(tenant) {
    this.tenant = tenant;
    this.forget();
    this.soon();
  }

  // Ask now, not in a second.
  soon() {
    this.treeAt = Math.min(this.treeAt, performance.now() - SECOND * TREE_SECONDS);
    this.wake();
  }

  async run() {
    document.addEventListener("visibilitychange", () => this.wake());
    for (;;) {
      if (!document.hidden && !this.locked) await this.look();
      await this.pause(SECOND);
    }
  }

  pause(milliseconds) {
    return new Promise((resolve) => {
      const timer = setTimeout(resolve, milliseconds);
      this.wake = () => {
        clearTimeout(timer);
        resolve();
      };
    });
  }

  async look() {
    const tenant = this.tenant;
    const whose = tenant ? `&tenant=${encodeURIComponent(tenant)}` : "";
    try {
      const snapshot = await getJSON(`v1/dashboard?finished_after=${this.newest}&since=${this.since}${whose}`);
      if (tenant !== this.tenant) return;
      this.take(snapshot);
      if (this.wantsTree()) await this.lookAtTree(whose);
    } catch (error) {
      await this.tell(error);
    }
  }

  take(snapshot) {
    if (this.snapshot && this.snapshot.started_at !== snapshot.started_at) this.forget();
    this.snapshot = snapshot;
    this.finished = [...[...snapshot.finished].reverse(), ...this.finished].slice(0, MAX_FINISHED);
    if (this.finished.length) this.newest = Math.max(this.newest, this.finished[0].number);
    for (const bucket of snapshot.history) this.history.set(bucket.start, bucket);
    while (this.history.size > MAX_BUCKETS) this.history.delete(this.history.keys().next().value);
    this.since = Math.floor(snapshot.now);
    this.dispatchEvent(new Event("snapshot"));
  }

  wantsTree() {
    const seconds = (performance.now() - this.treeAt) / SECOND;
    const changed = this.snapshot.tree_changes !== this.treeChanges;
    return seconds >= (changed ? TREE_SECONDS : TREE_AGES_SECONDS);
  }

  async lookAtTree(whose) {
    const changes = this.snapshot.tree_changes;
    this.treeAt = performance.now();
    this.tree = await getJSON(`v1/cache/tree?depth=64&limit=${TREE_NODES}&top=0${whose}`);
    this.pins = this.snapshot.memory.pinned ? (await getJSON(`v1/cache/pins${whose.replace("&", "?")}`)).data : [];
    this.treeChanges = changes;
    this.dispatchEvent(new Event("tree"));
  }

  async tell(error) {
    let detail = { state: "away", message: "The server does not answer. This page asks again every second." };
    if (error instanceof ApiError) {
      detail = { state: "trouble", message: error.message };
      if (error.status === 401) detail = { state: "key", message: "" };
      if (error.code === "model_loading") detail = { state: "loading", message: await loading() };
    } else if (!(error instanceof TypeError)) {
      console.error(error); // a fault of this page, not of the connection
    }
    this.locked = detail.state === "key";
    this.dispatchEvent(new CustomEvent("trouble", { detail }));
  }
}

async function loading() {
  const health = await fetch("health", { cache: "no-store" }).then((response) => response.json()).catch(() => ({}));
  const { done = 0, total = 0 } = health.progress ?? {};
  return total ? `The model is loading: ${Math.floor((100 * done) / total)} % of its weights are read.` : "The model is loading.";
}
