"use strict";
// Charts as SVG. A chart has the width of its place on the page.
const LINE_HEIGHT = 200, RIGHT = 12, TOP = 10, BOTTOM = 36;
const DASHES = [null, "7 4", "2 3"]; // dash patterns of the curves of one run: equal curves can be told apart

function smooth(points) {
  return points.map((p, i) => {
    const part = points.slice(Math.max(0, i - 9), i + 1).filter((q) => q[1] !== null);
    return [p[0], part.length ? part.reduce((sum, q) => sum + q[1], 0) / part.length : null];
  });
}

// Horizontal grid lines with numbers at the left side.
function valueAxis(svg, values, y, left, width) {
  for (const v of values) svg.append(el("line", { x1: left, x2: width - RIGHT, y1: y(v), y2: y(v), stroke: "var(--line)" }), el("text", { x: left - 6, y: y(v) + 4, "text-anchor": "end" }, num(v)));
}

// Numbers of steps below a chart, and the word "step". `x` returns the place of a step.
function stepAxis(svg, steps, x, left, width, height) {
  for (const v of steps) svg.append(el("text", { x: x(v), y: height - 20, "text-anchor": "middle" }, num(v, 9)));
  svg.append(el("text", { x: (left + width - RIGHT) / 2, y: height - 4, "text-anchor": "middle" }, "step"));
}

const leftOf = (values) => 14 + 7 * Math.max(...values.map((v) => num(v).length));

function lineChart(chart, resumes, mode) {
  const all = chart.series.flatMap((s) => s.points.filter((p) => p[1] !== null));
  const figure = el("figure", {}, el("h3", {}, chart.title + (chart.unit ? ` (${chart.unit})` : "")));
  if (!all.length) return figure;
  const readout = el("div", { class: "readout", "aria-live": "polite" });
  const shown = chart.series.filter((s) => s.points.length).length > 1, keys = shown ? el("div", {}, ...chart.series.map((s, n) => (s.points.length ? key(s.run ?? n, s.label) : ""))) : "";
  const meaning = chart.meaning.charAt(0).toUpperCase() + chart.meaning.slice(1);
  figure.append(sized(LINE_HEIGHT, (width) => lines(chart, all, resumes, mode, readout, width)), readout, keys, el("figcaption", {}, meaning + (meaning ? "." : "") + (chart.good ? ` ${chart.good}` : "")));
  return figure;
}

function limits(all) {
  let low = Math.min(...all.map((p) => p[2] ?? p[1])), high = Math.max(...all.map((p) => p[3] ?? p[1]));
  if (high - low <= 1e-9 * Math.abs(high)) { const room = Math.abs(high) / 10; low -= room; high += room || 1; }
  const room = (high - low) / 25;
  return [low, high, low >= 0 && low < room ? 0 : low - room, high + room];
}

function summary(chart) {
  return `${chart.title}: ` + chart.series.map((s) => {
    const p = s.points.filter((q) => q[1] !== null);
    return p.length ? `${s.label} from ${num(p[0][1])} at step ${p[0][0]} to ${num(p.at(-1)[1])} at step ${p.at(-1)[0]}` : `${s.label} not recorded`;
  }).join("; ");
}

function lines(chart, all, resumes, mode, readout, width) {
  const [low, high, bottom, top] = limits(all), marks = ticks(low, high), left = leftOf(marks), h = LINE_HEIGHT;
  const first = Math.min(...all.map((p) => p[0])), last = Math.max(...all.map((p) => p[0]), first + 1);
  const x = (v) => left + ((v - first) / (last - first)) * (width - left - RIGHT), y = (v) => TOP + ((top - v) / (top - bottom)) * (h - TOP - BOTTOM);
  const svg = el("svg", { viewBox: `0 0 ${width} ${h}`, height: h, role: "img", "aria-label": summary(chart), tabindex: 0 });
  valueAxis(svg, marks, y, left, width);
  stepAxis(svg, ticks(first, last).filter(Number.isInteger), x, left, width, h);
  for (const step of resumes || []) svg.append(el("line", { x1: x(step), x2: x(step), y1: TOP, y2: h - BOTTOM, stroke: "var(--soft)", "stroke-dasharray": "3 3" }));
  chart.series.forEach((s, n) => curve(svg, s, color(s.run ?? n), s.run === undefined ? DASHES[n % DASHES.length] : null, mode, x, y));
  addCursor(svg, chart, all, readout, { x, first, last, left, width, h });
  return svg;
}

