"""Config sections of commands other than `mrl train`: generate, evaluate, certify, plan, sweep."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from parallel.trainer_config import config_field as key


class Dtype(StrEnum):
    """Precision of weights and activations."""

    bfloat16 = "bfloat16"
    float32 = "float32"


class Direction(StrEnum):
    """Which values of a metric are better."""

    maximize = "maximize"
    minimize = "minimize"


@dataclass(frozen=True)
class GenerateConfig:
    """`mrl generate`: samples responses of model.path to the prompts of data.test."""

    output: str | None = key(
        None,
        "folder of the parquet files; default: generated/ in run.dir. Set it to continue an interrupted generation",
    )
    samples: int = key(8, "number of responses to each prompt", "responses", least=1)
    temperature: float = key(1.0, "sampling temperature; 0: greedy decoding, with samples=1", least=0)
    top_p: float = key(1.0, "nucleus sampling: the smallest set of tokens with this probability mass", above=0, most=1)
    top_k: int = key(-1, "sample from this number of most likely tokens; -1: from all", least=-1)
    deterministic: bool = key(
        True, "one seed for each response, and SGLang's batch-invariant kernels; false is faster but not reproducible"
    )
    rows: int | None = key(None, "use only the first rows of each file; default: all", "rows", least=1)
    base: str | None = key(
        None, "Hugging Face folder with config and tokenizer, needed if model.path is a Megatron checkpoint"
    )
    logprobs: bool = key(False, "also save the log-probability of each sampled token")
    score: bool = key(True, "also compute and save the reward of each response")
    prompts_per_file: int = key(
        64, "prompts in one output file; a file is written when all its prompts have responses", "prompts", least=1
    )
    requests_in_flight: int = key(256, "concurrent requests to one engine", "responses", least=1)


@dataclass(frozen=True)
class EvaluateConfig:
    """`mrl evaluate`: computes pass@k, maj@k and mean score of the responses of `mrl generate`."""

    input: str | None = key(None, "folder of a finished `mrl generate`; default: generate the responses first")
    output: str | None = key(None, "folder of evaluation.json, evaluation.png and scores.parquet; default: run.dir")
    k: list[int] = key(
        list, "values of k for pass@k and maj@k; default: 1, 2, 4, ... and the number of samples", least=1
    )
    threshold: float = key(1.0, "a response passes if its score is at least this")
    confidence: float = key(0.95, "confidence level of the intervals", above=0, below=1)
    rescore: bool = key(False, "recompute all scores with `reward`; default: only missing scores")


@dataclass(frozen=True)
class CertifyConfig:
    """`mrl certify`: compares one training step under the parallel layout with the same step in one process."""

    prompts: int = key(8, "number of groups in the batch of random tokens", "groups", least=1)
    responses_per_prompt: int = key(4, "group size", "responses", least=1)
    prompt_tokens: int = key(24, "longest prompt; lengths are random", "tokens", least=1)
    response_tokens: int = key(40, "longest response; lengths are random", "tokens", least=1)
    critic: bool = key(False, "compare a critic instead of an actor")
    lr: float = key(1e-4, "learning rate of the one step", above=0)
    dtype: Dtype = key(Dtype.float32, "precision of both sides; bfloat16 hides small errors in its rounding")


def _efficiency() -> dict[str, float]:
    return dict(matmul=0.5, attention=0.4, experts=0.35, bandwidth=0.75)


@dataclass(frozen=True)
class PlanConfig:
    """`mrl plan`: assumptions about the workload and about the hardware."""

    check_memory: bool = key(True, "`mrl train` refuses a run that does not fit into cluster.hardware")
    reserve_gb: float = key(
        2.0, "GPU memory of each process for the CUDA context, NCCL buffers and fragmentation", "GiB", least=0
    )
    prompt_tokens: int | None = key(
        None, "length of a typical prompt; default: data.max_prompt_tokens, or the response length", "tokens", least=1
    )
    lengths: str | None = key(
        None, "response lengths: a run directory, or a jsonl file of lists of lengths; default: log-normal lengths"
    )
    response_tokens: int | None = key(
        None, "median of the log-normal lengths; default: rollout.max_response_tokens / 4", "tokens", least=1
    )
    response_sigma: float = key(0.8, "sigma of the log-normal lengths; 0: all responses have the same length", least=0)
    expert_imbalance: float = key(
        1.5, "tokens on the expert-parallel rank with the most tokens, divided by the mean", above=0
    )
    picture: str | None = key(None, "`mrl plan placement` also draws the placement into this PNG file")
    top: int = key(5, "number of results of `mrl plan search`", least=1)
    fix: list[str] = key(
        list, "keys or sections that `mrl plan search` does not change, such as parallel, rollout.mode"
    )
    efficiency: dict[str, Any] = key(
        _efficiency,
        "attained fraction of the peak: matmul, attention and experts in FLOP/s, bandwidth in bytes/s",
        above=0,
    )
    latency_us: float = key(10.0, "latency of one collective operation", "us", least=0)
    pcie_gb_per_s: float = key(50.0, "bandwidth between one GPU and its host, each direction", "GB/s", above=0)
    weight_sync_gb_per_s: float = key(
        25.0,
        "bandwidth of one trainer rank or engine rank in a weight sync; 25: a 200 Gbit/s network card",
        "GB/s",
        above=0,
    )
    message_us: float = key(50.0, "latency of one weight-sync message", "us", least=0)


@dataclass(frozen=True)
class SweepConfig:
    """`mrl train -m`: how the points of a sweep are compared (hydra.sweeper and hydra.launcher say how they run)."""

    metric: str = key(
        "reward/mean", "metric of a point: mean over the last steps; eval/*: value of the last evaluation"
    )
    direction: Direction = key(Direction.maximize, "whether the largest or the smallest metric is the best")
