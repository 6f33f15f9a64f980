// What every part of the live page is made of: elements, numbers for people, and the listener. Text is only ever set as
// text, since model names and request ids come from clients.

const TIMEOUT_MS = 4000;
export const TOKEN_KEY = "kvproxy-admin-token";

export const byId = (id) => document.getElementById(id);

export function element(tag, className = "", text = "") {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== "") made.textContent = text;
  return made;
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// Text in which `words` are code.
export function withCode(text) {
  return text.split("`").map((part, i) => (i % 2 ? element("code", "", part) : document.createTextNode(part)));
}

const whole = new Intl.NumberFormat("en");
export const count = (n) => whole.format(Math.round(n));
export const short = (n) => (n >= 10000 ? `${(n / 1000).toFixed(n >= 100000 ? 0 : 1)}k` : count(n));
export const percent = (share) => `${Math.round(share * 100)} %`;
export const known = (value) => value !== null && value !== undefined;
export const words = (name) => String(name).replaceAll("_", " ");

export function seconds(s) {
  if (!known(s)) return "–";
  if (s < 0.00005) return "0 s";
  if (s < 0.0995) return `${(s * 1000).toFixed(s < 0.00995 ? 1 : 0)} ms`;
  if (s < 9.95) return `${s.toFixed(s < 0.995 ? 2 : 1)} s`;
  return `${Math.round(s)} s`;
}

export function span(s) {
  if (s < 90) return `${Math.round(s)} s`;
  if (s < 5400) return `${Math.round(s / 60)} min`;
  return s < 172800 ? `${Math.round(s / 3600)} h` : `${Math.round(s / 86400)} days`;
}

// Names without what all of a cluster end with (".inference.svc.cluster.local"), by cluster/id.
export function shortNames(endpoints) {
  const found = new Map();
  for (const cluster of new Set(endpoints.map((one) => one.cluster))) {
    const ids = endpoints.filter((one) => one.cluster === cluster).map((one) => one.id);
    const parts = ids[0].split(".");
    let common = "";
    for (let i = 1; i < parts.length && ids.length > 1; i++) {
      const end = `.${parts.slice(i).join(".")}`;
      if (ids.every((id) => id.endsWith(end) && id.length > end.length)) { common = end; break; }
    }
    const cut = common.length > 8 ? common.length : 0;
    for (const id of ids) found.set(`${cluster}/${id}`, cut ? `${id.slice(0, -cut)}…` : id);
  }
  return found;
}

export function ask(path, method = "GET") {
  const headers = {};
  const token = sessionStorage.getItem(TOKEN_KEY);
  if (token) headers.Authorization = `Bearer ${token}`;
  if (method !== "GET") headers["Content-Type"] = "application/json";
  return fetch(path, { method, headers, cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS) });
}
