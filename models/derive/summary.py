"""Summarizes a proposal: what the probes found, with the evidence."""

from models.derive.probes import Match
from models.derive.proposal import Proposal
from models.derive.structure import Structure

Line = tuple[str, str, str]  # part of the model, what was found, evidence


def summary(proposal: Proposal) -> list[Line]:
    """Return one line for each part of the model, with the evidence."""
    base = proposal.variants[0].structure
    lines = [_layers(base)]
    for kind in ("attention", "latent_attention", "mlp", "moe"):
        if matches := base.matches(kind):
            lines.append(_block(matches))
    norms = sorted({name.rpartition("{layer}.")[2] for layer in base.layers for name in layer.norms.values()})
    if norms:
        lines.append(
            ("norms", f"RMSNorm x weight: {', '.join(norms)}", f"formula = output, difference {base.error:.0e}")
        )
    for part, code in proposal.plan.parts.items():
        lines.append((f"part {part}", code.replace("config", "").strip(), _variant_evidence(proposal, code)))
    lines.append(("embeddings", ", ".join(base.outside_layers.values()), "logits = norm x matrix"))
    if proposal.engine is not None:
        fused = ", ".join(f"{name} = {' + '.join(parts)}" for name, parts in proposal.plan.fused_params.items())
        lines.append(("engine_fused_params", fused, proposal.engine.file.name + " of SGLang"))
    return lines


def _layers(base: Structure) -> Line:
    moe = base.moe_layers
    dense = [n for n in range(len(base.layers)) if n not in moe]
    text = "all dense" if not moe else ("all with experts" if not dense else f"dense {dense}, with experts {moe}")
    return "layers", f"{len(base.layers)} in the tiny model: {text}", "names of the tensors"


def _block(matches: list[Match]) -> Line:
    match = matches[0]
    tensors = {slot: name.rpartition("{layer}.")[2] for slot, name in match.slots.items()}
    text = ", ".join(f"{slot}={name}" for slot, name in tensors.items())
    error = max(m.error for m in matches)
    evidence = f"formula = output, difference {error:.0e}"
    options = match.options
    if match.kind == "moe":
        routing = options["routing"]
        kind = "weights sum to 1" if routing.normalized else "weights of all experts sum to 1"
        groups = f", {routing.chosen_groups} of {routing.groups} groups" if routing.groups > 1 else ""
        return "experts", f"{text}; {routing.score} router, {kind}, scale {routing.scale:g}{groups}", evidence
    if match.kind == "mlp":
        return "MLP", f"{text}; activation {options['activation']}", evidence
    rope = f"RoPE on {options['rotated']} components, {options['attention'].rope}"
    if without := [n for n, m in enumerate(matches) if m.options["attention"].rope == "none"]:
        rope += f", not in layers {without}"
    if scaling := options["attention"].scaling:
        rope += f"; queries x (1 + {scaling.beta:g} log(1 + floor(position / {scaling.period})))"
    return match.kind.replace("_", " "), f"{text}; {rope}", evidence


def _variant_evidence(proposal: Proposal, code: str) -> str:
    changed = [v.changed_field for v in proposal.variants if v.changed_field and f'"{v.changed_field}"' in code]
    return f"tensors with {changed[0]} changed" if changed else "all variants"
