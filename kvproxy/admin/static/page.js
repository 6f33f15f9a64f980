"use strict";
// The live page: asks /live once a second and puts what it says into the document. Text is only ever set as text,
// since model names and request ids come from clients.

const POLL_MS = 1000;
const TIMEOUT_MS = 4000;
const WINDOWS_S = [60, 120, 300]; // the smallest that holds all there is
const BRIDGED_S = 5.5; // a line goes on over a pause as long as this
const SMOOTH = 10; // seconds a hit rate is taken over
const TOKEN_KEY = "kvproxy-admin-token";

const byId = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";

function element(tag, className = "", text = "") {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== "") made.textContent = text;
  return made;
}

function shape(tag, attributes) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

// ---- numbers for people

const whole = new Intl.NumberFormat("en");
const count = (n) => whole.format(Math.round(n));
const short = (n) => (n >= 10000 ? `${(n / 1000).toFixed(n >= 100000 ? 0 : 1)}k` : count(n));
const percent = (share) => `${Math.round(share * 100)} %`;
const known = (value) => value !== null && value !== undefined;

function seconds(s) {
  if (!known(s)) return "–";
  if (s < 0.0995) return `${(s * 1000).toFixed(s < 0.00995 ? 1 : 0)} ms`;
  if (s < 9.95) return `${s.toFixed(s < 0.995 ? 2 : 1)} s`;
  return `${Math.round(s)} s`;
}

function span(s) {
  if (s < 90) return `${Math.round(s)} s`;
  if (s < 5400) return `${Math.round(s / 60)} min`;
  return s < 172800 ? `${Math.round(s / 3600)} h` : `${Math.round(s / 86400)} days`;
}

const words = (name) => String(name).replaceAll("_", " ");

// ---- tables: rows are kept by key and only what changed is written, so focus and selection stay where they are

function fill(tableId, rows, columns) {
  const table = byId(tableId);
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells].map((cell) => cell.dataset.short || cell.textContent);
  const kept = new Map([...body.rows].map((row) => [row.dataset.key, row]));
  let at = body.firstElementChild;
  for (const data of rows) {
    let row = kept.get(data.key);
    if (!row) {
      row = element("tr");
      row.dataset.key = data.key;
      columns.forEach((column, index) => {
        const cell = element("td", column.className || "");
        cell.dataset.label = heads[index];
        row.append(cell);
      });
    }
    kept.delete(data.key);
    row.className = data.className || "";
    columns.forEach((column, index) => column.show(row.cells[index], data));
    if (row === at) at = at.nextElementSibling;
    else body.insertBefore(row, at);
  }
  for (const row of kept.values()) row.remove();
}

function setText(cell, text) {
  if (cell.textContent !== text) cell.textContent = text;
}

const text = (value, className = "") => ({ className, show: (cell, data) => setText(cell, value(data)) });
const number = (value) => text(value, "number");

function titled(value, below, className) {
  return {
    className,
    show(cell, data) {
      if (!cell.firstChild) cell.append(element("b"), element("span", "sub"));
      setText(cell.firstChild, value(data));
      setText(cell.lastChild, below(data));
    },
  };
}

function pill(of, className = "") {
  return {
    className,
    show(cell, data) {
      if (!cell.firstChild) cell.append(element("span"));
      const [kind, label] = of(data);
      if (cell.firstChild.className !== `pill ${kind}`) cell.firstChild.className = `pill ${kind}`;
      setText(cell.firstChild, label);
    },
  };
}

function meter(share, label, highFrom) {
  return {
    className: "wide",
    show(cell, data) {
      if (!cell.firstChild) {
        const made = element("div", "meter");
        const bar = element("div", "bar");
        bar.setAttribute("aria-hidden", "true");
        bar.append(element("i"));
        made.append(element("span"), bar);
        cell.append(made);
      }
      const [labelled, bar] = cell.firstChild.children;
      const value = share(data);
      setText(labelled, label(data));
      bar.hidden = !known(value);
      bar.classList.toggle("high", known(value) && value >= highFrom);
      bar.firstChild.style.width = `${Math.min(100, 100 * (value || 0))}%`;
    },
  };
}

// ---- charts

