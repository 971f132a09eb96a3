// Puts the page together: who draws what when something arrives, the key, the colours, the tabs.

import { keyWanted, setKey } from "./api.js";
import { showCharts, startCharts } from "./charts.js";
import { $, duration, el, tenantName } from "./dom.js";
import { Feed } from "./feed.js";
import { showMemory, showPins, showReuse } from "./memory.js";
import { showOverview } from "./overview.js";
import { conversation, startPlayground } from "./playground.js";
import { showRequests, startRequests } from "./requests.js";
import { showTree, startTree } from "./tree.js";
import { startWhy } from "./why.js";

const feed = new Feed();

function showState(state, words) {
  $("state").dataset.state = state;
  $("state").textContent = words;
}

function showBanner(message) {
  $("banner").textContent = message;
  $("banner").hidden = !message;
}

feed.addEventListener("snapshot", () => {
  const { snapshot } = feed;
  const { server } = snapshot;
  $("model").textContent = server.models[0];
  $("model").title = `${server.models.join(", ")}: ${server.dtype} on ${server.device}, policy ${server.scheduling_policy}. Trunkline ${server.version}`;
  document.title = `Trunkline: ${server.models[0]}`;
  showState("ready", `Ready, up ${duration(Math.max(0, snapshot.now - snapshot.started_at))}`);
  showBanner(server.prefix_caching ? "" : "Prefix caching is off (--no-enable-prefix-caching): nothing is kept for later requests.");
  $("change-key").hidden = !server.has_keys;
  $("tier-legend").hidden = !server.tiers.length;
  showTenants(snapshot);
  showOverview(feed);
  showCharts(feed);
  showRequests(feed);
  showMemory(snapshot);
});

feed.addEventListener("tree", () => {
  showTree(feed.tree);
  showReuse(feed.tree.reuse_curve);
  showPins(feed.pins);
});

feed.addEventListener("trouble", ({ detail }) => {
  const words = { away: "No answer", loading: "Loading", key: "Locked", trouble: "Trouble" };
  showState(detail.state, words[detail.state]);
  showBanner(detail.message);
  if (detail.state === "key") $("change-key").hidden = false; // for whoever closed the box
});

// An admin of several tenants may look at one of them.
function showTenants({ is_admin: isAdmin, server, owners }) {
  $("tenant-choice").hidden = !isAdmin || !server.has_keys;
  if (feed.tenant) return; // owners are then of that one only
  const select = $("tenant");
  const names = owners.map((owner) => owner.tenant);
  if (select.options.length === names.length + 1) return;
  const options = owners.map((owner) => el("option", { value: owner.tenant }, `${tenantName(owner.tenant)} (${owner.keys.join(", ")})`));
  select.replaceChildren(el("option", { value: "" }, "all tenants"), ...options);
}

$("tenant").addEventListener("change", (event) => feed.choose(event.target.value));

// ---- the key

function askForKey(note) {
  if ($("key-dialog").open) return;
  if (note) $("key-note").textContent = note;
  $("key-dialog").showModal();
  $("key").focus();
}

let wasTried = false;
keyWanted.addEventListener("wanted", () => askForKey(wasTried ? "That is none of the keys this server was started with. Try another." : ""));
$("change-key").addEventListener("click", () => askForKey(""));
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  wasTried = true;
  setKey($("key").value.trim());
  $("key").value = "";
  $("key-dialog").close();
  feed.tenant = $("tenant").value = "";
  feed.unlock();
});

// ---- colours

const THEMES = { "": ["Auto", "as the system has them"], light: ["Light", "light"], dark: ["Dark", "dark"] };

function showTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
  $("theme").textContent = THEMES[theme][0];
  $("theme").setAttribute("aria-label", `Colours: ${THEMES[theme][1]}`);
}

$("theme").addEventListener("click", () => {
  const names = Object.keys(THEMES);
  const next = names[(names.indexOf(document.documentElement.dataset.theme ?? "") + 1) % names.length];
  try {
    localStorage.setItem("trunkline.theme", next);
  } catch {
    // Then it lasts until the page is loaded again.
  }
  showTheme(next);
});
showTheme(document.documentElement.dataset.theme ?? "");

// ---- tabs

const tabs = [...document.querySelectorAll("[role=tab]")];

function choose(tab, { focus } = {}) {
  for (const one of tabs) {
    const isChosen = one === tab;
    one.setAttribute("aria-selected", String(isChosen));
    one.tabIndex = isChosen ? 0 : -1;
    $(one.getAttribute("aria-controls")).hidden = !isChosen;
  }
  if (focus) tab.focus();
}

for (const tab of tabs) {
  tab.addEventListener("click", () => choose(tab));
  tab.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (step) choose(tabs[(tabs.indexOf(tab) + step + tabs.length) % tabs.length], { focus: true });
  });
}

startTree();
startCharts(() => feed.snapshot && showCharts(feed));
startRequests(() => feed.snapshot && showRequests(feed));
startPlayground(feed);
startWhy(conversation);
feed.run();
