"""The config schema: every key of a run with its type, default, unit, bounds and description.

The dataclasses are Hydra structured configs (registered by mrl/config/hydra_entry.py), so OmegaConf checks the types. The
command `mrl config` and docs/reference/config.md are generated from the metadata of the fields. A value of type `Node` names
a class or function by Hydra's `_target_`; mrl/config/instantiate.py builds it before any process starts.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from omegaconf import MISSING

from mrl.config.command_schema import (
    CertifyConfig,
    Dtype,
    EvaluateConfig,
    GenerateConfig,
    PlanConfig,
    SweepConfig,
)
from parallel.trainer_config import LrSchedule, OptimConfig
from parallel.trainer_config import config_field as key

Node = dict[str, Any]
ASYNC_STALENESS = 2  # default of rollout.max_staleness

# A class body cannot define a member `async`.
RolloutMode = StrEnum("RolloutMode", ["sync", "one_step_off", "async"])  # type: ignore[bad-class-definition]


class GroupOrder(StrEnum):
    """Order in which sampled groups are trained."""

    dispatched = "dispatched"
    completed = "completed"


class RowPolicy(StrEnum):
    """Handling of rows that cannot be used."""

    error = "error"
    skip = "skip"


class Aggregation(StrEnum):
    """How the loss is averaged over tokens."""

    token_mean = "token_mean"
    sequence_mean = "sequence_mean"
    fixed_length = "fixed_length"


class OldLogprobs(StrEnum):
    """Source of the old policy's log-probabilities."""

    recompute = "recompute"
    rollout = "rollout"


class Transport(StrEnum):
    """How weights travel from trainer ranks to engines."""

    auto = "auto"
    shared_memory = "shared_memory"
    cuda_ipc = "cuda_ipc"
    process_group = "process_group"
    disk = "disk"


class PauseMode(StrEnum):
    """What happens to running requests during a weight sync."""

    retract = "retract"
    abort = "abort"
    in_place = "in_place"


class Scheduler(StrEnum):
    """Cluster schedulers that `mrl train` can submit to."""

    slurm = "slurm"


@dataclass(frozen=True)
class RunConfig:
    """Identity of the run."""

    name: str = key("run", "name of the run in wandb and in the path of the default run directory")
    dir: str = key(MISSING, "run directory: metrics, logs, checkpoints, rollouts, learning curve")
    seed: int = key(0, "seed of prompt order, sampling and initialization", least=0)


@dataclass(frozen=True)
class ModelConfig:
    """The policy (actor)."""

    path: str = key(MISSING, "Hugging Face folder: config.json, *.safetensors, tokenizer")
    dtype: Dtype = key(Dtype.bfloat16, "precision of weights and activations")
    family: str | None = key(
        None, "your own model family: package.module:NAME or /path/file.py:NAME (docs/tutorials/model.md)"
    )

    @property
    def itemsize(self) -> int:
        """Bytes of one weight."""
        return {"bfloat16": 2, "float32": 4}[self.dtype]


@dataclass(frozen=True)
class DataConfig:
    """Prompts (docs/tutorials/data.md)."""

    inputs: Node | None = key(dict, "callable that creates missing input files before anything is read")
    train: list[str] = key(
        list, "training prompts: jsonl or parquet files, or folders written by save_to_disk of datasets"
    )
    mixture: Node = key(dict, "weighted training sources instead of train: name -> {files, weight, columns, system}")
    dataset: Node | None = key(dict, "your own dataset object instead of train")
    test: list[str] = key(list, "held-out prompts, in the formats of train; empty: no evaluation")
    test_sets: Node = key(dict, "further held-out sets: name -> files, or a source as in mixture")
    columns: Node = key(dict, "column names: prompt, ground_truth, data_source, extra_info -> name in your files")
    system: str | None = key(None, "system message for prompts that do not start with one")
    chat_template: str | None = key(None, "Jinja file that replaces the model's chat template")
    template_args: Node = key(dict, "variables of the chat template, such as enable_thinking")
    bad_rows: RowPolicy = key(
        RowPolicy.error, "handling of invalid rows; all of them are listed in run.dir/bad_rows_*.jsonl"
    )
    overlong: RowPolicy = key(
        RowPolicy.error, "handling of prompts longer than max_prompt_tokens; also listed in bad_rows_*.jsonl"
    )
    shuffle: bool = key(True, "new prompt order in every epoch, derived from run.seed")
    max_prompt_tokens: int | None = key(
        None,
        "longest allowed prompt; default: the model's context minus rollout.max_response_tokens",
        "tokens",
        least=1,
    )


