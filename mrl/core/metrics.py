"""Declarations of all metrics of a run: name (`area/quantity_unit`), unit, meaning, and format.

Logging a name that is not declared here is an error, so that dashboards, the progress display and the code agree. Four families
take any name: `time/<phase>_s` for any phase of the loop, `reward/<part>_mean` for any named part of a reward,
`eval/accuracy_sampled_<set>` and `_greedy_<set>` for any named test set, and `own/<name>` for metrics of a user's plug-in.
"""

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass

Metrics = dict[str, float]
"""Metric name -> value. Every name is declared in `METRICS` or belongs to one of the four families."""


@dataclass(frozen=True)
class Metric:
    """Declaration of one metric."""

    unit: str  # empty: dimensionless
    meaning: str
    show: str = ".3f"  # format specification
    label: str = ""  # name in the progress display; empty: the last part of the metric's name

    def text(self, value: float) -> str:
        """Format the value with its unit."""
        return f"{value:{self.show}} {self.unit}".rstrip()


METRICS: dict[str, Metric] = {
    "reward/mean": Metric("", "mean reward of the step's responses", label="reward"),
    "reward/failed_fraction": Metric("", "responses that could not be scored; they count as reward 0"),
    "eval/accuracy_sampled": Metric("", "held-out prompts answered correctly at temperature 1", label="sampled"),
    "eval/accuracy_greedy": Metric("", "held-out prompts answered correctly with greedy decoding", label="greedy"),
    "rollout/samples": Metric(
        "", "responses that the step trains; without groups that rollout.filter rejected", ",.0f"
    ),
    "rollout/tokens": Metric("tokens", "sampled tokens of these responses", ",.0f"),
    "rollout/response_length_mean_tokens": Metric("tokens", "mean length of a response", ".1f", label="length"),
    "rollout/weight_version": Metric("", "oldest weight version that sampled a response of the step", ".0f"),
    "rollout/age_mean_versions": Metric(
        "", "staleness: weight versions between sampling a response and training it", ".2f"
    ),
    "rollout/age_max_versions": Metric("", "staleness of the oldest response", ".0f"),
    "rollout/truncated_fraction": Metric("", "responses cut at the length limit"),
    "rollout/kept_groups_fraction": Metric("", "sampled groups that rollout.filter accepts"),
    "rollout/rounds": Metric("", "how often prompts were drawn until the step had enough groups", ".0f"),
    "rollout/waiting_groups": Metric("", "groups in the staleness buffer, finished or still being sampled", ".0f"),
    "rollout/dropped_groups": Metric("", "groups discarded because over-sampling drew more than needed", ".0f"),
    "rollout/length_selected_ratio": Metric(
        "", "mean length of trained responses, divided by that of all sampled responses; 1 is unbiased"
    ),
    "rollout/token_age_mean_versions": Metric("", "mean staleness of the sampled tokens", ".2f"),
    "rollout/mixed_versions_fraction": Metric("", "responses whose tokens are of several weight versions"),
    "rollout/turns_mean": Metric("", "assistant turns in a response", ".2f", label="turns"),
    "rollout/tool_calls_mean": Metric("", "tool calls in a response", ".2f", label="calls"),
    "rollout/tool_errors_fraction": Metric("", "tool calls that were malformed, failed or timed out"),
    "rollout/cached_tokens_fraction": Metric("", "prompt tokens of all turns that were in the engine's prefix cache"),
    "rollout/replaced_engines": Metric("", "engines that failed during sampling and were replaced", ".0f"),
    "rollout/retried_responses": Metric("", "responses requested again because an engine failed", ".0f"),
    "time/step_s": Metric("s", "wall time of the whole step", ".2f"),
    "spent/engine_s": Metric("s", "part of the step: waiting for SGLang to sample", ".2f"),
    "spent/megatron_s": Metric("s", "part of the step: Megatron's passes and optimizer on the slowest rank", ".2f"),
    "spent/critic_s": Metric("s", "part of the step: the critic's passes and optimizer on the slowest rank", ".2f"),
    "spent/sync_engine_s": Metric("s", "part of the step: waiting for SGLang to load weights", ".2f"),
    "spent/reward_s": Metric("s", "part of the step: decoding and scoring responses", ".2f"),
    "spent/controller_s": Metric("s", "rest of the step: everything except SGLang, Megatron and rewards", ".2f"),
    "throughput/tokens_per_s": Metric("tokens/s", "response tokens per second of the whole step", ",.0f"),
    "throughput/samples_per_s": Metric("samples/s", "responses per second of the whole step", ".1f"),
    "weight_sync/bytes": Metric("bytes", "bytes sent to all engines", ",.0f"),
    "weight_sync/version": Metric("", "weight version that all engines serve", ".0f"),
    "weight_sync/buckets": Metric("", "messages in which the weights were sent", ".0f"),
    "weight_sync/senders": Metric("", "trainer ranks that sent weights", ".0f"),
    "weight_sync/compressed_fraction": Metric("", "bytes sent, divided by the uncompressed bytes"),
    "weight_sync/attempts": Metric("", "pushes until every engine had the version", ".0f"),
    "weight_sync/replaced_engines": Metric("", "engines that failed during a push and were replaced", ".0f"),
    "placement/switch_s": Metric("s", "part of the step: offloading and loading colocated roles", ".2f"),
    "placement/switches": Metric("", "number of times that an offloaded role was loaded", ".0f"),
    "placement/residual_bytes": Metric("bytes", "largest device memory of an offloaded trainer rank", ",.0f"),
    "mismatch/logprob_abs_max": Metric(
        "nats", "largest difference of a token's log-probability between trainer and engine", ".1e", label="mismatch"
    ),
    "mismatch/logprob_abs_mean": Metric(
        "nats", "mean absolute difference of log-probabilities between trainer and engine", ".1e"
    ),
    "mismatch/kl": Metric("nats", "KL(engine || trainer) per token, estimated by the mean log ratio", ".2e"),
    "mismatch/k3": Metric("nats", "KL(engine || trainer) per token, by the k3 estimator", ".2e"),
    "mismatch/chi2": Metric("", "chi-square divergence of the trainer from the engine, per token", ".2e"),
    "mismatch/ess_fraction": Metric(
        "", "effective sample size under the trainer's policy, as a fraction of the tokens", ".4f"
    ),
    "mismatch/ppl_ratio": Metric(
        "", "perplexity of the samples under the trainer, divided by that under the engine", ".4f"
    ),
    "correction/weight_mean": Metric("", "mean off-policy correction weight of the response tokens"),
    "correction/truncated_fraction": Metric("", "response tokens whose correction weight was truncated", ".4f"),
    "correction/rejected_fraction": Metric("", "response tokens rejected as too far off-policy", ".4f"),
    "loss/policy": Metric("", "policy loss", ".2e"),
    "loss/clip_fraction": Metric("", "response tokens whose probability ratio was clipped"),
    "loss/dual_clip_fraction": Metric(
        "", "response tokens with negative advantage at the second bound of dual clipping"
    ),
    "loss/selected_fraction": Metric("", "response tokens that a covariance loss selects", ".5f"),
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
    "policy/kl_reward": Metric("nats", "KL from the reference per sampled token, as subtracted from the reward", ".2e"),
    "policy/kl_coef_loss": Metric("", "weight of the KL term of the loss", ".2e"),
    "policy/kl_coef_reward": Metric("", "weight of the KL penalty in the rewards", ".2e"),
    "policy/entropy_mean": Metric("nats", "mean entropy of the distributions that predicted the trained tokens"),
    "batch/computed_tokens": Metric("tokens", "tokens of forward and backward passes", ",.0f"),
    "batch/skipped_tokens_fraction": Metric("", "tokens not computed because their advantage is zero"),
    "batch/shared_tokens_fraction": Metric(
        "", "tokens of trained sequences that are not computed because prompts are shared"
    ),
    "batch/imbalance": Metric("", "cost of the most loaded replica, divided by the mean", ".4f"),
    "batch/micro_batches": Metric("", "micro-batches of the replica that has the most", ".0f"),
    "batch/optimizer_steps": Metric("", "optimizer steps on the rollout", ".0f"),
    "batch/trained_tokens": Metric("tokens", "response tokens in the loss", ",.0f"),
    "batch/zero_advantage_fraction": Metric("", "responses whose advantage is zero"),
}