function curve(svg, series, stroke, dash, mode, x, y) {
  const dense = series.points.length > 20;
  const path = (points) => points.filter((p) => p[1] !== null).map((p, i) => `${i ? "L" : "M"}${x(p[0]).toFixed(1)} ${y(p[1]).toFixed(1)}`).join("");
  const draw = (points, opacity, size) => svg.append(el("path", { d: path(points), fill: "none", stroke, opacity, "stroke-width": size, "stroke-linejoin": "round", "stroke-dasharray": dash }));
  for (const p of series.points) if (p.length > 2) svg.append(el("line", { x1: x(p[0]), x2: x(p[0]), y1: y(p[2]), y2: y(p[3]), stroke, opacity: 0.6, "stroke-width": 1.5 }));
  if (mode !== "smooth" || !dense) draw(series.points, dense && mode === "both" ? 0.35 : 1, dense && mode === "both" ? 1 : 1.8);
  if (dense && mode !== "raw") draw(smooth(series.points), 1, 2);
  if (!dense) for (const p of series.points) if (p[1] !== null) svg.append(el("circle", { cx: x(p[0]), cy: y(p[1]), r: 2.6, fill: stroke }));
}

// The pointer and the arrow keys move a cursor. `readout` shows the values at the cursor. The cursor starts at the last step.
function addCursor(svg, chart, all, readout, { x, first, last, left, width, h }) {
  const cursor = el("line", { y1: TOP, y2: h - BOTTOM, stroke: "var(--ink)", opacity: 0 });
  const steps = [...new Set(all.map((p) => p[0]))].sort((a, b) => a - b);
  let at = steps.length - 1;
  const value = (s) => {
    const p = s.points.find((q) => q[0] === steps[at]);
    return p ? `${s.label}: ${num(p[1])}${p.length > 2 ? ` (${num(p[2], 3)} to ${num(p[3], 3)})` : ""}` : "";
  };
  const show = (index, visible = true) => {
    at = Math.max(0, Math.min(steps.length - 1, index));
    for (const [name, v] of Object.entries({ x1: x(steps[at]), x2: x(steps[at]), opacity: visible ? 0.5 : 0 })) cursor.setAttribute(name, v);
    readout.textContent = `Step ${steps[at]} – ${chart.series.map(value).filter(Boolean).join("; ")}`;
  };
  const nearest = (step) => steps.reduce((best, s, i) => (Math.abs(s - step) < Math.abs(steps[best] - step) ? i : best), 0);
  svg.append(cursor);
  svg.addEventListener("pointermove", (event) => show(nearest(first + ((event.clientX - svg.getBoundingClientRect().left - left) / (width - left - RIGHT)) * (last - first))));
  svg.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1, Home: -1e9, End: 1e9 }[event.key];
    if (move) { event.preventDefault(); show(at + move); }
  });
  show(at, false);
}

// Draws step labels below the first column and every n-th column. Returns [function: index of a column -> its left edge, width].
function columnAxis(svg, columns, left, width, height) {
  const size = (width - left - RIGHT) / columns.length, every = Math.max(1, Math.ceil(columns.length / Math.max(1, Math.floor((width - left) / 70))));
  const shown = columns.map((range, i) => [i, range[0]]).filter(([i]) => i % every === 0);
  stepAxis(svg, shown.map(([i]) => i), (i) => left + (i + 0.5) * size, left, width, height);
  svg.querySelectorAll("text[text-anchor=middle]").forEach((text, n) => { if (n < shown.length) text.textContent = String(shown[n][1]); });
  return [(i) => left + i * size, size];
}

