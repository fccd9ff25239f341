"""Declarations of all metrics of a run: name (`area/quantity_unit`), unit, meaning, format, section, and good values.

Logging a name that is not declared is an error, so that dashboards, the progress display and the code agree. METRICS declares
most names. mrl.core.metric_families declares names of these forms:

- `time/<phase>_s`, where <phase> is a phase of the training loop
- `reward/<part>_mean`, where <part> is a named part of a reward
- `reward/<source>/mean`, `reward/<source>/<part>_mean` and `reward/<source>/failed_fraction`, where <source> is a data source
- `eval/<set>/reward`, `eval/<set>/accuracy`, `eval/<set>/pass_at_<k>` and `eval/<set>/maj_at_<k>`, where <set> is a set of
  data.test_sets. The first two may end with `_sampled` or `_greedy`
- `own/<name>`, where <name> is a metric of a user's loss or correction
"""

import difflib
import math
from collections.abc import Iterable, Sequence

from mrl.core.metric_families import Metric, find_member

Metrics = dict[str, float]
"""Metric name -> value. Every name is in `METRICS` or has one of the forms above."""


SECTIONS = {
    "reward": "Reward",
    "eval": "Held-out prompts",
    "rollout": "Rollout",
    "policy": "Policy",
    "loss": "Loss",
    "optim": "Optimizer",
    "advantage": "Advantages",
    "distill": "Distillation",
    "preference": "Preferences",
    "critic": "Critic",
    "mismatch": "Mismatch between trainer and engine",
    "correction": "Correction of the mismatch",
    "throughput": "Throughput",
    "time": "Time by phase",
    "component_time": "Time by component",
    "batch": "Batches",
    "weight_sync": "Weight sync",
    "placement": "Placement",
    "own": "Metrics of plug-ins",
}
"""Area of a metric's name -> title of its section, in the order in which dashboards and pages show the sections."""


