// Sessions whose contexts the engines are to keep, by cluster and engine, and those that wait, once there are any.

import { byId, count, known, short, span } from "./parts.js";
import { fill, meter, number, pill, text } from "./table.js";

const COLUMNS = [
  text((one) => one.key, "lead"),
  pill((one) => (one.waiting ? ["warn", "some wait"] : ["good", one.memory_known ? "all fit" : "memory unknown"])),
  number((one) => count(one.residents)),
  number((one) => count(one.waiting)),
  number((one) => span(one.expected_wait_s)),
  number((one) => short(one.growth_tokens)),
  number((one) => count(one.gave_way)),
];

const ENGINES = [
  text((one) => one.key, "lead"),
  number((one) => count(one.residents)),
  meter(
    (one) => (known(one.memory_tokens) ? one.context_tokens / one.memory_tokens : null),
    (one) => short(one.context_tokens) + (known(one.memory_tokens) ? ` of ${short(one.memory_tokens)}` : ""),
    1,
  ),
  number((one) => (known(one.limit_tokens) ? short(one.limit_tokens) : "no limit")),
];

const WAITS = [
  text((one) => span(one.waited_s), "lead"),
  text((one) => (one.begins ? "begins" : "goes on")),
  number((one) => short(one.tokens)),
  text((one) => one.endpoint || "–"),
];

export function show({ sessions }) {
  const rows = Object.entries(sessions || {}).map(([key, one]) => ({ key, ...one }));
  byId("residents-card").hidden = !rows.some((one) => one.residents || one.waiting);
  fill("residents", rows, COLUMNS);
  const engines = rows.flatMap((row) =>
    Object.entries(row.endpoints).map(([id, one]) => ({ key: `${row.key}/${id}`, ...one })));
  fill("residents-engines", engines, ENGINES);
  const waits = rows.flatMap((row) => row.waits.map((one, place) => ({ key: `${row.key}/${place}`, ...one })));
  byId("residents-waits").hidden = !waits.length;
  fill("residents-waits", waits, WAITS);
}
