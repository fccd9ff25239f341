"use strict";
// Elements, numbers and charts. Every text is set as text, never as HTML.
const colour = (n) => `var(--c${n % 8})`;
function el(tag, attributes = {}, ...children) {
  const svg = ["svg", "g", "path", "line", "rect", "text", "polyline", "circle"].includes(tag);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return node;
}
function num(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  return size && (size < 1e-3 || size >= 1e7) ? value.toExponential(2) : value.toLocaleString("en", { maximumSignificantDigits: 5 });
}
const key = (n, label) => el("span", { class: "key" }, el("i", { style: `background:${colour(n)}`, "aria-hidden": "true" }), label);
function ticks(low, high) {
  const raw = (high - low) / 4 || 1, power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find((each) => each * power >= raw * 0.999), found = [];
  for (let v = Math.ceil(low / step - 1e-9) * step; v <= high + step * 1e-6 && found.length < 9; v += step) found.push(v);
  return found;
}
function smooth(points) { return points.map((p, i) => { const part = points.slice(Math.max(0, i - 9), i + 1).filter((q) => q[1] !== null); return [p[0], part.length ? part.reduce((s, q) => s + q[1], 0) / part.length : null]; }); }
const W = 380, H = 190, L = 48, R = 10, T = 8, B = 22;
function lineChart(chart, resumes, mode) {
  const all = chart.series.flatMap((s) => s.points.filter((p) => p[1] !== null));
  const figure = el("figure", {}, el("h3", {}, chart.title + (chart.unit ? ` (${chart.unit})` : "")));
  if (!all.length) return figure;
  let low = Math.min(...all.map((p) => p[2] ?? p[1])), high = Math.max(...all.map((p) => p[3] ?? p[1]));
  if (low === high) { low -= Math.abs(low) / 10 || 0.5; high += Math.abs(high) / 10 || 0.5; }
  const first = Math.min(...all.map((p) => p[0])), last = Math.max(...all.map((p) => p[0]), first + 1);
  const x = (v) => L + ((v - first) / (last - first)) * (W - L - R), y = (v) => T + ((high - v) / (high - low)) * (H - T - B);
  const label = `${chart.title}: ` + chart.series.map((s) => { const p = s.points.filter((q) => q[1] !== null); return p.length ? `${s.label} from ${num(p[0][1])} at step ${p[0][0]} to ${num(p.at(-1)[1])} at step ${p.at(-1)[0]}` : `${s.label} not recorded`; }).join("; ");
  const svg = el("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": label, tabindex: 0 });
  for (const v of ticks(low, high)) svg.append(el("line", { x1: L, x2: W - R, y1: y(v), y2: y(v), stroke: "var(--line)" }), el("text", { x: L - 5, y: y(v) + 4, "text-anchor": "end" }, num(v)));
  for (const v of ticks(first, last).filter(Number.isInteger)) svg.append(el("text", { x: x(v), y: H - 6, "text-anchor": "middle" }, String(v)));
  for (const step of resumes || []) svg.append(el("line", { x1: x(step), x2: x(step), y1: T, y2: H - B, stroke: "var(--soft)", "stroke-dasharray": "3 3" }));
  const path = (points) => points.filter((p) => p[1] !== null).map((p, i) => `${i ? "L" : "M"}${x(p[0]).toFixed(1)} ${y(p[1]).toFixed(1)}`).join("");
  chart.series.forEach((s, n) => {
    const c = colour(s.run ?? n), dense = s.points.length > 20, draw = (points, o, w) => svg.append(el("path", { d: path(points), fill: "none", stroke: c, opacity: o, "stroke-width": w }));
    for (const p of s.points) if (p.length > 2) svg.append(el("line", { x1: x(p[0]), x2: x(p[0]), y1: y(p[2]), y2: y(p[3]), stroke: c, opacity: 0.6 }));
    if (mode !== "smooth" || !dense) draw(s.points, dense && mode === "both" ? 0.35 : 1, dense && mode === "both" ? 1 : 1.8);
    if (dense && mode !== "raw") draw(smooth(s.points), 1, 2);
    if (!dense) for (const p of s.points) if (p[1] !== null) svg.append(el("circle", { cx: x(p[0]), cy: y(p[1]), r: 2.6, fill: c }));
  });
  const cursor = el("line", { y1: T, y2: H - B, stroke: "var(--ink)", opacity: 0 }); svg.append(cursor);
  const readout = el("div", { class: "readout", "aria-live": "polite" });
  const steps = [...new Set(all.map((p) => p[0]))].sort((a, b) => a - b); let at = steps.length - 1;
  const show = (index) => {
    at = Math.max(0, Math.min(steps.length - 1, index));
    cursor.setAttribute("x1", x(steps[at])); cursor.setAttribute("x2", x(steps[at])); cursor.setAttribute("opacity", 0.5);
    readout.textContent = `step ${steps[at]}: ` + chart.series.map((s) => { const p = s.points.find((q) => q[0] === steps[at]); return p ? `${s.label} ${num(p[1])}` + (p.length > 2 ? ` (${num(p[2])} to ${num(p[3])})` : "") : ""; }).filter(Boolean).join(", ");
  };
  svg.addEventListener("pointermove", (event) => { const box = svg.getBoundingClientRect(), v = first + (((event.clientX - box.left) / box.width) * W - L) / (W - L - R) * (last - first); let near = 0; steps.forEach((s, i) => { if (Math.abs(s - v) < Math.abs(steps[near] - v)) near = i; }); show(near); });
  svg.addEventListener("keydown", (event) => { const move = { ArrowLeft: -1, ArrowRight: 1, Home: -1e9, End: 1e9 }[event.key]; if (move) { event.preventDefault(); show(at + move); } });
  figure.append(svg, readout, el("div", {}, ...chart.series.map((s, n) => key(s.run ?? n, s.label))), el("figcaption", {}, chart.meaning + (chart.good ? `. Good: ${chart.good}` : "")));
  return figure;
}
function stackedChart(time) {
  const w = 1100, h = 240, names = Object.keys(time.phases), count = time.steps.length, totals = time.steps.map((_, i) => names.reduce((s, n) => s + time.phases[n][i], 0)), high = Math.max(...totals) || 1;
  const svg = el("svg", { viewBox: `0 0 ${w} ${h}`, role: "img", "aria-label": `Seconds of each phase: ${names.map((n) => `${n} ${num(time.phases[n].at(-1))} s`).join(", ")} in the last steps` });
  for (const v of ticks(0, high)) { const y = h - 24 - (v / high) * (h - 36); svg.append(el("line", { x1: 50, x2: w, y1: y, y2: y, stroke: "var(--line)" }), el("text", { x: 44, y: y + 4, "text-anchor": "end" }, num(v))); }
  const width = (w - 50) / count;
  time.steps.forEach((range, i) => { let base = h - 24; names.forEach((n, c) => { const size = (time.phases[n][i] / high) * (h - 36); base -= size; const bar = el("rect", { x: 50 + i * width + 0.5, y: base, width: Math.max(1, width - 1), height: size, fill: colour(c) }); const tip = document.createElementNS("http://www.w3.org/2000/svg", "title"); tip.textContent = `steps ${range.join(" to ")}: ${n} ${num(time.phases[n][i])} s`; bar.append(tip); svg.append(bar); }); });
  [0, count - 1].forEach((i) => svg.append(el("text", { x: 50 + (i + 0.5) * width, y: h - 6, "text-anchor": "middle" }, String(time.steps[i][0]))));
  return el("figure", { class: "wide" }, el("h3", {}, "Phases of the steps (s)"), svg, el("div", {}, ...names.map((n, c) => key(c, n))));
}
function heatMap(chart) {
  const w = 560, h = 220, rows = chart.edges.length - 1, cw = (w - 56) / chart.steps.length, ch = (h - 30) / rows;
  const svg = el("svg", { viewBox: `0 0 ${w} ${h}`, role: "img", "aria-label": `${chart.title}: from ${num(chart.edges[0])} to ${num(chart.edges.at(-1))} over ${chart.steps.length} columns of steps` });
  chart.counts.forEach((column, i) => { const most = Math.max(...column) || 1; column.forEach((count, r) => { if (count) svg.append(el("rect", { x: 56 + i * cw, y: (rows - 1 - r) * ch + 4, width: Math.max(1, cw - 0.6), height: ch - 0.6, fill: "var(--accent)", opacity: 0.12 + 0.88 * (count / most) })); }); });
  [0, rows].forEach((r) => svg.append(el("text", { x: 50, y: (rows - r) * ch + (r ? 14 : 4), "text-anchor": "end" }, num(chart.edges[r]))));
  [0, chart.steps.length - 1].forEach((i) => svg.append(el("text", { x: 56 + (i + 0.5) * cw, y: h - 6, "text-anchor": "middle" }, String(chart.steps[i][0]))));
  return el("figure", {}, el("h3", {}, chart.title), svg, el("figcaption", {}, "One column for each step or group of steps; darker: more responses."));
}
function parallelChart(data) {
  const w = 1100, h = 300, axes = [...data.keys, data.metric], scored = data.points.map((p, n) => ({ p, n })).filter((e) => e.p.value !== null), values = scored.map((e) => e.p.value), low = Math.min(...values), high = Math.max(...values);
  if (!scored.length) return el("p", {}, "No point has a result yet.");
  const x = (i) => 70 + (i * (w - 160)) / Math.max(1, axes.length - 1), choices = data.keys.map((_, i) => [...new Set(data.points.map((p) => p.values[i]))].sort((a, b) => Number(a) - Number(b) || String(a).localeCompare(b)));
  const y = (i, p) => { const t = i < data.keys.length ? (choices[i].indexOf(p.values[i]) + 0.5) / choices[i].length : high > low ? (p.value - low) / (high - low) : 0.5; return h - 30 - t * (h - 70); };
  const svg = el("svg", { viewBox: `0 0 ${w} ${h}`, role: "img", "aria-label": `Parallel coordinates of ${axes.join(", ")}; the table below has the same values` });
  for (const { p, n } of scored) svg.append(el("polyline", { points: axes.map((_, i) => `${x(i)},${y(i, p)}`).join(" "), fill: "none", stroke: n === data.best ? "var(--c1)" : "var(--c0)", opacity: n === data.best ? 1 : 0.45, "stroke-width": n === data.best ? 4 : 2 }));
  axes.forEach((name, i) => { svg.append(el("line", { x1: x(i), x2: x(i), y1: 40, y2: h - 30, stroke: "var(--soft)" }), el("text", { x: x(i), y: 24, "text-anchor": "middle" }, name)); if (i < data.keys.length) choices[i].forEach((v, j) => svg.append(el("text", { x: x(i) + 6, y: h - 26 - ((j + 0.5) / choices[i].length) * (h - 70) }, v))); else [low, high].forEach((v) => svg.append(el("text", { x: x(i) + 6, y: v === high ? 44 : h - 26 }, num(v)))); });
  return el("figure", { class: "wide" }, svg, el("figcaption", {}, "Each line is a point of the sweep; the thick line is the best one."));
}
function table(name, heads, rows, best) {
  const body = el("tbody"), cell = (v) => el("td", typeof v === "number" ? { class: "n" } : {}, typeof v === "number" ? num(v) : v === null || v === undefined ? "–" : String(v));
  const fill = (order) => body.replaceChildren(...order.map((row) => el("tr", { class: row === rows[best] ? "best" : null }, ...row.map(cell)))); let up = false;
  const sort = (i) => { up = !up; fill([...rows].sort((a, b) => (typeof a[i] === "number" && typeof b[i] === "number" ? a[i] - b[i] : String(a[i] ?? "").localeCompare(String(b[i] ?? ""), "en", { numeric: true })) * (up ? 1 : -1))); };
  fill(rows);
  return el("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": name }, el("table", {}, el("thead", {}, el("tr", {}, ...heads.map((head, i) => el("th", { scope: "col" }, el("button", { type: "button", onclick: () => sort(i) }, head))))), body));
}
