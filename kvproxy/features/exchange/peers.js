// The other processes that decide as one with this one, a line each.

import { byId, count, percent, seconds, setText, short, span } from "./parts.js";
import { fill, number, pill, text } from "./table.js";

const COLUMNS = [
  text((one) => one.origin, "lead wide"),
  pill((one) => (one.alive ? ["good", one.waiting ? "behind" : "alive"] : ["down", "silent"])),
  text((one) => `${one.heard_s_ago < 90 ? seconds(one.heard_s_ago) : span(one.heard_s_ago)} ago`),
  number((one) => seconds(one.lag_p50_s)),
  number((one) => seconds(one.lag_p99_s)),
  number((one) => count(one.gaps)),
  number((one) => count(one.lost)),
  number((one) => short(one.index_blocks)),
];

export function show({ sync }) {
  byId("peers-card").hidden = !sync;
  if (!sync) return;
  const away = Object.entries(sync.links).filter(([, connected]) => !connected).map(([name]) => `, ${name} away`);
  setText(byId("peers-state"), `${sync.origin} is ${sync.status}${away.join("")}: ${percent(sync.consistency_ratio)} of what others routed is known here`);
  fill("peers", sync.peers.map((one) => ({ ...one, key: one.origin, className: one.alive ? "" : "down" })), COLUMNS);
}