@dataclass(frozen=True)
class RolloutConfig:
    """Sampling with SGLang engines (docs/concepts/asynchrony.md, docs/tutorials/agent.md)."""

    prompts_per_step: int = key(32, "distinct prompts in one step", "prompts", least=1)
    responses_per_prompt: int = key(8, "group size: responses to each prompt", "responses", least=1)
    max_response_tokens: int = key(512, "longest response; longer ones are truncated", "tokens", least=1)
    temperature: float = key(1.0, "temperature of sampling and of the log-probabilities in training", above=0)
    mode: RolloutMode = key(
        RolloutMode("sync"), "sync; one_step_off: sample the next step during training; async: sample continuously"
    )
    max_staleness: int | None = key(
        None, "async: largest age of a trained token; default: 2", "weight versions", least=0
    )
    group_order: GroupOrder | None = key(
        None,
        "train groups in the order dispatched or completed; default: completed if async or over-sampled, else dispatched",
    )
    over_sample_rate: float = key(
        0.0, "fraction of extra groups in flight; the slowest are dropped when a step has enough", least=0
    )
    filter: Node | None = key(dict, "rewards of a group -> whether to train on it; rejected groups are resampled")
    max_sampling_rounds: int = key(
        10, "limit of prompts drawn for a step, as a multiple of prompts_per_step, when filter rejects groups", least=1
    )
    agent: Node | None = key(dict, "multi-turn agent with tool calls")
    num_engines: int = key(1, "number of SGLang servers", "engines", least=1)
    engine_tp: int = key(1, "tensor-parallel size of each engine", "GPUs", least=1)
    engine_urls: list[str] = key(list, "running SGLang servers to use instead of starting engines")
    deterministic: bool = key(
        False, "one seed for each response (run.seed, step, index); slower (docs/how_to/resume.md)"
    )
    routing_replay: bool = key(False, "mixture of experts: train with the experts that the engine selected per token")
    request_timeout_s: float = key(
        600.0,
        "deadline of one batch of responses, after which the run fails; a hang report is written if the rollout worker does not "
        "answer 60 s + 2 x scoring.timeout_s later",
        "s",
        above=0,
    )
    record: bool = key(False, "save the tokens of each step in run.dir/rollouts/step_N.npz")
    replay: str | None = key(None, "folder of recorded rollouts to train on, without engines")

    @property
    def staleness(self) -> int:
        """Largest age of a trained token, in weight versions."""
        async_staleness = ASYNC_STALENESS if self.max_staleness is None else self.max_staleness
        return {"sync": 0, "one_step_off": 1}.get(self.mode, async_staleness)

    @property
    def in_order(self) -> bool:
        """Whether steps train groups in the order they were dispatched."""
        if self.group_order is not None:
            return self.group_order == "dispatched"
        return self.mode != "async" and not self.over_sample_rate

    def __post_init__(self) -> None:
        if self.max_staleness is not None and self.mode != "async":
            raise ValueError(
                f"rollout.max_staleness={self.max_staleness} with rollout.mode={self.mode}: only async takes it; "
                "the staleness of sync is 0, that of one_step_off 1."
            )
        if self.over_sample_rate and self.group_order == "dispatched":
            raise ValueError(
                f"rollout.over_sample_rate={self.over_sample_rate} with rollout.group_order=dispatched, which waits for "
                "every group; use 0, or group_order=completed."
            )


