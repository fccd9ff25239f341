"""Every key we own: its type, unit, default and effect. The yaml groups in conf/ mirror this file.

A value of type `Node` names a class or function by Hydra's `_target_`; it is built, and its arguments checked, in
mrl/controller/build.py before any process starts. Unknown keys are errors (mrl/config/validate.py).
"""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

Node = dict[str, Any]
ASYNC_STALENESS = 2


@dataclass(frozen=True)
class RunConfig:
    name: str = "run"  # names the run in wandb and in the default folder
    dir: str = MISSING  # everything of a run goes here: metrics, logs, rollouts, checkpoints, picture
    seed: int = 0  # order of prompts, sampling, initialisation


@dataclass(frozen=True)
class ModelConfig:
    path: str = MISSING  # Hugging Face folder: config.json, *.safetensors, tokenizer
    dtype: str = "bfloat16"  # of weights and activations: bfloat16 or float32
    family: str | None = None  # a family of your own: "package.module:NAME" or "/path/file.py:NAME" (docs/families.md)

    @property
    def itemsize(self) -> int:
        """Bytes of a weight."""
        return {"bfloat16": 2, "float32": 4}[self.dtype]


@dataclass(frozen=True)
class DataConfig:
    inputs: Node | None = None  # callable run once before anything is read: makes the files named below
    train: list[str] = field(default_factory=list)  # prompts: jsonl or parquet files, folders of datasets' save_to_disk
    mixture: Node = field(default_factory=dict)  # in place of train: name -> {files, weight, columns, system}
    dataset: Node | None = None  # in place of train: an object of your own that gives rows (docs/data.md)
    test: list[str] = field(default_factory=list)  # held-out prompts, likewise; without any no evaluation
    test_sets: Node = field(default_factory=dict)  # more of them, by name: name -> files, or as in mixture
    columns: Node = field(default_factory=dict)  # prompt, ground_truth, data_source, extra_info -> your names of them
    system: str | None = None  # system message of prompts that begin with none
    chat_template: str | None = None  # Jinja file in place of the model's own chat template
    template_args: Node = field(default_factory=dict)  # variables of the chat template, such as enable_thinking
    bad_rows: str = "error"  # rows that cannot be used: error, or skip; all are listed in run.dir/bad_rows_*.jsonl
    overlong: str = "error"  # prompts longer than allowed: error, or skip; listed there too
    shuffle: bool = True  # a new order every epoch, from run.seed
    max_prompt_tokens: int | None = None  # longest allowed prompt; default: the model's context less the response


@dataclass(frozen=True)
class RolloutConfig:
    prompts_per_step: int = 32  # N: distinct prompts sampled in one step
    responses_per_prompt: int = 8  # G: responses to each prompt
    max_response_tokens: int = 512  # a longer response is cut
    temperature: float = 1.0  # of sampling, and of the log-probabilities in training
    mode: str = "sync"  # sync; one_step_off: sampled while the step before is trained; async (docs/asynchrony.md)
    max_staleness: int | None = None  # async: weight versions a token may be older than those it trains; default: 2
    order: str | None = (
        None  # steps train groups as they were drawn, or as finished (async's default, favours the quick)
    )
    over_sampling: float = (
        0.0  # groups in the making beyond those needed, as a share of a step's; the slowest are dropped
    )
    filter: Node | None = None  # rewards of a group -> whether it is trained; others are replaced by new prompts
    max_sampling_rounds: int = (
        10  # at most so many times prompts_per_step are drawn for a step; then it has fewer groups
    )
    agent: Node | None = None  # responses of several turns, in which the policy calls tools (docs/agents.md)
    num_engines: int = 1  # SGLang servers
    engine_tp: int = 1  # tensor-parallel size of each engine
    engine_urls: list[str] = field(default_factory=list)  # SGLang servers that run already, in place of our own
    deterministic: bool = False  # each response from a seed of its own (run.seed, step, place); slower (docs/faults.md)
    routing_replay: bool = (
        False  # train with the experts that the engine chose for each token (a mixture of experts only)
    )
    start_timeout_s: float = 600.0  # until every engine answers
    request_timeout_s: float = 600.0  # for one batch of responses
    record: bool = False  # keep each step's tokens in run.dir/rollouts/step_N.npz
    replay: str | None = None  # folder of such files: train on them, without any engine

    @property
    def staleness(self) -> int:
        """Weight versions that a token may be older than those it trains."""
        ahead = ASYNC_STALENESS if self.max_staleness is None else self.max_staleness
        return {"sync": 0, "one_step_off": 1}.get(self.mode, ahead)

    @property
    def in_order(self) -> bool:
        """Whether steps train groups in the order they were drawn."""
        return self.order == "drawn" or (self.order is None and self.mode != "async" and not self.over_sampling)


