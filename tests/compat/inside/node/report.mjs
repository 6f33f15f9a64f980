// Prints what came of each call as one JSON object, without what differs between two runs on one server.

export const URL = process.env.KVPROXY_COMPAT_URL;
export const MODEL = process.env.KVPROXY_COMPAT_MODEL;

const VARYING = /(^|_)id$|^(id|created|timestamp|date)|_at$|cache|^(headers|response|request|rawResponse)$/i;

function masked(value) {
  if (Array.isArray(value)) return value.map(masked);
  if (value === null || typeof value !== 'object') return typeof value === 'bigint' ? String(value) : value;
  return Object.fromEntries(
    Object.keys(value).sort().map((key) => [key, VARYING.test(key) ? typeof value[key] : masked(value[key])]));
}

// Join the texts of a stream's parts: how many parts there are is up to the engine's batches.
export async function joined(stream, kindOf, textOf) {
  const kinds = new Set();
  let text = '';
  let last;
  for await (const part of stream) {
    kinds.add(kindOf(part));
    text += textOf(part) ?? '';
    last = part;
  }
  return {kinds: [...kinds], text, last};
}

function failure(error) {
  const {status, statusCode, message, code, param, type} = error;
  return {failed: {name: error.constructor.name, status: status ?? statusCode, message: String(message).slice(0, 300), code, param, type}};
}

// A call whose connection ends in the middle of its upload may never settle: Node would end without a report.
function limited(call) {
  let timer;
  const late = new Promise((_, fail) => { timer = setTimeout(() => fail(new Error('no answer within 60 s')), 60_000); });
  return Promise.race([call(), late]).finally(() => clearTimeout(timer));
}

export async function report(calls) {
  const found = {};
  for (const [name, call] of Object.entries(calls)) {
    try {
      found[name] = masked(JSON.parse(JSON.stringify((await limited(call)) ?? null)));
    } catch (error) {
      found[name] = masked(failure(error));
    }
  }
  console.log(JSON.stringify(found));
  process.exit();
}
