// Endpoints by cluster, the ill on top, and the router queues.

import { ask, byId, count, element, known, percent, seconds, setText, short, shortNames, words } from "./parts.js";
import { fill, meter, number, pill, text, titled } from "./table.js";

const DENSE_FROM = 9; // endpoints from which each has one line
const DOWN = { unhealthy: "down: probes fail", ejected: "down: ejected", breaker_open: "down: breaker open" };
const ILL = { down: 0, warn: 1, good: 2 };

function stateOf(endpoint) {
  if (endpoint.condition in DOWN) {
    const back = endpoint.condition === "ejected" ? `, ${seconds(endpoint.ejected_for_s)} more` : "";
    return ["down", DOWN[endpoint.condition] + back];
  }
  if (endpoint.condition !== "up") return ["warn", words(endpoint.condition)];
  if (endpoint.probes_in_doubt) return ["down", "not answering probes"];
  if (endpoint.failures_in_a_row) return ["warn", `${endpoint.failures_in_a_row} failed in a row`];
  return ["good", "up"];
}

const STREAM = { exact: "good", degraded: "warn", approximate: "warn", connecting: "warn" };

// Without streams nothing is wrong: most engines publish no events. What a dead engine held is of no use.
function eventsOf({ cache, condition }) {
  if (!cache) return [null, "–"];
  if (!cache.streams.length) return [null, "not followed"];
  if (condition in DOWN) return [null, "not used while it is down"];
  const reason = cache.streams.map((one) => words(one.reason)).filter((one) => one !== "following")[0];
  return [STREAM[cache.state], cache.state + (reason ? `: ${reason}` : "")];
}

const urlBeside = (e) => (e.dense || e.url.endsWith(`//${e.id}`) ? "" : e.url);

const usage = meter((e) => e.engine?.kv_usage, (e) => (known(e.engine?.kv_usage) ? percent(e.engine.kv_usage) : "–"), 0.9);

const fullOf = ({ used_bytes: used, capacity_bytes: room }) => (known(used) && room ? `, ${percent(used / room)} full` : "");

// Below the use of engine memory: what lies on each tier, where there is more than that one.
function showMemory(cell, endpoint) {
  usage.show(cell, endpoint);
  const tiers = (endpoint.cache?.tiers || []).filter((one) => one.tokens || one.used_bytes);
  const wanted = tiers.length > 1 ? JSON.stringify(tiers) : "";
  if ((cell.dataset.tiers || "") === wanted) return;
  cell.dataset.tiers = wanted;
  cell.querySelector(".tiers")?.remove();
  if (!wanted) return;
  const most = Math.max(1, ...tiers.map((one) => one.tokens || 0));
  const picture = element("div", "tiers");
  for (const one of tiers) {
    const bar = element("i", one.tier);
    bar.style.width = `${Math.max(2, (100 * (one.tokens || 0)) / most)}%`;
    const label = element("span", "", `${one.tier} ${known(one.tokens) ? `${short(one.tokens)} tokens` : ""}${fullOf(one)}`);
    picture.append(label, bar);
  }
  cell.append(picture);
}

const ENDPOINT_COLUMNS = [
  titled((e) => e.name, urlBeside, "lead"),
  pill(stateOf, "state"),
  meter((e) => e.share, (e) => count(e.requests_last_minute), Infinity),
  { ...usage, show: showMemory },
  number((e) => count(e.in_flight)),
  number((e) => short(e.pending_tokens)),
  number((e) => (known(e.engine?.waiting) ? `${e.engine.waiting} + ${e.engine.running ?? 0}` : "–")),
  number((e) => (e.slowness ? `${(1 / e.slowness).toFixed(2)}×` : "–")),
  pill(eventsOf, "wide events"),
  { className: "action wide", show: showDrain },
];

let tell = () => {};
let again = () => {};

// `trouble` shows a message, `poll` asks for the state again.
export function connect(trouble, poll) {
  tell = trouble;
  again = poll;
}

function showDrain(cell, endpoint) {
  if (!cell.firstChild) {
    const made = element("button");
    made.type = "button";
    made.addEventListener("click", (event) => { event.stopPropagation(); drain(cell.endpoint); });
    cell.append(made);
  }
  cell.endpoint = endpoint;
  const label = endpoint.condition === "draining" ? "Resume" : "Drain";
  setText(cell.firstChild, label);
  cell.firstChild.setAttribute("aria-label", `${label} ${endpoint.id}`);
}

async function drain(endpoint) {
  const draining = endpoint.condition === "draining";
  const question = `Drain the endpoint "${endpoint.id}"? It gets no new requests and finishes those it has.`;
  if (!draining && !window.confirm(question)) return;
  const where = [endpoint.cluster, ...endpoint.id.split("/")].map(encodeURIComponent).join("/");
  try {
    const answer = await ask(`endpoints/${where}/${draining ? "undrain" : "drain"}`, "POST");
    if (!answer.ok) tell(`${endpoint.id}: ${(await answer.json()).error}`);
  } catch (error) {
    tell(`${endpoint.id}: ${error.message}`);
  }
  again();
}

// On a narrow screen a line opens into all of its figures.
byId("endpoints").addEventListener("click", (event) => {
  const row = event.target.closest("tr.dense");
  if (!row) return;
  if (row.dataset.open) delete row.dataset.open;
  else row.dataset.open = "1";
  row.classList.toggle("open", Boolean(row.dataset.open));
});

