"""Every number a run reports: its name `area/what_unit`, unit, meaning, and how it is shown.

A name that is not declared here is an error, so that dashboards, the progress display and the code agree.
`time/<phase>_s` is the one open family: any phase of the loop may be timed.
"""

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass


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
    "eval/accuracy_sampled": Metric("", "held-out problems solved, sampled at temperature 1", label="sampled"),
    "eval/accuracy_greedy": Metric("", "held-out problems solved, likeliest token each time", label="greedy"),
    "rollout/samples": Metric("", "responses generated", ",.0f"),
    "rollout/tokens": Metric("tokens", "response tokens generated", ",.0f"),
    "rollout/response_length_mean_tokens": Metric("tokens", "mean length of a response", ".1f", label="length"),
    "rollout/weight_version": Metric("", "oldest version of the weights that sampled a response", ".0f"),
    "rollout/truncated_fraction": Metric("", "responses cut at the length limit"),
    "time/step_s": Metric("s", "wall time of the whole step", ".2f"),
    "spent/engine_s": Metric("s", "of the step: waiting for SGLang to sample", ".2f"),
    "spent/megatron_s": Metric("s", "of the step: Megatron's passes and optimizer, slowest rank", ".2f"),
    "spent/sync_engine_s": Metric("s", "of the step: waiting for SGLang to take in weights", ".2f"),
    "spent/reward_s": Metric("s", "of the step: decoding and scoring, where it happens", ".2f"),
    "spent/controller_s": Metric("s", "of the step: all that is neither SGLang, Megatron nor reward", ".2f"),
    "throughput/tokens_per_s": Metric("tokens/s", "response tokens per second of the whole step", ",.0f"),
    "throughput/samples_per_s": Metric("samples/s", "responses per second of the whole step", ".1f"),
    "weight_sync/bytes": Metric("bytes", "weights sent to each engine", ",.0f"),
    "weight_sync/version": Metric("", "version of the weights the engines hold now", ".0f"),
    "weight_sync/buckets": Metric("", "messages the weights travelled in", ".0f"),
    "weight_sync/tensors": Metric("", "tensors sent, by Hugging Face name", ".0f"),
    "mismatch/logprob_abs_max": Metric("nats", "largest gap trainer to engine for a token", ".1e", label="mismatch"),
    "mismatch/logprob_abs_mean": Metric("nats", "mean gap trainer to engine per token", ".1e"),
    "loss/policy": Metric("", "policy loss", ".2e"),
    "loss/clip_fraction": Metric("", "response tokens whose probability ratio was clipped"),
    "loss/sft": Metric("nats", "mean cross-entropy per response token", label="loss"),
    "optim/grad_norm": Metric("", "gradient norm before clipping"),
    "optim/lr": Metric("", "learning rate", ".1e"),
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


def find(name: str) -> Metric:
    """The declaration of `name`.

    Raises: ValueError if there is none, with the nearest name that exists.
    """
    if name in METRICS:
        return METRICS[name]
    if phase := _PHASE_TIME.fullmatch(name):
        return Metric("s", f"wall time of phase {phase[1]}", ".2f")
    near = difflib.get_close_matches(name, METRICS, n=1, cutoff=0.0)[0]
    raise ValueError(f"metric {name!r} is not declared; did you mean {near!r}? Declare a new one in mrl/metrics.py.")


def label(name: str) -> str:
    """The short name that the progress display shows: `reward/mean` -> `reward`, `time/rollout_s` -> `rollout`."""
    return find(name).label or name.split("/")[1].removesuffix("_s")


def check(names: Iterable[str]) -> None:
    """Raises: ValueError for the first name that is not declared."""
    for name in names:
        find(name)
