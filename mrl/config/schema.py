"""The config schema: every key of a run with its type, default, unit, bounds and description.

The dataclasses are Hydra structured configs, so OmegaConf checks the types. `mrl config` and docs/reference/config.md show the
metadata of the fields. A value of type `Node` is a dict with keys of any name. A `Node` with the key `_target_` configures a
plug-in: the value of `_target_` names a class or function. mrl/config/instantiate.py instantiates all plug-ins before any
process starts. A value of type `Any` is a name or a `Node`.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from omegaconf import MISSING

from mrl.config.command_schema import (
    CertifyConfig,
    EvaluateConfig,
    GenerateConfig,
    PlanConfig,
    SftConfig,
    SweepConfig,
)
from mrl.config.data_schema import DataConfig, ModelConfig
from mrl.config.process_schema import (
    CheckpointConfig,
    ClusterConfig,
    FaultToleranceConfig,
    Node,
    PlacementConfig,
    ProfileConfig,
    StepDumpConfig,
    TrackingConfig,
    WeightSyncConfig,
)
from parallel.trainer_config import LoraConfig, OptimConfig
from parallel.trainer_config import config_field as key

ASYNC_STALENESS = 2  # default of rollout.max_staleness, in weight versions

# Defined by a call, because `async` is a Python keyword and cannot be a member in a class body.
RolloutMode = StrEnum("RolloutMode", ["sync", "one_step_off", "async"])  # type: ignore[bad-class-definition]


class GroupOrder(StrEnum):
    """Order in which steps train on groups: the order in which prompts were drawn, or in which responses are finished."""

    dispatched = "dispatched"
    completed = "completed"


class OnUnhealthy(StrEnum):
    """What happens when the health check of learning finds a problem."""

    warn = "warn"
    stop = "stop"


class OldLogprobs(StrEnum):
    """Source of the old policy's log-probabilities."""

    recompute = "recompute"
    rollout = "rollout"


@dataclass(frozen=True)
class RunConfig:
    """Name, folder and seed of the run."""

    name: str = key("run", "Name of the run, in wandb and in the path of the default run directory.")
    dir: str = key(MISSING, "Run directory, which holds metrics, logs, checkpoints, rollouts and the learning curve.")
    seed: int = key(0, "Seed for the order of the prompts, for sampling and for random model weights.", least=0)


