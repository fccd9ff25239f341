"""`mrl generate`: plans a generation, then samples and scores responses to all prompts of the plan.

The plan contains model, prompt sources, reward and sampling. It is checked before any process starts. The command also continues
interrupted generations.
"""

import asyncio
import shutil
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

from models.conversion.hf_reader import HFWeights, check_hf_folder
from models.conversion.resumable_folder import ByteProgress, fingerprint
from models.families import family_of
from models.hf_config import HFConfig
from mrl.config.schema import Config
from mrl.controller.plan_engine_dtype import check_engine_device, check_engine_dtype
from mrl.controller.plan_models import chat_template, make_input_files, max_prompt_length
from mrl.controller.plan_prompts import unscored_row_check
from mrl.data.prompts import PromptConstraints, PromptDataset
from mrl.data.sources import PromptSource, test_sources
from mrl.data.tokenizer import load_tokenizer
from mrl.evaluation.engines import EngineWatcher, engine_group, running_engines
from mrl.evaluation.evaluation_prompts import (
    EvaluationPrompt,
    SetRewards,
    checked_rewards,
    load_prompts,
    prompts_digest,
)
from mrl.evaluation.response_store import JsonObject, ResponseStore
from mrl.rewards.pass_at_k import MAX_SAMPLES
from mrl.rewards.scorer import Scorer
from mrl.rollout.client import Completion, SamplingParams
from mrl.rollout.engine_pool import deadline_error
from mrl.rollout.engines.server_args import DETERMINISTIC, check_server_args, default_server_args

CONVERTED_FOLDER_NAME = "model"  # temporary subfolder of generate.output; contains the converted Megatron checkpoint


@dataclass(frozen=True)
class SampledModel:
    """The model that engines serve: a Hugging Face folder, or a Megatron checkpoint that is converted to a temporary folder."""

    hf: HFConfig
    checkpoint: Path | None = None  # Megatron checkpoint with the weights; None: the weights are in `folder`

    @property
    def folder(self) -> Path:
        """The Hugging Face folder with the config and the tokenizer."""
        return self.hf.path.parent

    @property
    def context(self) -> int:
        """Context length of the model: the longest sequence, in tokens."""
        return family_of(self.hf).read(self.hf).max_position_embeddings

    @property
    def vocab_size(self) -> int:
        """Number of tokens in the model's vocabulary."""
        return family_of(self.hf).read(self.hf).vocab_size

    def fingerprint(self) -> dict[str, list[int]]:
        """Return the size and the modification time of config.json and of every weight file."""
        weights = sorted(self.checkpoint.iterdir()) if self.checkpoint else HFWeights(self.folder).files
        return fingerprint([self.hf.path, *weights])

    def prepare_engine_folder(self, scratch: Path, progress: AbstractContextManager[ByteProgress]) -> Path:
        """Return a Hugging Face folder that engines can load.

        A Megatron checkpoint is converted to the folder `scratch`. If `scratch` exists already, it is used as it is. Raises
        ValueError if the checkpoint does not belong to this model.
        """
        if not self.checkpoint:
            return self.folder
        from models.conversion import convert_checkpoint  # imports torch

        if not scratch.is_dir():
            with progress as bar:
                convert_checkpoint.to_hf(self.checkpoint, self.hf, scratch, bar)
        return scratch


def find_model(config: Config) -> SampledModel:
    """Return the model at model.path. Raises ValueError if lora.path is set, or if model.path or generate.base is unusable."""
    if config.lora.path:
        raise ValueError(
            f"lora.path={config.lora.path}: engines load no adapters; leave the key out, and set model.path to an exported "
            "folder with merged weights, such as hf/ of a run."
        )
    path, base = Path(config.model.path), config.generate.base
    if (path / ".metadata").is_file() and not (path / "config.json").is_file():
        if not base:
            raise ValueError(
                f"model.path={path}: a Megatron checkpoint has neither config nor tokenizer; name the Hugging Face folder "
                "that it was trained from: generate.base=FOLDER."
            )
        return SampledModel(HFConfig.load(base, config.model.family), path)
    if base:
        raise ValueError(
            f"generate.base={base} is only for a Megatron checkpoint, but model.path={path} is not one; remove generate.base."
        )
    inner = [folder for name in ("hf", "checkpoint", "actor") if (folder := path / name).is_dir()]
    inner += sorted(path.glob("checkpoints/step_*/actor"))[-1:]
    if inner and not (path / "config.json").is_file():
        raise ValueError(
            f"model.path={path} has no config.json, but contains models; set model.path to {' or '.join(map(str, inner))}."
        )
    return SampledModel(check_hf_folder(path, config.model.family))


