"""Functions that call the algorithms of verl and trl with ragged batches. They run in a process that `install` prepares.

A batch is a `Case` of loss_cases.py or an AdvantageInputs of mrl. Its arrays [R] contain the tokens of B responses, one response
after another. The functions pad the arrays to [B, T], call the function of the peer, and return arrays [R].
"""

import inspect
import sys
import textwrap
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ROOT = Path(__file__).parents[2]
PEERS = ROOT / "build/peers"


def missing_packages() -> str:
    """Return what is missing for these tests, and how to get it; an empty string if nothing is missing."""
    lock = (ROOT / "requirements/peers.txt").read_text()
    if (PEERS / ".requirement").is_file() and (PEERS / ".requirement").read_text() == lock:
        return ""
    return f"no verl and trl in {PEERS}; scripts/fetch_peers.sh downloads them"


def install() -> None:
    """Make the packages of the peers importable in this process. All other packages keep the version of .venv."""
    sys.path.append(str(PEERS))
    torch.set_default_dtype(torch.float64)


class Padded:
    """Converts arrays [R] of B responses to tensors [B, T] and back, and has the mask of the tokens.

    `gaps` [R]: number of masked tokens before each token, such as tokens of tool results, which the policy did not sample.
    """

    def __init__(self, lengths: NDArray, gaps: NDArray | None = None) -> None:
        gaps = np.zeros(sum(lengths), int) if gaps is None else gaps
        ends = np.cumsum(lengths)
        positions = [np.cumsum(gaps[end - n : end] + 1) - 1 for end, n in zip(ends, lengths, strict=True)]
        rows, columns = np.repeat(np.arange(len(lengths)), lengths), np.concatenate(positions)
        self.lengths = torch.tensor(lengths)
        self.bool_mask = torch.zeros(len(lengths), max(columns) + 1, dtype=torch.bool)
        self.bool_mask[rows, columns] = True
        self.mask = self.bool_mask.to(torch.float64)

    def __call__(self, values: NDArray, filler: float = 0.0) -> Tensor:
        padded = torch.full(self.mask.shape, filler, dtype=torch.float64)
        padded[self.bool_mask] = torch.tensor(np.asarray(values), dtype=torch.float64)
        return padded

    def flat(self, values: Tensor) -> NDArray:
        return values[self.bool_mask].detach().numpy()


def _gradient(pad: Padded, logprobs: Tensor, loss: Tensor) -> tuple[float, NDArray]:
    loss.backward()
    assert logprobs.grad is not None
    return loss.item(), pad.flat(logprobs.grad)


# verl


def verl_advantages(
    name: str, batch: Any, settings: Mapping[str, Any], gaps: NDArray | None = None, **others: Any
) -> NDArray:
    """Return the advantages [R] of one of verl's estimators.

    `settings`: fields of AlgoConfig. `gaps`: see Padded. `others`: further arguments of the estimator; arrays [R] are padded.
    """
    from verl.trainer.config import AlgoConfig
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    estimator, pad = get_adv_estimator_fn(name), Padded(batch.lengths, gaps)
    config = AlgoConfig(**settings)
    columns = {name: pad(values) for name, values in batch.columns.items()}
    prompt = torch.ones(len(batch.lengths), 2)
    available = {
        "token_level_rewards": pad(batch.token_rewards),
        "response_mask": pad.mask,
        "index": np.array([f"prompt {group}" for group in batch.groups], dtype=object),
        "config": config,
        "gamma": config.gamma,
        "lam": config.lam,
        "norm_adv_by_std_in_grpo": config.norm_adv_by_std_in_grpo,
        "values": columns["values"],
        "old_log_probs": columns["old_logprobs"],
        "sum_pi_squared": columns["sum_pi_squared"],
        "reward_baselines": torch.tensor(batch.greedy_rewards),
        "non_tensor_batch": batch.reward_parts,
        "batch": {"prompts": prompt, "attention_mask": torch.cat([prompt, pad.mask], 1).long()},
        **{name: pad(value) if isinstance(value, np.ndarray) else value for name, value in others.items()},
    }
    parameters = inspect.signature(estimator).parameters
    advantages, _ = estimator(**{name: value for name, value in available.items() if name in parameters})
    return pad.flat(advantages)