@dataclass(frozen=True)
class RolloutConfig:
    """Sampling with SGLang engines (docs/concepts/asynchrony.md, docs/tutorials/agent.md)."""

    prompts_per_step: int = key(32, "Number of different prompts in one step.", "prompts", least=1)
    responses_per_prompt: int = key(8, "Number of responses to each prompt (group size).", "responses", least=1)
    group_sizes: Node | None = key(
        dict,
        "Function that chooses the number of responses to each prompt by the difficulty of the prompt: "
        "mrl.data.samplers.ByDifficulty, or your own. The mean number over all prompts stays rollout.responses_per_prompt. "
        "Default: all prompts get the same number.",
    )
    max_response_tokens: int = key(
        512, "Largest length of a response. Longer responses are truncated.", "tokens", least=1
    )
    temperature: float = key(
        1.0, "Temperature for sampling. Training computes log-probabilities with the same temperature.", above=0
    )
    top_p: float = key(
        1.0,
        "Nucleus sampling: tokens come from the smallest set of most likely tokens whose probabilities add up to at least top_p. "
        "Training computes log-probabilities without this restriction (docs/concepts/algorithms.md).",
        above=0,
        most=1,
    )
    top_k: int = key(
        -1,
        "Tokens come from the top_k most likely tokens. -1: from all tokens. Training computes log-probabilities without "
        "this restriction.",
        "tokens",
    )
    min_p: float = key(
        0.0,
        "Only tokens whose probability is at least min_p times the largest probability can be sampled. Training computes "
        "log-probabilities without this restriction.",
        least=0,
        most=1,
    )
    repetition_penalty: float = key(
        1.0,
        "Above 1, tokens that have occurred in the response become less likely. Training computes log-probabilities without "
        "this penalty; only algorithm.correction corrects for the difference.",
        above=0,
        most=2,
    )
    stop: list[str] = key(list, "Texts that end a response. The response contains the tokens of the stop text.")
    stop_token_ids: list[int] = key(
        list,
        "Token ids that end a response, in addition to the model's end-of-sequence token. The response contains them.",
    )
    mode: RolloutMode = key(
        RolloutMode("sync"),
        "With sync, sampling and training take turns. With one_step_off, the next step is sampled while one step is trained. "
        "With async, sampling runs ahead of training by up to max_staleness weight versions.",
    )
    max_staleness: int | None = key(
        None,
        "Largest staleness of a trained token, which is the number of weight versions from sampling the token to training on "
        "it. Only for rollout.mode=async, where the default is 2.",
        "weight versions",
        least=0,
    )
    group_order: GroupOrder | None = key(
        None,
        "Order in which steps train on groups. dispatched: the order in which their prompts were drawn. completed: the order in "
        "which their responses are finished. Default: completed if rollout.mode=async or over_sample_rate > 0, otherwise "
        "dispatched.",
    )
    over_sample_rate: float = key(
        0.0,
        "Over-sampling: the engines sample over_sample_rate x prompts_per_step more groups than a step needs. "
        "When a step has all its groups, the run drops the other groups if their staleness would exceed max_staleness in the "
        "next step.",
        least=0,
    )
    filter: Node | None = key(
        dict,
        "Function that decides from the rewards of a group whether a step trains on the group. Groups of new prompts replace "
        "rejected groups.",
    )
    max_sampling_rounds: int = key(
        10,
        "If rollout.filter rejects groups, one step draws at most max_sampling_rounds x prompts_per_step prompts.",
        least=1,
    )
    agent: Node | None = key(dict, "Agent that samples several turns with tool calls.")
    num_engines: int = key(1, "Number of SGLang servers (engines).", "engines", least=1)
    engine_tp: int = key(1, "Tensor-parallel size of each engine.", "GPUs", least=1)
    engine_urls: list[str] = key(list, "URLs of running SGLang servers. The run then starts no engines.")
    deterministic: bool = key(
        False,
        "Whether each response has its own seed, computed from run.seed and the serial number of the response. "
        "Sampling is then slower (docs/how_to/resume.md).",
    )
    routing_replay: bool = key(
        False, "For a mixture of experts: whether to train each token with the experts that the engine chose for it."
    )
    request_timeout_s: float = key(
        600.0,
        "Timeout for the responses of one step, after which the run fails. If the rollout worker does not answer within "
        "a further 60 s + 2 x scoring.timeout_s, a hang report is written.",
        "s",
        above=0,
    )
    record: bool = key(
        False,
        "Whether to save the tokens of each step in run.dir/rollouts/step_N.npz, and the responses of each evaluation in "
        "run.dir/rollouts/evaluation_STEP_INDEX.jsonl.",
    )
    replay: str | None = key(
        None, "Folder of rollouts saved by rollout.record. The run trains on these rollouts and starts no engines."
    )

    @property
    def staleness(self) -> int:
        """Largest staleness of a trained token, in weight versions."""
        async_staleness = ASYNC_STALENESS if self.max_staleness is None else self.max_staleness
        return {"sync": 0, "one_step_off": 1}.get(self.mode, async_staleness)

    @property
    def in_order(self) -> bool:
        """Whether steps train on groups in the order in which their prompts were drawn."""
        if self.group_order is not None:
            return self.group_order == "dispatched"
        return self.mode != "async" and not self.over_sample_rate

    def __post_init__(self) -> None:
        if self.max_staleness is not None and self.mode != "async":
            raise ValueError(
                f"rollout.max_staleness={self.max_staleness} with rollout.mode={self.mode}: only async has this key; "
                "the staleness of sync is always 0 and the staleness of one_step_off is always 1."
            )
        if self.over_sample_rate and self.group_order == "dispatched":
            raise ValueError(
                f"rollout.over_sample_rate={self.over_sample_rate} with rollout.group_order=dispatched, which waits for "
                "every group; use rollout.over_sample_rate=0 or rollout.group_order=completed."
            )