@dataclass(frozen=True)
class GenerationPlan:
    """A checked generation: model, prompt sources, reward, sampling parameters, and the output folder."""

    config: Config
    store: ResponseStore
    model: SampledModel
    sources: list[PromptSource]
    rewards: SetRewards | None  # None: the responses are not scored
    sampling: SamplingParams  # parameters of every response, except the seed

    @property
    def server_args(self) -> dict[str, Any]:
        """Arguments of SGLang for every engine, except model_path, tp_size and random_seed."""
        config = self.config
        device = config.sglang.get("device")
        defaults = default_server_args(config.model.dtype, self.model.context, device=device)
        return defaults | {DETERMINISTIC: config.generate.deterministic} | config.sglang

    def prompts(self) -> list[EvaluationPrompt]:
        """Read and check all prompts.

        Raises ValueError with file, row and reason if a prompt is unusable and data.bad_rows or data.overlong does not omit it.
        """
        config = self.config
        limit = max_prompt_length(config, self.model.context)
        constraints = PromptConstraints(limit, self.model.vocab_size, chat_template(config))
        return load_prompts(
            self.sources, str(self.model.folder), constraints, self._enforce_row_policies, config.generate.rows
        )

    def _enforce_row_policies(self, data: PromptDataset, file_index: int) -> None:
        path = self.store.folder.with_name(f"{self.store.folder.name}_bad_rows_{file_index}.jsonl")
        data.enforce_row_policies(path, bad_rows=self.config.data.bad_rows, overlong=self.config.data.overlong)


def plan_generation(config: Config) -> GenerationPlan:
    """Check the config of `mrl generate` and return its plan. Starts no process. Raises ValueError for a mistake in the config.

    The prompts are not read here, because a finished generation does not need them. GenerationPlan.prompts reads them.
    """
    generate = config.generate
    if generate.samples > MAX_SAMPLES:
        raise ValueError(
            f"generate.samples={generate.samples}: at most {MAX_SAMPLES} responses to a prompt are evaluated."
        )
    check_server_args(config.sglang)
    if DETERMINISTIC in config.sglang:
        raise ValueError(f"sglang.{DETERMINISTIC} is set by mrl; use generate.deterministic.")
    rewards = checked_rewards(config.reward, config.data.test_sets) if generate.score else None
    make_input_files(config)
    sources = test_sources(config.data)
    if rewards:
        sources = [
            replace(each, unusable_reason=unscored_row_check(rewards.of_set.get(each.name, rewards.reward)))
            for each in sources
        ]
    if not sources:
        raise ValueError(
            "data.test and data.test_sets are empty: there are no prompts. Set data.test to parquet or jsonl files of prompts, "
            "or to a folder of such files. To use a data set class, set data.test_sets (see docs/tutorials/data.md)."
        )
    files = [Path(file) for source in sources for file in source.files]
    for file in files:
        if not file.exists():
            raise ValueError(
                f"data.test or data.test_sets: {file}: no such file; expected a .parquet or .jsonl file, or a folder."
            )
    model = find_model(config)
    sampling = SamplingParams(
        max_new_tokens=config.rollout.max_response_tokens,
        temperature=generate.temperature,
        top_p=generate.top_p,
        top_k=generate.top_k,
    )
    folder = generate.output or str(Path(config.run.dir) / "generated")
    store = ResponseStore(folder, _response_settings(config, model, files))
    if not (config.rollout.engine_urls or store.finished):
        check_engine_device(config, family_of(model.hf))
        check_engine_dtype(config, model.hf, config.model.dtype, config.generate.deterministic, "generate")
    return GenerationPlan(config, store, model, sources, rewards, sampling)


DATA_KEYS = ("test_sets", "columns", "system", "chat_template", "template_args", "bad_rows", "overlong")
"""Keys of the data section that determine the prompts, in addition to the files."""