function chart(id, title, series, format) {
  const figure = byId(id);
  const caption = element("figcaption");
  const moment = element("span", "moment");
  caption.append(element("h2", "", title), moment);
  const legend = element("div", "legend");
  const values = series.map(({ name, className }) => {
    const item = element("div", className);
    const strong = element("strong", "", "–");
    const mark = element("i");
    mark.setAttribute("aria-hidden", "true");
    item.append(mark, strong, element("span", "", name));
    legend.append(item);
    return strong;
  });
  const plot = element("div", "plot");
  const svg = shape("svg", { viewBox: "0 0 300 100", preserveAspectRatio: "none", role: "img" });
  for (const y of [0.5, 50, 99.5]) svg.append(shape("line", { class: "grid", x1: 0, x2: 300, y1: y, y2: y }));
  const area = shape("path", { class: "plot-area one" });
  const lines = series.map(({ className }) => shape("path", { class: `plot-line ${className}` }));
  const cursor = shape("line", { class: "cursor", y1: 0, y2: 100, visibility: "hidden" });
  svg.append(area, ...lines, cursor);
  const top = element("span", "top");
  plot.append(svg, top);
  const axis = element("div", "axis");
  const from = element("span");
  axis.append(from, element("span", "", "now"));
  figure.append(caption, legend, plot, axis);

  let shown = { ago: [], columns: [] };
  let pointed = null; // share of the width under the pointer
  let window_s = WINDOWS_S[0];
  const x = (ago) => 300 * (1 - ago / window_s);

  function read() {
    let index = shown.ago.length - 1;
    if (pointed !== null) {
      const wanted = window_s * (1 - pointed);
      shown.ago.forEach((ago, i) => {
        if (Math.abs(ago - wanted) < Math.abs(shown.ago[index] - wanted)) index = i;
      });
      cursor.setAttribute("x1", x(shown.ago[index] ?? 0));
      cursor.setAttribute("x2", x(shown.ago[index] ?? 0));
    }
    cursor.setAttribute("visibility", pointed === null || index < 0 ? "hidden" : "visible");
    setText(moment, pointed === null || index < 0 ? "" : `${span(shown.ago[index])} ago`);
    values.forEach((value, i) => {
      const column = shown.columns[i] || [];
      setText(value, format(pointed === null ? latest(column) : column[index]));
    });
  }
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    pointed = Math.max(0, Math.min(1, (event.clientX - box.left) / box.width));
    read();
  });
  svg.addEventListener("pointerleave", () => { pointed = null; read(); });

  return (ago, columns, ceiling) => {
    shown = { ago, columns };
    window_s = WINDOWS_S.find((one) => one >= (ago[0] ?? 0)) ?? WINDOWS_S.at(-1);
    setText(from, `${window_s / 60} min ago`);
    const y = (value) => 99 - 98 * Math.min(1, value / ceiling);
    columns.forEach((column, i) => lines[i].setAttribute("d", path(ago, column, x, y)));
    area.setAttribute("d", columns.length ? under(ago, columns[0], x, y) : "");
    setText(top, format(ceiling));
    read();
    svg.setAttribute("aria-label", `${title}, last ${window_s / 60} minutes: ${series.map(({ name }, i) => `${name} ${values[i].textContent}`).join(", ")}`);
  };
}

// A value of the last few seconds, so that a quiet second does not blank the figure.
function latest(column) {
  for (let i = column.length - 1; i >= Math.max(0, column.length - 5); i--) if (known(column[i])) return column[i];
  return null;
}

// Stretches of values; a few seconds without any do not part them.
function stretches(ago, column) {
  const found = [];
  column.forEach((value, i) => {
    if (!known(value)) return;
    const last = found.at(-1);
    if (last && last.at(-1)[0] - ago[i] <= BRIDGED_S) last.push([ago[i], value]);
    else found.push([[ago[i], value]]);
  });
  return found;
}

function path(ago, column, x, y) {
  const at = ([when, value]) => `${x(when).toFixed(2)} ${y(value).toFixed(2)}`;
  return stretches(ago, column).map((points) => `M${at(points[0])}h.01L${points.map(at).join("L")}`).join(""); // h: a dot
}

