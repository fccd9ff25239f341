"""Health check: finds problems that keep a run from learning, in the metrics of each step.

`RULES` lists the problems. A rule reads the metrics of one step, of the first steps and of the best earlier step. A problem is
reported once, after it has been present for several consecutive steps. The report contains the measured values and the config
keys to change. At the end of the run, the health check says how many steps had each reported problem. docs/how_to/learning.md
describes each problem.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np
import orjson

from mrl.core.jsonl import check_lines
from mrl.core.metrics import Metrics
from mrl.core.run_errors import UnhealthyRunError

BASELINE_STEPS = 3  # number of steps with which later steps are compared: the first steps that trained the actor
TRAINED_STEP_METRIC = "optim/grad_norm"  # a step has it if it trained the actor; steps that warm up the critic lack it
MIN_TRUNCATED_FRACTION = 0.9  # smallest fraction of truncated responses that is a problem
MIN_FAILED_FRACTION = 0.05  # smallest fraction of responses without a score that is a problem
ENTROPY_LEFT = 0.05  # an entropy below this fraction of the first steps' entropy has collapsed
# The mean difference of log-probabilities is a problem if it exceeds both of these limits:
MISMATCH_NATS = 0.05  # absolute limit
MISMATCH_GROWTH = 5.0  # limit as a multiple of the mean difference in the first steps
# A gradient norm has exploded if it exceeds this factor times the larger of two norms: of the first steps, and of the best
# earlier step. The norms of the first steps alone are not a good reference: if hardly any response is right at first, most
# advantages are 0, so these norms are very small.
GRAD_NORM_GROWTH = 20.0
# The mean reward has collapsed if its fall since the best step exceeds both of these limits:
REWARD_LOST = 0.75  # fraction of the rise from the first steps to the best step
REWARD_ERRORS = 5.0  # number of standard errors of the mean reward in the best step
EQUAL_REWARDS_ERRORS = 2.0  # if all rewards of a step are equal, this number of standard errors is the only limit


@dataclass(frozen=True)
class LearningSettings:
    """Config values that the rules read and quote in their texts."""

    responses_per_prompt: int
    max_response_tokens: int
    lr: float
    advantage: str  # name of the advantage estimator's class
    group_relative: bool  # whether the advantage compares the responses to one prompt with each other
    reads_rewards: bool = True  # whether advantages depend on rewards; false for distillation without rewards
    mask_truncated: bool = False


@dataclass(frozen=True)
class StepView:
    """The input of a rule: the settings, and the metrics of one step, of the first steps and of the best earlier step."""

    now: Metrics
    first: Sequence[Metrics]  # at most BASELINE_STEPS steps; each trained the actor
    settings: LearningSettings
    best: Metrics = field(default_factory=dict)  # the earlier step with the largest mean reward

    def value(self, name: str) -> float:
        """Return a metric of this step; NaN if the step does not have it."""
        return self.now.get(name, math.nan)

    def baseline(self, name: str) -> float:
        """Return the median of a metric over the steps in `first`; NaN until BASELINE_STEPS of them have the metric."""
        values = [metrics[name] for metrics in self.first if math.isfinite(metrics.get(name, math.nan))]
        return float(np.median(values)) if len(values) == BASELINE_STEPS else math.nan


def _no_signal(step: StepView) -> str:
    if step.value("batch/zero_advantage_fraction") != 1 or step.value("rollout/kept_groups_fraction") == 0:
        return ""
    if _reward_collapsed(step) or not step.settings.reads_rewards:
        return ""  # _diverged reports a collapsed reward; if advantages do not depend on rewards, there is no problem
    settings, mean = step.settings, step.value("reward/mean")
    if settings.group_relative and settings.responses_per_prompt == 1:
        reason = one_response_text(settings.advantage)
    elif _is_solved(step):
        return ""
    elif step.value("reward/std") == 0:
        reason = (
            f"every reward of the step is {mean:.4g}. Compare the responses with their rewards (`mrl samples`): either the "
            "reward function does not tell good responses from bad ones, or the prompts of data.train are all too hard or all "
            "too easy for the model."
        )
    else:
        reason = (
            f"all responses to one prompt have the same reward (mean {mean:.4g}). Raise rollout.responses_per_prompt "
            f"(now {settings.responses_per_prompt}) or rollout.temperature, or use prompts of medium difficulty in data.train."
        )
    return f"every advantage is 0, so the rewards teach the model nothing: {reason}"


def one_response_text(advantage: str) -> str:
    """Explain why an estimator that compares the responses to one prompt cannot learn from a single response."""
    return (
        f"rollout.responses_per_prompt=1, but {advantage} compares the responses to one prompt with each other. Set "
        "rollout.responses_per_prompt to 4 or more, or choose an algorithm that needs no groups, such as algorithm=reinforce_pp."
    )


def _is_solved(step: StepView) -> bool:
    """Return whether all rewards of the step are equal, above the median of the first steps, and not below any earlier mean."""
    mean, first = step.value("reward/mean"), step.baseline("reward/mean")
    best = step.best.get("reward/mean", -math.inf)
    is_best = mean > best or math.isclose(mean, best, abs_tol=1e-9)
    return step.value("reward/std") == 0 and is_best and mean > first and not math.isclose(mean, first, abs_tol=1e-9)


def _constant_reward(step: StepView) -> str:
    is_seen = step.value("reward/std") == 0 and step.value("batch/zero_advantage_fraction") < 1
    if not (is_seen and step.settings.reads_rewards) or _is_solved(step):
        return ""
    return (
        f"every reward of the step is {step.value('reward/mean'):.4g}, so the rewards do not tell good responses from bad ones. "
        "Check the reward function with `mrl samples`, or use prompts of medium difficulty in data.train."
    )


def _truncated(step: StepView) -> str:
    fraction, settings = step.value("rollout/truncated_fraction"), step.settings
    if not fraction >= MIN_TRUNCATED_FRACTION:
        return ""
    masked = ", and algorithm.mask_truncated=true excludes them from the loss" if settings.mask_truncated else ""
    return (
        f"{fraction:.0%} of the responses were truncated at rollout.max_response_tokens={settings.max_response_tokens}{masked}. "
        "Raise rollout.max_response_tokens. If the model never ends its responses, check data.chat_template and "
        "data.template_args, or fine-tune the model first (sft.train)."
    )


def _failed_rewards(step: StepView) -> str:
    fraction = step.value("reward/failed_fraction")
    if not fraction >= MIN_FAILED_FRACTION:
        return ""
    return (
        f"{fraction:.0%} of the responses could not be scored; their reward counts as 0. The file logs/rollout.log in run.dir "
        "has the reasons. Correct the reward function. If it is slow, raise scoring.sample_timeout_s."
    )


def _entropy_collapse(step: StepView) -> str:
    entropy, first = step.value("policy/entropy_mean"), step.baseline("policy/entropy_mean")
    if not entropy < ENTROPY_LEFT * first:
        return ""
    return (
        f"the entropy of the policy collapsed to {entropy:.2g} nats per token, from {first:.2g} in the first steps; the "
        f"responses to a prompt become equal, and learning ends. Lower optim.lr (now {step.settings.lr:g}), or set "
        "algorithm.entropy_coef above 0 or algorithm.kl_in_loss."
    )


def _mismatch(step: StepView) -> str:
    name = "mismatch/logprob_abs_mean"
    mismatch, first = step.value(name), step.baseline(name)
    if not mismatch > max(MISMATCH_NATS, MISMATCH_GROWTH * first if math.isfinite(first) else MISMATCH_NATS):
        return ""
    before = f", {first:.2g} in the first steps" if math.isfinite(first) else ""
    return (
        f"the log-probabilities of trainer and engine differ by {mismatch:.2g} nats per token on average{before}; the samples no "
        "longer come from the policy that is trained. Lower rollout.max_staleness, set algorithm.correction, use the same "
        "precision (model.dtype) in both, and for a mixture of experts set rollout.routing_replay=true. `mrl certify engine`, "
        "with the arguments of this run, names the layer in which both differ on equal weights."
    )


def _nothing_trained(step: StepView) -> str:
    settings, kept = step.settings, step.value("rollout/kept_groups_fraction")
    if kept == 0:
        return (
            "rollout.filter rejected all groups of the step, so nothing was trained "
            f"(mean reward {step.value('reward/mean'):.4g}). Use prompts that the filter accepts, raise "
            f"rollout.responses_per_prompt (now {settings.responses_per_prompt}), or change rollout.filter."
        )
    if step.value("optim/grad_norm") != 0 or step.value("batch/zero_advantage_fraction") == 1:
        return ""
    if settings.mask_truncated and step.value("rollout/truncated_fraction") == 1:
        reason = (
            "algorithm.mask_truncated=true excludes all responses, because all were truncated. Raise "
            f"rollout.max_response_tokens (now {settings.max_response_tokens})."
        )
    elif (rejected := step.value("correction/rejected_fraction")) > 0:
        reason = (
            f"algorithm.correction rejects {rejected:.0%} of the sampled tokens as too far off-policy. Lower "
            "rollout.max_staleness, or relax algorithm.correction."
        )
    else:
        reason = "no response has an effect on the loss. Check algorithm.loss and algorithm.advantage."
    return f"the gradient norm is 0, so the step changed nothing: {reason}"


def _reward_collapsed(step: StepView) -> bool:
    """Return whether the mean reward has collapsed since the best step.

    If all responses of the step have the same reward, a fall by more than EQUAL_REWARDS_ERRORS standard errors is a collapse.
    Otherwise, a fall is a collapse if it exceeds both REWARD_LOST (relative to the rise) and REWARD_ERRORS standard errors. A
    step with the problem "failed rewards" has no collapse.

    Rewards may be negative, so the mean is not compared with 0. The responses to one prompt often get the same reward. For the
    standard error, each prompt therefore counts as one reward.
    """
    best = step.best.get("reward/mean", math.nan)
    fall, rise = best - step.value("reward/mean"), best - step.baseline("reward/mean")
    prompts = step.best.get("rollout/samples", math.nan) / step.settings.responses_per_prompt
    error = step.best.get("reward/std", math.nan) / math.sqrt(max(1.0, prompts))
    if _failed_rewards(step):
        return False
    if step.value("reward/std") == 0:
        return fall > 0 and fall > EQUAL_REWARDS_ERRORS * error
    return rise > 0 and fall > REWARD_LOST * rise and fall > REWARD_ERRORS * error


def _diverged(step: StepView) -> str:
    norm = step.value("optim/grad_norm")
    first, best = step.baseline("optim/grad_norm"), step.best.get("optim/grad_norm", 0.0)
    if norm > GRAD_NORM_GROWTH * max(first, best) > 0:
        in_best = f" and {best:.3g} in the best step" if best else ""  # a step that warmed up the critic has no norm
        sign = f"the gradient norm rose to {norm:.3g}, from {first:.3g} in the first steps{in_best}"
    elif _reward_collapsed(step):
        sign = (
            f"the mean reward fell to {step.value('reward/mean'):.3g}, from {step.best['reward/mean']:.3g} in the best step, and "
            f"the entropy of the policy changed to {step.value('policy/entropy_mean'):.2g} nats per token, from "
            f"{step.best.get('policy/entropy_mean', math.nan):.2g}"
        )
    else:
        return ""
    return f"{sign}: the training diverges. optim.lr is {step.settings.lr:g}; try a tenth of it, or a longer optim.warmup_steps."


@dataclass(frozen=True)
class Rule:
    """One problem that the health check finds."""

    find: Callable[[StepView], str]  # returns a description of the problem, or "" if the step does not have the problem
    patience: int = 3  # the problem is reported after this number of consecutive steps with the problem


RULES = {
    "no learning signal": Rule(_no_signal, 2),
    "all rewards equal": Rule(_constant_reward),
    "nothing trained": Rule(_nothing_trained, 2),
    "truncated responses": Rule(_truncated),
    "failed rewards": Rule(_failed_rewards),
    "entropy collapse": Rule(_entropy_collapse),
    "mismatch of trainer and engine": Rule(_mismatch),
    "divergence": Rule(_diverged, 2),
}
"""Name of a problem -> rule."""


@dataclass
class LearningHealth:
    """Applies RULES to the metrics of each step. Reports each problem once; at the end, reports how many steps had it."""

    settings: LearningSettings
    report: Callable[[str], None]  # shows a line to the user
    stop: bool = False  # whether a problem ends the run
    first: list[Metrics] = field(default_factory=list)  # metrics of the first steps that trained the actor
    _best: Metrics = field(default_factory=dict)  # metrics of the step with the largest mean reward
    # problem -> number of consecutive steps that had it, up to the last checked step
    _streaks: dict[str, int] = field(default_factory=dict)
    _steps: dict[str, list[int]] = field(default_factory=dict)  # problem -> all steps that had it
    _reported: dict[str, str] = field(default_factory=dict)  # problem -> text of its report
    _checked: int = 0  # number of checked steps

    def check(self, step: int, metrics: Metrics) -> None:
        """Check a finished step. With `stop`, raise UnhealthyRunError when a problem is reported."""
        view = StepView(now=metrics, first=tuple(self.first), settings=self.settings, best=self._best)
        if metrics.get("reward/mean", -math.inf) > self._best.get("reward/mean", -math.inf):
            self._best = metrics
        if len(self.first) < BASELINE_STEPS and TRAINED_STEP_METRIC in metrics:
            self.first.append(metrics)
        self._checked += 1
        new = [text for name, rule in RULES.items() if (text := self._apply(name, rule, view, step))]
        for text in new:
            self.report(f"step {step}: {text}")
        if new and self.stop:
            raise UnhealthyRunError(f"trainer.on_unhealthy=stop ends the run after step {step}: {new[0]}")

    def _apply(self, name: str, rule: Rule, view: StepView, step: int) -> str:
        """Apply one rule. Returns the text to report, or ""."""
        text = rule.find(view)
        self._streaks[name] = self._streaks.get(name, 0) + 1 if text else 0
        if text:
            self._steps.setdefault(name, []).append(step)
        if self._streaks[name] < rule.patience or name in self._reported:
            return ""
        self._reported[name] = text
        return text

    def report_totals(self) -> None:
        """For each reported problem, report how many steps had it."""
        for name in self._reported:
            steps = self._steps[name]
            self.report(f"{name}: in {len(steps)} of {self._checked} steps, from step {steps[0]} to step {steps[-1]}")


def read_first_steps(path: Path, name: str = TRAINED_STEP_METRIC) -> list[Metrics]:
    """Return the metrics of the first BASELINE_STEPS steps in a metrics.jsonl that have the metric `name`.

    Damaged lines are skipped. Returns [] if there is no file.
    """
    steps = (orjson.loads(line) for _, line in check_lines(path).lines)
    found = islice((step for step in steps if step.get(name) is not None), BASELINE_STEPS)
    return [{key: value for key, value in step.items() if value is not None} for step in found]


def find_static_problems(
    settings: LearningSettings, *, num_rows: int, prompts_per_step: int, max_steps: int
) -> list[str]:
    """Return the problems that can be found before the run starts. `num_rows`: number of rows of data.train."""
    problems = []
    if settings.group_relative and settings.responses_per_prompt == 1:
        problems.append(f"the run cannot learn: {one_response_text(settings.advantage)}")
    if num_rows < prompts_per_step and max_steps:
        problems.append(
            f"data.train has {num_rows} rows, but a step draws rollout.prompts_per_step={prompts_per_step} prompts, so each step "
            f"repeats rows. Add rows, or set rollout.prompts_per_step to at most {num_rows}."
        )
    return problems