def verl_loss(
    mode: str, case: Any, aggregation: str, settings: Mapping[str, Any], policy_loss: Mapping[str, Any]
) -> tuple[float, NDArray]:
    """Return verl's loss of a batch, and its gradient [R]. `settings`: fields of ActorConfig."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config.actor import ActorConfig, PolicyLossConfig

    pad = Padded(case.lengths)
    config = ActorConfig(
        strategy="megatron",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        policy_loss=PolicyLossConfig(loss_mode=mode, **policy_loss),
        **settings,
    )
    logprobs = pad(case.logprobs).requires_grad_()
    loss, _ = get_policy_loss_fn(mode)(pad(case.old), logprobs, pad(case.advantages), pad.mask, aggregation, config)
    return _gradient(pad, logprobs, loss)


def verl_bypass_loss(case: Any, preset: str, aggregation: str) -> tuple[float, NDArray, int]:
    """Return verl's loss in bypass mode with a preset, its gradient [R], and the number of tokens that are not rejected."""
    from verl.trainer.config import RolloutCorrectionConfig
    from verl.trainer.ppo import core_algos
    from verl.workers.config.actor import ActorConfig, PolicyLossConfig

    pad, correction = Padded(case.lengths), getattr(RolloutCorrectionConfig, preset)()
    config = ActorConfig(
        strategy="megatron",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_c=1e9,
        policy_loss=PolicyLossConfig(loss_mode="bypass_mode", rollout_correction=correction),
    )
    logprobs = pad(case.logprobs).requires_grad_()
    loss, _ = core_algos.compute_policy_loss_bypass_mode(
        pad(case.rollout), logprobs, pad(case.advantages), pad.mask, aggregation, config
    )
    _, kept = verl_correction(case, preset, {}, current=True)
    return *_gradient(pad, logprobs, loss), int(kept.sum())


def verl_correction(
    case: Any, preset: str | None, settings: Mapping[str, Any], current: bool = False
) -> tuple[NDArray, NDArray]:
    """Return verl's importance weights [R] and whether each token is kept [R].

    `settings`: fields of RolloutCorrectionConfig, in place of a preset. `current`: the numerator is the current policy.
    """
    from verl.trainer.config import RolloutCorrectionConfig
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

    config = getattr(RolloutCorrectionConfig, preset)() if preset else RolloutCorrectionConfig(**settings)
    pad, names = Padded(case.lengths), ("rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize")
    weights, mask, _ = compute_rollout_correction_and_rejection_mask(
        old_log_prob=pad(case.logprobs if current else case.old),
        rollout_log_prob=pad(case.rollout),
        response_mask=pad.mask,
        **{name: getattr(config, name) for name in (*names, "rollout_rs", "rollout_rs_threshold")},
    )
    given = pad.mask if weights is None else weights.batch["rollout_is_weights"]
    return pad.flat(given), pad.flat(mask)


def verl_kl_coefs(coef: float, target: float, horizon: int, measured: list[float], samples: int) -> list[float]:
    """Return verl's adaptive KL coefficient after each of the steps that measured these KL divergences."""
    from verl.trainer.ppo.core_algos import AdaptiveKLController

    controller, coefs = AdaptiveKLController(coef, target, horizon), []
    for value in measured:
        controller.update(value, samples)
        coefs.append(float(controller.value))
    return coefs


def verl_kl(case: Any, kind: str) -> tuple[NDArray, NDArray]:
    """Return verl's KL estimates [R], and the gradient [R] of their sum."""
    from verl.trainer.ppo.core_algos import kl_penalty

    logprobs = torch.tensor(case.logprobs, requires_grad=True)
    values = kl_penalty(logprobs, torch.tensor(case.columns["ref_logprobs"]), kind)
    values.sum().backward()
    assert logprobs.grad is not None
    return values.detach().numpy(), logprobs.grad.numpy()


def verl_value_loss(lengths: NDArray, values: NDArray, returns: NDArray, old: NDArray, clip: float) -> Any:
    """Return verl's value loss, averaged over tokens, and its gradient [R] with respect to the values."""
    from verl.trainer.ppo.core_algos import compute_value_loss

    pad = Padded(lengths)
    predicted = pad(values).requires_grad_()
    loss, _ = compute_value_loss(predicted, pad(returns), pad(old), pad.mask, clip)
    return _gradient(pad, predicted, loss)


def verl_aggregate(lengths: NDArray, losses: NDArray, mode: str, scale: int) -> float:
    """Return the loss that verl computes from losses of tokens [R]."""
    from verl.trainer.ppo.core_algos import agg_loss

    pad = Padded(lengths)
    return agg_loss(pad(losses), pad.mask, mode, loss_scale_factor=scale).item()