function under(ago, column, x, y) {
  const at = ([when, value]) => `L${x(when).toFixed(2)} ${y(value).toFixed(2)}`;
  const edge = ([when]) => x(when).toFixed(2);
  return stretches(ago, column)
    .map((points) => `M${edge(points[0])} 99.5${points.map(at).join("")}L${edge(points.at(-1))} 99.5Z`).join("");
}

// The next round number over all values: 1, 2 or 5 times a power of ten.
function roundUp(values, least) {
  const most = Math.max(least, ...values.filter(known));
  const power = 10 ** Math.floor(Math.log10(most));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= most * 0.999);
}

// What of `part` there was to `all`, over the last SMOOTH seconds before each sample; null while nothing was prompted.
function rate(part, all) {
  let parts = 0;
  let whole_ = 0;
  return part.map((_, i) => {
    parts += part[i];
    whole_ += all[i];
    if (i >= SMOOTH) { parts -= part[i - SMOOTH]; whole_ -= all[i - SMOOTH]; }
    return whole_ > 0.5 ? Math.min(1, Math.max(0, parts / whole_)) : null;
  });
}

// The mean of each value and the four before it.
function calm(column) {
  return column.map((_, i) => {
    const near = column.slice(Math.max(0, i - 4), i + 1);
    return near.reduce((sum, value) => sum + value, 0) / near.length;
  });
}

const perSecond = (value) => (known(value) ? (value < 10 && value % 1 ? value.toFixed(1) : count(value)) : "–");
const drawRequests = chart("chart-requests", "Requests a second",
  [{ name: "ended", className: "one" }, { name: "failed", className: "fail" }], perSecond);
const drawTtft = chart("chart-ttft", "Time to first byte",
  [{ name: "median", className: "one" }, { name: "p95", className: "two" }], seconds);
const drawHits = chart("chart-hits", "Prompt tokens from cache",
  [{ name: "reused", className: "one" }, { name: "predicted", className: "two" }],
  (share) => (known(share) ? percent(share) : "–"));

function showHistory(history) {
  const { ago_s: ago } = history;
  const requests = calm(history.requests);
  drawRequests(ago, [requests, calm(history.failed)], roundUp(requests, 5));
  const ttft = [history.ttft_p50_s, history.ttft_p95_s];
  drawTtft(ago, ttft, roundUp(ttft.flat(), 0.01));
  const prompts = history.prompt_tokens;
  drawHits(ago, [rate(history.cached_tokens, prompts), rate(history.predicted_tokens, prompts)], 1);
}

// ---- what is shown of each part

const DOWN = { unhealthy: "down: probes fail", ejected: "down: ejected", breaker_open: "down: breaker open" };

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

const STREAM = { exact: "good", degraded: "warn", approximate: "", connecting: "warn" };

function eventsOf({ cache }) {
  if (!cache) return ["", ""];
  const reason = cache.streams.map((one) => words(one.reason)).filter((one) => one !== "following")[0];
  return [STREAM[cache.state], cache.state.toUpperCase() + (reason ? `: ${reason}` : "")];
}

const ENDPOINT_COLUMNS = [
  titled((e) => e.id, (e) => e.url, "lead"),
  pill(stateOf, "state"),
  meter((e) => e.share, (e) => count(e.requests_last_minute), Infinity),
  meter((e) => e.engine?.kv_usage, (e) => (known(e.engine?.kv_usage) ? percent(e.engine.kv_usage) : "–"), 0.9),
  number((e) => count(e.in_flight)),
  number((e) => short(e.pending_tokens)),
  number((e) => (known(e.engine?.waiting) ? `${e.engine.waiting} + ${e.engine.running ?? 0}` : "–")),
  number((e) => (e.slowness ? `${(1 / e.slowness).toFixed(2)}×` : "–")),
  pill(eventsOf, "wide"),
  { className: "action wide", show: showDrain },
];