@dataclass(frozen=True)
class ScoringConfig:
    """How the reward function is run. The key `reward` selects the function (docs/tutorials/reward.md)."""

    workers: int | None = key(
        None,
        "Number of processes that run the reward function. Default: one for each core, at most 8.",
        "processes",
        least=1,
    )
    sample_timeout_s: float = key(
        10.0,
        "Timeout for the score of one response. After it, the worker process is killed and the response counts as not scored.",
        "s",
        above=0,
    )
    memory_gb: float = key(4.0, "Memory limit of one worker process.", "GiB", above=0)
    timeout_s: float = key(
        300.0,
        "Timeout of one call of the scorer, which scores all groups that have finished since the last call. Responses that have "
        "no score after this time count as not scored.",
        "s",
        above=0,
    )
    rehearse: bool = key(
        True,
        "Whether to call the reward function, and the agent if there is one, with made-up responses before the run starts. "
        "An error in the function or in the agent is then reported at once. Rewards that call a server are not called.",
    )

    @property
    def limits(self) -> dict[str, Any]:
        """Keyword arguments of a Scorer: all keys of this section except `rehearse`."""
        return {name: value for name, value in vars(self).items() if name != "rehearse"}


@dataclass(frozen=True)
class AlgorithmConfig:
    """Advantages and loss (docs/concepts/algorithms.md). Each file in conf/algorithm configures a published algorithm."""

    advantage: Node = key(
        MISSING, "Advantage estimator. It computes advantages of responses or tokens from the rewards."
    )
    loss: Node = key(MISSING, "Policy loss. It computes the loss of each sampled token.")
    aggregation: Any = key(
        "token_mean",
        "Weight of each token in the loss: token_mean, sequence_mean, fixed_length, token_sum, sequence_sum, or a mapping whose "
        "_target_ names your own function.",
    )
    correction: Node | None = key(
        dict,
        "Off-policy correction. It multiplies the loss of each token by a weight, or excludes tokens from the loss. Default: "
        "truncated importance sampling if three conditions hold: samples may be stale, algorithm.old_logprobs is recompute, and "
        "the loss uses log-probabilities. Otherwise, the default is no correction.",
    )
    kl_in_loss: Node | None = key(
        dict,
        "KL penalty (default kind: k3) against the reference (default: the initial policy). It is added to the loss.",
    )
    kl_in_reward: Node | None = key(
        dict, "KL penalty (default kind: k1) against the reference. It is subtracted from the rewards."
    )
    entropy_coef: float = key(0.0, "Coefficient of the entropy bonus in the loss.")
    adaptive_entropy: Node | None = key(
        dict,
        "Adapts the coefficient of the entropy bonus, so that the entropy does not stay below `target`: the coefficient grows by "
        "`step` after a training step whose entropy is at most `target`, and otherwise falls by `step`. Example: "
        "{target: 0.2, step: 0.005, max_coef: 1.0}. Default: the coefficient is constant.",
    )
    whiten: bool = key(
        False, "Whether to normalize advantages to mean 0 and standard deviation 1 over all sampled tokens in the loss."
    )
    mask_truncated: bool = key(False, "Whether to exclude truncated responses from the loss.")
    resampling: Node | None = key(
        dict,
        "Function that draws the responses on which a step trains, with replacement and with probabilities that depend on their "
        "rewards (policy filtration). Default: none, so a step trains on each response once.",
    )
    old_logprobs: OldLogprobs = key(
        OldLogprobs.recompute,
        "Source of the old log-probabilities. With recompute, the trainer computes them. With rollout, they are the "
        "log-probabilities that the engine reports.",
    )
    skip_zero_advantage: bool = key(
        True, "Whether to skip responses that do not change the gradient. Training is then faster, with the same loss."
    )
    mini_batches: int = key(
        1, "Number of optimizer steps in one pass over the rollout. Each mini-batch contains whole groups.", least=1
    )
    epochs: int = key(1, "Number of passes over each rollout.", least=1)