METRICS: dict[str, Metric] = {
    "reward/mean": Metric(
        "", "mean reward of the step, with the same weight for each prompt", label="reward", good="rises over the run"
    ),
    "reward/std": Metric(
        "",
        "standard deviation of the rewards of all sampled responses of the step",
        good="above 0; at 0 all responses have the same reward",
    ),
    "reward/uniform_groups_fraction": Metric(
        "",
        "fraction of the sampled groups whose responses all have the same reward",
        good="well below 1; these groups teach nothing",
    ),
    "reward/failed_fraction": Metric(
        "", "fraction of the responses that could not be scored; their reward is 0", good="0"
    ),
    "eval/reward_sampled": Metric(
        "",
        "mean reward of one response to each held-out prompt, sampled at temperature 1; held-out sets with a reward or sampling "
        "settings of their own are not included",
        label="sampled",
        good="rises with reward/mean; if it falls while reward/mean rises, the policy overfits",
        reduction="last",
    ),
    "eval/reward_greedy": Metric(
        "",
        "mean reward of the greedy response to each held-out prompt, for the same held-out sets as eval/reward_sampled",
        label="greedy",
        good="rises with reward/mean",
        reduction="last",
    ),
    "eval/accuracy_sampled": Metric(
        "",
        "fraction of the held-out prompts whose response, sampled at temperature 1, is correct",
        label="accuracy sampled",
        good="rises with reward/mean",
        reduction="last",
    ),
    "eval/accuracy_greedy": Metric(
        "",
        "fraction of the held-out prompts whose greedy response is correct",
        label="accuracy greedy",
        good="rises with reward/mean",
        reduction="last",
    ),
    "rollout/samples": Metric(
        "",
        "number of responses on which the step trains; groups that rollout.filter rejects are not included",
        ",.0f",
        good="constant, unless rollout.filter rejects groups",
    ),
    "rollout/tokens": Metric(
        "tokens",
        "number of sampled tokens in the responses on which the step trains",
        ",.0f",
        good="changes only with the length of the responses",
        reduction="sum",
    ),
    "rollout/response_length_mean_tokens": Metric(
        "tokens",
        "mean length of the responses, tool results included",
        ".1f",
        label="length",
        good="well below rollout.max_response_tokens",
    ),
    "rollout/weight_version": Metric(
        "", "oldest weight version that sampled a token", ".0f", good="rises by 1 in each step", reduction="last"
    ),
    "rollout/staleness_mean": Metric(
        "",
        "mean staleness of the responses: number of weight versions from the first sampled token to training",
        ".2f",
        good="0 for synchronous rollouts; at most rollout.max_staleness",
    ),
    "rollout/staleness_max": Metric(
        "", "largest staleness of a response", ".0f", good="at most rollout.max_staleness", reduction="max"
    ),
    "rollout/truncated_fraction": Metric(
        "",
        "fraction of the responses that ended because of the token limit or the turn limit",
        good="near 0; a truncated response often has no answer",
    ),
    "rollout/kept_groups_fraction": Metric(
        "", "fraction of the sampled groups that rollout.filter accepts", good="above 0.5; rejected groups cost time"
    ),
    "rollout/rounds": Metric(
        "",
        "number of times that prompts were drawn for the step: once, and again each time after groups were rejected",
        ".0f",
        good="1",
    ),
    "rollout/epoch": Metric(
        "",
        "number of prompts that the steps have used so far, divided by the number of training prompts",
        ".2f",
        good="rises in each step by rollout.prompts_per_step / number of training prompts",
        reduction="last",
    ),
    "rollout/waiting_groups": Metric(
        "",
        "number of groups in the staleness buffer, finished or still being sampled",
        ".0f",
        good="0 for synchronous rollouts; else constant",
    ),
    "rollout/dropped_groups": Metric(
        "",
        "number of groups that were discarded because over-sampling dispatched more groups than needed",
        ".0f",
        good="near 0; dropped groups cost time",
        reduction="sum",
    ),
    "rollout/trained_length_ratio": Metric(
        "",
        "mean response length of the groups on which the last four steps trained, divided by the mean over equally many groups "
        "that were drawn one after another, trained or not; below 1, the steps prefer short responses",
        good="near 1",
    ),
    "rollout/token_staleness_mean": Metric(
        "", "mean staleness of the sampled tokens", ".2f", good="at most rollout.max_staleness"
    ),
    "rollout/mixed_versions_fraction": Metric(
        "",
        "fraction of the responses whose tokens were sampled by several weight versions",
        good="0 for synchronous rollouts",
    ),
    "rollout/turns_mean": Metric(
        "", "mean number of turns in a response", ".2f", label="turns", good="between 1 and the limit of turns"
    ),
    "rollout/tool_calls_mean": Metric(
        "", "mean number of tool calls in a response", ".2f", label="calls", good="above 0 if the task needs tools"
    ),
    "rollout/tool_errors_fraction": Metric(
        "", "fraction of the tool calls that were malformed, failed or timed out", good="falls towards 0"
    ),
    "rollout/cached_tokens_fraction": Metric(
        "",
        "fraction of the input tokens of all turns that were in the engine's prefix cache",
        good="high; later turns then skip the prefill of earlier turns",
    ),
    "rollout/replaced_engines": Metric(
        "", "number of engines that failed during sampling and were replaced", ".0f", good="0", reduction="sum"
    ),
    "rollout/retried_responses": Metric(
        "", "number of responses that were requested again because an engine failed", ".0f", good="0", reduction="sum"
    ),
    "time/step_s": Metric("s", "wall time of the whole step", ".2f", good="constant after the first step"),
    "component_time/engine_s": Metric(
        "s", "time that the step waits for SGLang to sample", ".2f", good="near 0 for disaggregated asynchronous runs"
    ),
    "component_time/megatron_s": Metric(
        "s",
        "part of the step that the slowest rank spends in Megatron's forward and backward passes and optimizer",
        ".2f",
        good="constant for responses of constant length",
    ),
    "component_time/critic_s": Metric(
        "s",
        "part of the step that the slowest rank spends in the critic's forward and backward passes and optimizer",
        ".2f",
        good="at most component_time/megatron_s for models of equal size",
    ),
    "component_time/score_s": Metric(
        "s",
        "duration of the forward passes for log-probabilities and other columns, summed over all models, which may overlap",
        ".2f",
        good="below the time of the update",
    ),
    "component_time/overlap_s": Metric(
        "s",
        "time saved because models work at the same time: sum of their durations minus wall time of the phases score and update",
        ".2f",
        good="above 0 if critic, reference or other models have devices of their own",
    ),
    "component_time/sync_engine_s": Metric(
        "s", "part of the step that waits for SGLang to load weights", ".2f", good="a few percent of the step"
    ),
    "component_time/reward_s": Metric(
        "s", "part of the step that decodes and scores responses", ".2f", good="a few percent of the step"
    ),
    "component_time/reward_overlap_s": Metric(
        "s", "scoring time that delays no step", ".2f", good="above 0 if reward models or judges compute the rewards"
    ),
    "component_time/controller_s": Metric(
        "s",
        "rest of the step: its wall time minus the time in which engines, trainer ranks or rewards work",
        ".2f",
        good="a few percent of the step",
    ),
    "throughput/tokens_per_s": Metric(
        "tokens/s", "sampled tokens, divided by the wall time of the whole step", ",.0f", good="high and constant"
    ),
    "throughput/samples_per_s": Metric(
        "samples/s", "responses, divided by the wall time of the whole step", ".1f", good="high and constant"
    ),
    "weight_sync/bytes": Metric(
        "bytes",
        "bytes sent to all engines; bytes written if weight_sync.transport=disk or weight_sync.lora=adapter",
        ",.0f",
        good="constant; smaller with weight_sync.delta",
        reduction="sum",
    ),
    "weight_sync/version": Metric(
        "", "weight version that all engines serve", ".0f", good="rises by 1 in each step", reduction="last"
    ),
    "weight_sync/buckets": Metric("", "number of buckets sent, counted once for each receiver", ".0f", good="constant"),
    "weight_sync/senders": Metric("", "number of trainer ranks that sent weights", ".0f", good="constant"),
    "weight_sync/compressed_fraction": Metric(
        "", "size of the sent data, divided by its size before compression", good="below 0.5 with weight_sync.delta"
    ),
    "weight_sync/attempts": Metric(
        "", "number of pushes that it took until every engine had the weight version", ".0f", good="1", reduction="max"
    ),
    "weight_sync/replaced_engines": Metric(
        "", "number of engines that failed during a push and were replaced", ".0f", good="0", reduction="sum"
    ),
    "placement/switch_s": Metric(
        "s", "part of the step that offloads and loads colocated roles", ".2f", good="a few percent of the step"
    ),
    "placement/switches": Metric("", "number of times that an offloaded role was loaded", ".0f", good="constant"),
    "placement/residual_bytes": Metric(
        "bytes",
        "largest device memory that an offloaded trainer rank still uses",
        ",.0f",
        good="small in comparison with the memory of the GPU",
        reduction="max",
    ),
    "mismatch/logprob_abs_max": Metric(
        "nats",
        "largest absolute difference between the trainer's and the engine's log-probability of a token",
        ".1e",
        label="mismatch",
        good="1e-4 or less in float32; below about 1 in bfloat16",
        reduction="max",
    ),
    "mismatch/logprob_abs_mean": Metric(
        "nats",
        "mean absolute difference between the trainer's and the engine's log-probability of a token",
        ".1e",
        good="1e-5 or less in float32; below about 0.02 in bfloat16",
    ),
    "mismatch/nan_tokens": Metric(
        "tokens", "number of trained tokens whose engine log-probability is NaN", ",.0f", good="0", reduction="sum"
    ),
    "mismatch/kl": Metric(
        "nats",
        "KL(engine || trainer) per token, estimated by the mean of log(pi_engine / pi_trainer)",
        ".2e",
        good="constant; below 1e-3 for fresh samples",
    ),
    "mismatch/k3": Metric(
        "nats", "KL(engine || trainer) per token, estimated by k3", ".2e", good="constant; below 1e-3 for fresh samples"
    ),
    "mismatch/chi2": Metric(
        "", "chi-square divergence of the trainer from the engine, per token", ".2e", good="near 0, and constant"
    ),
    "mismatch/ess_fraction": Metric(
        "", "effective sample size under the trainer's policy, divided by the number of tokens", ".4f", good="near 1"
    ),
    "mismatch/ppl_ratio": Metric(
        "", "perplexity of the samples under the trainer, divided by that under the engine", ".4f", good="near 1"
    ),
    "correction/weight_mean": Metric("", "mean weight that algorithm.correction gives a trained token", good="near 1"),
    "correction/truncated_fraction": Metric(
        "", "fraction of the trained tokens whose correction weight was truncated", ".4f", good="near 0"
    ),
    "correction/rejected_fraction": Metric(
        "", "fraction of the trained tokens that the correction rejects as too far off-policy", ".4f", good="near 0"
    ),
    "loss/policy": Metric(
        "", "loss of the actor, averaged over the optimizer steps", ".2e", good="no target; look at the reward instead"
    ),
    "loss/clip_fraction": Metric(
        "", "fraction of the trained tokens whose probability ratio was clipped", good="below about 0.2"
    ),
    "loss/dual_clip_fraction": Metric(
        "", "fraction of the trained tokens with a negative advantage and a loss that dual_clip limits", good="near 0"
    ),
    "loss/selected_fraction": Metric(
        "", "fraction of the trained tokens that ClipCov or KLCov selects", ".5f", good="near algorithm.loss.fraction"
    ),
    "loss/response_weight": Metric(
        "", "mean weight that VESPO gives to a token's response", ".4f", good="near 1; near 0 if samples are too old"
    ),
    "loss/mtp": Metric("nats", "mean cross-entropy of the tokens that the MTP layers predict", good="falls"),
    "loss/sft": Metric(
        "nats", "loss of supervised training; for cross-entropy: mean per response token", label="loss", good="falls"
    ),
    "loss/sft_held_out": Metric("nats", "loss/sft on the rows of sft.test", good="falls"),
    "optim/grad_norm": Metric("", "gradient norm before clipping", good="constant, without jumps"),
    "optim/lr": Metric("", "learning rate", ".1e", good="follows the schedule of optim", reduction="last"),
    "advantage/mean": Metric("", "mean advantage per trained token", good="near 0"),
    "advantage/std": Metric(
        "", "standard deviation of the advantages over trained tokens", good="above 0; at 0 the policy learns nothing"
    ),
    "advantage/drawn_fraction": Metric(
        "", "fraction of the responses that algorithm.resampling draws at least once", ".4f", good="constant"
    ),
    "preference/accuracy": Metric(
        "", "fraction of pairs that the model ranks correctly, or of labels that it agrees with", good="rises towards 1"
    ),
    "preference/held_out_accuracy": Metric("", "preference/accuracy on the rows of sft.test", good="rises towards 1"),
    "preference/margin": Metric("", "reward of the chosen minus reward of the rejected response", good="rises"),
    "preference/chosen_reward": Metric("", "mean reward, or score, of the chosen responses", good="rises"),
    "preference/rejected_reward": Metric("", "mean reward, or score, of the rejected responses", good="falls"),
    "preference/chosen_logprob": Metric("nats", "mean log-probability of a chosen response", good="falls little"),
    "preference/rejected_logprob": Metric("nats", "mean log-probability of a rejected response", good="falls"),
    "preference/reference_point": Metric("nats", "KL to the reference in the loss of KTO", ".2e", good="rises slowly"),
    "critic/loss": Metric("", "half the mean squared error of the values, with clipping", ".2e", good="falls"),
    "critic/value_mean": Metric("", "mean of the critic's values for the sampled tokens", good="near the mean return"),
    "critic/explained_variance": Metric(
        "", "1 - Var[return - value] / Var[return]; 1: perfect values; 0: constant values", good="above 0, towards 1"
    ),
    "critic/grad_norm": Metric("", "the critic's gradient norm before clipping", good="constant, without jumps"),
    "critic/lr": Metric(
        "", "the critic's learning rate", ".1e", good="follows the schedule of critic.optim", reduction="last"
    ),
    "distill/divergence": Metric(
        "nats",
        "divergence between teacher and policy per sampled token (algorithm.loss.divergence), averaged like the loss",
        label="divergence",
        good="falls over the run",
    ),
    "distill/teacher_mass": Metric(
        "",
        "probability that the teacher gives to its algorithm.loss.top_k most probable tokens",
        good="close to 1; if it is lower, a larger top_k shows the policy more of the teacher's distribution",
    ),
    "distill/policy_mass": Metric(
        "",
        "probability that the policy gives to the algorithm.loss.top_k most probable tokens of the teacher",
        good="approaches distill/teacher_mass",
    ),
    "policy/kl_ref": Metric(
        "nats", "mean estimate of KL(policy || reference) per trained token, as in the loss", ".2e", good="rises slowly"
    ),
    "policy/kl_reward": Metric(
        "nats",
        "mean estimate of KL(policy || reference) per sampled token, as subtracted from the reward",
        ".2e",
        good="rises slowly",
    ),
    "policy/kl_coef_loss": Metric(
        "", "coefficient of the KL term in the loss", ".2e", good="constant, unless it is adapted", reduction="last"
    ),
    "policy/kl_coef_reward": Metric(
        "", "coefficient of the KL term in the reward", ".2e", good="constant, unless it is adapted", reduction="last"
    ),
    "policy/entropy_coef": Metric(
        "",
        "coefficient of the entropy bonus that the step used; 0 while an adaptive bonus is not active",
        ".2e",
        good="constant, unless it is adapted",
        reduction="last",
    ),
    "policy/entropy_mean": Metric(
        "nats",
        "mean entropy of the distributions that predicted the trained tokens",
        good="falls slowly; near 0 the policy no longer explores",
    ),
    "batch/offline_samples": Metric(
        "", "number of rows of data.offline.path in the step", ".0f", good="near data.offline.rows_per_step"
    ),
    "batch/offline_reward_mean": Metric(
        "", "mean reward of the rows of data.offline.path in the step", good="constant for a file of one kind"
    ),
    "batch/computed_tokens": Metric(
        "tokens",
        "number of tokens that the forward and backward passes compute",
        ",.0f",
        good="with shared prompts, less than the tokens of all trained prompts and responses together",
        reduction="sum",
    ),
    "batch/skipped_tokens_fraction": Metric(
        "",
        "fraction of the tokens that are not computed because the advantage of their response is 0",
        good="equal to the fraction of tokens in groups whose rewards are all equal",
    ),
    "batch/shared_tokens_fraction": Metric(
        "",
        "fraction of the tokens of trained sequences that are not computed because responses share their prompt",
        good="high for long prompts",
    ),
    "batch/imbalance": Metric(
        "",
        "estimated cost of the replica with the most work, divided by the mean cost of the replicas",
        ".4f",
        good="near 1",
        reduction="max",
    ),
    "batch/micro_batches": Metric(
        "", "largest number of micro-batches on a replica", ".0f", good="constant for constant lengths", reduction="max"
    ),
    "batch/optimizer_steps": Metric(
        "", "number of optimizer steps", ".0f", good="algorithm.mini_batches x algorithm.epochs", reduction="sum"
    ),
    "batch/trained_tokens": Metric(
        "tokens", "number of sampled tokens in the loss", ",.0f", good="near rollout/tokens", reduction="sum"
    ),
    "batch/zero_advantage_fraction": Metric(
        "", "fraction of the responses whose advantage is 0", good="well below 1; these responses teach nothing"
    ),
}


