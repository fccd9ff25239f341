"use strict";
// Builds the sections of the page from the data. The state of filters is kept in the URL after #.
const data = JSON.parse(document.getElementById("data").textContent);
const state = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
const remember = () => { const kept = Object.entries(state).filter(([, v]) => v !== "" && v !== undefined); try { history.replaceState(null, "", `#${new URLSearchParams(kept)}`); } catch (error) { /* a sandboxed page has no history */ } };
const main = document.getElementById("main"), nav = el("nav", { "aria-label": "Sections" });
function section(id, title, ...content) {
  nav.append(el("a", { href: `#${id}`, onclick: (event) => { event.preventDefault(); document.getElementById(id).scrollIntoView(); } }, title));
  main.append(el("section", { id, "aria-labelledby": `${id}-title` }, el("h2", { id: `${id}-title` }, title), ...content));
}
const copyable = (title, command) => el("div", {}, el("b", {}, title), el("div", { class: "command" }, el("code", {}, command), el("button", { type: "button", "aria-label": `Copy: ${title}`, onclick: (event) => { const button = event.currentTarget; navigator.clipboard?.writeText(command).then(() => { button.textContent = "Copied"; }); } }, "Copy")));
const date = (seconds) => (seconds ? new Date(seconds * 1000).toLocaleString("sv") : "–");
function header() {
  document.getElementById("top").append(el("h1", {}, ...breakable(data.title)), el("p", { class: "soft" }, `${data.subtitle} · written ${date(data.written)}${data.reload_every_s ? `, reloads every ${data.reload_every_s} s` : ""}`), nav);
}
// A chart that is constant in all steps becomes a sentence, except a chart of rewards.
function isConstant(chart) {
  const values = chart.series.flatMap((s) => s.points.map((p) => p[1]));
  return !/reward/i.test(chart.title) && values.length > chart.series.length && values.every((v) => v === values[0]);
}
function curves() {
  const grid = el("div", { class: "grid" }), still = data.charts.filter(isConstant), draw = () => grid.replaceChildren(...data.charts.filter((chart) => !isConstant(chart)).map((chart) => lineChart(chart, data.resumes, state.curve ?? "both")));
  const select = el("select", { "aria-label": "Curves" }, ...[["both", "raw and smoothed"], ["raw", "raw"], ["smooth", "smoothed"]].map(([v, t]) => el("option", { value: v }, t)));
  select.value = state.curve ?? "both"; select.addEventListener("input", () => { state.curve = select.value; remember(); draw(); }); draw();
  const notes = ["Smoothed: the mean of the last 10 points, in curves of more than 20 points.", data.charts.some((chart) => chart.series.some((s) => s.points.some((p) => p.length > 2))) ? "Bars at held-out rewards: 95% intervals." : "", (data.resumes ?? []).length ? "Dashed lines: resumes." : "", "The arrow keys move the cursor of a chart."].filter(Boolean).join(" ");
  section("learning", "Learning curves", ...(data.charts.length ? [el("div", { class: "controls" }, el("label", {}, "Curves", select)), el("p", { class: "soft" }, notes), grid, still.length ? el("p", { class: "soft" }, `Constant in all steps: ${still.map((chart) => `${chart.title.toLowerCase()} ${num(chart.series.find((s) => s.points.length).points[0][1])}`).join("; ")}.`) : ""] : [el("p", {}, "No step was recorded yet.")]));
}
function times() {
  const p = data.provenance, perfetto = p.trace ? el("p", {}, el("a", { href: p.trace }, "timeline.json"), " opens in ui.perfetto.dev.") : "";
  const components = data.components.length ? barChart("Mean step by component", "s", [["Step", data.components]], "The mean duration of a step, without evaluation and checkpoints: what the controller waits for, and its own work.") : "";
  const ranks = data.ranks.length ? barChart("Forward and backward passes of each trainer rank", "s", data.ranks.map((r) => [r.process, [["computing", r.computing_s], ["gradient reduction", r.reducing_s], ["other", r.other_s]], `${num(r.tokens)} tokens`]), "Sum over the recorded steps. Gradient reduction contains the wait for the slowest rank; with pipeline stages, other contains the wait for other stages.") : "";
  const list = (sentences) => el("ul", {}, ...sentences.map((s) => el("li", {}, s)));
  section("time", "Where the time goes", list(data.sentences), ...(data.timeline.length ? [el("h3", {}, "From the timeline"), list(data.timeline)] : []), data.timeline.length ? "" : el("p", { class: "soft" }, "No timeline was recorded; tracking.timeline=true records one."), perfetto, data.time ? el("div", { class: "grid" }, stackedChart(data.time), components, ranks) : "");
}
function origin() {
  const p = data.provenance, facts = [["Folder", p.folder], ["Command", p.command || "not recorded"], ["Outcome", p.outcome + (p.error ? `. Error: ${p.error}` : "")], ["Commit", (p.commit ?? "not recorded") + (p.changed_files ? `, with ${p.changed_files} changed files` : "")], ["Hosts", p.hosts.map((h) => `${h.name} (${h.cpus} CPUs, ${h.gpus} GPUs)`).join(", ") || "not recorded"]];
  const starts = p.events.map((e) => [e.event, date(e.time), e.step, e.outcome, e.error]), count = Object.keys(p.packages).length;
  section("provenance", "Provenance", el("dl", { class: "facts" }, ...facts.flatMap(([name, v]) => [el("dt", {}, name), el("dd", {}, el("code", {}, ...breakable(v)))])),
    el("h3", {}, "Starts, resumes and ends"), starts.length ? table("Starts, resumes and ends", ["event", "time", "step", "outcome", "error"], starts) : el("p", {}, "Not recorded."),
    el("h3", {}, "Config keys that differ from their defaults"), !p.changed.length ? el("p", {}, "Not recorded.") : table("Changed config keys", ["key", "value", "default", "set by", "meaning"], p.changed.map((c) => [c.key, c.value, c.default, c.given ? "command line" : "config group", c.meaning])),
    count ? fold(`${count} packages`, false, table("Packages", ["package", "version"], Object.entries(p.packages))) : el("p", {}, "Packages: not recorded."));
}
function run() {
  curves();
  times();
  section("samples", "Samples", ...(data.samples.rows.length ? samplesBrowser(data.samples, state, remember) : [el("p", {}, data.samples.left_out)]));
  section("distributions", "Lengths and rewards", data.distributions.length ? el("div", { class: "grid two" }, ...data.distributions.map(heatMap)) : el("p", {}, "Not recorded."));
  origin();
  section("metrics", "All metrics", fold(`${data.metrics.length} metrics with first, last, smallest and largest value`, false, table("All metrics", ["metric", "first", "last", "smallest", "largest", "unit", "meaning", "good value"], data.metrics)));
  section("next", "Next commands", ...data.provenance.next.map((c) => copyable(c.title, c.command)));
}
function pair() {
  curves();
  section("differences", "What differs", data.differences.length ? table("Config differences", ["key", ...data.labels], data.differences) : el("p", {}, "No config key differs."), el("h3", {}, "Commit and packages"), data.packages.length ? table("Package differences", ["commit or package", ...data.labels], data.packages) : el("p", {}, "No difference was recorded."));
  section("metrics", "Metrics at the same step", el("p", {}, data.step ? `Step ${data.step}, the last step that both runs finished.` : "The runs share no step."), fold(`${data.metrics.length} metrics`, window.innerWidth > 760, table("Metrics", ["metric", ...data.labels, "difference", "unit", "meaning"], data.metrics)));
  const responses = (list, n) => el("div", {}, el("h4", {}, ...breakable(data.labels[n])), ...list.map((s) => el("div", {}, el("p", { class: "soft" }, `step ${s.step}, reward ${num(s.reward)}`), el("div", { class: "text", tabindex: 0, role: "group", "aria-label": "response" }, s.response))));
  section("samples", "Samples of the same prompts", data.pairs.length ? "" : el("p", {}, "The runs kept no samples of the same prompt."), ...data.pairs.map((p, n) => el("details", { open: n < 1 ? "" : null }, el("summary", {}, p.prompt.slice(0, 120)), el("div", { class: "text", tabindex: 0, role: "group", "aria-label": "prompt" }, p.prompt), p.ground_truth ? el("p", {}, `Expected answer: ${p.ground_truth}`) : "", el("div", { class: "pairs" }, responses(p.first, 0), responses(p.second, 1)))));
}
function sweep() {
  section("points", "Points", table("Points of the sweep", ["point", ...data.keys, "state", "steps", data.metric, "reason"], data.points.map((p, n) => [n, ...p.values, p.state, p.steps, p.value, p.reason]), data.best));
  section("parallel", "Overrides and results", parallelChart(data), data.explained_variance.length > 1 ? table("Effects of the keys", ["key", "fraction of the variance of the results that the key explains"], data.explained_variance) : "");
  curves();
}
header();
if (data.health) main.append(el("div", { class: `banner ${data.health.state}`, role: "status" }, el("b", {}, data.health.headline), ...data.health.lines.map((line) => el("p", {}, line))));
section("questions", "Questions and answers", el("dl", { class: "answers" }, ...data.answers.map((a) => el("div", { class: a.state }, el("dt", {}, a.question), el("dd", {}, ...(a.text.startsWith("mrl ") ? [el("code", {}, a.text)] : breakable(a.text)), " ", a.link ? el("a", { href: `#${a.link}`, "aria-label": `Details: ${a.question}`, onclick: (event) => { event.preventDefault(); document.getElementById(a.link).scrollIntoView(); } }, "details") : "")))));
({ run, pair, sweep })[data.kind]();
if (state.y) requestAnimationFrame(() => window.scrollTo(0, Number(state.y)));
if (data.reload_every_s) setInterval(() => { if (!["INPUT", "SELECT"].includes(document.activeElement?.tagName)) { state.y = Math.round(window.scrollY); remember(); location.reload(); } }, data.reload_every_s * 1000);
