"use strict";
// The browser of samples: filters, a list that draws only its visible rows, and one sample in full.
const ROW = 68; // height of a row of the list, in pixels
const PICKS = { all: "all samples", best: "best of each step", worst: "worst of each step", equal: "groups with equal rewards", mixed: "groups with different rewards", truncated: "truncated", failed: "not scored" };
const block = (value) => el("div", { class: "text", tabindex: 0, role: "group", "aria-label": "text" }, String(value ?? ""));
const fold = (title, open, ...content) => el("details", { open: open ? "" : null }, el("summary", {}, title), ...content);

// Returns a function (index of a sample, column) -> value.
function reader(table) {
  const at = Object.fromEntries(table.columns.map((name, i) => [name, i]));
  return (i, name) => (name === "prompt text" ? table.prompts[table.rows[i][at.prompt]] : table.rows[i][at[name]]);
}

// Returns a function that tells whether a sample matches the filters in `state`.
function sampleFilter(table, get, state) {
  const texts = table.rows.map(() => null), text = (i) => (texts[i] ??= `${get(i, "prompt text")}\n${get(i, "response") ?? ""}`.toLowerCase());
  const picks = { best: (i) => get(i, "rank") === 0, worst: (i) => get(i, "rank") === get(i, "last"), equal: (i) => get(i, "uniform") === true, mixed: (i) => get(i, "uniform") === false, truncated: (i) => get(i, "truncated"), failed: (i) => get(i, "failure") };
  return (i) => {
    const reward = get(i, "reward");
    return (!state.step || String(get(i, "step")) === state.step) && (!state.source || get(i, "source") === state.source) && (!state.low || reward >= Number(state.low)) && (!state.high || reward <= Number(state.high))
      && (picks[state.pick]?.(i) ?? true) && (!state.q || text(i).includes(state.q.toLowerCase()));
  };
}

function sampleControls(table, get, state, changed) {
  const control = (name, label, node) => {
    node.setAttribute("aria-label", label);
    node.value = state[name] ?? (node.tagName === "SELECT" ? node.options[0].value : "");
    node.addEventListener("input", () => { state[name] = node.value; changed(); });
    return el("label", {}, label, node);
  };
  const select = (choices) => el("select", {}, ...choices.map(([value, label]) => el("option", { value }, label)));
  const unique = (name) => [...new Set(table.rows.map((_, i) => get(i, name)))].filter((v) => v !== null), number = () => el("input", { type: "number", step: "any", style: "width:7em" });
  const sources = unique("source");
  return el("div", { class: "controls" }, control("q", "Search", el("input", { type: "search" })), control("step", "Step", select([["", "all"], ...unique("step").map((v) => [String(v), String(v)])])),
    control("pick", "Show", select(Object.entries(PICKS))), control("low", "Reward from", number()), control("high", "Reward to", number()),
    sources.length > 1 ? control("source", "Source", select([["", "all"], ...sources.map((v) => [v, v])])) : null, control("color", "Color of tokens", select(Object.entries(COLORS))));
}

function samplesBrowser(table, state, remember) {
  const get = reader(table), fits = sampleFilter(table, get, state), space = el("div", { role: "presentation" }), count = el("p", { class: "soft", "aria-live": "polite" }), detail = el("div", { class: "detail" });
  const list = el("div", { class: "list", role: "listbox", tabindex: 0, "aria-label": "Samples" }, space);
  const drawn = new Map(); // position in `found` -> row of the list
  const arrows = table.rows.some((_, i) => (get(i, "turns") ?? []).length > 1) ? " An arrow → in the list separates two turns." : "";
  let found = [], chosen = 0, waiting = false;
  function filter() {
    found = table.rows.map((_, i) => i).filter(fits); chosen = 0; list.scrollTop = 0;
    space.style.height = `${found.length * ROW}px`;
    count.textContent = `${found.length.toLocaleString("en")} of ${table.rows.length.toLocaleString("en")} samples match. ${table.left_out}${arrows}`;
    choose(0);
  }
  function draw() { // keeps the rows that stay visible
    const start = Math.max(0, Math.floor(list.scrollTop / ROW) - 6), end = Math.min(found.length, start + Math.ceil((list.clientHeight || 560) / ROW) + 12);
    for (const [n, row] of drawn) if (n < start || n >= end) { row.remove(); drawn.delete(n); }
    for (let n = start; n < end; n++) if (!drawn.has(n)) drawn.set(n, listRow(get, found[n], n, { chosen: n === chosen, size: found.length, choose: () => choose(n) }));
    space.append(...[...drawn].filter(([, row]) => !row.isConnected).map(([, row]) => row));
    if (found.length) list.setAttribute("aria-activedescendant", `sample-${chosen}`); else list.removeAttribute("aria-activedescendant");
  }
  function choose(n) {
    chosen = Math.max(0, Math.min(found.length - 1, n));
    const top = chosen * ROW;
    if (top < list.scrollTop) list.scrollTop = top;
    if (top + ROW > list.scrollTop + list.clientHeight) list.scrollTop = top + ROW - list.clientHeight;
    drawn.clear(); space.replaceChildren(); draw();
    detail.replaceChildren(...(found.length ? sampleDetail(table, get, found[chosen], state.color ?? "none") : [el("p", {}, "No sample matches the filters.")]));
  }
  list.addEventListener("scroll", () => { if (!waiting) { waiting = true; requestAnimationFrame(() => { waiting = false; draw(); }); } }, { passive: true });
  list.addEventListener("keydown", (event) => {
    const move = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10, Home: -1e9, End: 1e9 }[event.key];
    if (move) { event.preventDefault(); choose(chosen + move); }
  });
  requestAnimationFrame(filter);
  return [sampleControls(table, get, state, () => { remember(); filter(); }), count, el("div", { class: "browser" }, list, detail)];
}

