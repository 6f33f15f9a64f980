// What breaks prefixes: by cause, client and tenant, with what helps under the cause.

import { byId, count, known, seconds, setText, short, words } from "./parts.js";
import { fill, number, text, titled } from "./table.js";

const COLUMNS = [
  titled((one) => words(one.cause), (one) => one.fix.replaceAll("`", ""), "lead wide"),
  text((one) => one.client || "unknown"),
  text((one) => one.tenant || "–"),
  text((one) => one.part),
  number((one) => count(one.breaks)),
  number((one) => short(one.tokens)),
  number((one) => (known(one.seconds) && one.seconds > 0 ? seconds(one.seconds) : "–")),
];

export function show(live) {
  const { returned, causes } = live.cache?.breaks || { returned: 0, causes: [] };
  byId("breaks-card").hidden = !causes.length;
  setText(byId("breaks-state"), `of ${count(returned)} turns of sessions that returned`);
  fill("breaks", causes.map((one) => ({ ...one, key: `${one.cause}/${one.client}/${one.tenant}`, title: one.what })), COLUMNS);
}