def _response_settings(config: Config, model: SampledModel, prompt_files: list[Path]) -> dict[str, Any]:
    """Return the settings that determine the output files. A generation continues only if none of them has changed.

    The result contains config values, versions of packages, and sizes and modification times of files. rollout.num_engines and
    rollout.engine_urls are not included, because they may change when a generation continues. data.max_prompt_tokens is not
    included, because ResponseStore.check_prompts compares the prompts themselves.
    """
    generate = config.generate
    names = (
        "samples",
        "temperature",
        "top_p",
        "top_k",
        "deterministic",
        "rows",
        "logprobs",
        "score",
        "prompts_per_file",
    )
    files = model.fingerprint() | fingerprint([file for path in prompt_files for file in _files_of(path)])
    return {
        "model.path": str(Path(config.model.path).resolve()),
        "model.dtype": config.model.dtype,
        "data.test": [str(Path(file).resolve()) for file in config.data.test],
        **{f"data.{name}": vars(config.data)[name] for name in DATA_KEYS},
        **{f"generate.{name}": vars(generate)[name] for name in names},
        "rollout.max_response_tokens": config.rollout.max_response_tokens,
        "run.seed": config.run.seed,
        "rollout.engine_tp": config.rollout.engine_tp,
        "sglang": config.sglang,
        "reward": config.reward if generate.score else None,
        "determinism": describe_determinism(config),
        **{f"version of {name}": version(name) for name in ("sglang", "torch", "transformers")},
        **{f"size and time of {path}": found for path, found in files.items()},
    }


def _files_of(path: Path) -> list[Path]:
    """Return the files of a folder, or the file itself."""
    return sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]


def describe_determinism(config: Config) -> str:
    """Return a text for the terminal and _generate.json that says how reproducible the responses are."""
    if config.generate.temperature == 0:
        kind = "greedy decoding: always the most probable token"
    elif config.generate.deterministic:
        kind = (
            f"each response has its own seed, computed from run.seed={config.run.seed}, the name of its held-out set, "
            "and the numbers of its file, row and sample"
        )
    else:
        return (
            "not reproducible: a response depends on the other requests in its engine's batch; run.seed sets only the seeds of "
            "the engines"
        )
    if not config.generate.deterministic:
        return (
            kind
            + "; if two tokens are nearly equally likely, rounding decides, and rounding depends on the engine's batch"
        )
    return (
        kind
        + ". A repeated run gives the same responses on a GPU with batch-invariant kernels; on a CPU, rounding may change a token"
    )


FILES_AHEAD = 2
"""Number of output files whose responses are requested in advance, beyond the files that the engines can sample at once.

So the engines stay busy while the slowest responses of a file are sampled, and while the responses of a file are scored. An
output file contains the responses to generate.prompts_per_file prompts.
"""

MAX_HTTP_REQUESTS = 64
"""Largest number of concurrent HTTP requests, divided by the number of engines in service.

From generate.requests_in_flight=128 on, one HTTP request carries generate.requests_in_flight // 64 prompts.
"""

GenerationRequest = tuple[list[int], SamplingParams]  # prompt tokens and sampling parameters of one response
PendingResponses = list[Future[list[Completion]]]  # one future per HTTP request


class GenerationProgress(Protocol):
    """Display of the progress of a generation."""

    def begin(self, total: int, done: int) -> None:
        """Start the display. Of `total` responses, `done` exist already."""

    def advance(self, responses: int, tokens: int) -> None:
        """Add newly finished responses to the display. `responses` and `tokens` are their counts."""


def generate(
    plan: GenerationPlan, progress: GenerationProgress, converting: AbstractContextManager[ByteProgress]
) -> JsonObject:
    """Sample all missing responses. Return the totals that are written to _generate.json.

    The totals are the numbers of responses, prompts and files, and the seconds for which this process sampled and scored.

    Args:
        converting: context that shows the progress of the conversion of a Megatron checkpoint.

    Raises:
        ValueError: a prompt, the output folder or the Megatron checkpoint cannot be used (raised before engines start), an
            external server does not support seeds, or the Ray cluster has no room for the engines.
        EngineError: no engine is left, or an engine refused a request. Finished files are kept.
    """
    prompts, settings = plan.prompts(), plan.config.generate
    with plan.store as store:
        store.check_prompts(prompts_digest(prompts))
        scratch = store.folder / CONVERTED_FOLDER_NAME  # only used if the model is a Megatron checkpoint
        folder = plan.model.prepare_engine_folder(scratch, converting)
        group = engine_group(plan.config, plan.server_args, folder)
        with running_engines(plan.config, group, logprobs=settings.logprobs) as watcher:
            dispatcher = RequestDispatcher(watcher, settings.requests_in_flight)
            totals = Generation(plan, prompts, dispatcher, progress).run()
        shutil.rmtree(scratch, ignore_errors=True)
        store.finish(totals)
    return totals