@dataclass(frozen=True)
class ParallelConfig:
    """Parallel layout of the trainer ranks (docs/tutorials/model.md)."""

    tp: int = key(1, "Tensor-parallel size.", "ranks", least=1)
    sp: bool | None = key(
        None, "Whether to use sequence parallelism in each tensor-parallel group. Default: true if tp > 1."
    )
    pp: int = key(1, "Pipeline-parallel size.", "stages", least=1)
    vpp: int = key(1, "Number of virtual pipeline stages on each pipeline rank.", "stages", least=1)
    cp: int = key(1, "Context-parallel size: number of ranks among which each sequence is divided.", "ranks", least=1)
    ep: int = key(1, "Expert-parallel size.", "ranks", least=1)
    etp: int | None = key(None, "Expert-tensor-parallel size. Default: tp.", "ranks", least=1)
    dp: int | None = key(
        None,
        "Data-parallel size. Default: computed from parallel.world_size if set, otherwise the smallest size that ep allows.",
        "replicas",
        least=1,
    )
    world_size: int | None = key(None, "Number of trainer ranks. Set it in place of parallel.dp.", "ranks", least=1)


def _critic_optim() -> OptimConfig:
    return OptimConfig(lr=1e-5)


def _value_loss() -> Node:
    return {"_target_": "mrl.algorithms.losses.ValueLoss"}


@dataclass(frozen=True)
class CriticConfig:
    """The value model of actor-critic algorithms (algorithm=ppo)."""

    path: str | None = key(
        None, "Hugging Face folder of the critic's initial weights. Default: the initial weights of the actor."
    )
    optim: OptimConfig = key(_critic_optim, "Optimizer of the critic.")
    loss: Node = key(_value_loss, "Value loss. It computes the loss of each predicted value from the return.")
    warmup_steps: int = key(0, "Number of training steps at the start that train only the critic.", "steps", least=0)
    mini_batches: int | None = key(
        None, "Number of optimizer steps in one pass over a rollout. Default: algorithm.mini_batches.", least=1
    )
    epochs: int | None = key(None, "Number of passes over each rollout. Default: algorithm.epochs.", least=1)
    parallel: Node = key(dict, "Sizes of the critic's layout that differ from the section parallel, such as {tp: 2}.")
    ddp: Node = key(dict, "Settings of Megatron's data parallelism for the critic that differ from trainer.ddp.")
    max_tokens_per_micro_batch: int | None = key(
        None,
        "Largest number of tokens in one micro-batch that trains the critic. Default: trainer.max_tokens_per_micro_batch.",
        "tokens",
        least=1,
    )
    max_tokens_per_forward_micro_batch: int | None = key(
        None,
        "Largest number of tokens in one micro-batch of the passes that compute values. Default: "
        "trainer.max_tokens_per_forward_micro_batch.",
        "tokens",
        least=1,
    )


