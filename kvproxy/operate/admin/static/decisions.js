// The last decisions. They stand still while a person looks at them, and open into what each was made of.

import { ask, byId, count, element, known, seconds, setText, shortNames, span, words } from "./parts.js";
import { fill, number, pill, text } from "./table.js";

const endOf = (d) => {
  const retries = d.retries ? `, ${d.retries} ${d.retries === 1 ? "retry" : "retries"}` : "";
  if (d.result === "client_left") return ["", `client left${retries}`];
  if (d.result === "failed") {
    const how = d.end === "completed" ? "" : words(d.local_reason || d.end) || "no answer";
    return ["down", [how, d.status || ""].filter(Boolean).join(" ") + retries];
  }
  return [d.result === "client_error" || retries ? "warn" : "good", `${d.status}${retries}`];
};

const COLUMNS = [
  text((d) => `${d.ago_s < 10 ? seconds(d.ago_s) : span(d.ago_s)} ago`, "when"),
  { className: "code id", show: showId },
  text((d) => d.model || "–", "model"),
  { className: "where", show: showEndpoint },
  text((d) => d.reason || "–", "why"),
  number((d) => (known(d.prompt_tokens) ? count(d.prompt_tokens) : "–"), "prompt"),
  number((d) => (known(d.matched_tokens) ? count(d.matched_tokens) : "–"), "predicted"),
  { className: "number reused", show: showReused },
  number((d) => seconds(d.ttft_s), "ttft"),
  pill(endOf, "state"),
];

function showId(cell, d) {
  if (!cell.firstChild) {
    const made = element("button", "link");
    made.type = "button";
    made.setAttribute("aria-expanded", "false");
    cell.append(made);
  }
  const button = cell.firstChild;
  setText(button, d.request_id.slice(0, 13) || "open");
  button.setAttribute("aria-label", `Why request ${d.request_id || d.number} went there`);
  button.setAttribute("aria-expanded", String(opened.has(d.key)));
  button.dataset.of = d.key;
}

function showEndpoint(cell, d) {
  setText(cell, d.name || d.endpoint || "–");
  cell.title = d.endpoint || "";
}

function showReused(cell, d) {
  setText(cell, known(d.cached_tokens) ? count(d.cached_tokens) : "–");
  cell.dataset.of = known(d.prompt_tokens) ? ` of ${count(d.prompt_tokens)}` : "";
}

const opened = new Map(); // key of a decision to its details, or to why there are none
let newest = null;
let looking = false;

let followed = false;

export function showDecisions(live) {
  newest = live;
  if (!followed) {
    followed = true;
    followAddress().then(() => {
      draw();
      if (linked) byId("decisions").scrollIntoView({ block: "center" });
    });
  }
  const still = looking || opened.size > 0;
  const which = byId("failed-only").checked ? "the last that failed" : "";
  setText(byId("decisions-state"), still ? "standing still while you look" : which);
  if (!still) draw();
}

function draw() {
  if (!newest) return;
  const failedOnly = byId("failed-only").checked;
  const recent = failedOnly ? newest.failed_decisions || [] : newest.decisions;
  const chosen = linked && recent.every(({ number: one }) => one !== linked.number) ? [...recent, linked] : recent;
  const names = shortNames(newest.endpoints);
  const rows = chosen.flatMap((one) => {
    const row = { ...one, name: names.get(`${one.cluster}/${one.endpoint}`), key: String(one.number ?? `${one.request_id}/${one.ended_at}`), className: "decision" };
    const detail = opened.get(row.key);
    return detail ? [row, { key: `${row.key} detail`, className: "detail", group: (cell) => showDetail(cell, detail) }] : [row];
  });
  fill("decisions", rows, COLUMNS);
  byId("decisions").hidden = !rows.length;
  byId("decisions-none").hidden = rows.length > 0;
  byId("try-it").hidden = newest.decisions.length > 0;
  setText(byId("none-text"), newest.decisions.length
    ? "None of the requests that are still remembered failed." : "No request has ended yet. Send one:");
  if (!newest.decisions.length) setText(byId("try-it"), tryIt(newest));
}

function tryIt(live) {
  const base = publicUrl(live) || "http://HOST:PORT";
  const model = live.endpoints.flatMap((one) => one.models)[0];
  const body = `{"model": "${model || "MODEL"}", "messages": [{"role": "user", "content": "Hello"}]}`;
  const names = model ? "" : `curl -s ${base}/v1/models    # the names of the models\n`;
  return `${names}curl -s ${base}/v1/chat/completions -H 'content-type: application/json' \\\n  -d '${body}'`;
}

// Where clients connect, as seen from here: a listener on every interface is reached like this page.
export function publicUrl(live) {
  return (live.public_url || "").replace(/\/\/(0\.0\.0\.0|\[::\])(?=:|$)/, `//${window.location.hostname}`);
}