@dataclass(frozen=True)
class ScoringConfig:
    """How the reward is run; its own settings are in `reward`."""

    workers: int | None = None  # processes for rewards that could fail; default: one for each core, 8 at most
    sample_timeout_s: float = 10.0  # for one response; a worker that takes longer is ended, and the response failed
    memory_gb: float = 4.0  # of one worker; what needs more fails
    timeout_s: float = 300.0  # for all responses of a step; those without a reward by then have failed


@dataclass(frozen=True)
class AlgorithmConfig:
    advantage: Node = MISSING  # rewards -> advantages of responses or tokens
    loss: Node = MISSING  # policy loss per sampled token
    aggregation: str = "token_mean"  # how tokens are averaged: token_mean, sequence_mean or fixed_length
    # weights of tokens against the gap between trainer and engine, or older weights; default: none where rollout.mode=sync,
    # else truncated importance sampling
    correction: Node | None = None
    kl_in_loss: Node | None = None  # KL to the weights that reinforcement started from, added to the loss
    kl_in_reward: Node | None = None  # the same, taken from the rewards
    entropy_coef: float = 0.0  # of the mean entropy, which is raised; 0: none
    whiten: bool = False  # advantages to mean 0 and standard deviation 1 over all sampled tokens of the step
    mask_truncated: bool = False  # leave responses that were cut at the token limit out of the loss
    old_logprobs: str = (
        "recompute"  # of the old policy, where they are needed: recompute, or take the engine's (rollout)
    )
    skip_zero_advantage: bool = True  # leave out responses that cannot change the gradient (same loss, less work)
    mini_batches: int = 1  # optimizer steps on each pass over a rollout, over whole groups
    epochs: int = 1  # passes over each rollout
    lr: float = 1e-6  # learning rate after warm-up
    lr_schedule: str = (
        "constant"  # after warm-up: constant, linear or cosine, over lr_decay_steps; or wsd: drop at the end
    )
    lr_decay_steps: int = 0  # optimizer steps until the learning rate is lr_min; warm-up included
    lr_min: float = 0.0  # learning rate in the end
    betas: tuple[float, float] = (0.9, 0.95)  # of AdamW
    eps: float = 1e-8  # of AdamW
    weight_decay: float = 0.0
    clip_grad: float = 1.0  # largest gradient norm; 0: no clipping
    warmup_steps: int = 0  # optimizer steps of linear learning-rate warm-up


@dataclass(frozen=True)
class OwnParallelConfig:
    """The layout of a second model; what is not set is as in the parallel section."""

    tp: int | None = None
    sp: bool | None = None
    pp: int | None = None
    vpp: int | None = None
    cp: int | None = None
    ep: int | None = None
    etp: int | None = None
    dp: int | None = None
    world_size: int | None = None


@dataclass(frozen=True)
class CriticConfig:
    """The value function of algorithms that have one (algorithm=ppo)."""

    path: str | None = None  # Hugging Face folder it starts from; default: the actor's
    lr: float = 1e-5  # learning rate, constant
    betas: tuple[float, float] = (0.9, 0.95)  # of AdamW
    eps: float = 1e-8  # of AdamW
    weight_decay: float = 0.0
    clip_grad: float = 1.0
    value_clip: float = (
        0.2  # values move at most so far in one rollout's updates before their loss is flat; 0: no limit
    )
    warmup_steps: int = 0  # first steps, in which only the critic learns
    mini_batches: int | None = None  # optimizer steps on each pass over a rollout; default: the actor's
    epochs: int | None = None  # passes over each rollout; default: the actor's
    parallel: OwnParallelConfig = field(default_factory=OwnParallelConfig)


@dataclass(frozen=True)
class TeacherConfig:
    """The model that algorithms of distillation learn from (algorithm=distill)."""

    path: str | None = None  # Hugging Face folder; same tokens as the actor
    parallel: OwnParallelConfig = field(default_factory=OwnParallelConfig)


