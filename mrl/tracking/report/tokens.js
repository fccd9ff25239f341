"use strict";
// The tokens of one response, colored by a value. The pointer and the arrow keys show all values of one token.
const COLORS = { none: "no color", logprobs: "log-probability", advantages: "advantage", versions: "weight version", mismatch: "mismatch" };
const SCALES = { logprobs: "nats; the stronger, the less probable", advantages: "; green: above 0, orange: below 0", versions: "; the stronger, the newer", mismatch: "nats; the stronger, the larger" };

// All values of each token by name; null where a value is not recorded.
function tokenValues(entry) {
  const size = entry.tokens.length, list = (v) => (Array.isArray(v) ? v : Array(size).fill(v ?? null));
  const values = Object.fromEntries(["logprobs", "trainer_logprobs", "advantages", "versions", "trained"].map((name) => [name, list(entry[name])]));
  values.mismatch = values.logprobs.map((v, n) => (v === null || values.trainer_logprobs[n] === null ? null : Math.abs(v - values.trainer_logprobs[n])));
  return values;
}

function shade(mode, v, low, high) {
  if (v === null) return null;
  const most = Math.max(Math.abs(low), Math.abs(high)) || 1;
  const share = { versions: high > low ? (v - low) / (high - low) : 0.3, logprobs: 1 - Math.exp(v) }[mode] ?? Math.abs(v) / most;
  const hue = mode === "versions" ? 0 : mode === "advantages" && v > 0 ? 2 : 1;
  return `background:color-mix(in srgb, ${color(hue)} ${Math.round(45 * share)}%, transparent)`;
}

function describeToken(entry, values, n) {
  const parts = [["engine's log-probability", "logprobs"], ["trainer's log-probability", "trainer_logprobs"], ["mismatch", "mismatch"], ["advantage", "advantages"], ["weight version", "versions"]];
  const known = parts.filter(([, name]) => values[name][n] !== null).map(([label, name]) => `${label} ${num(values[name][n])}`);
  return `Token ${n + 1} of ${entry.tokens.length}, ${JSON.stringify(entry.tokens[n])}: ${known.join(", ") || "no value recorded"}${values.trained[n] === 0 ? "; not trained" : ""}.`;
}

function tokenView(entry, mode) {
  const values = tokenValues(entry), shown = values[mode] ?? [], known = shown.filter((v) => v !== null);
  const low = Math.min(...known), high = Math.max(...known), hint = `Point at a token, or press the arrow keys, to see its values.${values.trained.includes(0) ? " Dotted underline: not trained, such as the results of tools." : ""}`;
  const legend = mode === "none" ? hint : known.length ? `Color: ${COLORS[mode]} from ${num(low)} to ${num(high)} ${SCALES[mode]}. ${hint}`.replace(" ;", ";") : `${COLORS[mode]}: not recorded for this sample. ${hint}`;
  const spans = entry.tokens.map((text, n) => el("span", { class: values.trained[n] === 0 ? "token untrained" : "token", style: known.length ? shade(mode, shown[n], low, high) : null, "data-n": n }, text));
  const isTurn = (n) => n && values.trained[n] !== null && values.trained[n] !== values.trained[n - 1]; // a turn begins at the token
  const pieces = spans.flatMap((span, n) => (isTurn(n) ? [el("span", { class: "turn" }, values.trained[n] ? "next turn of the model" : "result of a tool"), span] : [span]));
  const readout = el("p", { class: "readout", "aria-live": "polite" }, legend), box = el("div", { class: "text", tabindex: 0, role: "group", "aria-label": "Tokens of the response; the arrow keys show the values of one token" }, ...pieces);
  let at = -1;
  const show = (n) => {
    spans[at]?.classList.remove("chosen"); at = Math.max(0, Math.min(spans.length - 1, n));
    spans[at].classList.add("chosen"); spans[at].scrollIntoView({ block: "nearest" }); readout.textContent = describeToken(entry, values, at);
  };
  box.addEventListener("pointerover", (event) => { if (event.target.dataset.n) show(Number(event.target.dataset.n)); });
  box.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1, Home: -1e9, End: 1e9 }[event.key];
    if (move) { event.preventDefault(); show(at + move); }
  });
  return el("div", {}, box, readout);
}
