// Advice: asked for by a button, computed beside the proxy, shown until there is newer advice.

import { ask, byId, element, setText } from "./parts.js";

const RUNNING_MS = 2000;

const change = ({ value }) => `${value > 1 ? "+" : "−"}${Math.abs(Math.round((value - 1) * 100))} %`;

function gainText({ gain }) {
  if (!gain) return "";
  const figures = `mean TTFT ${change(gain.ttft_mean)}, p99 ${change(gain.ttft_p99)}, ITL p99 ${change(gain.itl_p99)}`;
  return `${gain.at_most ? "at most " : ""}${figures}; confidence ${gain.confidence}`;
}

function item(one) {
  const made = element("li");
  const said = element("span");
  said.append(element("b", "", `${one.setting}: `), `${one.what}. `, element("span", "sub", gainText(one)));
  for (const { engines, flag } of one.flags) {
    const line = element("div", "sub");
    line.append(`${engines}: `, element("code", "", flag));
    said.append(line);
  }
  if (one.config) said.append(element("div", "sub code", `kvproxy: ${one.config}`));
  made.append(element("span", `pill ${one.gain ? "" : "warn"}`, one.gain ? "expected" : "known"), said);
  return made;
}

function show({ state, started, error, advice }) {
  byId("advice-card").hidden = state === "unavailable";
  byId("advise").disabled = state === "running";
  const at = started ? new Date(started).toLocaleTimeString() : "";
  const texts = { none: "", running: `running since ${at}`, failed: `failed: ${error}`, done: `of ${at}; nothing was changed` };
  setText(byId("advice-state"), texts[state] || "");
  if (!advice) return;
  const notes = [...advice.notes, ...advice.pools.flatMap((pool) => pool.notes.map((note) => `${pool.name}: ${note}`))];
  const found = advice.pools.flatMap((pool) => pool.advice);
  const rows = [...found.map(item), ...notes.map((note) => element("li", "muted", note))];
  if (!found.length) rows.unshift(element("li", "", "Nothing is known to help."));
  byId("advice").replaceChildren(...rows);
}

export async function refreshAdvice() {
  try {
    const answer = await ask("advise");
    if (!answer.ok) return;
    const said = await answer.json();
    show(said);
    if (said.state === "running") setTimeout(refreshAdvice, RUNNING_MS);
  } catch {
    setTimeout(refreshAdvice, RUNNING_MS); // the page says itself that there is no answer
  }
}

export function connectAdvice(trouble) {
  byId("advise").addEventListener("click", async () => {
    const answer = await ask("advise", "POST");
    if (!answer.ok && answer.status !== 409) trouble((await answer.json()).error);
    refreshAdvice();
  });
}
