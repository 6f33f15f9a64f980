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

// The id, and below it the address where that says more; a port stays in one piece.
function showName(cell, e) {
  if (!cell.firstChild) cell.append(element("b"), element("span", "sub"));
  setText(cell.firstChild, e.name);
  if (cell.title !== (e.title || e.url)) cell.title = e.title || e.url;
  const address = e.dense || e.url.endsWith(`//${e.id}`) ? "" : e.url.replace(/^http:\/\//, "");
  if (cell.lastChild.dataset.shown === address) return;
  cell.lastChild.dataset.shown = address;
  const [, host, port] = /^(.*?)(:\d+)?$/.exec(address);
  cell.lastChild.replaceChildren(host, element("wbr"), element("span", "port", port || ""));
}

const isDown = (e) => e.condition in DOWN;
const GPU = "device";

// A line for each tier: how full it is where that is known, else what lies there. Every bar has the same scale.
function memoryOf(endpoint) {
  if (isDown(endpoint)) return [];
  const used = endpoint.engine?.kv_usage;
  const others = (endpoint.cache?.tiers || []).filter((one) => one.tier !== GPU && (one.tokens || one.used_bytes));
  const rows = known(used) ? [{ label: others.length ? "GPU" : "", share: used, value: percent(used) }] : [];
  for (const { tier, tokens, used_bytes: bytes, capacity_bytes: room } of others) {
    const share = known(bytes) && room ? bytes / room : null;
    rows.push({ label: tier, share, value: known(share) ? percent(share) : `${short(tokens || 0)} tokens` });
  }
  return rows;
}

function showMemory(cell, endpoint) {
  const rows = memoryOf(endpoint);
  const wanted = JSON.stringify(rows);
  if (cell.dataset.shown === wanted) return;
  cell.dataset.shown = wanted;
  const picture = element("div", "memory");
  for (const { label, share, value } of rows) {
    const bar = element("div", `bar${known(share) ? "" : " none"}${share >= 0.9 ? " high" : ""}`);
    const filled = element("i");
    filled.style.width = `${Math.min(100, 100 * (share || 0))}%`;
    bar.append(filled);
    picture.append(element("span", "muted", label), element("span", "number", value), bar);
  }
  cell.replaceChildren(rows.length ? picture : document.createTextNode("–"));
}

const ENDPOINT_COLUMNS = [
  { className: "lead", show: showName },
  pill(stateOf, "state"),
  meter((e) => e.share, (e) => count(e.requests_last_minute), Infinity),
  { className: "number", show: showErrors },
  number((e) => seconds(e.ttft_p95_s)),
  { className: "wide metered", show: showMemory },
  number((e) => count(e.in_flight)),
  number((e) => (known(e.engine?.waiting) && !isDown(e) ? `${e.engine.waiting} + ${e.engine.running ?? 0}` : "–")),
  number((e) => short(e.pending_tokens), "extra"),
  number((e) => (e.slowness && !isDown(e) ? `${(1 / e.slowness).toFixed(2)}×` : "–"), "extra"),
  pill(eventsOf, "wide events"),
  { className: "action wide", show: showDrain },
];

function showErrors(cell, e) {
  setText(cell, count(e.errors_last_minute));
  cell.classList.toggle("bad", e.errors_last_minute > 0);
}

byId("more-columns").addEventListener("click", (event) => {
  const all = byId("endpoints").classList.toggle("all");
  event.target.setAttribute("aria-pressed", String(all));
});

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
  const told = ["unknown", "refused"].filter((state) => states.includes(state));
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

const FEW_REQUESTS = 10, MOST = 0.8;

// Under light load one engine may serve all: waiting costs nothing there, and computing a prefix twice does.
function lightLoadOf(rows) {
  const up = rows.filter((row) => row.condition === "up");
  const all = up.reduce((sum, row) => sum + row.requests_last_minute, 0);
  const busiest = up.find((row) => row.requests_last_minute >= MOST * all);
  const waits = up.some((row) => row.engine?.waiting || row.pending_tokens);
  if (up.length < 2 || all < FEW_REQUESTS || !busiest || waits) return [];
  return [["", `light load: requests stay with ${busiest.id}, which holds their prefixes`]];
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
  const more = [...prioritiesOf(rows), ...stepsOf(rows), ...adaptersOf(rows), ...lightLoadOf(rows)];
  const facts = [...(alone ? [] : sums), ["", `${count(inFlight)} in flight`], ...more];
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
  number((q) => count(q.released.turn + q.released.room)),
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