@dataclass(frozen=True)
class ScoringConfig:
    """Execution of the reward function; `reward` selects the function (docs/tutorials/reward.md)."""

    workers: int | None = key(
        None, "worker processes of a reward that may crash; default: one for each core, at most 8", "processes", least=1
    )
    sample_timeout_s: float = key(
        10.0,
        "timeout of scoring one response; its worker is then killed and the response counts as not scored",
        "s",
        above=0,
    )
    memory_gb: float = key(4.0, "memory limit of one worker", "GiB", above=0)
    timeout_s: float = key(
        300.0, "timeout of scoring all responses of a step; the others then count as not scored", "s", above=0
    )


@dataclass(frozen=True)
class AlgorithmConfig:
    """Advantages and loss (docs/concepts/algorithms.md); the files in conf/algorithm are the published algorithms."""

    advantage: Node = key(MISSING, "advantage estimator: rewards -> advantages of responses or tokens")
    loss: Node = key(MISSING, "policy loss of each sampled token")
    aggregation: Aggregation = key(Aggregation.token_mean, "average of the loss over tokens")
    correction: Node | None = key(
        dict, "off-policy correction of token weights; default: truncated importance sampling unless rollout.mode=sync"
    )
    kl_in_loss: Node | None = key(dict, "KL penalty to the reference (initial) policy, added to the loss")
    kl_in_reward: Node | None = key(dict, "KL penalty to the reference policy, subtracted from the rewards")
    entropy_coef: float = key(0.0, "coefficient of the entropy bonus")
    whiten: bool = key(
        False, "normalize advantages to mean 0 and standard deviation 1 over the sampled tokens in the loss"
    )
    mask_truncated: bool = key(False, "exclude truncated responses from the loss")
    old_logprobs: OldLogprobs = key(
        OldLogprobs.recompute, "old log-probabilities: recomputed by the trainer, or those of the rollout engine"
    )
    skip_zero_advantage: bool = key(True, "skip responses without effect on the gradient: same loss, less compute")
    mini_batches: int = key(1, "optimizer steps in one pass over a rollout, split by groups", least=1)
    epochs: int = key(1, "passes over each rollout", least=1)


@dataclass(frozen=True)
class ParallelConfig:
    """Parallel layout of the trainer ranks (docs/tutorials/model.md)."""

    tp: int = key(1, "tensor-parallel size", "ranks", least=1)
    sp: bool | None = key(None, "sequence parallelism within the tensor-parallel group; default: if tp > 1")
    pp: int = key(1, "pipeline-parallel size", "stages", least=1)
    vpp: int = key(1, "virtual pipeline stages on each pipeline rank", "stages", least=1)
    cp: int = key(1, "context-parallel size: ranks that share one sequence", "ranks", least=1)
    ep: int = key(1, "expert-parallel size", "ranks", least=1)
    etp: int | None = key(None, "expert-tensor-parallel size; default: tp", "ranks", least=1)
    dp: int | None = key(
        None, "data-parallel size; default: from world_size, or the smallest that ep allows", "replicas", least=1
    )
    world_size: int | None = key(None, "number of trainer ranks, instead of dp", "ranks", least=1)


def _critic_optim() -> OptimConfig:
    return OptimConfig(lr=1e-5)


def _sft_optim() -> OptimConfig:
    return OptimConfig(lr=1e-5, lr_schedule=LrSchedule.linear_to_tenth)


@dataclass(frozen=True)
class CriticConfig:
    """The value model of actor-critic algorithms (algorithm=ppo)."""

    path: str | None = key(None, "Hugging Face folder of the initial weights; default: the actor's")
    optim: OptimConfig = key(_critic_optim, "optimizer of the critic")
    value_clip: float = key(0.2, "largest change of a value within one rollout's updates; 0: no limit", least=0)
    warmup_steps: int = key(0, "number of first steps that update only the critic", "steps", least=0)
    mini_batches: int | None = key(None, "optimizer steps in one pass over a rollout; default: the actor's", least=1)
    epochs: int | None = key(None, "passes over each rollout; default: the actor's", least=1)
    parallel: Node = key(dict, "layout keys that differ from the section parallel, such as {tp: 2}")


@dataclass(frozen=True)
class TeacherConfig:
    """The teacher of distillation (algorithm=distill)."""

    path: str | None = key(None, "Hugging Face folder; the teacher has the actor's tokenizer")
    parallel: Node = key(dict, "layout keys that differ from the section parallel, such as {tp: 2}")


