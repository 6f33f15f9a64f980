// Sessions whose contexts the engines are to keep, a line for each cluster, once any is resident or waits.

import { byId, count, known, short, span } from "./parts.js";
import { fill, number, pill, text } from "./table.js";

const COLUMNS = [
  text((one) => one.key, "lead"),
  pill((one) => (one.waiting ? ["warn", "some wait"] : ["good", one.memory_known ? "all fit" : "memory unknown"])),
  number((one) => count(one.residents)),
  number((one) => count(one.waiting)),
  number((one) => (known(one.expected_wait_s) ? span(one.expected_wait_s) : "–")),
  number((one) => short(one.growth_tokens)),
  number((one) => count(one.gave_way)),
];

export function show({ sessions }) {
  const rows = Object.entries(sessions || {}).map(([key, one]) => ({ key, ...one }));
  byId("residents-card").hidden = !rows.some((one) => one.residents || one.waiting);
  fill("residents", rows, COLUMNS);
}