// The place of a bar in the middle of a column that begins at `x`.
function bar(x, size) {
  const width = Math.max(1, Math.min(60, size - 0.8));
  return { x: x + (size - width) / 2, width };
}

function stackedChart(time) {
  const names = Object.keys(time.phases), totals = time.steps.map((_, i) => names.reduce((sum, n) => sum + time.phases[n][i], 0)), h = 260;
  const high = Math.max(...totals) || 1, sums = names.map((n) => time.phases[n].reduce((a, b) => a + b, 0)), all = sums.reduce((a, b) => a + b, 0) || 1;
  const label = `Seconds of each phase in ${stepRange(time.steps.at(-1))}: ${names.map((n) => `${n} ${num(time.phases[n].at(-1), 3)} s`).join(", ")}`;
  const draw = (width) => {
    const marks = ticks(0, high), left = leftOf(marks), y = (v) => TOP + (1 - v / high) * (h - TOP - BOTTOM), svg = el("svg", { viewBox: `0 0 ${width} ${h}`, height: h, role: "img", "aria-label": label });
    const [x, size] = columnAxis(svg, time.steps, left, width, h);
    valueAxis(svg, marks, y, left, width);
    time.steps.forEach((range, i) => {
      let base = 0;
      names.forEach((n, c) => {
        const seconds = time.phases[n][i], top = y(base + seconds);
        svg.append(el("rect", { ...bar(x(i), size), y: top, height: Math.max(0, y(base) - top), fill: color(c) }, el("title", {}, `${stepRange(range)}: ${n} ${num(seconds, 3)} s`)));
        base += seconds;
      });
    });
    return svg;
  };
  return el("figure", { class: "wide" }, el("h3", {}, "Phases of a step (s)"), sized(h, draw), el("div", {}, ...names.map((n, c) => key(c, `${n} ${percent(sums[c] / all)}`))), el("figcaption", {}, "Mean seconds of each step or group of steps, without evaluation and checkpoints. The percentages are shares of the time of all steps."));
}

// One horizontal bar for each row [name, [[part, size]...], note]. All bars have the same scale.
function barChart(title, unit, rows, caption) {
  const parts = [...new Set(rows.flatMap(([, sizes]) => sizes.map(([name]) => name)))], most = Math.max(...rows.map(([, sizes]) => sizes.reduce((sum, [, v]) => sum + v, 0))) || 1;
  const line = ([name, sizes, note]) => {
    const pieces = sizes.map(([part, v]) => el("i", { style: `width:${(100 * v) / most}%;background:${color(parts.indexOf(part))}` }));
    return el("div", { class: "bar" }, el("div", {}, el("b", {}, `${name} `), ...sizes.map(([part, v]) => key(parts.indexOf(part), `${part} ${num(v, 3)} ${unit}`)), note ?? ""), el("div", { class: "pieces", "aria-hidden": "true" }, ...pieces));
  };
  return el("figure", { class: "wide" }, el("h3", {}, title), ...rows.map(line), el("figcaption", {}, caption));
}

function heatMap(chart) {
  const h = 240, rows = chart.edges.length - 1;
  const draw = (width) => {
    const low = chart.edges[0], high = chart.edges.at(-1), whole = chart.edges[1] - low === 1, marks = ticks(low, high).filter((v) => !whole || Number.isInteger(v)), left = leftOf(marks), ch = (h - TOP - BOTTOM) / rows, y = (v) => TOP + (1 - (v - low) / (high - low)) * (h - TOP - BOTTOM);
    const svg = el("svg", { viewBox: `0 0 ${width} ${h}`, height: h, role: "img", "aria-label": `${chart.title}: from ${num(low)} to ${num(high)}, from ${stepRange(chart.steps[0])} to ${stepRange(chart.steps.at(-1))}` });
    const [x, size] = columnAxis(svg, chart.steps, left, width, h);
    valueAxis(svg, marks, y, left, width);
    chart.counts.forEach((column, i) => {
      const total = column.reduce((a, b) => a + b, 0) || 1, most = Math.max(...column) || 1;
      column.forEach((count, r) => { if (count) svg.append(el("rect", { ...bar(x(i), size), y: TOP + (rows - 1 - r) * ch, height: ch - 0.6, fill: "var(--accent)", opacity: 0.12 + 0.88 * (count / most) }, el("title", {}, `${stepRange(chart.steps[i])}: ${percent(count / total)} from ${num(chart.edges[r])} to ${num(chart.edges[r + 1])}`))); });
    });
    return svg;
  };
  return el("figure", {}, el("h3", {}, chart.title), sized(h, draw), el("figcaption", {}, "One column for each step or group of steps. The stronger the color of a cell, the more of the column's responses are in it."));
}