def find(name: str) -> Metric:
    """Return the declaration of `name`. If there is none, raise ValueError with the most similar declared name."""
    if name in METRICS:
        return METRICS[name]
    if member := find_member(name):
        return member
    near = difflib.get_close_matches(name, METRICS, n=1, cutoff=0.0)[0]
    raise ValueError(
        f"metric {name!r} is not declared; did you mean {near!r}? Declare a new metric in mrl/core/metrics.py."
    )


def logged_name(name: str) -> str:
    """Return the name under which a metric of a loss or correction is logged: `surprise` -> `own/surprise`, `a/b` -> `a/b`."""
    return name if "/" in name else f"own/{name}"


def section(name: str) -> str:
    """Return the title of a metric's section: `reward/mean` -> `Reward`."""
    return SECTIONS[name.split("/")[0]]


def in_sections(names: Iterable[str]) -> dict[str, list[str]]:
    """Return title of a section -> its metrics among `names`, in the order of SECTIONS and METRICS."""
    found, order = set(names), list(METRICS)
    ranked = sorted(found, key=lambda name: (order.index(name) if name in METRICS else len(order), name))
    by_section = {title: [name for name in ranked if section(name) == title] for title in SECTIONS.values()}
    return {title: members for title, members in by_section.items() if members}


def reduce(name: str, values: Sequence[float]) -> float:
    """Reduce a metric's values of several steps to one number, as Metric.reduction says. Returns NaN if there are no values."""
    if not values:
        return math.nan
    reductions = {"mean": lambda: sum(values) / len(values), "sum": lambda: sum(values), "max": lambda: max(values)}
    return reductions.get(find(name).reduction, lambda: values[-1])()


def label(name: str) -> str:
    """Return the short name for the progress display: `reward/mean` -> `reward`, `time/rollout_s` -> `rollout`."""
    return find(name).label or name.split("/")[1].removesuffix("_s")


def check(names: Iterable[str]) -> None:
    """Raise ValueError for the first name that is not declared."""
    for name in names:
        find(name)