@dataclass(frozen=True)
class SftConfig:
    train: str | None = None  # parquet or jsonl file with columns prompt (messages), response (text); none: no stage
    output: str | None = None  # Hugging Face folder to write; `mrl train` skips the stage where it exists already
    steps: int = 200  # optimizer steps
    batch_size: int = 128  # rows per step
    lr: float = 1e-5  # learning rate, decaying linearly to a tenth
    betas: tuple[float, float] = (0.9, 0.95)  # of AdamW
    weight_decay: float = 0.0
    clip_grad: float = 1.0
    warmup_steps: int = 0


@dataclass(frozen=True)
class ParallelConfig:
    tp: int = 1  # tensor-parallel size: each layer's matrices are cut over tp processes
    sp: bool | None = None  # sequence parallelism over the same processes; default: where tp > 1
    pp: int = 1  # pipeline stages
    vpp: int = 1  # virtual stages on each pipeline process
    cp: int = 1  # context-parallel size: each sequence is cut over cp processes
    ep: int = 1  # expert-parallel size: a layer's experts are spread over ep processes
    etp: int | None = None  # expert-tensor-parallel size; default: tp
    dp: int | None = None  # data-parallel replicas; default: world_size / (tp * pp * cp), or as few as the experts need
    world_size: int | None = None  # trainer processes in all, in place of dp


@dataclass(frozen=True)
class TrainerConfig:
    max_steps: int = 1000  # steps of rollout and update; fewer end the run early and cleanly
    stop_reward: float | None = None  # end when the mean reward of the last `stop_window` steps reaches this
    stop_window: int = 5  # steps
    max_tokens_per_micro_batch: int = 8192  # tokens in one packed forward pass, per replica
    share_prompts: bool = True  # compute a prompt once for all responses to it in a pack (same gradients, less work)
    logprob_chunk: int = 1024  # tokens whose logits exist at one time
    eval_every: int = 0  # steps between evaluations on data.test; 0: only before and after
    eval_rows: int | None = None  # evaluate on the first rows of data.test only
    save: bool = True  # write checkpoint/ and hf/ at the end
    timeout_s: float = 1800.0  # for any one call to the trainer processes


@dataclass(frozen=True)
class CheckpointConfig:
    """What is kept of a run while it goes on: all that `resume` needs (docs/resume.md)."""

    every: int = 50  # steps between checkpoints in run.dir/checkpoints; 0: at the end only
    keep_last: int = 2  # checkpoints; older ones are removed
    keep_best: int = 0  # besides, those with the highest `best_metric`
    best_metric: str = "reward/mean"  # of the step the checkpoint was written after
    asynchronous: bool = True  # training goes on while a checkpoint is written; at most one is
    timeout_s: float = 1800.0  # for one checkpoint to be written
    export_every: int = 0  # steps between Hugging Face folders in run.dir/exports; 0: none
    copy_to: str | None = None  # any fsspec URL: each checkpoint that is whole is copied there too


@dataclass(frozen=True)
class FaultsConfig:
    """What a run does when processes fail (docs/faults.md)."""

    max_restarts: int = 5  # of trainer or rollout processes without a new checkpoint in between; then the run ends
    engine_stall_s: float = 60.0  # an engine that makes no progress for so long is replaced
    engine_tries: int = 3  # of one response, on other engines, before the run ends
    grace_s: float = 60.0  # after SIGTERM or USR1: a step that may take longer is abandoned


@dataclass(frozen=True)
class CapsuleConfig:
    """Steps that are kept whole, for `mrl replay` (docs/replay.md)."""

    steps: list[int] = field(default_factory=list)  # these; a step with a NaN always is
    spike: float = 10.0  # and one whose gradient norm is so many times the median of the last `window`; 0: none
    window: int = 20  # steps
    keep: int = 3  # capsules of spikes; later ones are not written