_PHASE_TIME = re.compile(r"time/([a-z][a-z_]*)_s")
_OWN = re.compile(r"own/(\w+)")
_HELD_OUT = re.compile(r"eval/accuracy_(sampled|greedy)_(\w+)")
_REWARD_PART = re.compile(r"reward/(\w+)_mean")


def find(name: str) -> Metric:
    """Return the declaration of `name`. Raises ValueError with the nearest declared name if there is none."""
    if name in METRICS:
        return METRICS[name]
    if phase := _PHASE_TIME.fullmatch(name):
        return Metric("s", f"wall time of phase {phase[1]}", ".2f")
    if own := _OWN.fullmatch(name):
        return Metric("", f"{own[1]}, reported by a user's plug-in")
    if held_out := _HELD_OUT.fullmatch(name):
        return Metric(
            "",
            f"held-out prompts of {held_out[2]} answered correctly, {held_out[1]}",
            label=f"{held_out[2]} {held_out[1]}",
        )
    if part := _REWARD_PART.fullmatch(name):
        return Metric("", f"mean of the reward's part {part[1]} over the responses", label=part[1])
    near = difflib.get_close_matches(name, METRICS, n=1, cutoff=0.0)[0]
    raise ValueError(
        f"metric {name!r} is not declared; did you mean {near!r}? Declare a new one in mrl/core/metrics.py."
    )


def label(name: str) -> str:
    """Return the short name for the progress display: `reward/mean` -> `reward`, `time/rollout_s` -> `rollout`."""
    return find(name).label or name.split("/")[1].removesuffix("_s")


def check(names: Iterable[str]) -> None:
    """Raise ValueError for the first name that is not declared."""
    for name in names:
        find(name)
