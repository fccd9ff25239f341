"""Declarations of all metrics of a run: name (`area/quantity_unit`), unit, meaning, and format.

Logging a name that is not declared is an error, so that dashboards, the progress display and the code agree. METRICS declares
most names. Names of these four forms are also declared:

- `time/<phase>_s`, where <phase> is a phase of the training loop
- `reward/<part>_mean`, where <part> is a named part of a reward
- `eval/reward_sampled_<set>` and `eval/reward_greedy_<set>`, where <set> is a set of data.test_sets
- `own/<name>`, where <name> is a metric of a user's plug-in
"""

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass

Metrics = dict[str, float]
"""Metric name -> value. Every name is in `METRICS` or has one of the four forms above."""


@dataclass(frozen=True)
class Metric:
    """Declaration of one metric."""

    unit: str  # empty for a number without unit
    meaning: str  # what the value measures, for plots and docs/reference/metrics.md
    number_format: str = ".3f"  # Python format specification of the value
    label: str = ""  # name in the progress display; if it is empty, `label()` makes one from the metric's name

    def text(self, value: float) -> str:
        """Format the value with its unit."""
        return f"{value:{self.number_format}} {self.unit}".rstrip()


METRICS: dict[str, Metric] = {
    "reward/mean": Metric("", "mean reward of the step's responses", label="reward"),
    "reward/std": Metric("", "standard deviation of the rewards of all sampled responses of the step"),
    "reward/uniform_groups_fraction": Metric(
        "", "fraction of the sampled groups whose responses all have the same reward"
    ),
    "reward/failed_fraction": Metric("", "fraction of the responses that could not be scored; their reward is 0"),
    "eval/reward_sampled": Metric(
        "", "mean reward of one response to each held-out prompt, sampled at temperature 1", label="sampled"
    ),
    "eval/reward_greedy": Metric("", "mean reward of the greedy response to each held-out prompt", label="greedy"),
    "rollout/samples": Metric(
        "", "number of responses that the step trains; groups that rollout.filter rejects are not included", ",.0f"
    ),
    "rollout/tokens": Metric("tokens", "number of sampled tokens in the responses that the step trains", ",.0f"),
    "rollout/response_length_mean_tokens": Metric(
        "tokens", "mean length of the responses, tool results included", ".1f", label="length"
    ),
    "rollout/weight_version": Metric("", "oldest weight version that sampled a token of the step", ".0f"),
    "rollout/age_mean_versions": Metric(
        "", "mean staleness of the responses: number of weight versions from the first sampled token to training", ".2f"
    ),
    "rollout/age_max_versions": Metric("", "largest staleness of a response", ".0f"),
    "rollout/truncated_fraction": Metric("", "fraction of the responses that were cut at the length limit"),
    "rollout/kept_groups_fraction": Metric("", "fraction of the sampled groups that rollout.filter accepts"),
    "rollout/rounds": Metric(
        "", "number of times that prompts were drawn for the step: once, and again after groups were rejected", ".0f"
    ),
    "rollout/waiting_groups": Metric(
        "", "number of groups in the staleness buffer, finished or still being sampled", ".0f"
    ),
    "rollout/dropped_groups": Metric(
        "", "number of groups that were discarded because over-sampling dispatched more groups than needed", ".0f"
    ),
    "rollout/length_selected_ratio": Metric(
        "",
        "mean length of trained groups, divided by the mean length of as many consecutively drawn groups; 1 means no bias",
    ),
    "rollout/token_age_mean_versions": Metric("", "mean staleness of the sampled tokens", ".2f"),
    "rollout/mixed_versions_fraction": Metric(
        "", "fraction of the responses whose tokens were sampled by several weight versions"
    ),
    "rollout/turns_mean": Metric("", "mean number of assistant turns in a response", ".2f", label="turns"),
    "rollout/tool_calls_mean": Metric("", "mean number of tool calls in a response", ".2f", label="calls"),
    "rollout/tool_errors_fraction": Metric("", "fraction of the tool calls that were malformed, failed or timed out"),
    "rollout/cached_tokens_fraction": Metric(
        "", "fraction of the prompt tokens, over all turns, that the engine had in its prefix cache"
    ),
    "rollout/replaced_engines": Metric("", "number of engines that failed during sampling and were replaced", ".0f"),
    "rollout/retried_responses": Metric(
        "", "number of responses that were requested again because an engine failed", ".0f"
    ),
    "time/step_s": Metric("s", "wall time of the whole step", ".2f"),
    "spent/engine_s": Metric("s", "part of the step that waits for SGLang to sample", ".2f"),
    "spent/megatron_s": Metric(
        "s", "part of the step for Megatron's forward and backward passes and its optimizer, on the slowest rank", ".2f"
    ),
    "spent/critic_s": Metric(
        "s",
        "part of the step for the critic's forward and backward passes and its optimizer, on the slowest rank",
        ".2f",
    ),
    "spent/sync_engine_s": Metric("s", "part of the step that waits for SGLang to load weights", ".2f"),
    "spent/reward_s": Metric("s", "part of the step that decodes and scores responses", ".2f"),
    "spent/controller_s": Metric(
        "s", "rest of the step: its wall time minus time/score_s and all other spent/* metrics", ".2f"
    ),
    "throughput/tokens_per_s": Metric(
        "tokens/s", "response tokens, divided by the wall time of the whole step", ",.0f"
    ),
    "throughput/samples_per_s": Metric("samples/s", "responses, divided by the wall time of the whole step", ".1f"),
    "weight_sync/bytes": Metric("bytes", "number of bytes sent, summed over all engines", ",.0f"),
    "weight_sync/version": Metric("", "weight version that all engines serve", ".0f"),
    "weight_sync/buckets": Metric("", "number of buckets in which the weights were sent", ".0f"),
    "weight_sync/senders": Metric("", "number of trainer ranks that sent weights", ".0f"),
    "weight_sync/compressed_fraction": Metric("", "size of the sent data, divided by its size before compression"),
    "weight_sync/attempts": Metric("", "number of pushes until every engine had the weight version", ".0f"),
    "weight_sync/replaced_engines": Metric("", "number of engines that failed during a push and were replaced", ".0f"),
    "placement/switch_s": Metric("s", "part of the step that offloads and loads colocated roles", ".2f"),
    "placement/switches": Metric("", "number of times that an offloaded role was loaded", ".0f"),
    "placement/residual_bytes": Metric(
        "bytes", "largest device memory that an offloaded trainer rank still uses", ",.0f"
    ),
    "mismatch/logprob_abs_max": Metric(
        "nats",
        "largest absolute difference between the trainer's and the engine's log-probability of a token",
        ".1e",
        label="mismatch",
    ),
    "mismatch/logprob_abs_mean": Metric(
        "nats", "mean absolute difference between the trainer's and the engine's log-probability of a token", ".1e"
    ),
    "mismatch/nan_tokens": Metric(
        "tokens", "number of trained tokens for which the engine reported no log-probability (NaN)", ",.0f"
    ),
    "mismatch/kl": Metric("nats", "KL(engine || trainer) per token, estimated by the mean log ratio", ".2e"),
    "mismatch/k3": Metric("nats", "KL(engine || trainer) per token, estimated by k3", ".2e"),
    "mismatch/chi2": Metric("", "chi-square divergence of the trainer from the engine, per token", ".2e"),
    "mismatch/ess_fraction": Metric(
        "", "effective sample size under the trainer's policy, divided by the number of tokens", ".4f"
    ),
    "mismatch/ppl_ratio": Metric(
        "", "perplexity of the samples under the trainer, divided by their perplexity under the engine", ".4f"
    ),
    "correction/weight_mean": Metric("", "mean weight that algorithm.correction gives a response token"),
    "correction/truncated_fraction": Metric(
        "", "fraction of the response tokens whose correction weight was truncated", ".4f"
    ),
    "correction/rejected_fraction": Metric(
        "", "fraction of the response tokens that the correction rejects as too far off-policy", ".4f"
    ),
    "loss/policy": Metric("", "loss of the actor, averaged over the optimizer steps", ".2e"),
    "loss/clip_fraction": Metric("", "fraction of the response tokens whose probability ratio was clipped"),
    "loss/dual_clip_fraction": Metric(
        "", "fraction of the response tokens whose loss is limited by dual_clip; their advantage is negative"
    ),
    "loss/selected_fraction": Metric("", "fraction of the response tokens that ClipCov or KLCov selects", ".5f"),
    "loss/sft": Metric("nats", "mean cross-entropy per response token in supervised fine-tuning", label="loss"),
    "optim/grad_norm": Metric("", "gradient norm before clipping"),
    "optim/lr": Metric("", "learning rate", ".1e"),
    "advantage/mean": Metric("", "mean advantage per trained token"),
    "advantage/std": Metric("", "standard deviation of the advantages over trained tokens"),
    "critic/loss": Metric("", "half the mean squared error of the values", ".2e"),
    "critic/value_mean": Metric("", "mean of the critic's values for the sampled tokens"),
    "critic/explained_variance": Metric(
        "", "1 - Var[return - value] / Var[return]; 1 for perfect values, 0 for constant values"
    ),
    "critic/grad_norm": Metric("", "the critic's gradient norm before clipping"),
    "critic/lr": Metric("", "the critic's learning rate", ".1e"),
    "policy/kl_ref": Metric(
        "nats", "mean estimate of KL(policy || reference) over the trained tokens, as in the loss", ".2e"
    ),
    "policy/kl_reward": Metric(
        "nats", "mean estimate of KL(policy || reference) over the sampled tokens, as subtracted from the reward", ".2e"
    ),
    "policy/kl_coef_loss": Metric("", "coefficient of the KL term in the loss", ".2e"),
    "policy/kl_coef_reward": Metric("", "coefficient of the KL penalty in the reward", ".2e"),
    "policy/entropy_mean": Metric("nats", "mean entropy of the distributions that predicted the trained tokens"),
    "batch/computed_tokens": Metric("tokens", "number of tokens that the forward and backward passes compute", ",.0f"),
    "batch/skipped_tokens_fraction": Metric(
        "", "fraction of the tokens that are not computed because the advantage of their response is 0"
    ),
    "batch/shared_tokens_fraction": Metric(
        "", "fraction of the tokens of trained sequences that are not computed because responses share their prompt"
    ),
    "batch/imbalance": Metric(
        "", "estimated cost of the replica with the most work, divided by the mean cost of the replicas", ".4f"
    ),
    "batch/micro_batches": Metric("", "largest number of micro-batches on a replica", ".0f"),
    "batch/optimizer_steps": Metric("", "number of optimizer steps on the responses of the step", ".0f"),
    "batch/trained_tokens": Metric("tokens", "number of response tokens in the loss", ",.0f"),
    "batch/zero_advantage_fraction": Metric("", "fraction of the responses whose advantage is 0"),
}

