"""Every number a run reports: its name `area/what_unit`, unit, meaning, and how it is shown.

A name that is not declared here is an error, so that dashboards, the progress display and the code agree.
Four families are open: `time/<phase>_s`, any phase of the loop; `reward/<part>_mean`, any named part of a reward;
`eval/accuracy_sampled_<set>` and `_greedy_<set>`, any named held-out set; and `own/<name>`, whatever a user's plug-in reports.
"""

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass

Metrics = dict[str, float]
"""Metric name -> value. Every name is declared in `METRICS` or belongs to an open family."""


@dataclass(frozen=True)
class Metric:
    """One declared number."""

    unit: str  # empty: dimensionless
    meaning: str
    show: str = ".3f"  # format specification
    label: str = ""  # in the progress display; empty: the name's last part

    def text(self, value: float) -> str:
        """The value as a person reads it, with its unit."""
        return f"{value:{self.show}} {self.unit}".rstrip()


METRICS: dict[str, Metric] = {
    "reward/mean": Metric("", "mean reward of the step's responses", label="reward"),
    "reward/failed_fraction": Metric("", "responses that could not be scored, and count as 0"),
    "eval/accuracy_sampled": Metric("", "held-out problems solved, sampled at temperature 1", label="sampled"),
    "eval/accuracy_greedy": Metric("", "held-out problems solved, likeliest token each time", label="greedy"),
    "rollout/samples": Metric("", "responses of the step, without groups that rollout.filter refused", ",.0f"),
    "rollout/tokens": Metric("tokens", "response tokens generated", ",.0f"),
    "rollout/response_length_mean_tokens": Metric("tokens", "mean length of a response", ".1f", label="length"),
    "rollout/weight_version": Metric("", "oldest version of the weights that sampled a response", ".0f"),
    "rollout/age_mean_versions": Metric("", "weight versions between a response's first token and its training", ".2f"),
    "rollout/age_max_versions": Metric("", "the same of the oldest response", ".0f"),
    "rollout/truncated_fraction": Metric("", "responses cut at the length limit"),
    "rollout/kept_groups_fraction": Metric("", "groups sampled that rollout.filter lets be trained"),
    "rollout/rounds": Metric("", "times that prompts were drawn until the step had enough groups", ".0f"),
    "rollout/waiting_groups": Metric("", "groups drawn and not trained yet, whole or in the making", ".0f"),
    "rollout/dropped_groups": Metric("", "groups given up by over-sampling", ".0f"),
    "rollout/length_selected_ratio": Metric("", "mean length of what is trained over that of what is drawn; 1 is fair"),
    "rollout/token_age_mean_versions": Metric("", "weight versions between a sampled token and its training", ".2f"),
    "rollout/mixed_versions_fraction": Metric("", "responses sampled by several weight versions"),
    "rollout/turns_mean": Metric("", "assistant turns in a response", ".2f", label="turns"),
    "rollout/tool_calls_mean": Metric("", "tool calls in a response", ".2f", label="calls"),
    "rollout/tool_errors_fraction": Metric("", "tool calls that were malformed, failed or took too long"),
    "rollout/cached_tokens_fraction": Metric("", "prompt tokens of all turns that the engine's prefix cache held"),
    "rollout/replaced_engines": Metric("", "engines that failed while they sampled, and were replaced", ".0f"),
    "rollout/redone_responses": Metric("", "responses asked for again because an engine failed", ".0f"),
    "time/step_s": Metric("s", "wall time of the whole step", ".2f"),
    "spent/engine_s": Metric("s", "of the step: waiting for SGLang to sample", ".2f"),
    "spent/megatron_s": Metric("s", "of the step: Megatron's passes and optimizer, slowest rank", ".2f"),
    "spent/critic_s": Metric("s", "of the step: the critic's passes and optimizer, slowest rank", ".2f"),
    "spent/sync_engine_s": Metric("s", "of the step: waiting for SGLang to take in weights", ".2f"),
    "spent/reward_s": Metric("s", "of the step: decoding and scoring, where it happens", ".2f"),
    "spent/controller_s": Metric("s", "of the step: all that is neither SGLang, Megatron nor reward", ".2f"),
    "throughput/tokens_per_s": Metric("tokens/s", "response tokens per second of the whole step", ",.0f"),
    "throughput/samples_per_s": Metric("samples/s", "responses per second of the whole step", ".1f"),
    "weight_sync/bytes": Metric("bytes", "sent, to all engines together", ",.0f"),
    "weight_sync/version": Metric("", "version of the weights the engines hold now", ".0f"),
    "weight_sync/buckets": Metric("", "messages the weights travelled in", ".0f"),
    "weight_sync/senders": Metric("", "trainer processes that sent weights", ".0f"),
    "weight_sync/compressed_fraction": Metric("", "bytes sent over those of the weights themselves"),
    "weight_sync/attempts": Metric("", "pushes until every engine had the version", ".0f"),
    "weight_sync/replaced_engines": Metric("", "engines that failed while weights were pushed", ".0f"),
    "placement/switch_s": Metric("s", "of the step: memory that changed hands between those that share devices", ".2f"),
    "placement/switches": Metric("", "times that one who had slept was woken", ".0f"),
    "placement/residual_bytes": Metric(
        "bytes", "most that a trainer process kept on its device while it slept", ",.0f"
    ),
    "mismatch/logprob_abs_max": Metric("nats", "largest gap trainer to engine for a token", ".1e", label="mismatch"),
    "mismatch/logprob_abs_mean": Metric("nats", "mean gap trainer to engine per token", ".1e"),
    "mismatch/kl": Metric("nats", "KL(engine || trainer) per token, mean log ratio", ".2e"),
    "mismatch/k3": Metric("nats", "the same, by the estimate of less variance", ".2e"),
    "mismatch/chi2": Metric("", "chi-square divergence of the trainer from the engine, per token", ".2e"),
    "mismatch/ess_fraction": Metric("", "effective share of the tokens as samples of the trainer's policy", ".4f"),
    "mismatch/ppl_ratio": Metric("", "perplexity of the samples, trainer over engine", ".4f"),
    "correction/weight_mean": Metric("", "mean weight of tokens against off-policy samples"),
    "correction/truncated_fraction": Metric("", "response tokens whose off-policy weight was bounded", ".4f"),
    "correction/rejected_fraction": Metric("", "response tokens left out as too far off policy", ".4f"),
    "loss/policy": Metric("", "policy loss", ".2e"),
    "loss/clip_fraction": Metric("", "response tokens whose probability ratio was clipped"),
    "loss/dual_clip_fraction": Metric("", "response tokens of negative advantage whose loss met the second bound"),
    "loss/selected_fraction": Metric("", "response tokens that the loss treats apart for their covariance", ".5f"),
    "loss/sft": Metric("nats", "mean cross-entropy per response token", label="loss"),
    "optim/grad_norm": Metric("", "gradient norm before clipping"),
    "optim/lr": Metric("", "learning rate", ".1e"),
    "advantage/mean": Metric("", "mean advantage per trained token"),
    "advantage/std": Metric("", "standard deviation of the advantages over trained tokens"),
    "critic/loss": Metric("", "half the mean squared error of the values", ".2e"),
    "critic/value_mean": Metric("", "mean value before a sampled token"),
    "critic/explained_variance": Metric("", "1 - Var[return - value] / Var[return]; 1 is perfect, 0 a constant"),
    "critic/grad_norm": Metric("", "the critic's gradient norm before clipping"),
    "critic/lr": Metric("", "the critic's learning rate", ".1e"),
    "policy/kl_ref": Metric("nats", "KL from the reference per trained token, as in the loss", ".2e"),
    "policy/kl_reward": Metric("nats", "KL from the reference per sampled token, as taken from the reward", ".2e"),
    "policy/kl_coef_loss": Metric("", "weight of the KL term of the loss", ".2e"),
    "policy/kl_coef_reward": Metric("", "weight of the KL penalty in the rewards", ".2e"),
    "policy/entropy_mean": Metric("nats", "mean entropy of the distributions that predicted the trained tokens"),
    "batch/computed_tokens": Metric("tokens", "tokens that went through the model forward and backward", ",.0f"),
    "batch/skipped_tokens_fraction": Metric("", "tokens left out because their advantage is zero"),
    "batch/shared_tokens_fraction": Metric("", "tokens of trained sequences saved by computing shared prompts once"),
    "batch/imbalance": Metric("", "cost of the most loaded replica over the mean", ".4f"),
    "batch/micro_batches": Metric("", "packed forward passes of the replica that has most", ".0f"),
    "batch/optimizer_steps": Metric("", "mini-batches of the rollout", ".0f"),
    "batch/trained_tokens": Metric("tokens", "response tokens in the loss", ",.0f"),
    "batch/zero_advantage_fraction": Metric("", "responses without effect on the gradient"),
}