function parallelChart(data) {
  const scored = data.points.map((p, n) => ({ p, n })).filter((each) => each.p.value !== null), h = 300;
  if (!scored.length) return el("p", {}, "No point has a result yet.");
  const axes = [...data.keys, data.metric], results = scored.map((each) => each.p.value), low = Math.min(...results), high = Math.max(...results);
  const choices = data.keys.map((_, i) => [...new Set(data.points.map((p) => p.values[i]))].sort((a, b) => Number(a) - Number(b) || String(a).localeCompare(b)));
  const y = (i, p) => {
    const share = i < data.keys.length ? (choices[i].indexOf(p.values[i]) + 0.5) / choices[i].length : high > low ? (p.value - low) / (high - low) : 0.5;
    return h - 20 - share * (h - 64);
  };
  const marks = results.length > 5 ? [low, (low + high) / 2, high] : [...new Set(results)].sort((a, b) => a - b);
  const labels = axes.map((_, i) => (i < data.keys.length ? choices[i].map((v) => [v || "–", y(i, { values: Object.assign([], { [i]: v }) })]) : marks.map((v) => [num(v), y(i, { value: v })])));
  const draw = (width) => {
    const room = (i) => 24 + 7 * Math.max(...labels[i].map(([text]) => text.length)), left = room(0), right = room(axes.length - 1);
    const x = (i) => left + (i * (width - left - right)) / Math.max(1, axes.length - 1), svg = el("svg", { viewBox: `0 0 ${width} ${h}`, height: h, role: "img", "aria-label": `Parallel coordinates of ${axes.join(", ")}; the table of points has the same values` });
    const ordered = [...scored].sort((a, b) => (a.n === data.best) - (b.n === data.best));
    for (const { p, n } of ordered) svg.append(el("polyline", { points: axes.map((_, i) => `${x(i)},${y(i, p)}`).join(" "), fill: "none", stroke: color(n), opacity: n === data.best ? 1 : 0.7, "stroke-width": n === data.best ? 5 : 2 }, el("title", {}, data.labels[n] ?? String(n))));
    axes.forEach((name, i) => parallelAxis(svg, { name, x: x(i), h, width, last: i === axes.length - 1, first: i === 0, labels: apart(labels[i]) }));
    return svg;
  };
  return el("figure", { class: "wide" }, sized(h, draw), el("figcaption", {}, "Each line is a point of the sweep, in the color of its curves below. The thick line is the best point."));
}

// The labels of an axis without those that would overlap an earlier one. The largest and the smallest value come first.
function apart(labels) {
  const shown = [];
  for (const label of [labels.at(-1), ...labels]) if (shown.every(([, y]) => Math.abs(y - label[1]) >= 14)) shown.push(label);
  return shown;
}

// The first axis has its labels at the left side, the last one at the right side. No line passes there.
function parallelAxis(svg, { name, x, h, width, first, last, labels }) {
  svg.append(el("line", { x1: x, x2: x, y1: 34, y2: h - 14, stroke: "var(--soft)" }), el("text", { x: first ? 4 : last ? width - 4 : x, y: 18, "text-anchor": first ? "start" : last ? "end" : "middle", class: "strong" }, name));
  for (const [text, y] of labels) svg.append(el("text", { x: first ? x - 8 : x + 8, y: y + 4, "text-anchor": first ? "end" : "start", class: "halo" }, text));
}
