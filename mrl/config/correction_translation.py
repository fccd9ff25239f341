"""Rules that translate the off-policy corrections of verl and trl into overrides of mrl."""

from typing import Any

from mrl.config.translation_rules import (
    VERL_CORRECTION_PREFIX,
    VERL_ESTIMATOR,
    VERL_LOSSES,
    Note,
    Overrides,
    Values,
    is_on,
)

_CORRECTIONS = "mrl.algorithms.corrections."
_IMPORTANCE = f"{_CORRECTIONS}ImportanceSampling"
# Option of verl's rollout_rs, without the ending _k1 -> level of ImportanceSampling.
_LEVEL_OF_K1_OPTION = {"token": "token", "seq_sum": "sequence", "seq_mean": "geometric"}


def correction_node(nodes: list[Overrides]) -> Overrides:
    """Return the override of algorithm.correction: the only node, or a Product of several. A node is a dict with `_target_`."""
    product = {"_target_": f"{_CORRECTIONS}Product", "corrections": nodes}
    return {"algorithm.correction": nodes[0] if len(nodes) == 1 else product}


def verl_correction(value: Any, values: Values) -> Overrides | Note:
    """Translate all keys algorithm.rollout_correction.* together.

    This function is the rule of rollout_is, rollout_rs and bypass_mode, and returns the same result for each of these keys.
    """
    read = lambda name, default=None: values.get(VERL_CORRECTION_PREFIX + name, default)  # noqa: E731
    bypass, policy_gradient = is_on(read("bypass_mode")), str(read("loss_type")) == "reinforce"
    nodes, overrides = list[dict[str, Any]](), dict[str, Any]()
    for option, bounds in _verl_rejections(read("rollout_rs"), read("rollout_rs_threshold")):
        nodes.append(_rejection(option, bounds))
    if read("rollout_is") and (policy_gradient or not bypass):
        nodes.append(_verl_weights(str(read("rollout_is")), str(read("rollout_is_threshold", 2.0))))
        if is_on(read("rollout_is_batch_normalize")):
            nodes[-1]["batch_normalize"] = True
        if not bypass and str(values.get(VERL_ESTIMATOR)).endswith("optimal_token_baseline"):
            overrides["algorithm.advantage.correction"] = nodes[-1]
    if bypass:
        overrides["algorithm.old_logprobs"] = "rollout"
        nodes = [node | {"numerator": "current"} for node in nodes]
        if policy_gradient:
            overrides |= VERL_LOSSES["gpg"]
    if not nodes and not overrides:
        return Note("verl's config has no correction, which is also mrl's default", user_must_act=False)
    return overrides | (correction_node(nodes) if nodes else {})


def _verl_rejections(options: Any, thresholds: Any) -> list[tuple[str, list[float]]]:
    """Return (option, bounds) per option of rollout_rs. `_` joins two bounds. A single threshold applies to all options."""
    names = [name.strip() for name in str(options or "").split(",") if name.strip()]
    texts = [text.strip() for text in str(thresholds).split(",")]
    texts = texts * len(names) if len(texts) == 1 else texts
    return [(name, [float(x) for x in text.split("_")]) for name, text in zip(names, texts, strict=True)]


def _rejection(option: str, bounds: list[float]) -> Overrides:
    """Return the node for one option of verl's rollout_rs, such as seq_mean_k1 or token_k3."""
    level, _, kind = option.rpartition("_")
    if kind != "k1":
        name = level.removeprefix("seq_")
        return {"_target_": f"{_CORRECTIONS}Rejection", "level": name, "kind": kind, "high": bounds[0]}
    low, high = bounds if len(bounds) == 2 else (1 / bounds[0], bounds[0])
    # verl bounds pi_rollout / pi_old. ImportanceSampling bounds the inverse ratio, so the two bounds are inverted and swapped.
    return {
        "_target_": _IMPORTANCE,
        "level": _LEVEL_OF_K1_OPTION[level],
        "mode": "reject",
        "low": 1 / high,
        "high": 1 / low,
    }


def _verl_weights(level: str, threshold: str) -> Overrides:
    """Return the node for verl's rollout_is: a mask if the threshold is two numbers joined by `_`, else a truncation."""
    low, _, high = threshold.rpartition("_")
    bounds = (
        {"mode": "mask", "low": float(low), "high": float(high)} if low else {"mode": "truncate", "high": float(high)}
    )
    return {"_target_": _IMPORTANCE, "level": level, **bounds}


def trl_correction(value: Any, values: Values) -> Overrides | Note:
    """Translate the keys vllm_importance_sampling_* and off_policy_mask_threshold together.

    This function is the rule of vllm_importance_sampling_correction, off_policy_mask_threshold and use_vllm, and returns the same
    result for each of these keys. With use_vllm, trl applies importance sampling by default.
    """
    prefix, nodes = "vllm_importance_sampling_", list[dict[str, Any]]()
    if is_on(values.get(f"{prefix}correction", values.get("use_vllm", False))):
        level, _, mode = str(values.get(f"{prefix}mode", "sequence_mask")).partition("_")
        high = values.get(f"{prefix}clip_max", values.get(f"{prefix}cap", 3.0))
        low = values.get(f"{prefix}clip_min")
        bounds = {"low": float(low or 0.0), "high": float("inf") if high is None else float(high)}
        nodes.append({"_target_": _IMPORTANCE, "level": level, "mode": mode, **bounds})
    if (delta := values.get("off_policy_mask_threshold")) is not None:
        nodes.append({"_target_": f"{_CORRECTIONS}OffPolicyMask", "delta": float(delta)})
    return correction_node(nodes) if nodes else Note("off is the default", user_must_act=False)