_PHASE_TIME = re.compile(r"time/([a-z][a-z_]*)_s")
_OWN = re.compile(r"own/(\w+)")
_HELD_OUT = re.compile(r"eval/reward_(sampled|greedy)_(\w+)")
_REWARD_PART = re.compile(r"reward/(\w+)_mean")


def find(name: str) -> Metric:
    """Return the declaration of `name`. If there is none, raise ValueError with the most similar declared name."""
    if name in METRICS:
        return METRICS[name]
    if phase := _PHASE_TIME.fullmatch(name):
        return Metric("s", f"wall time of the phase {phase[1]}", ".2f")
    if own := _OWN.fullmatch(name):
        return Metric("", f"{own[1]}, reported by a user's plug-in")
    if held_out := _HELD_OUT.fullmatch(name):
        return Metric(
            "",
            f"mean reward on the prompts of test set {held_out[2]}, {held_out[1]}",
            label=f"{held_out[2]} {held_out[1]}",
        )
    if part := _REWARD_PART.fullmatch(name):
        return Metric("", f"mean of the reward's part {part[1]}", label=part[1])
    near = difflib.get_close_matches(name, METRICS, n=1, cutoff=0.0)[0]
    raise ValueError(
        f"metric {name!r} is not declared; did you mean {near!r}? Declare a new metric in mrl/core/metrics.py."
    )


def label(name: str) -> str:
    """Return the short name for the progress display: `reward/mean` -> `reward`, `time/rollout_s` -> `rollout`."""
    return find(name).label or name.split("/")[1].removesuffix("_s")


def check(names: Iterable[str]) -> None:
    """Raise ValueError for the first name that is not declared."""
    for name in names:
        find(name)