def verl_filtration(rewards: NDArray, method: str, power: float, repetitions: int) -> NDArray:
    """Return [B]: how often verl draws each response in many resamplings, as a fraction of all draws."""
    from verl.protocol import DataProto
    from verl.trainer.ppo.core_algos import compute_pf_ppo_reweight_data

    torch.manual_seed(0)
    count = len(rewards)
    tensors = {"token_level_scores": torch.tensor(rewards)[:, None], "row": torch.arange(count)}
    data = DataProto.from_dict(tensors=tensors)
    drawn = [compute_pf_ppo_reweight_data(data, method, power).batch["row"] for _ in range(repetitions)]
    return np.bincount(torch.cat(drawn).numpy(), minlength=count) / (count * repetitions)


# trl


def trl_loss(case: Any, settings: Mapping[str, Any], weights: NDArray | None = None) -> tuple[float, NDArray]:
    """Return the loss of trl's GRPOTrainer for a batch, and its gradient [R].

    `settings`: fields of GRPOConfig. `weights` [R]: importance weights of the correction.
    """
    from trl.trainer.grpo_trainer import GRPOTrainer

    pad = Padded(case.lengths)
    logprobs, inputs = pad(case.logprobs).requires_grad_(), _trl_inputs(case, pad)
    trainer = _trl_trainer(settings, logprobs, pad(case.columns["entropies"]))
    if weights is not None:
        trainer.use_vllm = trainer.vllm_importance_sampling_correction = True
        inputs["importance_sampling_ratio"] = pad(weights, 1.0)
    return _gradient(pad, logprobs, GRPOTrainer._compute_loss(trainer, None, inputs))


def trl_entropy_steps(
    case: Any, entropies: NDArray, settings: Mapping[str, Any]
) -> tuple[list[float], list[float], list[NDArray]]:
    """Return three lists with one element for each step of trl: loss, coefficient after the step, gradient [R].

    The coefficient is that of the entropy bonus. The gradient is with respect to the entropies. `entropies` [steps, R]: entropies
    of the tokens in each step. `settings`: fields of GRPOConfig. All steps have the same log-probabilities.
    """
    from trl.trainer.grpo_trainer import GRPOTrainer

    pad = Padded(case.lengths)
    trainer = _trl_trainer(settings, pad(case.logprobs), torch.empty(0))
    losses, coefs, slopes = [], [], []
    for values in entropies:
        entropy = pad(values).requires_grad_()
        trainer._get_per_token_logps_and_entropies = lambda *args, entropy=entropy, **kwargs: (
            pad(case.logprobs).requires_grad_(),
            entropy,
            None,
        )
        loss, slope = _gradient(pad, entropy, GRPOTrainer._compute_loss(trainer, None, _trl_inputs(case, pad)))
        losses.append(loss)
        coefs.append(trainer.entropy_coef)
        slopes.append(slope)
    return losses, coefs, slopes


def _trl_trainer(settings: Mapping[str, Any], logprobs: Tensor, entropies: Tensor) -> SimpleNamespace:
    """Return a stand-in for trl's GRPOTrainer, for its loss. Log-probabilities and entropies replace the model."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    given = {
        "loss_type": "grpo",
        "epsilon": 0.2,
        "epsilon_high": 0.2,
        "delta": None,
        "beta": 0.0,
        "use_bias_correction_kl": False,
        "importance_sampling_level": "token",
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "max_completion_length": 9,
        "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.05,
        "vespo_k_pos": 2.0,
        "vespo_lambda_pos": 3.0,
        "vespo_k_neg": 3.0,
        "vespo_lambda_neg": 2.0,
        "entropy_coef": 0.0,
        "use_adaptive_entropy": False,
        "entropy_target": 0.2,
        "entropy_coef_delta": 0.005,
        "entropy_coef_min": 0.0,
        "entropy_coef_max": 1.0,
    } | dict(settings)
    trainer = SimpleNamespace(
        **given,
        args=SimpleNamespace(**given, steps_per_generation=1),
        epsilon_low=given["epsilon"],
        accelerator=_one_process(),
        model=SimpleNamespace(training=True),
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        aux_loss_enabled=False,
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=given["entropy_coef"] != 0 or given["use_adaptive_entropy"],
        _last_world_entropy=float("inf"),
        _entropy_window_stats=None,
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (logprobs, entropies, None),
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
    )
    trainer.get_high_entropy_mask = lambda *args: GRPOTrainer.get_high_entropy_mask(trainer, *args)
    return trainer


def _trl_inputs(case: Any, pad: Padded) -> dict[str, Tensor]:
    """Return the inputs of the loss of trl's GRPOTrainer."""
    prompt, firsts = torch.ones(len(case.lengths), 2, dtype=torch.long), np.cumsum(case.lengths) - case.lengths
    return {
        "prompt_ids": prompt,
        "prompt_mask": prompt,
        "completion_ids": torch.ones(pad.mask.shape, dtype=torch.long),
        "completion_mask": pad.mask.long(),
        "advantages": torch.tensor(case.advantages[firsts]),
        "num_items_in_batch": pad.mask.sum(),
        "old_per_token_logps": pad(case.old),
        "sampling_per_token_logps": pad(case.rollout),
        "ref_per_token_logps": pad(case.columns["ref_logprobs"]),
    }


