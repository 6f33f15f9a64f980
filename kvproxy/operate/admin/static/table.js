// Tables whose rows are kept by key and where only what changed is written, so that focus and selection stay in place.

import { byId, element, known, setText } from "./parts.js";

// `rows`: objects with a `key`; one with `group` (a function of its cell) is a row of one wide cell.
export function fill(tableId, rows, columns) {
  const table = byId(tableId);
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells].map((cell) => cell.dataset.short || cell.textContent);
  const kept = new Map([...body.rows].map((row) => [row.dataset.key, row]));
  let at = body.firstElementChild;
  for (const data of rows) {
    const row = kept.get(data.key) || makeRow(data, columns, heads);
    kept.delete(data.key);
    if (row.dataset.open) row.className = `${data.className || ""} open`;
    else row.className = data.className || "";
    if (data.group) data.group(row.cells[0]);
    else columns.forEach((column, index) => column.show(row.cells[index], data));
    if (row === at) at = at.nextElementSibling;
    else body.insertBefore(row, at);
  }
  for (const row of kept.values()) row.remove();
}

function makeRow(data, columns, heads) {
  const row = element("tr");
  row.dataset.key = data.key;
  if (data.group) {
    const cell = element("td", "wide");
    cell.colSpan = columns.length;
    row.append(cell);
    return row;
  }
  columns.forEach((column, index) => {
    const cell = element("td", column.className || "");
    cell.dataset.label = heads[index];
    row.append(cell);
  });
  return row;
}

export const text = (value, className = "") => ({ className, show: (cell, data) => setText(cell, value(data)) });
export const number = (value, className = "") => text(value, `number ${className}`.trim());

export function titled(value, below, className) {
  return {
    className,
    show(cell, data) {
      if (!cell.firstChild) cell.append(element("b"), element("span", "sub"));
      setText(cell.firstChild, value(data));
      setText(cell.lastChild, below(data));
      if (data.title && cell.title !== data.title) cell.title = data.title;
    },
  };
}

// `of` answers with a kind ("" is grey, null is plain text) and a label.
export function pill(of, className = "") {
  return {
    className,
    show(cell, data) {
      if (!cell.firstChild) cell.append(element("span"));
      const [kind, label] = of(data);
      const wanted = kind === null ? "muted" : `pill ${kind}`;
      if (cell.firstChild.className !== wanted) cell.firstChild.className = wanted;
      setText(cell.firstChild, label);
    },
  };
}

export function meter(share, label, highFrom) {
  return {
    className: "wide metered",
    show(cell, data) {
      if (!cell.firstChild) {
        const made = element("div", "meter");
        const bar = element("div", "bar");
        bar.setAttribute("aria-hidden", "true");
        bar.append(element("i"));
        made.append(element("span"), bar);
        cell.append(made);
      }
      const [labelled, bar] = cell.firstChild.children;
      const value = share(data);
      setText(labelled, label(data));
      bar.hidden = !known(value);
      bar.classList.toggle("high", known(value) && value >= highFrom);
      bar.firstChild.style.width = `${Math.min(100, 100 * (value || 0))}%`;
    },
  };
}
