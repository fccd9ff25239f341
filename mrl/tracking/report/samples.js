"use strict";
// The browser of samples: filters, a list that only draws its visible rows, and one sample in full.
const ROW = 46;
const COLOURS = { none: "no colour", logprobs: "log-probability", advantages: "advantage", versions: "weight version", mismatch: "mismatch" };
const PICKS = { all: "all samples", best: "best of each step", worst: "worst of each step", equal: "groups with equal rewards", mixed: "groups with different rewards", truncated: "truncated", failed: "not scored" };
function samplesBrowser(table, state, changed) {
  const at = Object.fromEntries(table.columns.map((name, i) => [name, i])), rows = table.rows, get = (i, name) => rows[i][at[name]];
  const prompt = (i) => table.prompts[get(i, "prompt")], texts = rows.map((_, i) => null), text = (i) => texts[i] ??= `${prompt(i)}\n${get(i, "response") ?? ""}`.toLowerCase();
  let found = [], chosen = 0;
  const count = el("p", { class: "soft", "aria-live": "polite" }), space = el("div", { role: "presentation" }), list = el("div", { class: "list", role: "listbox", tabindex: 0, "aria-label": "Samples" }, space), detail = el("div", { "aria-live": "polite" });
  const control = (name, label, node) => { node.setAttribute("aria-label", label); node.value = state[name] ?? (node.tagName === "SELECT" ? node.options[0].value : ""); node.addEventListener("input", () => { state[name] = node.value; changed(); filter(); }); return el("label", {}, label, node); };
  const select = (choices) => el("select", {}, ...choices.map(([value, label]) => el("option", { value }, label)));
  const unique = (name) => [...new Set(rows.map((r) => r[at[name]]))].filter((v) => v !== null);
  const same = (a, b) => get(a, "step") === get(b, "step") && (get(a, "group") ?? get(a, "prompt")) === (get(b, "group") ?? get(b, "prompt"));
  const keep = {
    step: (i) => !state.step || String(get(i, "step")) === state.step, source: (i) => !state.source || get(i, "source") === state.source,
    low: (i) => !state.low || get(i, "reward") >= Number(state.low), high: (i) => !state.high || get(i, "reward") <= Number(state.high), q: (i) => !state.q || text(i).includes(state.q.toLowerCase()),
    pick: (i) => ({ best: get(i, "rank") === 0, worst: get(i, "rank") === get(i, "last"), equal: get(i, "uniform"), mixed: !get(i, "uniform"), truncated: get(i, "truncated"), failed: get(i, "failure") })[state.pick] ?? true };
  function filter() {
    found = rows.map((_, i) => i).filter((i) => Object.values(keep).every((test) => test(i))); chosen = 0; list.scrollTop = 0;
    space.style.height = `${found.length * ROW}px`; count.textContent = `${found.length.toLocaleString("en")} of ${rows.length.toLocaleString("en")} samples. ${table.left_out}`; draw(); show();
  }
  function draw() {
    const start = Math.max(0, Math.floor(list.scrollTop / ROW) - 6), end = Math.min(found.length, start + Math.ceil((list.clientHeight || 560) / ROW) + 12), nodes = [];
    for (let n = start; n < end; n++) { const i = found[n]; nodes.push(el("div", { role: "option", id: `sample-${n}`, "aria-selected": String(n === chosen), "aria-posinset": n + 1, "aria-setsize": found.length, style: `top:${n * ROW}px`, onclick: () => choose(n) }, el("b", {}, `reward ${num(get(i, "reward"))}`), ` step ${get(i, "step")} · ${get(i, "num_tokens") ?? "?"} tokens${get(i, "truncated") ? " · truncated" : ""}${get(i, "failure") ? " · not scored" : ""}`, el("br"), String(get(i, "response") ?? "").slice(0, 120))); }
    space.replaceChildren(...nodes); if (found.length) list.setAttribute("aria-activedescendant", `sample-${chosen}`); else list.removeAttribute("aria-activedescendant");
  }
  function choose(n) {
    if (!found.length) return; chosen = Math.max(0, Math.min(found.length - 1, n)); const top = chosen * ROW;
    if (top < list.scrollTop) list.scrollTop = top; if (top + ROW > list.scrollTop + list.clientHeight) list.scrollTop = top + ROW - list.clientHeight; draw(); show();
  }
  function show() {
    if (!found.length) return detail.replaceChildren(el("p", {}, "No sample fits the filters."));
    const i = found[chosen], group = rows.map((_, n) => n).filter((n) => same(n, i)), parts = Object.entries(get(i, "parts") ?? {}), turns = get(i, "turns");
    const nodes = [el("h3", {}, `Step ${get(i, "step")}, reward ${num(get(i, "reward"))}`), el("p", { class: "soft" }, `row ${get(i, "row") ?? "?"} · ${get(i, "num_tokens") ?? "?"} tokens · weight version ${get(i, "weight_version") ?? "?"}${get(i, "source") ? ` · ${get(i, "source")}` : ""}${parts.map(([n, v]) => ` · ${n} ${num(v)}`).join("")}`)];
    if (get(i, "failure")) nodes.push(el("p", {}, `Not scored: ${get(i, "failure")}`));
    nodes.push(el("h4", {}, "Prompt"), block(prompt(i)), el("h4", {}, "Response"), response(i));
    if (turns && turns.length > 1) nodes.push(el("h4", {}, "Turns"), ...turns.map((turn, n) => fold(`${n + 1}. ${turn[0]}`, turn[1], turn[0] === "assistant")));
    if (group.length > 1) nodes.push(el("h4", {}, `Group: ${group.length} kept responses to this prompt`), ...(group.some((n) => (get(n, "turns") ?? []).length > 1) ? [tree(group.map((n) => ({ n, turns: get(n, "turns") ?? [] })), 0)] : group.map((n) => el("p", {}, el("b", {}, `reward ${num(get(n, "reward"))} `), String(get(n, "response") ?? "").slice(0, 200)))));
    detail.replaceChildren(...nodes);
  }
  const block = (value) => el("div", { class: "text", tabindex: 0, role: "group", "aria-label": "text" }, String(value ?? ""));
  const fold = (title, value, open) => el("details", { open: open ? "" : null }, el("summary", {}, title), block(value));
  function tree(members, depth) { // responses that share their first turns share a branch
    const node = el("div", { class: "tree" }), branches = new Map();
    for (const m of members) { const turn = m.turns[depth]; if (!turn) { node.append(el("p", {}, `reward ${num(get(m.n, "reward"))}`)); continue; } const id = turn.join("\u0000"); branches.set(id, [...(branches.get(id) ?? []), m]); }
    for (const shared of branches.values()) { const [role, value] = shared[0].turns[depth]; node.append(el("details", { open: depth < 1 ? "" : null }, el("summary", {}, `${role} (${shared.length}): ${value.slice(0, 70)}`), block(value), tree(shared, depth + 1))); }
    return node;
  }
  function response(i) {
    const entry = table.tokens[i], mode = state.colour ?? "none"; if (!entry || mode === "none") return block(get(i, "response"));
    const size = entry.tokens.length, expand = (v) => (Array.isArray(v) ? v : Array(size).fill(v ?? null));
    const values = mode === "mismatch" ? expand(entry.logprobs).map((v, n) => { const other = expand(entry.trainer_logprobs)[n]; return v === null || other === null ? null : Math.abs(v - other); }) : expand(entry[mode]);
    const known = values.filter((v) => v !== null); if (!known.length) return el("div", {}, el("p", {}, `${COLOURS[mode]}: not recorded for this sample.`), block(get(i, "response")));
    const low = Math.min(...known), high = Math.max(...known), most = Math.max(Math.abs(low), Math.abs(high)) || 1;
    const paint = (v) => { if (v === null) return ""; const share = mode === "versions" ? (high > low ? (v - low) / (high - low) : 0.3) : mode === "logprobs" ? Math.min(1, -v / 5) : Math.abs(v) / most; return `background:color-mix(in srgb, ${mode === "advantages" && v > 0 ? "var(--c2)" : mode === "versions" ? "var(--c0)" : "var(--c1)"} ${Math.round(45 * share)}%, transparent)`; };
    const legend = el("p", { class: "soft" }, `${COLOURS[mode]}: ${num(low)} to ${num(high)}${mode === "logprobs" ? " nats; darker: less probable" : mode === "advantages" ? "; green: above 0, orange: below 0" : "; darker: larger"}. Point at a token for its value.`);
    return el("div", {}, legend, el("div", { class: "text", tabindex: 0, role: "group", "aria-label": "response with coloured tokens" }, ...entry.tokens.map((t, n) => el("span", { class: "token", style: paint(values[n]), title: `${COLOURS[mode]} ${num(values[n])}${expand(entry.trained)[n] === 0 ? ", not trained" : ""}` }, t))));
  }
  let waiting = false; list.addEventListener("scroll", () => { if (!waiting) { waiting = true; requestAnimationFrame(() => { waiting = false; draw(); }); } }, { passive: true });
  list.addEventListener("keydown", (event) => { const move = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10, Home: -1e9, End: 1e9 }[event.key]; if (move) { event.preventDefault(); choose(chosen + move); } });
  const controls = el("div", { class: "controls" }, control("q", "Search", el("input", { type: "search" })), control("step", "Step", select([["", "all"], ...unique("step").map((v) => [String(v), String(v)])])), control("pick", "Show", select(Object.entries(PICKS))), control("low", "Reward from", el("input", { type: "number", step: "any", style: "width:7em" })), control("high", "Reward to", el("input", { type: "number", step: "any", style: "width:7em" })), unique("source").length > 1 ? control("source", "Source", select([["", "all"], ...unique("source").map((v) => [v, v])])) : null, control("colour", "Colour of tokens", select(Object.entries(COLOURS))));
  requestAnimationFrame(filter);
  return [controls, count, el("div", { class: "browser" }, list, detail)];
}