function showDetail(cell, detail) {
  if (cell.detail === detail) return;
  cell.detail = detail;
  if (typeof detail === "string") { cell.replaceChildren(element("p", "muted", detail)); return; }
  const id = element("p", "whole-id");
  id.append(element("code", "", detail.request_id || "(without an id)"));
  if (detail.request_id) id.append(copier(detail.request_id));
  const facts = [
    `policy ${detail.policy || "–"}`, detail.tenant && `tenant ${detail.tenant}`, `cluster ${detail.cluster || "–"}`,
    detail.streamed ? "streamed" : "not streamed", `over after ${seconds(detail.duration_s)}`,
    known(detail.completion_tokens) && `${count(detail.completion_tokens)} tokens generated`,
  ].filter(Boolean);
  const notes = (detail.notes || []).map((line) => element("p", "", line));
  cell.replaceChildren(id, element("p", "muted", facts.join(" · ")), ...notes, candidates(detail));
}

function copier(id) {
  const button = element("button", "", "Copy id");
  button.type = "button";
  button.setAttribute("aria-label", `Copy id ${id}`);
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(id);
      button.textContent = "Copied";
    } catch { // not a secure origin: selected, for the keyboard
      window.getSelection().selectAllChildren(button.previousSibling);
      button.textContent = "Selected";
    }
  });
  return button;
}

function candidates(detail) {
  if (!detail.candidates.length) {
    const why = detail.policy ? "The candidates of this decision were not kept: there were too many. Receipts have the cheapest." :
      "No endpoint was chosen.";
    return element("p", "muted", why);
  }
  const table = element("table", "candidates");
  table.append(element("caption", "muted", "Candidates, the cheapest first; costs in the policy's own unit"));
  const head = element("tr");
  for (const name of ["Endpoint", "Cost", "Held there", "Known by", "Age"]) {
    const cell = element("th", name === "Endpoint" || name === "Known by" ? "" : "number", name);
    cell.scope = "col";
    head.append(cell);
  }
  table.createTHead().append(head);
  const body = table.createTBody();
  for (const one of detail.candidates) {
    const tiers = Object.entries(one.lower).map(([tier, tokens]) => `${count(tokens)} ${tier}`);
    const lower = tiers.length ? ` (${tiers.join(", ")})` : "";
    const row = element("tr", one.endpoint === detail.endpoint ? "chosen" : "");
    const held = known(one.matched_tokens) ? `${count(one.matched_tokens)} tokens${lower}` : "–";
    row.append(
      element("td", "", one.endpoint), element("td", "number", known(one.cost) ? Number(one.cost.toPrecision(4)).toString() : "–"),
      element("td", "number", held), element("td", "", one.source ? words(one.source) : "–"),
      element("td", "number", known(one.age_s) ? span(one.age_s) : "–"));
    body.append(row);
  }
  return table;
}

async function toggle(key) {
  if (opened.delete(key)) setAddress("");
  else {
    opened.clear();
    await open(key);
  }
  drawOpened();
}

async function open(key) {
  try {
    const answer = await ask(`decisions/${encodeURIComponent(key)}`);
    const said = await answer.json();
    if (!answer.ok) throw new Error(said.error);
    opened.set(key, said);
    setAddress(said.request_id);
  } catch (error) {
    opened.set(key, error.message);
  }
}

// A decision, and the choice of the failed, can be linked: ?failed=1 and #REQUEST-ID.
function setAddress(requestId) {
  const query = byId("failed-only").checked ? "?failed=1" : "";
  const anchor = requestId ? `#${encodeURIComponent(requestId)}` : "";
  window.history.replaceState(null, "", `${window.location.pathname}${query}${anchor}`);
}

let linked = null; // the decision that the address names, which may be older than those shown

async function followAddress() {
  byId("failed-only").checked = new URLSearchParams(window.location.search).get("failed") === "1";
  const wanted = decodeURIComponent(window.location.hash.slice(1));
  if (!wanted) return;
  try {
    const answer = await ask(`decisions?limit=1&request_id=${encodeURIComponent(wanted)}`);
    if (!answer.ok) return;
    const { decisions } = await answer.json();
    linked = decisions[0] || null;
    if (linked) await open(String(linked.number));
  } catch {
    linked = null; // the page reports itself that nothing answers
  }
}

// Rows that are shown stay; only what is open changes.
function drawOpened() {
  const body = byId("decisions").tBodies[0];
  for (const row of [...body.rows].filter((one) => one.className === "detail")) row.remove();
  for (const row of [...body.rows]) {
    const detail = opened.get(row.dataset.key);
    row.cells[1].firstChild.setAttribute("aria-expanded", String(Boolean(detail)));
    if (!detail) continue;
    const below = element("tr", "detail");
    below.dataset.key = `${row.dataset.key} detail`;
    const cell = element("td", "wide");
    cell.colSpan = COLUMNS.length;
    below.append(cell);
    row.after(below);
    showDetail(cell, detail);
  }
}

const table = byId("decisions");
table.addEventListener("click", (event) => {
  const row = event.target.closest("tr.decision");
  if (row && !window.getSelection().toString()) toggle(row.dataset.key);
});
table.addEventListener("pointerenter", (event) => { if (event.pointerType === "mouse") looking = true; });
table.addEventListener("pointerleave", () => { looking = false; });
byId("failed-only").addEventListener("change", () => {
  opened.clear();
  looking = false;
  linked = null;
  setAddress("");
  draw();
});