@dataclass(frozen=True)
class WeightSyncConfig:
    transport: str = "auto"  # shared_memory, cuda_ipc, process_group or disk; auto: by where trainers and engines are
    bucket_bytes: int = 64 * 1024 * 1024  # weights travel in buckets of at most this size; each sender has two
    pause_mode: str = (
        "retract"  # running requests: retract (recompute), abort (end) or in_place (keep their old KV cache)
    )
    delta: bool = False  # send what changed since the last version, compressed; each sender keeps a copy of its share
    timeout_s: float = 300.0  # for each wait of a sync: an engine that does not answer for so long is replaced
    tries: int = 3  # pushes of one version, with new engines in place of those that fail, before the run ends


@dataclass(frozen=True)
class GenerateConfig:
    """`mrl generate`: responses to the prompts of data.test, by model.path."""

    output: str | None = None  # folder of parquet files; default: generated/ in run.dir. Name it to go on after a stop
    samples: int = 8  # responses to each prompt
    temperature: float = 1.0  # of sampling; 0: the likeliest token each time, and then samples must be 1
    top_p: float = 1.0  # sample from the likeliest tokens that have this probability together; 1: from all
    top_k: int = -1  # sample from so many likeliest tokens; -1: from all
    max_response_tokens: int | None = None  # a longer response is cut; default: rollout.max_response_tokens
    deterministic: bool = (
        True  # each response from a seed of its own, with SGLang's deterministic kernels; false: faster
    )
    rows: int | None = None  # the first rows of each file only
    base: str | None = (
        None  # where model.path is a Megatron checkpoint: Hugging Face folder with its config and tokenizer
    )
    logprobs: bool = False  # also keep the log-probability of every sampled token
    score: bool = True  # also keep what `reward` gives
    prompts_per_file: int = 64  # a file appears when all its prompts are answered: what a stop can cost
    requests_in_flight: int = 256  # responses that an engine is asked for at one time


@dataclass(frozen=True)
class EvaluateConfig:
    """`mrl evaluate`: pass@k, maj@k and mean score of the responses of `mrl generate`."""

    input: str | None = None  # folder of a finished `mrl generate`; default: generate first, by the section above
    output: str | None = None  # folder of evaluation.json, evaluation.png and scores.parquet; default: run.dir
    k: list[int] = field(default_factory=list)  # of pass@k and maj@k; default: 1, 2, 4, ... and all samples
    threshold: float = 1.0  # a response passes when its score is this or more
    confidence: float = 0.95  # of the intervals
    rescore: bool = False  # score again by `reward`; default: only what has no score yet


@dataclass(frozen=True)
class CertifyConfig:
    """`mrl certify`: one step under the layout, and in one process."""

    prompts: int = 8  # groups of the batch, of random tokens
    responses_per_prompt: int = 4
    prompt_tokens: int = 24  # longest prompt; lengths are drawn
    response_tokens: int = 40  # longest response; lengths are drawn
    critic: bool = False  # a critic with a value head in place of the actor
    lr: float = 1e-4  # of the one step
    dtype: str = "float32"  # of both sides, whatever model.dtype is; bfloat16 hides mistakes in its round-off


@dataclass(frozen=True)
class PlanConfig:
    """What `mrl plan` assumes of the hardware."""

    send_gb_per_s: float = 25.0  # of one trainer rank; a 200 Gbit/s network card
    receive_gb_per_s: float = 25.0  # of one engine rank
    message_us: float = 50.0  # what a message costs besides its bytes
    check_memory: bool = True  # refuse a run that the machines of cluster.hardware cannot hold
    reserve_gb: float = 2.0  # GiB of a GPU that each process keeps besides: CUDA's context, NCCL's buffers, fragments
    prompt_tokens: int | None = None  # a typical prompt; default: data.max_prompt_tokens, or as long as a response
    expert_imbalance: float = 1.5  # tokens that the busiest rank's experts get, over the mean
    picture: str | None = None  # `mrl plan placement` also draws into this PNG
    top: int = 5  # answers of `mrl plan search`
    fix: list[str] = field(default_factory=list)  # keys or sections that it leaves as they are: parallel, rollout.mode
    lengths: str | None = None  # of responses: a run's folder, or a jsonl file of lists of tokens; default: log-normal
    response_tokens: int | None = None  # median, log-normal; default: a quarter of rollout.max_response_tokens
    response_sigma: float = 0.8  # of the log-normal lengths; 0: all as long
    matmul_efficiency: float = 0.5  # share of the GPU's TFLOP/s that matrices reach
    attention_efficiency: float = 0.4  # and attention
    expert_efficiency: float = 0.35  # and grouped experts, uneven routing included
    bandwidth_efficiency: float = 0.75  # share of memory's, NVLink's and the network's GB/s that is reached
    latency_us: float = 10.0  # of a collective, besides its bytes
    pcie_gb_per_s: float = 50.0  # of one GPU to its host, each direction