// What the engines make of the priority they are told, where they are.
function prioritiesOf(rows) {
  const states = rows.map((row) => row.engine_priority?.state).filter(Boolean);
  const told = ["obeys", "unknown", "does_not_pay", "ignores", "refused"].filter((state) => states.includes(state));
  if (!told.length) return [];
  const counts = told.map((state) => `${words(state)} ${states.filter((one) => one === state).length}`);
  return [["", `engine priority: ${counts.join(", ")}`]];
}

// Engines of hybrid models reuse in long steps.
function stepsOf(rows) {
  const steps = [...new Set(rows.map((row) => row.cache?.reuse_step_tokens).filter(Boolean))];
  return steps.map((step) => ["", `reuses in steps of ${count(step)} tokens: prompts under ${count(step)} never hit`]);
}

// LoRA adapters over the cluster's engines.
function adaptersOf(rows) {
  const served = new Set(rows.flatMap((row) => row.adapters?.served || []));
  return served.size ? [["", `${count(served.size)} adapter${served.size === 1 ? "" : "s"}`]] : [];
}

function groupOf(name, rows, live) {
  const up = rows.filter((row) => row.condition === "up" || row.condition === "saturated").length;
  const down = rows.filter((row) => row.condition in DOWN).length;
  const { requests, failed } = live.clusters?.[name] || { requests: 0, failed: 0 };
  const inFlight = rows.reduce((sum, row) => sum + row.in_flight, 0);
  const policy = live.routing[name]?.policy || "";
  const sums = [
    [down ? "bad" : "", `${up} of ${rows.length} up`], ["", `${count(requests)} requests in the last minute`],
    [failed ? "bad" : "", `${count(failed)} failed`],
  ];
  const alone = rows.length === live.endpoints.length; // the card's head has the sums already
  const known = [...prioritiesOf(rows), ...stepsOf(rows), ...adaptersOf(rows)];
  const facts = [...(alone ? [] : sums), ["", `${count(inFlight)} in flight`], ...known];
  return (cell) => {
    const shown = JSON.stringify([name, policy, facts]);
    if (cell.dataset.shown === shown) return;
    cell.dataset.shown = shown;
    const said = facts.map(([className, fact]) => element("span", className, fact));
    cell.replaceChildren(element("b", "", name), element("code", "", policy), ...said);
  };
}

let conditions = new Map();

export function showEndpoints(live) {
  const most = Math.max(1, ...live.endpoints.map((e) => e.requests_last_minute));
  const dense = live.endpoints.length >= DENSE_FROM;
  const names = shortNames(live.endpoints);
  const all = live.endpoints.map((endpoint) => {
    const [kind] = stateOf(endpoint);
    return {
      ...endpoint, kind, dense,
      key: `${endpoint.cluster}/${endpoint.id}`,
      name: dense ? `\u200e${names.get(`${endpoint.cluster}/${endpoint.id}`)}\u200e` : endpoint.id, // marks: see page.css
      title: dense ? `${endpoint.id} ${endpoint.url}` : "",
      share: endpoint.requests_last_minute / most,
      slowness: live.routing[endpoint.cluster]?.learned?.slowness?.[endpoint.id],
      className: dense ? `${kind} dense` : kind,
    };
  });
  const groups = [...new Set(all.map((row) => row.cluster))].map((name) => {
    const rows = all.filter((row) => row.cluster === name).sort((a, b) => ILL[a.kind] - ILL[b.kind]);
    return { name, rows, worst: ILL[rows[0].kind] };
  });
  groups.sort((a, b) => a.worst - b.worst);
  const heads = (one) => ({ key: `cluster ${one.name}`, className: "group", group: groupOf(one.name, one.rows, live) });
  fill("endpoints", groups.flatMap((one) => [heads(one), ...one.rows]), ENDPOINT_COLUMNS);
  const up = all.filter((row) => row.condition === "up").length;
  const { requests, failed } = live.last_minute;
  setText(byId("endpoints-summary"),
    `${up} of ${all.length} up · ${count(requests)} requests in the last minute, ${count(failed)} failed`);
  announce(all);
}

// Screen readers hear what changed, not every number.
function announce(rows) {
  const now = new Map(rows.map((row) => [row.key, stateOf(row)]));
  const news = [...now].filter(([key, [kind]]) => conditions.has(key) && conditions.get(key) !== kind);
  if (news.length) byId("news").textContent = news.map(([key, [, label]]) => `${key}: ${label}`).join("; ");
  conditions = new Map([...now].map(([key, [kind]]) => [key, kind]));
}

function stateOfQueue({ depth, limit, oldest_wait_s: oldest, max_wait_s: longest }) {
  if (depth >= limit) return ["down", "full: refuses"];
  if (depth && oldest >= longest / 2) return ["warn", "long waits"];
  return depth ? ["good", "holds requests"] : ["", "empty"];
}

const QUEUE_COLUMNS = [
  titled((q) => q.key, (q) => `at most ${seconds(q.max_wait_s)}`, "lead"),
  pill(stateOfQueue, "state"),
  meter((q) => q.depth / q.limit, (q) => `${count(q.depth)} of ${count(q.limit)}`, 0.8),
  number((q) => (q.depth ? seconds(q.oldest_wait_s) : "–")),
  number((q) => count(q.released.turn)),
  number((q) => count(q.released.max_wait)),
  number((q) => count(q.released.client_left)),
  number((q) => count(q.released.no_endpoint)),
  text((q) => count(q.refused), "number"),
];

export function showQueues(routing) {
  const queues = Object.entries(routing).filter(([, one]) => one.queue);
  const rows = queues.map(([name, { queue }]) => ({ ...queue, key: name, className: stateOfQueue(queue)[0] }));
  fill("queues", rows, QUEUE_COLUMNS);
  byId("queues-card").hidden = queues.length === 0;
}
