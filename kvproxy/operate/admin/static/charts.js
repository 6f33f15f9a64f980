// The three charts: lines over the last minutes or the last hour.

import { byId, count, element, known, percent, seconds, setText, span } from "./parts.js";

// By span: the windows (the smallest that holds all there is), and seconds a sample.
const SPANS = { "5m": { windows: [60, 120, 300], step: 1 }, "1h": { windows: [600, 1800, 3600], step: 10 } };
const BRIDGED = 5.5; // samples without a value that do not part a line
const SMOOTH = 10; // samples a hit rate is taken over
const LOW = 0.4, LOW_FOR = 30; // an axis falls once its values were under this share of it for so many drawings
const SVG = "http://www.w3.org/2000/svg";

function shape(tag, attributes) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

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
  const marks = shape("g", {});
  const area = shape("path", { class: "plot-area one" });
  const lines = series.map(({ className }) => shape("path", { class: `plot-line ${className}` }));
  const cursor = shape("line", { class: "cursor", y1: 0, y2: 100, visibility: "hidden" });
  svg.append(area, marks, ...lines, cursor);
  const top = element("span", "top");
  const middle = element("span", "middle");
  plot.append(svg, top, middle);
  const axis = element("div", "axis");
  const from = element("span");
  axis.append(from, element("span", "", "now"));
  figure.append(caption, legend, plot, axis);

  let shown = { ago: [], columns: [] };
  let pointed = null; // share of the width under the pointer
  let window_s = 60;
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

  function mark(events) {
    const within = events.filter(({ ago_s: when }) => when <= window_s);
    marks.replaceChildren(...within.map(({ ago_s: when, kind, what }) => {
      const line = shape("line", { class: `mark ${kind}`, x1: x(when), x2: x(when), y1: 0, y2: 100 });
      const title = shape("title", {});
      title.textContent = what;
      line.append(title);
      return line;
    }));
  }

  return (ago, columns, ceiling, { windows, step }, events) => {
    shown = { ago, columns };
    window_s = windows.find((one) => one >= (ago[0] ?? 0)) ?? windows.at(-1);
    setText(from, `${window_s / 60} min ago`);
    mark(events);
    const y = (value) => 99 - 98 * Math.min(1, value / ceiling);
    // A line of failures is drawn where there are some: a red line along zero would be all one sees of a good hour.
    const drawn = columns.map((column, i) => (series[i].className === "fail" ? column.map((v) => (v > 0 ? v : null)) : column));
    drawn.forEach((column, i) => lines[i].setAttribute("d", path(ago, column, x, y, step)));
    area.setAttribute("d", columns.length ? under(ago, columns[0], x, y, step) : "");
    setText(top, format(ceiling));
    setText(middle, format(ceiling / 2));
    read();
    const said = series.map(({ name }, i) => `${name} ${values[i].textContent}`).join(", ");
    svg.setAttribute("aria-label", `${title}, last ${window_s / 60} minutes: ${said}`);
  };
}

// A value of the last few samples, so that a quiet second does not blank the figure.
function latest(column) {
  for (let i = column.length - 1; i >= Math.max(0, column.length - 5); i--) if (known(column[i])) return column[i];
  return null;
}

// Stretches of values; a few samples without any do not part them.
function stretches(ago, column, step) {
  const found = [];
  column.forEach((value, i) => {
    if (!known(value)) return;
    const last = found.at(-1);
    if (last && last.at(-1)[0] - ago[i] <= BRIDGED * step) last.push([ago[i], value]);
    else found.push([[ago[i], value]]);
  });
  return found;
}

function path(ago, column, x, y, step) {
  const at = ([when, value]) => `${x(when).toFixed(2)} ${y(value).toFixed(2)}`;
  return stretches(ago, column, step).map((points) => `M${at(points[0])}h.01L${points.map(at).join("L")}`).join(""); // h: a dot
}

function under(ago, column, x, y, step) {
  const at = ([when, value]) => `L${x(when).toFixed(2)} ${y(value).toFixed(2)}`;
  const edge = ([when]) => x(when).toFixed(2);
  return stretches(ago, column, step)
    .map((points) => `M${edge(points[0])} 99.5${points.map(at).join("")}L${edge(points.at(-1))} 99.5Z`).join("");
}

// The next round number over all values: 1, 2 or 5 times a power of ten.
function roundUp(values, least) {
  const most = Math.max(least, ...values.filter(known));
  const power = 10 ** Math.floor(Math.log10(most));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= most * 0.999);
}

// A ceiling that rises at once and falls only when the values have been low for a while: the scale stays put.
function steady(least) {
  let ceiling = 0;
  let lowFor = 0;
  let spanned = "";
  return (values, spanName) => {
    const wanted = roundUp(values, least);
    lowFor = wanted <= ceiling * LOW ? lowFor + 1 : 0;
    if (wanted > ceiling || lowFor >= LOW_FOR || spanName !== spanned) { ceiling = wanted; lowFor = 0; }
    spanned = spanName;
    return ceiling;
  };
}

// What of `part` there was to `all`, over the last SMOOTH samples before each; null while nothing was prompted.
function rate(part, all) {
  let parts = 0;
  let alls = 0;
  return part.map((_, i) => {
    parts += part[i];
    alls += all[i];
    if (i >= SMOOTH) { parts -= part[i - SMOOTH]; alls -= all[i - SMOOTH]; }
    return alls > 0.5 ? Math.min(1, Math.max(0, parts / alls)) : null;
  });
}

// The mean of each value and the four before it, a second.
function calm(column, step) {
  return column.map((_, i) => {
    const near = column.slice(Math.max(0, i - 4), i + 1);
    return near.reduce((sum, value) => sum + value, 0) / near.length / step;
  });
}

const perSecond = (value) => (known(value) ? (value < 10 && value % 1 ? value.toFixed(1) : count(value)) : "–");
const drawRequests = chart("chart-requests", "Requests a second",
  [{ name: "ended", className: "one" }, { name: "failed", className: "fail" }], perSecond);
const drawTtft = chart("chart-ttft", "First byte, streamed answers",
  [{ name: "median", className: "one" }, { name: "p95", className: "two" }], seconds);
const drawHits = chart("chart-hits", "Prompt tokens from cache",
  [{ name: "reused", className: "one" }, { name: "predicted", className: "two" }],
  (share) => (known(share) ? percent(share) : "–"));
const requestsAxis = steady(5);
const ttftAxis = steady(0.01);

export function showHistory(history, spanName, events) {
  const scale = SPANS[spanName];
  const { ago_s: ago } = history;
  const requests = calm(history.requests, scale.step);
  drawRequests(ago, [requests, calm(history.failed, scale.step)], requestsAxis(requests, spanName), scale, events);
  const ttft = [history.ttft_p50_s, history.ttft_p95_s];
  drawTtft(ago, ttft, ttftAxis(ttft.flat(), spanName), scale, events);
  const prompts = history.prompt_tokens;
  drawHits(ago, [rate(history.cached_tokens, prompts), rate(history.predicted_tokens, prompts)], 1, scale, events);
}