@dataclass(frozen=True)
class TrackingConfig:
    wandb: bool = True  # offline unless a key is set; never asks for a login
    project: str = "mrl"  # wandb project
    group: str | None = None  # wandb group; the points of a sweep have one together


@dataclass(frozen=True)
class SweepConfig:
    """`mrl train -m`: many runs with other values of some keys (docs/sweeps.md)."""

    params: Node = field(default_factory=dict)  # key -> its values ("1e-4,3e-4", "range(1,4)", "interval(0,1)")
    metric: str = (
        "reward/mean"  # what points are compared by: the last steps' mean, or the last evaluation's (eval/...)
    )
    maximize: bool = True  # the largest is the best
    at_once: int = 1  # points that run at one time
    trials: int | None = (
        None  # so many points, chosen by what earlier ones achieved (Optuna); default: every combination
    )


@dataclass(frozen=True)
class HardwareConfig:
    """The machines of the cluster, for `mrl plan`: cluster=h100 and the like fill it in. 0: not known, so no limit."""

    name: str | None = None  # of the GPU
    gpu_memory_gb: float = 0.0  # GiB of one GPU that processes can use
    tflops_bf16: float = 0.0  # dense matrix products in bfloat16, TFLOP/s of one GPU
    hbm_gb_per_s: float = 0.0  # of a GPU's own memory
    nvlink_gb_per_s: float = 0.0  # of one GPU to the others of its node, both directions together
    network_gb_per_s: float = 0.0  # of one GPU to other nodes, each direction
    host_memory_gb: float = 0.0  # GiB of one node

    def __post_init__(self) -> None:
        for key, value in vars(self).items():
            if key != "name" and value < 0:
                raise ValueError(f"cluster.hardware.{key}={value}: must be 0 or more; 0 says that it is not known.")


@dataclass(frozen=True)
class ClusterConfig:
    address: str | None = None  # of a running Ray cluster; default: start one on this machine
    start_timeout_s: float = 600.0  # until all trainer processes have their model
    scheduler: str | None = None  # slurm: the command submits the run as a job (docs/slurm.md); none: it runs
    nodes: int | None = None  # of the job, or that `mrl plan` may use; default: as many as the run needs
    gpus_per_node: int = 8  # 0: none, and each CPU of a job is a place for a process
    partition: str | None = None  # of the job; default: the cluster's
    time: str | None = None  # limit of the job, such as "4:00:00" or "2-12" (days-hours); default: the partition's
    slurm: Node = field(default_factory=dict)  # any other option of sbatch, with _ for -; true: without a value
    components: list[Node] = field(default_factory=list)  # further parts of a heterogeneous job: what differs in each
    dry_run: bool = False  # show the job and submit nothing; `mrl train --dry-run` sets it
    hardware: HardwareConfig = field(default_factory=HardwareConfig)


@dataclass(frozen=True)
class PlacementConfig:
    """Which processes run on which devices (docs/placement.md)."""

    pools: Node = field(default_factory=dict)  # name -> roles, or {roles, gpus, strategy}; none: one for each role


@dataclass(frozen=True)
class Config:
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: Node = MISSING  # responses -> rewards
    scoring: ScoringConfig = field(default_factory=ScoringConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    sft: SftConfig = field(default_factory=SftConfig)  # the job of `mrl sft`; in `mrl train` a warm start
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    weight_sync: WeightSyncConfig = field(default_factory=WeightSyncConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    faults: FaultsConfig = field(default_factory=FaultsConfig)
    capsule: CapsuleConfig = field(default_factory=CapsuleConfig)
    resume: str = "auto"  # auto: go on where run.dir has a run; never: refuse that; or a checkpoint of another run
    generate: GenerateConfig = field(default_factory=GenerateConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    certify: CertifyConfig = field(default_factory=CertifyConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    sglang: Node = field(default_factory=dict)  # any ServerArgs field of SGLang, passed on
    megatron: Node = field(default_factory=dict)  # any TransformerConfig field of Megatron, passed on
