"""The config sections `model` and `data`: the trained model, where prompts and responses come from, and the order of prompts."""

from dataclasses import dataclass, field
from enum import StrEnum

from omegaconf import MISSING

from mrl.config.command_schema import Dtype
from mrl.config.process_schema import Node
from parallel.trainer_config import config_field as key


class RowPolicy(StrEnum):
    """What happens to rows of data that cannot be used."""

    error = "error"
    skip = "skip"


@dataclass(frozen=True)
class ModelConfig:
    """The model that is trained: the policy, also called actor."""

    path: str = key(
        MISSING,
        "Model: a Hugging Face folder (config.json, *.safetensors and tokenizer), an id on the Hub (OWNER/NAME or "
        "OWNER/NAME@REVISION), or a URL that fsspec knows.",
    )
    dtype: Dtype = key(Dtype.bfloat16, "Precision of model weights and activations.")
    family: str | None = key(
        None, "Your own model family, as package.module:NAME or /path/file.py:NAME (docs/tutorials/model.md)."
    )
    train_vision: bool = key(False, "Whether the vision tower of an image model is trained, too.")
    train_mtp: bool = key(
        False,
        "Whether the layers for multi-token prediction (MTP) are trained, too. Their loss gives no gradient to the policy. If "
        "they are not trained, exports contain them unchanged (docs/how_to/mtp.md).",
    )
    mtp_loss_coef: float = key(0.1, "Coefficient of the loss of the MTP layers (model.train_mtp).", above=0)

    @property
    def itemsize(self) -> int:
        """Bytes of one model weight."""
        return {"bfloat16": 2, "float32": 4}[self.dtype]


@dataclass(frozen=True)
class OfflineConfig:
    """Responses from a file, on which steps train in addition to the sampled responses (docs/tutorials/data.md)."""

    path: str | None = key(
        None,
        "Parquet or jsonl file with the columns prompt, response and reward, and optionally logprobs. With null, a step trains "
        "on sampled responses only.",
    )
    rows_per_step: int = key(
        8,
        "Largest number of rows of data.offline.path in one step. Rows with the same prompt are a group and stay together.",
        "rows",
        least=1,
    )
    advantage: float | None = key(
        None,
        "Advantage of every row, in place of the advantage that algorithm.advantage computes from the rewards. With a positive "
        "number, rows are imitated as in supervised fine-tuning, and the file needs no column reward.",
    )


@dataclass(frozen=True)
class DataConfig:
    """Prompts for training and evaluation (docs/tutorials/data.md)."""

    inputs: Node | None = key(
        dict, "Function that creates input files that do not exist yet. It runs before any file is read."
    )
    train: list[str] = key(
        list,
        "Training prompts: jsonl files, parquet files, folders written by datasets.Dataset.save_to_disk, ids on the Hub "
        "(OWNER/NAME@REVISION:PATTERN, where @REVISION and :PATTERN may be left out), or URLs that fsspec knows.",
    )
    mixture: Node = key(
        dict,
        "Several training sources with sampling weights, in place of data.train: {NAME: {files, weight, columns, system}}.",
    )
    dataset: Node | None = key(dict, "Your own dataset class or function, which replaces data.train.")
    test: list[str] = key(list, "Held-out prompts for evaluation, in the same formats as data.train.")
    test_sets: Node = key(
        dict,
        "More held-out sets: {NAME: list of files} or {NAME: {files, columns, system, rows, reward, n, temperature, top_p, "
        "top_k, min_p, repetition_penalty, stop, stop_token_ids, max_response_tokens}} (docs/tutorials/data.md).",
    )
    columns: Node = key(
        dict,
        "Column names in your files, such as {prompt: question}. The keys are prompt, ground_truth, data_source, extra_info, "
        "ability, style, images, videos.",
    )
    system: str | None = key(None, "System message for prompts that do not start with a system message.")
    chat_template: str | None = key(None, "Jinja file that replaces the chat template of the model.")
    template_args: Node = key(dict, "Variables of the chat template, such as {enable_thinking: false}.")
    bad_rows: RowPolicy = key(
        RowPolicy.error,
        "What happens to invalid rows. With error, the run does not start. With skip, the run does not use these rows. "
        "run.dir/bad_rows_*.jsonl lists the rows.",
    )
    overlong: RowPolicy = key(
        RowPolicy.error,
        "What happens to prompts longer than data.max_prompt_tokens. With error, the run does not start. "
        "With skip, the run does not use these rows. "
        "run.dir/bad_rows_*.jsonl lists the rows.",
    )
    shuffle: bool = key(True, "Whether each epoch has a new random order of prompts, derived from run.seed.")
    sampler: Node | None = key(
        dict,
        "Function that chooses the prompts of each step: mrl.data.samplers.Curriculum, mrl.data.samplers.DifficultyMixture, or "
        "your own. Default: sources are drawn in proportion to their weights in data.mixture, and each source has its own "
        "epochs, which draw each of its rows once.",
    )
    offline: OfflineConfig = field(default_factory=OfflineConfig)
    max_prompt_tokens: int | None = key(
        None,
        "Largest length of a prompt. Default: the model's context length minus rollout.max_response_tokens.",
        "tokens",
        least=1,
    )
