"""Config sections with the keys of single commands: sft, generate, evaluate, certify, plan and sweep (`mrl train -m`)."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from mrl.config.process_schema import Node
from parallel.trainer_config import LrSchedule, OptimConfig
from parallel.trainer_config import config_field as key


class Dtype(StrEnum):
    """Precision of model weights and activations."""

    bfloat16 = "bfloat16"
    float32 = "float32"


class Direction(StrEnum):
    """Whether larger or smaller values of a metric are better."""

    maximize = "maximize"
    minimize = "minimize"


def _sft_optim() -> OptimConfig:
    return OptimConfig(lr=1e-5, lr_schedule=LrSchedule.linear_to_tenth)


@dataclass(frozen=True)
class SftConfig:
    """Supervised training, for `mrl sft` and for the warm start of `mrl train` (docs/tutorials/data.md)."""

    objective: Node = key(
        lambda: {"_target_": "mrl.algorithms.losses.CrossEntropy"},
        "Loss. conf/objective has cross-entropy, losses for preference data (dpo and others), and losses of reward models.",
    )
    train: str | None = key(
        None,
        "Parquet or jsonl file with the columns that the objective needs: (prompt, response), (prompt, chosen, rejected) or "
        "(prompt, completion, label). With null, `mrl train` has no warm start.",
    )
    test: str | None = key(
        None,
        "Held-out rows in the form of sft.train. Their loss is measured after the last step, and every trainer.eval_every steps.",
    )
    output: str | None = key(
        None,
        "Hugging Face folder for the trained model. If it already exists, `mrl train` uses it and skips the warm start.",
    )
    steps: int = key(200, "Number of optimizer steps.", "optimizer steps", least=1)
    batch_size: int = key(128, "Number of rows in one optimizer step. A pair is one row.", "rows", least=1)
    optim: OptimConfig = key(
        _sft_optim,
        "Optimizer of supervised training. If sft.optim.lr_decay_steps is 0, the decay ends after sft.steps steps.",
    )


@dataclass(frozen=True)
class GenerateConfig:
    """Keys of `mrl generate`, which samples responses of the model in model.path to held-out prompts."""

    output: str | None = key(
        None,
        "Folder for the parquet files. Default: generated/ in run.dir. Set this key to continue an interrupted generation.",
    )
    samples: int = key(8, "Number of responses to each prompt.", "responses", least=1)
    temperature: float = key(
        1.0, "Sampling temperature. 0 means greedy decoding and needs generate.samples=1.", least=0
    )
    top_p: float = key(
        1.0,
        "Nucleus sampling: tokens are sampled from the smallest set whose total probability reaches this value.",
        above=0,
        most=1,
    )
    top_k: int = key(
        -1,
        "Top-k sampling: tokens are sampled from this number of most likely tokens. -1 means from all tokens.",
        least=-1,
    )
    deterministic: bool = key(
        True,
        "Whether each response has its own seed and SGLang uses batch-invariant kernels. false is faster, but the "
        "responses are not reproducible.",
    )
    rows: int | None = key(
        None, "Number of rows that are used, from the start of each file. Default: all rows.", "rows", least=1
    )
    base: str | None = key(
        None, "Hugging Face folder with config and tokenizer. Required if model.path is a Megatron checkpoint."
    )
    logprobs: bool = key(False, "Whether to save the log-probability of each sampled token.")
    score: bool = key(True, "Whether to compute and save the reward of each response.")
    prompts_per_file: int = key(
        64,
        "Number of prompts in one output file. A file is written when all its responses are finished.",
        "prompts",
        least=1,
    )
    requests_in_flight: int = key(256, "Largest number of concurrent requests to one engine.", "requests", least=1)


@dataclass(frozen=True)
class EvaluateConfig:
    """`mrl evaluate`: computes pass@k, maj@k and the mean score of responses (docs/reference/commands.md)."""

    input: str | None = key(
        None,
        "Responses: a folder that a finished `mrl generate` has written, or a parquet or jsonl file of another tool, or a folder "
        "of such files. Default: `mrl evaluate` generates the responses first.",
    )
    columns: dict[str, Any] = key(
        dict,
        "Name of a column in mrl -> its name in the files of another tool. {response: completion} means that the column "
        "completion has the responses. The names in mrl are prompt, response, ground_truth, data_source, extra_info, ability, "
        "style and num_tokens. mrl knows the column names of verl, "
        "lm-evaluation-harness and lighteval.",
    )
    harness: str | None = key(
        None,
        "Command line of your own lm-evaluation-harness, such as 'lm_eval --tasks gsm8k'. It runs its tasks with engines that "
        "mrl starts, in place of the prompts in data.test.",
    )
    compare: str | None = key(
        None, "Folder of an earlier evaluation of the same prompts, with which the results are compared."
    )
    output: str | None = key(None, "Folder for evaluation.json, evaluation.png and scores.parquet. Default: run.dir.")
    k: list[int] = key(
        list, "Values of k for pass@k and maj@k. Default: 1, 2, 4, ... and the number of samples.", least=1
    )
    threshold: float = key(1.0, "A response passes if its score is at least this value.")
    confidence: float = key(0.95, "Confidence level of the intervals.", above=0, below=1)
    rescore: bool = key(
        False,
        "Whether to compute all scores again with the reward of this config. Otherwise scores are computed only if the input has "
        "none.",
    )


@dataclass(frozen=True)
class CertifyConfig:
    """`mrl certify`: compares one training step under the parallel layout with the same step in one process."""

    prompts: int = key(8, "Number of groups in the batch, which consists of random tokens.", "groups", least=1)
    responses_per_prompt: int = key(4, "Number of responses to each prompt (group size).", "responses", least=1)
    prompt_tokens: int = key(24, "Largest length of a prompt. Lengths are random.", "tokens", least=1)
    response_tokens: int = key(32, "Largest length of a response. Lengths are random.", "tokens", least=1)
    critic: bool = key(False, "Whether to compare a critic. Otherwise an actor is compared.")
    lr: float = key(1e-4, "Learning rate of the compared step.", above=0)
    dtype: Dtype = key(Dtype.float32, "Precision of both compared steps. Rounding in bfloat16 can hide small errors.")


def _efficiency() -> dict[str, float]:
    """Return the default of plan.efficiency: the fractions of the vendor's peak speeds that a GPU attains.

    `matmul` and `attention` come from one H100 (benchmarks/README.md, "One H100"). Single matrix products attain 0.68 to 0.73 of
    the peak, and the attention kernels that mrl chooses attain 0.24 to 0.52. The planner's times have no terms for norms,
    activation functions, RoPE and the loss, so `matmul` and `attention` also account for this work. With 0.38 and 0.3, the
    planner predicts the times of the two measured updates within 6 %. `bandwidth` is below the 0.83 that a plain copy attains.
    `experts` has not been measured.
    """
    return dict(matmul=0.38, attention=0.3, experts=0.35, bandwidth=0.75)


@dataclass(frozen=True)
class PlanConfig:
    """`mrl plan`: assumptions about the workload and about the hardware."""

    check_memory: bool = key(
        True, "Whether `mrl train` refuses a run that needs more memory than cluster.hardware has."
    )
    reserve_gb: float = key(
        2.0, "GPU memory that each process needs for the CUDA context, NCCL buffers and fragmentation.", "GiB", least=0
    )
    prompt_tokens: int | None = key(
        None,
        "Length of a typical prompt. Default: data.max_prompt_tokens if set, otherwise rollout.max_response_tokens as a cautious "
        "guess; at most what the context leaves beside the response. Default in `mrl plan search`: the mean length in data.train "
        "if its files and the tokenizer exist, otherwise data.max_prompt_tokens if set, otherwise 512.",
        "tokens",
        least=1,
    )
    lengths: str | None = key(
        None,
        "Source of response lengths: a run directory, or a jsonl file with a list of lengths in each line. "
        "Default: a log-normal distribution.",
    )
    response_tokens: int | None = key(
        None,
        "Median of the log-normal distribution of response lengths. Default: rollout.max_response_tokens / 4.",
        "tokens",
        least=1,
    )
    response_sigma: float = key(
        0.8,
        "Sigma of the log-normal distribution of response lengths. With 0, all responses have the same length.",
        least=0,
    )
    expert_imbalance: float = key(
        1.5,
        "Number of tokens on the busiest expert-parallel rank, divided by the mean number of tokens of a rank.",
        above=0,
    )
    picture: str | None = key(None, "PNG file into which `mrl plan placement` draws the placement.")
    top: int = key(5, "Number of results that `mrl plan search` shows.", least=1)
    fix: list[str] = key(
        list, "Keys or sections that `mrl plan search` does not change, such as [parallel, rollout.mode]."
    )
    efficiency: dict[str, Any] = key(
        _efficiency,
        "Attained fractions of the peak FLOP/s (matmul, attention, experts) and of the peak memory bandwidth (bandwidth). matmul "
        "and attention also account for norms, activation functions, RoPE and the loss. The defaults of matmul and attention are "
        "fitted to measured updates on an H100; the defaults of experts and bandwidth are assumed.",
        above=0,
    )
    latency_us: float = key(10.0, "Latency of one collective operation.", "us", least=0)
    pcie_gb_per_s: float = key(50.0, "Bandwidth between one GPU and its host in each direction.", "GB/s", above=0)
    weight_sync_gb_per_s: float = key(
        25.0,
        "Bandwidth of one trainer rank or engine rank in a weight sync. The default fits a 200 Gbit/s network card.",
        "GB/s",
        above=0,
    )
    message_us: float = key(50.0, "Latency of one message in a weight sync.", "us", least=0)


@dataclass(frozen=True)
class SweepConfig:
    """How `mrl train -m` compares the runs of a sweep. The keys hydra.sweeper and hydra.launcher define how runs start."""

    metric: str = key(
        "reward/mean",
        "Metric that ranks the runs of a sweep, averaged over the last 5 steps. For a metric eval/*, only the last evaluation "
        "counts.",
    )
    direction: Direction = key(Direction.maximize, "Whether the largest or the smallest value is the best.")
