"""A config -> what `mrl generate` will do: every mistake a user can make is found here, before any process starts."""

from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from models.conversion.partial_folder import fingerprint
from mrl.config.instantiate import plug_in
from mrl.config.schema import Config
from mrl.controller.plan_train import chat, make_inputs, prompt_limit
from mrl.data.prompts import PromptDataset, Rules
from mrl.data.sources import Source, test_sources
from mrl.evaluation import model, questions
from mrl.evaluation.estimators import MAX_SAMPLES
from mrl.evaluation.questions import Question
from mrl.evaluation.store import Store
from mrl.rewards.base import Reward
from mrl.rewards.scorer import check_reward
from mrl.rollout.client import SamplingParams
from mrl.rollout.server import check_server_args, default_server_args
from mrl.rollout.server_args import DETERMINISTIC


@dataclass(frozen=True)
class GenerationPlan:
    """A checked generation: who is asked what, and where the answers go."""

    config: Config
    store: Store
    source: model.Source
    sources: list[Source]  # of prompts
    reward: Reward | None
    sampling: SamplingParams  # of every response, but for its seed

    @property
    def server_args(self) -> dict[str, Any]:
        """Of every engine, but for model_path and random_seed."""
        config = self.config
        ours = default_server_args(config.model.dtype, self.source.context) | {
            DETERMINISTIC: config.generate.deterministic
        }
        return ours | config.sglang | dict(tp_size=config.rollout.engine_tp)

    def questions(self) -> list[Question]:
        """All prompts, read and checked; raises ValueError that names file, row and reason."""
        config = self.config
        rollout = replace(config.rollout, max_response_tokens=self.sampling.max_new_tokens)
        limit = prompt_limit(replace(config, rollout=rollout), self.source.context)
        rules = Rules(limit, self.source.vocab_size, chat(config))
        return questions.load(self.sources, str(self.source.folder), rules, self._settle, config.generate.rows)

    def _settle(self, data: PromptDataset, number: int) -> None:
        path = self.store.folder.with_name(f"{self.store.folder.name}_bad_rows_{number}.jsonl")
        data.settle(path, bad_rows=self.config.data.bad_rows, overlong=self.config.data.overlong)


def plan_generation(config: Config) -> GenerationPlan:
    """Check all but the prompts, which a finished generation needs no more; raises ValueError, starts no process."""
    generate = config.generate
    if generate.samples > MAX_SAMPLES:
        raise ValueError(
            f"generate.samples={generate.samples}: at most {MAX_SAMPLES} responses to a prompt are evaluated."
        )
    check_server_args(config.sglang)
    if DETERMINISTIC in config.sglang:
        raise ValueError(f"sglang.{DETERMINISTIC} is set by mrl; use generate.deterministic.")
    reward = plug_in(config.reward, "reward") if generate.score else None
    if reward:
        check_reward(reward)
    make_inputs(config)
    sources = test_sources(config.data)
    if not sources:
        raise ValueError("data.test must name at least one parquet or jsonl file of prompts (see docs/data.md).")
    files = [Path(file) for source in sources for file in source.files]
    for file in files:
        if not file.exists():
            raise ValueError(f"data.test: {file}: no such file; expected a .parquet or .jsonl file, or a folder.")
    source = model.find(config)
    sampling = SamplingParams(
        max_new_tokens=generate.max_response_tokens or config.rollout.max_response_tokens,
        temperature=generate.temperature,
        top_p=generate.top_p,
        top_k=generate.top_k,
    )
    folder = generate.output or str(Path(config.run.dir) / "generated")
    store = Store(folder, _settings(config, source, sampling, files))
    return GenerationPlan(config, store, source, sources, reward, sampling)


DATA = ("test_sets", "columns", "system", "chat_template", "template_args", "bad_rows", "overlong")
"""What of the data section decides the prompts, besides the files."""


def _settings(config: Config, source: model.Source, sampling: SamplingParams, prompts: list[Path]) -> dict[str, Any]:
    """All that decides the responses, by the keys that a user sets; not how many engines there are, nor where."""
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
    files = source.fingerprint() | fingerprint([found for path in prompts for found in _below(path)])
    return {
        "model.path": str(Path(config.model.path).resolve()),
        "model.dtype": config.model.dtype,
        "data.test": [str(Path(file).resolve()) for file in config.data.test],
        **{f"data.{name}": vars(config.data)[name] for name in DATA},
        **{f"generate.{name}": vars(generate)[name] for name in names},
        "generate.max_response_tokens": sampling.max_new_tokens,
        "run.seed": config.run.seed,
        "rollout.engine_tp": config.rollout.engine_tp,
        "sglang": config.sglang,
        "reward": config.reward if generate.score else None,
        "determinism": determinism(config),
        **{f"version of {name}": version(name) for name in ("sglang", "torch", "transformers")},
        **{f"size and time of {path}": found for path, found in files.items()},
    }


def _below(path: Path) -> list[Path]:
    return sorted(found for found in path.rglob("*") if found.is_file()) if path.is_dir() else [path]


def determinism(config: Config) -> str:
    """What was asked for, in words: of the terminal, and of generate.json."""
    if config.generate.temperature == 0:
        kind = "the likeliest token each time"
    elif config.generate.deterministic:
        kind = (
            f"each response from its own seed, which follows from run.seed={config.run.seed}, set, file, row and sample"
        )
    else:
        return "none: responses depend on what an engine computes at the same time; run.seed seeds the engines only"
    if not config.generate.deterministic:
        return (
            kind + "; rounding, which depends on what an engine computes at the same time, decides between near-equals"
        )
    return kind + "; on a GPU by kernels whose rounding does not depend on the batch, on a CPU up to rounding"
