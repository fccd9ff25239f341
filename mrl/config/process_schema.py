"""Config sections about processes and machines: checkpoints, failures, weight sync, tracking, cluster, roles and placement."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from parallel.trainer_config import config_field as key

Node = dict[str, Any]
"""Mapping with keys of any name: a plug-in, or options of another program. Node is Hydra's word for a mapping, not a machine."""


class Transport(StrEnum):
    """How weights travel from trainer ranks to engines."""

    auto = "auto"
    shared_memory = "shared_memory"
    cuda_ipc = "cuda_ipc"
    process_group = "process_group"
    disk = "disk"


class LoraSync(StrEnum):
    """What a weight sync sends in a run with LoRA adapters."""

    merged = "merged"
    adapter = "adapter"


class PauseMode(StrEnum):
    """What happens to running requests during a weight sync."""

    retract = "retract"
    abort = "abort"
    in_place = "in_place"


class Scheduler(StrEnum):
    """Cluster schedulers to which mrl can submit jobs."""

    slurm = "slurm"


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints in run.dir/checkpoints (docs/how_to/resume.md)."""

    every: int = key(
        50,
        "Number of steps between checkpoints. With 0, the only checkpoint is written at the end of the run.",
        "steps",
        least=0,
    )
    keep_last: int = key(2, "Number of newest checkpoints to keep.", "checkpoints", least=1)
    keep_last_critic: int | None = key(
        None,
        "Number of newest checkpoints that keep the critic. keep_last is then the number of newest checkpoints that keep the "
        "actor. A run continues only from a checkpoint of actor and critic. Default: keep_last.",
        "checkpoints",
        least=1,
    )
    keep_best: int = key(
        0,
        "Number of checkpoints to keep because their values of checkpoint.best_metric are the highest, even if they are not "
        "among the keep_last newest.",
        "checkpoints",
        least=0,
    )
    best_metric: str = key(
        "reward/mean",
        "Metric that ranks checkpoints for keep_best. Its value in the last step before the checkpoint is used.",
    )
    asynchronous: bool = key(True, "Whether training continues while a checkpoint is written.")
    export_every: int = key(
        0,
        "Number of steps between exports of the actor to Hugging Face folders in run.dir/exports. 0 disables them.",
        "steps",
        least=0,
    )
    keep_last_exports: int | None = key(
        None, "Number of latest folders in run.dir/exports to keep. Default: all.", "folders", least=1
    )
    copy_to: str | None = key(None, "URL of a folder, in fsspec's syntax, to which each complete checkpoint is copied.")


@dataclass(frozen=True)
class FaultToleranceConfig:
    """Recovery from failed processes, and preemption (docs/how_to/resume.md)."""

    max_restarts: int = key(
        5,
        "Training: largest number of restarts of lost processes between two checkpoints; replaced engines do not count. "
        "Served models: largest number of replaced servers of each model. mrl generate and mrl evaluate: largest number of "
        "replaced engines.",
        least=0,
    )
    engine_stall_timeout_s: float = key(
        60.0, "An engine that has requests and computes nothing for this time is replaced.", "s", above=0
    )
    max_response_attempts: int = key(
        3,
        "Largest number of attempts to sample one response, each on another engine if there is one. An engine on which this "
        "number of requests in a row fails is taken out of service.",
        least=1,
    )
    preemption_grace_s: float = key(
        60.0,
        "Time that a run has for its current step after SIGTERM or SIGUSR1. A step that would take longer is abandoned.",
        "s",
        least=0,
    )


@dataclass(frozen=True)
class StepDumpConfig:
    """Dumps of training steps for `mrl replay` (docs/how_to/hangs.md). A step whose gradient is not finite is always dumped."""

    steps: list[int] = key(list, "Training steps to dump. The first step is 1.", least=1)
    spike_factor: float = key(
        10.0,
        "A step is dumped if its gradient norm is more than this factor times the median of recent steps (a spike). "
        "0 disables the detection of spikes.",
        least=0,
    )
    spike_window: int = key(
        20, "Number of recent steps from which the median for spike_factor is computed.", "steps", least=1
    )
    max_spikes: int = key(3, "Largest number of steps that are dumped because of a spike.", "dumps", least=0)


@dataclass(frozen=True)
class WeightSyncConfig:
    """Transfer of weights from trainer ranks to engines (docs/concepts/placement.md)."""

    transport: Transport = key(
        Transport.auto,
        "How weights travel to the engines. auto chooses a transport that suits the GPUs and machines.",
    )
    lora: LoraSync = key(
        LoraSync.merged,
        "What a run with lora.rank sends. merged sends all weights, which contain the adapters. adapter sends only the adapters, "
        "which SGLang then applies to the weights of model.path (docs/how_to/lora.md).",
    )
    bucket_bytes: int = key(
        64 * 1024 * 1024,
        "Size of one bucket. A bucket is a set of tensor parts that are sent together. Each sender holds two buckets.",
        "bytes",
        least=1,
    )
    pause_mode: PauseMode = key(
        PauseMode.retract,
        "What happens to running requests during a weight sync. retract recomputes their KV cache, in_place keeps the KV cache, "
        "and abort ends the requests, which are then sent again.",
    )
    delta: bool = key(
        False,
        "Whether to send only compressed differences from the previous weight version. Each sender then keeps a copy of the "
        "model weights that it sends.",
    )
    timeout_s: float = key(
        300.0, "Timeout for an engine in a weight sync. An engine that takes longer is replaced.", "s", above=0
    )
    max_attempts: int = key(
        3,
        "Largest number of attempts to push one weight version. Failed engines are replaced before each new attempt.",
        least=1,
    )


class TrackingBackend(StrEnum):
    """Where metrics are logged besides the run directory."""

    wandb = "wandb"
    tensorboard = "tensorboard"
    mlflow = "mlflow"


@dataclass(frozen=True)
class TrackingConfig:
    """Where a run records its metrics and its timeline, and which responses it records or shows as text."""

    backends: list[TrackingBackend] = key(
        lambda: [TrackingBackend.wandb],
        "Trackers that get all metrics, such as [wandb,tensorboard]. wandb logs offline without an API key. tensorboard writes "
        "run.dir/tensorboard. mlflow logs to the server that the environment variable MLFLOW_TRACKING_URI names, or, if it is "
        "not set, to run.dir/mlflow.",
    )
    project: str = key("mrl", "Project in wandb, experiment in MLflow.")
    name: str | None = key(
        None,
        "Name of the run in trackers. Default: run.name and the name of the run directory, such as "
        "quickstart/2026-01-31_12-00-00.",
    )
    entity: str | None = key(None, "User or team in wandb that owns the run. Default: that of the wandb login.")
    tags: list[str] = key(list, "Tags of the run in trackers, such as [baseline,lr-test].")
    notes: str | None = key(None, "Notes on the run in trackers.")
    group: str | None = key(None, "Group of the run in trackers. A sweep sets it for all its runs.")
    samples_per_step: int = key(
        8,
        "Number of responses of each step that run.dir/samples.jsonl keeps as text, for `mrl samples`. 0 keeps none.",
        "responses",
        least=0,
    )
    timeline: bool = key(
        False,
        "Whether every process records its work in run.dir/timeline, for `mrl timeline` (docs/how_to/speed.md).",
    )
    samples_every: int = key(
        10,
        "Number of steps between two displays of samples: the terminal shows the best and the worst response of the step, and "
        "trackers get a table of samples. 0 shows none.",
        "steps",
        least=0,
    )


@dataclass(frozen=True)
class ProfileConfig:
    """Profiles of trainer ranks with torch.profiler, in run.dir/profile (docs/how_to/speed.md)."""

    steps: list[int] = key(list, "Training steps to profile, such as [3,4]. The first step is 1.", least=1)
    ranks: list[int] = key(lambda: [0], "Trainer ranks to profile, of every model that has these ranks.", least=0)
    memory: bool = key(False, "Whether to record the allocations of memory too.")


@dataclass(frozen=True)
class HardwareConfig:
    """Hardware of the cluster. cluster=a100, h100, h200 and b200 set it. 0 means unknown: mrl does not check an unknown limit."""

    name: str | None = key(None, "Name of the GPU.")
    gpu_memory_gb: float = key(0.0, "Usable memory of one GPU.", "GiB", least=0)
    tflops_bf16: float = key(0.0, "Peak speed of one GPU for dense bfloat16 matrix products.", "TFLOP/s", least=0)
    hbm_gb_per_s: float = key(0.0, "Memory bandwidth of one GPU.", "GB/s", least=0)
    nvlink_gb_per_s: float = key(0.0, "NVLink bandwidth of one GPU, as the sum of both directions.", "GB/s", least=0)
    network_gb_per_s: float = key(0.0, "Network bandwidth of one GPU in each direction.", "GB/s", least=0)
    host_memory_gb: float = key(0.0, "Host memory of one node.", "GiB", least=0)


@dataclass(frozen=True)
class ClusterConfig:
    """Ray cluster and Slurm job (docs/tutorials/slurm.md)."""

    address: str | None = key(None, "Address of a running Ray cluster. Default: the run starts Ray on this machine.")
    start_timeout_s: float = key(
        600.0,
        "Time limit for all engines and trainer ranks to become ready. After it, a hang report is written.",
        "s",
        above=0,
    )
    cpu_threads: int = key(
        1,
        "CPU threads of each trainer rank and engine. Without GPUs, more threads speed up models that are larger than the"
        " quickstart's.",
        "threads",
        least=1,
    )
    scheduler: Scheduler | None = key(
        None, "With slurm, the run is submitted as a Slurm job. Default: it runs on this machine."
    )
    nodes: int | None = key(
        None, "Number of nodes, for the job and for `mrl plan`. Default: as many as needed.", "nodes", least=1
    )
    gpus_per_node: int = key(
        8, "Number of GPUs of one node. With 0, the job uses CPUs: one process for each CPU.", "GPUs", least=0
    )
    slurm: Node = key(
        dict,
        "Options of sbatch with _ in place of -, such as {partition: gpu}. The value true is for options without a value, "
        "as in {exclusive: true}.",
    )
    components: list[Node] = key(
        list,
        "More parts of a heterogeneous job. Each part lists the sbatch options in which it differs from the first part.",
    )
    dry_run: bool = key(
        False, "Whether to print the job script instead of submitting the job. --dry-run sets this key."
    )
    ray: Node = key(
        dict,
        "Settings of Ray: arguments of ray.init, such as {object_store_memory: 8000000000, object_spilling_directory: /scratch}. "
        "In a Slurm job, the settings of Ray's nodes are passed to `ray start` on every node. Default of object_store_memory: in "
        "a Slurm job, Ray's default; on this machine, a tenth of the free memory, but at most half of the free space of "
        "/dev/shm, and at least 512 MiB.",
    )
    hardware: HardwareConfig = key(HardwareConfig, "Hardware of the cluster.")


@dataclass(frozen=True)
class RoleConfig:
    """A frozen model beside the actor: an entry of the key `roles`.

    With `num_engines` 0, Megatron computes log-probabilities of the sampled tokens under the model. Otherwise SGLang serves the
    model to rewards or to distillation. The role `teacher`, and each role with `teacher_for`, is a teacher, from which
    distillation learns.
    """

    path: str | None = key(
        None,
        "Hugging Face folder. Default: the initial weights of the actor. A model that computes a column of log-probabilities "
        "must have the tokenizer of the actor.",
    )
    column: str = key(
        "",
        "Name of the column with the log-probabilities of the sampled tokens under the model. Default: teacher_logprobs for a "
        "teacher, otherwise NAME_logprobs.",
    )
    teacher_for: list[str] = key(
        list,
        "Data sources for which the model is the teacher: on their prompts, distillation learns from this model. The role "
        "`teacher` without this key teaches all prompts that no other teacher teaches.",
    )
    parallel: Node = key(dict, "Sizes of the model's layout that differ from the section parallel, such as {tp: 2}.")
    max_tokens_per_micro_batch: int | None = key(
        None,
        "Largest number of tokens in one micro-batch. Default: trainer.max_tokens_per_forward_micro_batch.",
        "tokens",
        least=1,
    )
    num_engines: int = key(
        0,
        "Number of SGLang servers that serve the model to rewards, or to distillation with top_k.",
        "servers",
        least=0,
    )
    engine_tp: int = key(1, "Tensor-parallel size of each SGLang server of the model.", "GPUs", least=1)
    sglang: Node = key(
        dict, "Arguments of the SGLang servers of the model: any field of ServerArgs, such as {is_embedding: true}."
    )

    @property
    def is_served(self) -> bool:
        """Whether SGLang serves the model."""
        return self.num_engines > 0


@dataclass(frozen=True)
class PlacementConfig:
    """Assignment of models and engines to GPUs (docs/concepts/placement.md)."""

    pools: Node = key(
        dict,
        "Pools of GPUs: {NAME: list of roles} or {NAME: {roles, gpus, strategy}}. The roles are actor, critic, engines and the "
        "names in the key roles. strategy is how Ray places the pool: PACK, SPREAD, STRICT_PACK or STRICT_SPREAD. Default: one "
        "pool for each role.",
    )