class RequestDispatcher:
    """Distributes requests over engines, with a limit on the responses that all engines together sample at the same time.

    EnginePool chooses the engine of each HTTP request: the fewest failed requests in a row, then the least expected work.
    """

    def __init__(self, watcher: EngineWatcher, in_flight: int) -> None:
        """`in_flight`: with n engines in service, at most n x `in_flight` GenerationRequests are computed at the same time."""
        # Upper limit for the responses that all engines together sample at the same time
        self.capacity = in_flight * len(watcher.pool.engines)
        self._watcher, self._max_requests = watcher, min(MAX_HTTP_REQUESTS, in_flight)
        # number of responses that one HTTP request asks for
        self._responses_per_http_request = in_flight // self._max_requests

    def submit(self, requests: Sequence[GenerationRequest]) -> PendingResponses:
        """Send the requests in another thread. Returns one future per HTTP request, with its responses in order."""
        parts = [
            requests[at : at + self._responses_per_http_request]
            for at in range(0, len(requests), self._responses_per_http_request)
        ]
        pool = self._watcher.pool
        return [pool.submit(self._watcher.call(partial(self._sample, part), self._max_requests)) for part in parts]

    async def _sample(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        pool = self._watcher.pool
        timeout_s, (prompts, params) = pool.spec.request_timeout_s, zip(*requests, strict=True)
        try:
            async with asyncio.timeout(timeout_s):
                return await pool.generate(range(len(requests)), prompts, params)
        except TimeoutError:
            raise deadline_error(timeout_s) from None


class Generation:
    """Samples the responses of a plan's missing output files, scores the responses and writes the files."""

    def __init__(
        self,
        plan: GenerationPlan,
        prompts: Sequence[EvaluationPrompt],
        dispatcher: RequestDispatcher,
        progress: GenerationProgress,
    ) -> None:
        self.plan, self.dispatcher, self.progress = plan, dispatcher, progress
        self.settings = plan.config.generate
        size = self.settings.prompts_per_file
        self.files = [prompts[at : at + size] for at in range(0, len(prompts), size)]  # prompts of each output file

    def run(self) -> JsonObject:
        """Write every missing output file, in order, and return the totals."""
        start, samples = time.monotonic(), self.settings.samples
        missing = [index for index in range(len(self.files)) if not self.plan.store.has(index)]
        num_prompts = sum(map(len, self.files))
        num_missing = sum(len(self.files[index]) for index in missing)
        self.progress.begin(num_prompts * samples, (num_prompts - num_missing) * samples)
        ahead = FILES_AHEAD + self.dispatcher.capacity // (self.settings.prompts_per_file * samples)
        pending: deque[tuple[int, PendingResponses]] = deque()
        rewards = self.plan.rewards
        with rewards.open_scorer(self.plan.config.scoring) if rewards else nullcontext() as scorer:
            for index in missing:
                pending.append((index, self.dispatcher.submit(self._requests(index))))
                if len(pending) > ahead:
                    self._complete(*pending.popleft(), scorer)
            while pending:
                self._complete(*pending.popleft(), scorer)
        seconds = round(time.monotonic() - start, 3)
        return dict(responses=num_prompts * samples, prompts=num_prompts, files=len(self.files), last_run_s=seconds)

    def _requests(self, file_index: int) -> list[GenerationRequest]:
        seed, sampling = self.plan.config.run.seed, self.plan.sampling
        return [
            (prompt.tokens, replace(sampling, seed=prompt.seed(seed, sample)))
            for prompt, sample in self._samples(file_index)
        ]

    def _samples(self, file_index: int) -> list[tuple[EvaluationPrompt, int]]:
        """Return (prompt, index of the response among the responses to this prompt) for each response of a file, in order."""
        return [(prompt, sample) for prompt in self.files[file_index] for sample in range(self.settings.samples)]

    def _complete(self, file_index: int, pending: PendingResponses, scorer: Scorer | None) -> None:
        """Wait for the responses of one output file, score the responses and write the file."""
        completions: list[Completion] = []
        for future in pending:
            completions += future.result()
            self.progress.advance(len(future.result()), sum(len(c.token_ids) for c in future.result()))
        texts = self._tokenizer.batch_decode([c.token_ids for c in completions], skip_special_tokens=True)
        rows = [
            prompt.to_row(sample, completion, text, logprobs=self.settings.logprobs)
            for (prompt, sample), completion, text in zip(self._samples(file_index), completions, texts, strict=True)
        ]
        if scorer and self.plan.rewards:
            rows = self.plan.rewards.add_scores(rows, scorer)
        self.plan.store.write(file_index, rows)

    @cached_property
    def _tokenizer(self) -> Any:
        return load_tokenizer(self.plan.model.folder)