_PHASE_TIME = re.compile(r"time/([a-z][a-z_]*)_s")
_OWN = re.compile(r"own/(\w+)")
_HELD_OUT = re.compile(r"eval/accuracy_(sampled|greedy)_(\w+)")
_REWARD_PART = re.compile(r"reward/(\w+)_mean")


def find(name: str) -> Metric:
    """The declaration of `name`.

    Raises: ValueError if there is none, with the nearest name that exists.
    """
    if name in METRICS:
        return METRICS[name]
    if phase := _PHASE_TIME.fullmatch(name):
        return Metric("s", f"wall time of phase {phase[1]}", ".2f")
    if own := _OWN.fullmatch(name):
        return Metric("", f"{own[1]}, as a plug-in from outside reports it")
    if held_out := _HELD_OUT.fullmatch(name):
        return Metric(
            "", f"held-out problems of {held_out[2]} solved, {held_out[1]}", label=f"{held_out[2]} {held_out[1]}"
        )
    if part := _REWARD_PART.fullmatch(name):
        return Metric("", f"mean over the responses of the reward's part {part[1]}", label=part[1])
    near = difflib.get_close_matches(name, METRICS, n=1, cutoff=0.0)[0]
    raise ValueError(
        f"metric {name!r} is not declared; did you mean {near!r}? Declare a new one in mrl/core/metrics.py."
    )


def label(name: str) -> str:
    """The short name that the progress display shows: `reward/mean` -> `reward`, `time/rollout_s` -> `rollout`."""
    return find(name).label or name.split("/")[1].removesuffix("_s")


def check(names: Iterable[str]) -> None:
    """Raises: ValueError for the first name that is not declared."""
    for name in names:
        find(name)