def _one_process() -> SimpleNamespace:
    """Return a stand-in for accelerate's Accelerator in a run with one process."""
    same: Callable = lambda values, *args, **kwargs: values  # noqa: E731
    return SimpleNamespace(num_processes=1, sync_gradients=True, gather=same, reduce=same, pad_across_processes=same)


def trl_weights(case: Any, settings: Mapping[str, Any]) -> NDArray:
    """Return the importance weights [R] of trl's GRPOTrainer. `settings`: its attributes vllm_importance_sampling_*.

    As in `trl_advantages`, only those statements of a method run that compute the result.
    """
    from trl.trainer import grpo_trainer

    pad = Padded(case.lengths)
    names = {
        "self": SimpleNamespace(
            **{"vllm_importance_sampling_clip_min": None, "vllm_importance_sampling_clip_max": 3.0} | dict(settings)
        ),
        "old_per_token_logps": pad(case.old),
        "sampling_per_token_logps": pad(case.rollout),
        "mask": pad.mask,
    }
    start = "                per_token_logps_diff = (old_per_token_logps"
    _run_statements(grpo_trainer, grpo_trainer.GRPOTrainer, start, "            # Compute the per-token log", names)
    return pad.flat(names["vllm_importance_sampling_ratio"].expand(pad.mask.shape))


def trl_advantages(rewards: NDArray, group_size: int, settings: Mapping[str, Any]) -> NDArray:
    """Return the advantages [B] of trl's GRPOTrainer. `rewards` [B, number of reward functions] are in groups of equal size.

    trl computes the advantages in a method that also samples. Here, only the statements that compute the advantages run.
    """
    from trl.trainer import grpo_trainer

    names = {
        "self": SimpleNamespace(
            **{"multi_objective_aggregation": "sum_then_normalize", "scale_rewards": "group"} | dict(settings),
            reward_weights=torch.ones(rewards.shape[1]),
            reward_funcs=[None] * rewards.shape[1],
        ),
        "rewards_per_func": torch.tensor(rewards),
        "num_generations": group_size,
        "device": torch.device("cpu"),
    }
    start, end = "        unscorable_mask = ", "        # Slice to keep only the local part of the data"
    _run_statements(grpo_trainer, grpo_trainer.GRPOTrainer, start, end, names)
    return names["advantages"].numpy()


def trl_rloo_advantages(rewards: NDArray, group_size: int, case: Any, beta: float) -> NDArray:
    """Return the advantages [B] of trl's RLOOTrainer, with a KL penalty of weight `beta` in the reward.

    As in `trl_advantages`, only those statements of a method run that compute the result.
    """
    from trl.trainer import rloo_trainer

    pad = Padded(case.lengths)
    names = {
        "self": SimpleNamespace(beta=beta, normalize_advantages=False),
        "rewards": torch.tensor(rewards),
        "num_generations": group_size,
        "old_per_token_logps": pad(case.old),
        "ref_per_token_logps": pad(case.columns["ref_logprobs"]),
        "completion_mask": pad.mask,
        "gather": lambda values: values,
    }
    start, end = "        # Include the KL penalty in the reward", "        is_std_zero = "
    _run_statements(rloo_trainer, rloo_trainer.RLOOTrainer, start, end, names)
    return names["advantages"].numpy()


def _run_statements(module: Any, trainer: type, start: str, end: str, names: dict[str, Any]) -> None:
    """Run the statements from the text `start` to the text `end` in the method of a trainer that samples and scores."""
    source = inspect.getsource(trainer._generate_and_score_completions)
    first = source.index(start)
    exec(textwrap.dedent(source[first : source.index(end, first)]), vars(module), names)