@dataclass(frozen=True)
class TrainerConfig:
    """The training loop (docs/concepts/loop.md)."""

    _target_: str | None = key(
        None,
        "Your own training step: a function that gets the Trainer, or a subclass of mrl.controller.trainer.Trainer. Default: the "
        "step of mrl (docs/concepts/loop.md).",
    )
    arguments: Node = key(dict, "Arguments of the function or fields of the class that trainer._target_ names.")
    max_steps: int = key(
        1000,
        "Number of training steps. With trainer.epochs, the run ends at the limit that it reaches first.",
        "steps",
        least=0,
    )
    epochs: float | None = key(
        None,
        "Number of passes over the training prompts. The run ends after the step in which it has used epochs x (rows of "
        "data.train) prompts. Default: trainer.max_steps alone ends the run.",
        "passes",
        above=0,
    )
    stop_reward: float | None = key(None, "The run stops when the mean reward of the last 5 steps reaches this value.")
    max_tokens_per_micro_batch: int = key(
        8192, "Largest number of tokens in one micro-batch of one replica.", "tokens", least=1
    )
    max_tokens_per_forward_micro_batch: int | None = key(
        None,
        "Largest number of tokens in one micro-batch of passes without gradients. These passes compute log-probabilities of the "
        "actor, log-probabilities of a reference that the actor's processes hold, and losses of held-out rows. These passes "
        "keep no activations. Default: max_tokens_per_micro_batch.",
        "tokens",
        least=1,
    )
    share_prompts: bool = key(
        True,
        "Whether to compute each prompt once for all its responses, with the same gradient (reason: docs/how_to/speed.md).",
    )
    logprob_chunk: int = key(
        1024, "Number of tokens whose logits are in memory at a time (docs/how_to/speed.md).", "tokens", least=1
    )
    overlap_grad_reduce: bool | None = key(
        None,
        "Whether gradients are reduced over replicas during the backward pass. Default: true on GPUs, false on CPUs.",
    )
    ddp: Node = key(
        dict,
        "More settings of Megatron's data parallelism: fields of DistributedDataParallelConfig, such as "
        "{grad_reduce_in_fp32: false} or, with overlap_grad_reduce, {bucket_size: 20000000}.",
    )
    eval_every: int = key(
        0,
        "Number of steps between evaluations on held-out prompts. With 0, evaluations run only before and after training.",
        "steps",
        least=0,
    )
    eval_rows: int | None = key(
        None,
        "Number of rows to evaluate, from the start of each held-out set that does not set `rows`. Default: all rows.",
        "rows",
        least=1,
    )
    on_unhealthy: OnUnhealthy = key(
        OnUnhealthy.warn,
        "What happens when a check of learning finds a problem (docs/how_to/learning.md). With warn, the problem is shown once. "
        "With stop, the run writes a checkpoint and ends with status 3.",
    )
    save: bool = key(True, "Whether to write a checkpoint and the Hugging Face folder hf/ at the end of the run.")
    timeout_s: float = key(
        1800.0,
        "Timeout for one call to the trainer ranks, after which a hang report is written. The same timeout applies to "
        "writing one checkpoint.",
        "s",
        above=0,
    )


@dataclass(frozen=True)
class Config:
    """All keys of a run. Each section is a dataclass."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: Node = key(MISSING, "Reward function. It computes the rewards of responses (docs/tutorials/reward.md).")
    scoring: ScoringConfig = field(default_factory=ScoringConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    optim: OptimConfig = key(OptimConfig, "Optimizer of the actor.")
    lora: LoraConfig = key(LoraConfig, "Low-rank adapters of the actor.")
    critic: CriticConfig = field(default_factory=CriticConfig)
    roles: Node = key(
        dict,
        "Frozen models beside the actor, by name, such as roles.teacher.path=FOLDER. If the key num_engines of a model is 0, "
        "Megatron computes the log-probabilities of the sampled tokens under this model; further keys: column, parallel, "
        "max_tokens_per_micro_batch. If num_engines is above 0, SGLang serves the model to rewards or to distillation; further "
        "keys: engine_tp, sglang (docs/concepts/placement.md). `teacher_for` is the list of data sources for which the model is "
        "the teacher (docs/how_to/distillation.md).",
    )
    sft: SftConfig = field(default_factory=SftConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    weight_sync: WeightSyncConfig = field(default_factory=WeightSyncConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    fault_tolerance: FaultToleranceConfig = field(default_factory=FaultToleranceConfig)
    step_dump: StepDumpConfig = field(default_factory=StepDumpConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    resume: str = key(
        "auto",
        "With auto, a run in run.dir continues. With never, a run.dir that contains a run is refused. With the folder "
        "of another run, a new run starts from the newest checkpoint in that folder.",
    )
    generate: GenerateConfig = field(default_factory=GenerateConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    certify: CertifyConfig = field(default_factory=CertifyConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    sglang: Node = key(dict, "Arguments of the SGLang servers: any field of ServerArgs (FP8: docs/how_to/fp8.md).")
    megatron: Node = key(dict, "Model settings of Megatron-Core: any field of TransformerConfig.")
