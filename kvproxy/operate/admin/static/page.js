// The live page: asks /live once a second and puts what it says into the document.

import { connectAdvice, refreshAdvice } from "./advice.js";
import { showHistory } from "./charts.js";
import { publicUrl, showDecisions } from "./decisions.js";
import { connect, showEndpoints, showQueues } from "./endpoints.js";
import { PANELS } from "./panels.js";
import { TOKEN_KEY, ask, byId, count, element, known, percent, seconds, setText, short, shortNames, span, withCode, words } from "./parts.js";
import { fill, number, text } from "./table.js";

const POLL_MS = 1000;

const HOT_COLUMNS = [
  text((p) => p.prefix, "code lead wide"),
  number((p) => short(p.estimated_tokens)),
  number((p) => p.touches.toFixed(1)),
  { className: "wide", show: showHolders },
];

function showHolders(cell, prefix) {
  if (!cell.firstChild) cell.append(element("div", "chips"));
  const nameOf = (name) => prefix.names.get(`${prefix.cluster}/${name}`) || name;
  const label = ([name, blocks]) => (blocks >= prefix.blocks ? nameOf(name) : `${nameOf(name)} ${percent(blocks / prefix.blocks)}`);
  const holders = Object.entries(prefix.replicas).sort((a, b) => b[1] - a[1]);
  const wanted = holders.map((one) => [one[1] >= prefix.blocks ? "chip" : "chip part", label(one)]);
  if (cell.dataset.shown === JSON.stringify(wanted)) return;
  cell.dataset.shown = JSON.stringify(wanted);
  const chips = wanted.map(([className, name]) => element("span", className, name));
  cell.firstChild.replaceChildren(...(chips.length ? chips : [element("span", "muted", "no endpoint")]));
}

// What a policy has learned; nothing that it only assumes.
function learnedText({ policy, learned }) {
  const facts = [policy];
  const { requests_without_sample: without, samples_by_kind: kinds } = learned;
  if (known(learned.samples) && !learned.samples) facts.push(`learning: no sample ${without ? `in ${count(without)} requests ` : ""}yet`);
  if (learned.samples) {
    facts.push(`${count(learned.tokens_per_s)} tokens/s prefill`);
    if (known(learned.rho)) facts.push(`${percent(learned.rho)} busy with it`);
    const by = Object.entries(kinds || {}).filter(([, number]) => number).map(([kind, number]) => `${count(number)} ${words(kind)}`);
    facts.push(`${count(learned.samples)} ${learned.samples === 1 ? "sample" : "samples"}${by.length ? ` (${by.join(", ")})` : ""}`);
  }
  return facts.join(" · ");
}

// Prompts kept for conversations that are expected back, and how often they were there.
function promisesText({ prompts, tokens, kept, broken }) {
  const held = `${count(prompts)} ${prompts === 1 ? "prompt" : "prompts"}, ${count(tokens)} tokens`;
  return kept + broken ? `${held} · promises kept ${percent(kept / (kept + broken))}` : held;
}