// The beginning of a response; the texts of several turns are joined by arrows.
function shortText(get, i, length) {
  const turns = get(i, "turns") ?? [], text = turns.length > 1 ? turns.map((turn) => turn[1].trim()).join(" → ") : String(get(i, "response") ?? "").trim();
  return text.slice(0, length) || "(empty response)";
}

const sampledTokens = (get, i) => `${get(i, "num_tokens") ?? "?"} sampled tokens`;

// A row of the list: facts, the beginning of the prompt, and the beginning of the response.
function listRow(get, i, n, { chosen, size, choose }) {
  const notes = [` step ${get(i, "step")}`, sampledTokens(get, i), get(i, "truncated") ? "truncated" : "", get(i, "failure") ? "not scored" : ""].filter(Boolean).join(" · ");
  return el("div", { role: "option", id: `sample-${n}`, "aria-selected": String(chosen), "aria-posinset": n + 1, "aria-setsize": size, style: `top:${n * ROW}px`, onclick: choose },
    el("b", {}, `reward ${num(get(i, "reward"))}`), notes, el("br"), el("span", { class: "soft" }, String(get(i, "prompt text") ?? "").trim().slice(0, 120)), el("br"), shortText(get, i, 120));
}

function sampleDetail(table, get, i, mode) {
  const turns = get(i, "turns") ?? [], parts = Object.entries(get(i, "parts") ?? {}).map(([name, v]) => `${name} ${num(v)}`);
  const facts = [`row ${get(i, "row") ?? "?"}`, sampledTokens(get, i), `weight version ${get(i, "weight_version") ?? "?"}`, get(i, "source") ?? "", get(i, "truncated") ? (turns.length > 1 ? "truncated (the limit also counts tool results)" : "truncated") : "", ...parts].filter(Boolean);
  const nodes = [el("h3", {}, `Step ${get(i, "step")}, reward ${num(get(i, "reward"))}`), el("p", { class: "soft" }, facts.join(" · "))];
  if (get(i, "failure")) nodes.push(el("p", {}, `Not scored: ${get(i, "failure")}`));
  nodes.push(el("h4", {}, "Prompt"), block(get(i, "prompt text")));
  if (get(i, "ground_truth")) nodes.push(el("h4", {}, "Expected answer"), block(get(i, "ground_truth")));
  nodes.push(el("h4", {}, "Response"), table.tokens[i] ? tokenView(table.tokens[i], mode) : block(turns.length > 1 ? turns.map((turn) => turn[1]).join("\n\n") : get(i, "response")));
  if (turns.length > 1) nodes.push(el("h4", {}, "Turns"), ...turns.map(([role, text], n) => fold(`${n + 1}. ${role}`, role === "assistant", block(text))));
  return nodes.concat(groupOf(table, get, i));
}

// The kept responses to the same prompt in the same step; conversations with several turns as a tree.
function groupOf(table, get, i) {
  const id = (n) => get(n, "group") ?? get(n, "prompt"), members = table.rows.map((_, n) => n).filter((n) => get(n, "step") === get(i, "step") && id(n) === id(i));
  const rewards = get(i, "group_rewards") ?? [], all = rewards.length > 1 ? [el("h4", {}, "Group"), el("p", {}, `Rewards of the ${rewards.length} responses to this prompt: ${rewards.map((v) => num(v, 3)).join(", ")}.`)] : [];
  if (members.length < 2) return all;
  const withTurns = members.some((n) => (get(n, "turns") ?? []).length > 1), title = el("h4", {}, `${members.length} kept responses to this prompt`);
  if (withTurns) return [...all, title, el("p", { class: "soft" }, "Conversations that begin with the same turns share a branch."), tree(members.map((n) => ({ reward: get(n, "reward"), turns: get(n, "turns") ?? [] })), 0)];
  return [...all, title, ...members.map((n) => el("p", {}, el("b", {}, `reward ${num(get(n, "reward"))} `), shortText(get, n, 200)))];
}

function tree(members, depth) {
  const node = el("div", { class: "tree" }), branches = new Map();
  for (const m of members) {
    const turn = m.turns[depth];
    if (!turn) node.append(el("p", {}, el("b", {}, `reward ${num(m.reward)}`)));
    else branches.set(turn.join("\u0000"), [...(branches.get(turn.join("\u0000")) ?? []), m]);
  }
  for (const shared of branches.values()) {
    const [role, text] = shared[0].turns[depth], ends = shared.length > 1 ? `, ${shared.length} responses` : "";
    node.append(fold(`${role}${ends}: ${text.trim().slice(0, 70) || "(empty)"}`, depth < 3, ...(text.length > 70 ? [block(text)] : []), tree(shared, depth + 1)));
  }
  return node;
}