function showDrain(cell, endpoint) {
  if (!cell.firstChild) {
    const made = element("button");
    made.type = "button";
    made.addEventListener("click", () => drain(cell.endpoint));
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
  const answer = await ask(`endpoints/${where}/${draining ? "undrain" : "drain"}`, "POST");
  if (!answer.ok) trouble(`${endpoint.id}: ${(await answer.json()).error}`);
  poll();
}

let conditions = new Map();

function showEndpoints(live) {
  const most = Math.max(1, ...live.endpoints.map((e) => e.requests_last_minute));
  const rows = live.endpoints.map((endpoint) => ({
    ...endpoint,
    key: `${endpoint.cluster}/${endpoint.id}`,
    share: endpoint.requests_last_minute / most,
    slowness: live.routing[endpoint.cluster]?.learned?.slowness?.[endpoint.id],
    className: stateOf(endpoint)[0],
  }));
  fill("endpoints", rows, ENDPOINT_COLUMNS);
  const up = rows.filter((row) => row.condition === "up").length;
  const { requests, failed } = live.last_minute;
  setText(byId("endpoints-summary"),
    `${up} of ${rows.length} up · ${count(requests)} requests in the last minute, ${count(failed)} failed`);
  announce(rows);
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
  number((q) => count(q.refused)),
];

function showQueues(routing) {
  const queues = Object.entries(routing).filter(([, one]) => one.queue);
  const rows = queues.map(([name, { queue }]) => ({ ...queue, key: name, className: stateOfQueue(queue)[0] }));
  fill("queues", rows, QUEUE_COLUMNS);
  byId("queues-card").hidden = queues.length === 0;
}

const HOT_COLUMNS = [
  text((p) => p.prefix, "code lead wide"),
  number((p) => short(p.estimated_tokens)),
  number((p) => p.touches.toFixed(1)),
  { className: "wide", show: showHolders },
];

function showHolders(cell, prefix) {
  if (!cell.firstChild) cell.append(element("div", "chips"));
  const label = ([name, blocks]) => (blocks >= prefix.blocks ? name : `${name} ${percent(blocks / prefix.blocks)}`);
  const holders = Object.entries(prefix.replicas).sort((a, b) => b[1] - a[1]);
  const wanted = holders.map((one) => [one[1] >= prefix.blocks ? "chip" : "chip part", label(one)]);
  if (cell.dataset.shown === JSON.stringify(wanted)) return;
  cell.dataset.shown = JSON.stringify(wanted);
  const chips = wanted.map(([className, name]) => element("span", className, name));
  cell.firstChild.replaceChildren(...(chips.length ? chips : [element("span", "muted", "nobody")]));
}

const GOOD_ENDS = new Set(["completed"]);
const endOf = (d) => {
  const retries = d.retries ? `, ${d.retries} ${d.retries === 1 ? "retry" : "retries"}` : "";
  if (d.end === "client_disconnected") return ["", `client left${retries}`];
  if (!GOOD_ENDS.has(d.end)) return ["down", `${words(d.end) || "no answer"} ${d.status || ""}${retries}`];
  return [d.status >= 400 ? "warn" : retries ? "warn" : "good", `${d.status}${retries}`];
};

const DECISION_COLUMNS = [
  text((d) => `${seconds(d.ago_s)} ago`),
  text((d) => d.request_id.slice(0, 13) || "–", "code wide"),
  text((d) => d.model || "–", "model wide"),
  text((d) => d.endpoint || "–"),
  text((d) => words(d.reason) || "–"),
  number((d) => (known(d.prompt_tokens) ? count(d.prompt_tokens) : "–")),
  number((d) => count(d.matched_tokens)),
  number((d) => (known(d.cached_tokens) ? count(d.cached_tokens) : "–")),
  number((d) => seconds(d.ttft_s)),
  pill(endOf, "state"),
];

function showWork(live) {
  const rows = [];
  for (const [name, { policy, learned }] of Object.entries(live.routing)) {
    const facts = [words(policy)];
    if (known(learned.tokens_per_s)) facts.push(`${count(learned.tokens_per_s)} tokens/s prefill`);
    if (known(learned.rho)) facts.push(`${percent(learned.rho)} busy with it`);
    if (known(learned.samples)) facts.push(`${count(learned.samples)} samples`);
    rows.push([`Cluster ${name}`, facts.join(" · ")]);
  }
  const { cache } = live;
  if (cache) {
    const running = cache.running.map(({ about, instance }) => (instance ? `${about} at ${instance}` : about));
    rows.push(["Running", running.join(", ") || "nothing"]);
    rows.push(["Waiting jobs", count(cache.waiting)], ["Pinned prefixes", count(cache.leases)]);
    const open = Object.entries(cache.breakers).filter(([, state]) => state !== "closed");
    rows.push(["Open breakers", open.map(([name, state]) => `${name} (${words(state)})`).join(", ") || "none"]);
  }
  rows.push(["Up for", span(live.uptime_s)]);
  if (byId("work").dataset.shown === JSON.stringify(rows)) return;
  byId("work").dataset.shown = JSON.stringify(rows);
  byId("work").replaceChildren(...rows.flatMap(([name, value]) => [element("dt", "", name), element("dd", "", value)]));
}

const SEVERITY = { problem: "down", error: "down", warning: "warn", note: "", ok: "good" };

function showFindings(findings) {
  const list = byId("findings");
  byId("findings-card").hidden = findings.length === 0;
  if (list.dataset.shown === JSON.stringify(findings)) return;
  list.dataset.shown = JSON.stringify(findings);
  list.replaceChildren(...findings.map(({ severity, where, what, fix }) => {
    const item = element("li");
    const said = element("span");
    said.append(element("b", "", where ? `${where}: ` : ""), what);
    if (fix) said.append(element("span", "sub", ` – ${fix}`));
    item.append(element("span", `pill ${SEVERITY[severity] || ""}`, severity), said);
    return item;
  }));
}

function show(live) {
  setText(byId("version"), live.version);
  byId("readiness").className = `pill ${live.ready ? "good" : "down"}`;
  setText(byId("readiness"), live.readiness);
  setText(byId("updated"), new Date(live.time).toLocaleTimeString());
  showFindings(live.findings);
  showHistory(live.history);
  showEndpoints(live);
  showQueues(live.routing);
  const hot = (live.cache?.hot || []).map((prefix) => ({ ...prefix, key: `${prefix.cluster}/${prefix.prefix}` }));
  fill("hot", hot, HOT_COLUMNS);
  byId("hot").hidden = !hot.length;
  byId("hot-none").hidden = hot.length > 0;
  showWork(live);
  const decisions = live.decisions.map((one, i) => ({ ...one, key: `${one.request_id || i}/${one.ended_at}` }));
  fill("decisions", decisions, DECISION_COLUMNS);
  byId("decisions").hidden = !decisions.length;
  byId("decisions-none").hidden = decisions.length > 0;
}

// ---- asking

function trouble(message) {
  const shown = byId("trouble");
  shown.hidden = !message;
  setText(shown, message);
}

function ask(path_, method = "GET") {
  const headers = {};
  const token = sessionStorage.getItem(TOKEN_KEY);
  if (token) headers.Authorization = `Bearer ${token}`;
  if (method !== "GET") headers["Content-Type"] = "application/json";
  return fetch(path_, { method, headers, cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS) });
}

let timer = 0;
let lastGood = null;

async function poll() {
  clearTimeout(timer);
  if (document.hidden || byId("token-dialog").open) return;
  try {
    const answer = await ask("live");
    if (answer.status === 401) { askForToken(); return; }
    if (!answer.ok) throw new Error((await answer.json()).error);
    show(await answer.json());
    lastGood = new Date();
    document.body.classList.remove("stale");
    trouble("");
  } catch (error) {
    const since = lastGood ? ` What is shown is from ${lastGood.toLocaleTimeString()}.` : "";
    document.body.classList.add("stale");
    const unreachable = error instanceof TypeError || error.name === "TimeoutError";
    trouble((unreachable ? "kvproxy does not answer." : `${error.message}.`) + since);
  }
  clearTimeout(timer);
  timer = setTimeout(poll, POLL_MS);
}

function askForToken() {
  byId("token-wrong").hidden = !sessionStorage.getItem(TOKEN_KEY);
  byId("token").value = "";
  byId("token-dialog").showModal();
}

byId("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(TOKEN_KEY, byId("token").value);
  byId("token-dialog").close();
});
byId("token-dialog").addEventListener("close", poll);
document.addEventListener("visibilitychange", poll);
poll();