@dataclass(frozen=True)
class SftConfig:
    """Supervised fine-tuning: the job of `mrl sft`, and the warm start of `mrl train` (docs/tutorials/data.md)."""

    train: str | None = key(None, "parquet or jsonl file with the columns prompt and response; null: no warm start")
    output: str | None = key(None, "Hugging Face folder to write; `mrl train` reuses one that exists")
    steps: int = key(200, "number of optimizer steps", "optimizer steps", least=1)
    batch_size: int = key(128, "rows in one step", "rows", least=1)
    optim: OptimConfig = key(_sft_optim, "optimizer of supervised fine-tuning; lr_decay_steps=0: the value of steps")


@dataclass(frozen=True)
class TrainerConfig:
    """The training loop."""

    max_steps: int = key(1000, "number of steps", "steps", least=0)
    stop_reward: float | None = key(None, "stop when the mean reward of the last 5 steps reaches this")
    max_tokens_per_micro_batch: int = key(8192, "tokens of one packed forward pass on one replica", "tokens", least=1)
    share_prompts: bool = key(True, "compute the prompt once for all responses of a group: same gradient, less compute")
    logprob_chunk: int = key(1024, "tokens whose logits are in memory at one time", "tokens", least=1)
    eval_every: int = key(
        0, "steps between evaluations on data.test; 0: only before and after training", "steps", least=0
    )
    eval_rows: int | None = key(None, "evaluate on the first rows of data.test only; default: all", "rows", least=1)
    save: bool = key(True, "write a checkpoint and the Hugging Face folder hf/ at the end")
    timeout_s: float = key(
        1800.0,
        "deadline of one call to the trainer ranks, after which a hang report is written; also of writing one checkpoint",
        "s",
        above=0,
    )


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints in run.dir/checkpoints (docs/how_to/resume.md)."""

    every: int = key(50, "steps between checkpoints; 0: only at the end", "steps", least=0)
    keep_last: int = key(2, "number of latest checkpoints to keep", "checkpoints", least=1)
    keep_best: int = key(
        0, "number of further checkpoints to keep, those with the best best_metric", "checkpoints", least=0
    )
    best_metric: str = key("reward/mean", "metric of the step after which a checkpoint is written")
    asynchronous: bool = key(True, "training continues while a checkpoint is written")
    export_every: int = key(0, "steps between Hugging Face folders in run.dir/exports; 0: none", "steps", least=0)
    copy_to: str | None = key(None, "fsspec URL to which each complete checkpoint is copied")


@dataclass(frozen=True)
class FaultToleranceConfig:
    """Recovery from failed processes, and preemption (docs/how_to/resume.md)."""

    max_restarts: int = key(
        5, "restarts of failed workers without a new checkpoint in between; then the run fails", least=0
    )
    engine_stall_timeout_s: float = key(60.0, "an engine without progress for this long is replaced", "s", above=0)
    max_response_attempts: int = key(3, "attempts to sample one response, each on another engine", least=1)
    preemption_grace_s: float = key(
        60.0, "after SIGTERM or USR1: a step that would take longer is abandoned", "s", least=0
    )


@dataclass(frozen=True)
class StepDumpConfig:
    """Dumps of whole steps for `mrl replay` (docs/how_to/hangs.md); a step with a NaN is always dumped."""

    steps: list[int] = key(list, "numbers of the steps to dump", least=0)
    spike_factor: float = key(
        10.0,
        "dump steps whose gradient norm is more than this times the recent median; 0: no detection of spikes",
        least=0,
    )
    spike_window: int = key(20, "steps of the median", "steps", least=1)
    max_spikes: int = key(3, "limit of dumps because of spikes", "dumps", least=0)


@dataclass(frozen=True)
class WeightSyncConfig:
    """Transfer of weights from trainer ranks to engines (docs/concepts/placement.md)."""

    transport: Transport = key(Transport.auto, "transport; auto: chosen by where trainer ranks and engines run")
    bucket_bytes: int = key(64 * 1024 * 1024, "size of a bucket; each sender holds two", "bytes", least=1)
    pause_mode: PauseMode = key(
        PauseMode.retract, "running requests: retract (recompute), abort (end) or in_place (keep the old KV cache)"
    )
    delta: bool = key(False, "send compressed differences to the last version; each sender keeps a copy of its shard")
    timeout_s: float = key(300.0, "timeout of an engine in a weight sync; then it is replaced", "s", above=0)
    max_attempts: int = key(
        3, "attempts to push one version, with failed engines replaced, before the run fails", least=1
    )


@dataclass(frozen=True)
class TrackingConfig:
    """Destinations of metrics other than the run directory."""

    wandb: bool = key(True, "log to Weights & Biases; offline without an API key")
    project: str = key("mrl", "wandb project")
    group: str | None = key(None, "wandb group; a sweep sets it for its points")


@dataclass(frozen=True)
class HardwareConfig:
    """Hardware of the cluster, set by cluster=h100 and similar groups. 0: unknown, so no limit is checked."""

    name: str | None = key(None, "name of the GPU")
    gpu_memory_gb: float = key(0.0, "usable memory of one GPU", "GiB", least=0)
    tflops_bf16: float = key(0.0, "peak of dense bfloat16 matrix products of one GPU", "TFLOP/s", least=0)
    hbm_gb_per_s: float = key(0.0, "memory bandwidth of one GPU", "GB/s", least=0)
    nvlink_gb_per_s: float = key(0.0, "NVLink bandwidth of one GPU, both directions together", "GB/s", least=0)
    network_gb_per_s: float = key(0.0, "network bandwidth of one GPU, each direction", "GB/s", least=0)
    host_memory_gb: float = key(0.0, "memory of one node", "GiB", least=0)


@dataclass(frozen=True)
class ClusterConfig:
    """Ray cluster and Slurm job (docs/tutorials/slurm.md)."""

    address: str | None = key(None, "address of a running Ray cluster; default: start Ray on this machine")
    start_timeout_s: float = key(
        600.0,
        "deadline for all engines and trainer ranks to be ready, after which a hang report is written",
        "s",
        above=0,
    )
    scheduler: Scheduler | None = key(None, "slurm: submit the run as a job; default: run on this machine")
    nodes: int | None = key(None, "nodes of the job and of `mrl plan`; default: as many as needed", "nodes", least=1)
    gpus_per_node: int = key(8, "GPUs of a node; 0: a CPU job, one process for each CPU", "GPUs", least=0)
    slurm: Node = key(
        dict, "options of sbatch with _ in place of -, such as partition, time; true: an option without a value"
    )
    components: list[Node] = key(list, "further parts of a heterogeneous job: the options that differ in each")
    dry_run: bool = key(False, "print the job and submit nothing; --dry-run sets it")
    hardware: HardwareConfig = key(HardwareConfig, "the machines")


@dataclass(frozen=True)
class PlacementConfig:
    """Assignment of models and engines to GPUs (docs/concepts/placement.md)."""

    pools: Node = key(dict, "pool name -> roles, or {roles, gpus, strategy}; empty: one pool for each role")


@dataclass(frozen=True)
class Config:
    """All keys. Each section is a dataclass."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: Node = key(MISSING, "reward function: responses -> rewards (docs/tutorials/reward.md)")
    scoring: ScoringConfig = field(default_factory=ScoringConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    optim: OptimConfig = key(OptimConfig, "optimizer of the actor")
    critic: CriticConfig = field(default_factory=CriticConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    weight_sync: WeightSyncConfig = field(default_factory=WeightSyncConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    fault_tolerance: FaultToleranceConfig = field(default_factory=FaultToleranceConfig)
    step_dump: StepDumpConfig = field(default_factory=StepDumpConfig)
    resume: str = key(
        "auto", "auto: continue the run in run.dir; never: refuse to continue; PATH: start from this checkpoint"
    )
    generate: GenerateConfig = field(default_factory=GenerateConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    certify: CertifyConfig = field(default_factory=CertifyConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    sglang: Node = key(dict, "any field of SGLang's ServerArgs")
    megatron: Node = key(dict, "any field of Megatron-Core's TransformerConfig")
