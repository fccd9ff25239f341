"use strict";
// Elements, numbers and tables. Every text is set as text, never as HTML.
const SVG = new Set(["svg", "g", "path", "line", "rect", "text", "polyline", "circle", "title"]);
const color = (n) => `var(--c${n % 8})`;

function el(tag, attributes = {}, ...children) {
  const node = SVG.has(tag) ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return node;
}

function num(value, digits = 4) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size && (size < 1e-3 || size >= 1e7)) return value.toExponential(Math.min(2, digits - 1)).replace(/\.?0+e/, "e");
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return value.toLocaleString("en", { maximumSignificantDigits: digits });
}

const percent = (share) => (share > 0 && share < 0.01 ? "<1%" : `${Math.round(100 * share)}%`);
const key = (n, label) => el("span", { class: "key" }, el("i", { style: `background:${color(n)}`, "aria-hidden": "true" }), label);
const stepRange = ([first, last]) => (first === last ? `step ${first}` : `steps ${first} to ${last}`);

// A text as nodes. Long words may be broken after the characters _ . / and =.
const breakable = (text) => String(text).split(/(\s+)/).flatMap((word) => (word.length < 20 ? [word] : word.split(/(?<=[_./=])/).flatMap((part, n) => (n ? [el("wbr"), part] : [part]))));

// Returns round numbers from `low` to `high`, with the largest step that gives at least three numbers.
function ticks(low, high) {
  const power = 10 ** Math.floor(Math.log10(high - low || 1));
  const marks = (step) => Array.from({ length: Math.floor(high / step + 1e-6) - Math.ceil(low / step - 1e-6) + 1 }, (_, i) => Number(((Math.ceil(low / step - 1e-6) + i) * step).toPrecision(10)));
  return [5, 2, 1, 0.5, 0.2, 0.1].map((each) => marks(each * power)).find((found) => found.length >= 3) ?? [low, high];
}

// Returns a box with the content `draw(width)`, drawn again when the width changes, so that texts of charts keep their size.
function sized(height, draw) {
  const box = el("div", { style: `min-height:${height}px` });
  let drawn = 0;
  new ResizeObserver(([entry]) => {
    const width = Math.floor(entry.contentRect.width); // rounded down, so that the content fits in the box
    if (width && width !== drawn) { drawn = width; box.replaceChildren(draw(width)); }
  }).observe(box);
  return box;
}

function table(name, heads, rows, best) {
  const body = el("tbody"), buttons = heads.map((head, i) => el("button", { type: "button", onclick: () => sort(i) }, ...breakable(head)));
  const numeric = heads.map((_, i) => rows.some((row) => typeof row[i] === "number"));
  const cells = buttons.map((button, i) => el("th", { scope: "col", class: numeric[i] ? "n" : null }, button));
  const text = (v) => (typeof v === "number" ? num(v) : v === null || v === undefined || v === "" ? "–" : String(v));
  const fill = (order) => body.replaceChildren(...order.map((row) => el("tr", { class: row === rows[best] ? "best" : null }, ...row.map((v, i) => el("td", { class: numeric[i] ? "n" : null, "data-head": heads[i] }, ...breakable(text(v)))))));
  const compare = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a ?? "").localeCompare(String(b ?? ""), "en", { numeric: true }));
  function sort(i) {
    const up = cells[i].getAttribute("aria-sort") !== "ascending";
    cells.forEach((cell, n) => (n === i ? cell.setAttribute("aria-sort", up ? "ascending" : "descending") : cell.removeAttribute("aria-sort")));
    fill([...rows].sort((a, b) => compare(a[i], b[i]) * (up ? 1 : -1)));
  }
  fill(rows);
  return el("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": name }, el("table", {}, el("thead", {}, el("tr", {}, ...cells)), body));
}