function showWork(live) {
  const rows = Object.entries(live.routing).map(([name, one]) => [`Cluster ${name}`, learnedText(one)]);
  for (const { name, state, reason } of live.capabilities) rows.push([name, `${state} · ${reason.replaceAll("`", "")}`]);
  const { cache } = live;
  if (cache) {
    const running = cache.running.map(({ about, instance }) => (instance ? `${about} at ${instance}` : about));
    rows.push(["Running", running.join(", ") || "nothing"]);
    rows.push(["Waiting jobs", count(cache.waiting)], ["Pinned prefixes", count(cache.leases)]);
    if (cache.promises) rows.push(["Leases", promisesText(cache.promises)]);
    const open = Object.entries(cache.breakers).filter(([, state]) => state !== "closed");
    rows.push(["Open breakers", open.map(([name, state]) => `${name} (${words(state)})`).join(", ") || "none"]);
  }
  if (byId("work").dataset.shown === JSON.stringify(rows)) return;
  byId("work").dataset.shown = JSON.stringify(rows);
  byId("work").replaceChildren(...rows.flatMap(([name, value]) => [element("dt", "", name), element("dd", "", value)]));
}

const clockTime = (ago_s) => new Date(Date.now() - ago_s * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });

// The band that answers one question: is all well, and if not, since when not?
function showState(live) {
  const { kind, sentence, since_s: since } = live.state;
  byId("state").className = `card ${kind}`;
  setText(byId("sentence"), known(since) ? `${sentence} since ${clockTime(since)}` : sentence);
  const { requests, failed, saved_prefill_s: saved } = live.last_minute;
  const share = requests ? 100 * (failed / requests) : 0;
  const failedText = `${share && share < 9.95 ? share.toFixed(1) : Math.round(share)} % of ${count(requests)}`;
  setText(byId("failed-share"), requests ? failedText : "–");
  byId("failed-share").className = failed ? "bad" : "";
  const { p95_s: now, p95_hour_ago_s: then } = live.ttft;
  setText(byId("ttft-now"), known(now) && known(then) ? `${seconds(now)} (an hour ago ${seconds(then)})` : seconds(now));
  const learns = Object.values(live.routing).some(({ learned }) => known(learned.samples));
  setText(byId("saved"), saved > 0 ? `${seconds(saved)} of engine time` : "–");
  byId("saved").title = known(saved) ? "Time that engines did not spend on prompts that were cached"
    : learns ? "Learning: no sample yet" : "No policy here learns speeds";
}

function showEvents(events) {
  const shown = JSON.stringify(events.map(({ kind, what, ago_s: ago }) => [kind, what, clockTime(ago)]));
  const list = byId("events");
  if (list.dataset.shown === shown) return;
  list.dataset.shown = shown;
  list.replaceChildren(...events.map(({ kind, what, ago_s: ago }) => {
    const item = element("li");
    item.append(element("time", "muted", clockTime(ago)), element("i", `mark ${kind}`), element("span", "", what));
    return item;
  }));
  byId("events-none").hidden = events.length > 0;
}

const SEVERITY = { problem: "down", error: "down", warning: "warn", note: "", ok: "good" };

function showFindings(findings) {
  const list = byId("findings");
  byId("findings-card").hidden = findings.length === 0;
  const rows = findings.map((one) => ({ ...one, age: known(one.age_s) ? span(one.age_s) : "" }));
  const shown = JSON.stringify(rows.map(({ severity, where, what, fix, age }) => [severity, where, what, fix, age]));
  if (list.dataset.shown === shown) return;
  list.dataset.shown = shown;
  list.replaceChildren(...rows.map(({ severity, where, what, fix, age }) => {
    const item = element("li");
    const said = element("span");
    said.append(element("b", "", where ? `${where}: ` : ""), ...withCode(what));
    if (fix) {
      const below = element("span", "sub");
      below.append(" – ", ...withCode(fix));
      said.append(below);
    }
    item.append(element("span", `pill ${SEVERITY[severity] || ""}`, severity), said, element("span", "age muted", age));
    return item;
  }));
}

function showHeader(live) {
  const { kind, text: said } = live.state;
  setText(byId("version"), live.version);
  byId("readiness").className = `pill ${kind}`;
  setText(byId("readiness"), said);
  setText(byId("updated"), new Date(live.time).toLocaleTimeString());
  const policies = [...new Set(Object.values(live.routing).map(({ policy }) => policy))];
  const url = publicUrl(live);
  const serving = (live.workers || []).filter(({ serves }) => serves).length;
  const workers = live.workers && `${serving} of ${live.workers.length} workers`;
  const file = live.config_file;
  const config = file && `${file.name} ${file.refused ? "refused, that in force" : ""} loaded ${span(file.loaded_s_ago)} ago`.replace("  ", " ");
  setText(byId("facts"), [policies.join(", "), workers, `running for ${span(live.uptime_s)}`, config, url && `clients at ${url}`].filter(Boolean).join(" · "));
  byId("links").hidden = Boolean(sessionStorage.getItem(TOKEN_KEY)); // a link carries no token
  document.title = kind === "good" ? "kvproxy" : `${said} – kvproxy`;
}

let shownSpan = "5m";

function show(live, spanName) {
  showHeader(live);
  showFindings(live.findings);
  showState(live);
  showEvents(live.events);
  showHistory(live.history, spanName, live.events);
  showEndpoints(live);
  showQueues(live.routing);
  const names = shortNames(live.endpoints);
  const hot = (live.cache?.hot || []).map((prefix) => ({ ...prefix, names, key: `${prefix.cluster}/${prefix.prefix}` }));
  fill("hot", hot, HOT_COLUMNS);
  byId("hot").hidden = !hot.length;
  byId("hot-none").hidden = hot.length > 0;
  showWork(live);
  for (const showPanel of PANELS) showPanel(live);
  showDecisions(live);
}

// ---- asking

function trouble(message) {
  const shown = byId("trouble");
  shown.hidden = !message;
  setText(shown, message);
}

let timer = 0;
let lastGood = null;

async function poll() {
  clearTimeout(timer);
  if (document.hidden || byId("token-dialog").open) return;
  const spanName = shownSpan;
  let live = null;
  try {
    const answer = await ask(`live?span=${spanName}`);
    if (answer.status === 401) { askForToken(); return; }
    if (!answer.ok) throw new Error((await answer.json()).error);
    live = await answer.json();
  } catch (error) {
    stale(error);
  }
  clearTimeout(timer);
  timer = setTimeout(poll, POLL_MS);
  if (!live || spanName !== shownSpan) return;
  lastGood = new Date();
  document.body.classList.remove("stale");
  trouble("");
  show(live, spanName);
}

function stale(error) {
  const since = lastGood ? ` What is shown is from ${lastGood.toLocaleTimeString()}.` : "";
  const unreachable = error instanceof TypeError || error.name === "TimeoutError";
  document.body.classList.add("stale");
  byId("readiness").className = "pill";
  setText(byId("readiness"), "stale");
  document.title = "no answer – kvproxy";
  trouble((unreachable ? "kvproxy does not answer." : `${error.message}.`) + since);
}

function askForToken() {
  byId("token-wrong").hidden = !sessionStorage.getItem(TOKEN_KEY);
  byId("token").value = "";
  byId("token-dialog").showModal();
}

byId("spans").addEventListener("click", (event) => {
  const wanted = event.target.dataset.span;
  if (!wanted) return;
  shownSpan = wanted;
  for (const one of byId("spans").children) one.setAttribute("aria-pressed", String(one.dataset.span === wanted));
  poll();
});
byId("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(TOKEN_KEY, byId("token").value);
  byId("token-dialog").close();
});
byId("token-dialog").addEventListener("close", () => { poll(); refreshAdvice(); });
document.addEventListener("visibilitychange", poll);
connect(trouble, poll);
connectAdvice(trouble);
poll();
refreshAdvice();
