"""Prompt data sets for RL: rows that are checked and tokenized, and an endless stream that draws rows."""

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, batched
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mrl.core.types import ImageInputs
from mrl.data import tokenizer as tokenization
from mrl.data.columns import PromptExample
from mrl.data.images import ImagePrompts, RequestImages, with_image_parts
from mrl.data.row_files import BadRow, Row, RowError, RowReport, RowTable, convert_rows
from mrl.data.samplers import (
    GroupSizeInputs,
    GroupSizes,
    MixtureSource,
    PromptHistory,
    PromptTable,
    Sampler,
    SamplerInputs,
    Shuffled,
    check_sizes,
    largest_size,
)
from mrl.data.sources import PromptSource
from mrl.data.tokenizer import ChatTemplate, Messages

CHUNK = 4096  # number of prompts that are tokenized at once; this limits the memory of the tokenizer library


@dataclass(frozen=True)
class PromptConstraints:
    """Conditions for the tokens of a prompt, and the chat template that renders the prompt."""

    max_prompt_tokens: int
    vocab_size: int  # a token id must be smaller than this size of the model's vocabulary
    chat: ChatTemplate = field(default_factory=ChatTemplate)
    images: ImagePrompts | None = None  # None: the model reads no images


@dataclass(frozen=True)
class PromptDrawing:
    """The user's rules for drawing prompts: which rows come next, and how many responses each prompt gets."""

    sampler: Sampler | None = None  # None: the default sampler
    name: str = ""  # data.sampler as text, which identifies the sampler in checkpoints; "": the default sampler
    group_sizes: GroupSizes | None = None  # None: all groups have the same size

    @property
    def needs_history(self) -> bool:
        """Whether the sampler or `group_sizes` reads the history of the rows: how often they were drawn, and their rewards."""
        uses_rewards = self.sampler is not None and getattr(self.sampler, "uses_rewards", True)
        return uses_rewards or self.group_sizes is not None


@dataclass(frozen=True, eq=False)
class PromptDataset:
    """The usable rows of all sources, one source after another. The index of a row counts from 0 over all sources."""

    examples: list[PromptExample]  # [rows]
    row_numbers: NDArray[np.int64]  # [rows] row number of each row in its own file, from 0
    tokens: NDArray[np.int32]  # [tokens of all prompts] the tokens of all rows, concatenated
    cu_seqlens: NDArray[np.int64]  # [rows + 1] start of each prompt in `tokens`, and the end of the last
    mixture: tuple[MixtureSource, ...]  # the sources, in the order of their rows
    report: RowReport  # counts of rows, and the rows that cannot be used
    model_path: str  # folder of the tokenizer
    image_prompts: ImagePrompts | None = None  # None: the model reads no images

    @classmethod
    def load(
        cls, sources: Sequence[PromptSource], model_path: str | Path, constraints: PromptConstraints
    ) -> "PromptDataset":
        """Read and tokenize every row of every source.

        Bad and overlong rows are omitted, and listed in `report`. Call `enforce_row_policies` to check whether the config
        allows such rows.

        Raises:
            ValueError: a file cannot be read; the tokenizer or its chat template cannot be used.
        """
        tokenizer = tokenization.load_tokenizer(model_path, constraints.chat)
        examples: list[PromptExample] = []
        numbers: list[int] = []
        tokens: list[NDArray[np.int32]] = []
        mixture, report = [], RowReport(0, 0)
        for source in sources:
            files = [_FilePrompts.read(table, source, tokenizer, constraints) for table in source.tables()]
            source_report = sum((file.report for file in files), RowReport(0, 0))
            mixture.append(MixtureSource(source.name, source_report.kept, source.weight))
            report += source_report
            examples += (example for file in files for example in file.examples)
            numbers += (number for file in files for number in file.row_numbers)
            tokens += (ids for file in files for ids in file.tokens)
        cu_seqlens = np.cumsum([0, *map(len, tokens)], dtype=np.int64)
        flat = np.concatenate([np.empty(0, np.int32), *tokens])
        return cls(
            examples,
            np.array(numbers, np.int64),
            flat,
            cu_seqlens,
            tuple(mixture),
            report,
            str(Path(model_path).resolve()),
            constraints.images,
        )

    def enforce_row_policies(self, path: Path, *, bad_rows: str, overlong: str) -> None:
        """Write the omitted rows to `path`, and raise an error if a policy forbids omitted rows. A policy is "error" or "skip".

        Raises:
            ValueError: a row was omitted under the policy "error", or a source has no usable row.
        """
        self.report.enforce_row_policies(path, bad_rows=bad_rows, overlong=overlong)
        for source in self.mixture:
            if not source.rows:
                described = f"source {source.name!r}" if source.name else "the files"
                raise ValueError(f"{described}: no row is left ({self.report}); {path} lists the reasons.")

    def __len__(self) -> int:
        return len(self.examples)

    def encode(self, row: int) -> list[int]:
        """Return the token ids of a prompt. The response follows them directly."""
        return self.tokens[self.cu_seqlens[row] : self.cu_seqlens[row + 1]].tolist()

    @cached_property
    def has_images(self) -> bool:
        """Whether at least one prompt has images."""
        return any(example.images for example in self.examples)

    def image_inputs(self, row: int) -> ImageInputs | None:
        """Return the pixels of the images of a prompt, or None if the prompt has no images. Decodes the images."""
        images = self.examples[row].images
        if not images:
            return None
        assert self.image_prompts is not None, "`load` omits rows with images if the model reads no images"
        return self.image_prompts.inputs(images)

    def request_images(self, row: int) -> RequestImages | None:
        """Return the images of a prompt for a request to an engine, or None if the prompt has no images."""
        images = self.examples[row].images
        if not images:
            return None
        assert self.image_prompts is not None, "`load` omits rows with images if the model reads no images"
        return RequestImages(tuple(image.data_url() for image in images), self.image_prompts.image_token)

    def decode(self, responses: Sequence[Sequence[int]]) -> list[str]:
        """Return the text of each response, without special tokens."""
        return tokenization.decode(self.model_path, responses)

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text of each token by itself, without special tokens."""
        return tokenization.token_texts(self.model_path, token_ids)

    def messages(self, row: int) -> Messages:
        """Return the messages of a prompt, including the system message."""
        return self.examples[row].messages

    def ground_truth(self, row: int) -> Any:
        """Return the ground truth of a prompt: a text, list or object."""
        return self.examples[row].ground_truth

    def data_source(self, row: int) -> str:
        """Return PromptExample.data_source of a row."""
        return self.examples[row].data_source

    def extra_info(self, row: int) -> dict[str, Any]:
        """Return the further fields of the row, which rewards may read."""
        return self.examples[row].extra_info

    def reward_fields(self, row: int) -> dict[str, Any]:
        """Return what a reward gets from the row: fields of mrl.rewards.reward_types.Response -> values."""
        example = self.examples[row]
        return dict(
            data_source=example.data_source,
            ground_truth=example.ground_truth,
            extra_info=example.extra_info,
            prompt=example.messages,
            ability=example.ability,
            style=example.style,
        )

    def rows_by_source(self) -> dict[str, range]:
        """Return name of a source -> its rows in this data set. A source without a name has the key `""`."""
        ends = accumulate(source.rows for source in self.mixture)
        return {source.name: range(end - source.rows, end) for source, end in zip(self.mixture, ends, strict=True)}

    @cached_property
    def rows_per_data_source(self) -> dict[str, int]:
        """PromptExample.data_source -> number of its rows."""
        return dict(Counter(example.data_source for example in self.examples))

    @cached_property
    def fingerprint(self) -> str:
        """Digest of all tokens and images. Data sets with the same fingerprint have the same prompts in the same order."""
        digest = hashlib.blake2b(self.tokens.tobytes(), digest_size=16)
        digest.update(self.cu_seqlens.tobytes())
        for example in self.examples:
            for image in example.images:
                digest.update(image.digest())
        return digest.hexdigest()

    def stream(self, batch_size: int, seed: int, shuffle: bool, rules: PromptDrawing | None = None) -> "PromptStream":
        """Return an endless stream of rows. By default, the stream draws from the sources in proportion to their weights."""
        return PromptStream(
            len(self), batch_size, seed, shuffle, self.mixture, self.fingerprint, rules=rules, examples=self.examples
        )


@dataclass(frozen=True)
class _Rendered:
    """A checked row, before it is tokenized."""

    number: int  # row number in the file
    example: PromptExample
    text: str  # the messages, rendered by the chat template
    image_tokens: list[int]  # number of tokens of each image


def _image_messages(
    example: PromptExample, column: str, images: ImagePrompts | None
) -> tuple[list[int], list[dict[str, Any]]]:
    """Return the number of tokens of each image, and the messages with image parts. Raises RowError for a bad image."""
    if not example.images:
        return [], example.messages
    if images is None:
        raise RowError(
            column,
            f"{len(example.images)} images, but nothing reads them here: the model has no vision tower, or the command does not "
            "support images.",
        )
    messages = with_image_parts(example.messages, len(example.images), column)
    return images.num_tokens(example.images, column), messages


@dataclass(frozen=True)
class _FilePrompts:
    """The usable rows of one file."""

    examples: list[PromptExample]
    row_numbers: list[int]  # row number of each example in the file
    tokens: list[NDArray[np.int32]]  # tokens of each example
    report: RowReport

    @classmethod
    def read(
        cls, table: RowTable, source: PromptSource, tokenizer: Any, constraints: PromptConstraints
    ) -> "_FilePrompts":
        from jinja2 import TemplateError

        name, folder = source.data_source(table), Path(table.file).resolve().parent if source.files else Path()

        def convert(number: int, row: Row) -> _Rendered:
            example = source.columns(row, name, source.system, folder)
            counts, messages = _image_messages(example, source.columns.images or "", constraints.images)
            try:
                rendered = tokenization.render(tokenizer, messages, constraints.chat.args)
            except (TemplateError, TypeError) as error:
                raise RowError(source.columns.prompt, f"the chat template refused the messages: {error}") from error
            _check_text(source.columns.prompt, rendered)
            _check_text(source.columns.ground_truth or "", example.ground_truth)
            if reason := source.unusable_reason(example):
                raise RowError(source.columns.data_source or "", reason)
            return _Rendered(number, example, rendered, counts)

        converted, omitted = convert_rows(table, convert)
        examples, numbers, tokens = [], [], []
        for chunk in batched(converted, CHUNK):
            encoded = tokenization.encode_texts(tokenizer, [row.text for row in chunk])
            for row, ids in zip(chunk, encoded, strict=True):
                ids, reason, overlong = _check_tokens(ids, row.image_tokens, constraints, source)
                if reason:
                    omitted.append(BadRow(table.file, row.number, source.columns.prompt, reason, overlong))
                else:
                    examples.append(row.example)
                    numbers.append(row.number)
                    tokens.append(np.array(ids, np.int32))
        omitted.sort(key=lambda bad: bad.row)
        return cls(examples, numbers, tokens, RowReport(len(table), len(examples), tuple(omitted)))


def mean_prompt_tokens(
    sources: Sequence[PromptSource],
    model_path: str | Path,
    chat: ChatTemplate,
    rows_per_file: int,
    images: ImagePrompts | None = None,
) -> int:
    """Return the mean length in tokens, rounded, of the first `rows_per_file` prompts of each file. Bad rows are ignored.

    Raises ValueError if a file or the tokenizer cannot be read, or if no row is usable.
    """
    tokenizer = tokenization.load_tokenizer(model_path, chat)
    unlimited = PromptConstraints(sys.maxsize, sys.maxsize, chat, images)
    lengths: list[int] = []
    for source in sources:
        for table in source.tables():
            first = RowTable(table.file, table.rows[:rows_per_file], table.row_numbers[:rows_per_file])
            lengths += map(len, _FilePrompts.read(first, source, tokenizer, unlimited).tokens)
    if not lengths:
        raise ValueError(
            "the prompts of the training data cannot be measured: no row is usable; set plan.prompt_tokens."
        )
    return round(sum(lengths) / len(lengths))


def _check_text(column: str, value: Any) -> None:
    """Raise RowError for a text that UTF-8 cannot encode, such as a lone surrogate.

    Only user-defined data sets can have such texts.
    """
    try:
        value.encode() if isinstance(value, str) else None
    except UnicodeEncodeError as error:
        raise RowError(column, f"not valid Unicode ({error}).") from error


def _check_tokens(
    ids: list[int], image_tokens: list[int], constraints: PromptConstraints, source: PromptSource
) -> tuple[list[int], str, bool]:
    """Return (token ids with expanded image tokens, reason, overlong). `_token_fault` explains `reason` and `overlong`."""
    if constraints.images is not None:
        try:
            ids = constraints.images.expand(ids, image_tokens, source.columns.prompt)
        except RowError as error:
            return ids, error.reason, False
    return ids, *_token_fault(ids, constraints, source.max_prompt_tokens)


def _token_fault(ids: list[int], constraints: PromptConstraints, max_prompt_tokens: int | None) -> tuple[str, bool]:
    """Return (reason, overlong). `reason` says why these tokens cannot be a prompt, and is empty if they can.

    `overlong` is true if the only reason is that there are too many tokens. `max_prompt_tokens` replaces the limit of
    `constraints`.
    """
    limit = constraints.max_prompt_tokens if max_prompt_tokens is None else max_prompt_tokens
    if not ids:
        return "the chat template gave no tokens.", False
    if max(ids) >= constraints.vocab_size:
        return (
            f"the tokenizer gives token {max(ids)}, but the model's vocabulary ends at {constraints.vocab_size - 1}; the "
            "tokenizer in the model's folder belongs to another model, or the text has a token that was added to the tokenizer."
        ), False
    if len(ids) > limit:
        return (
            f"{len(ids)} tokens are more than the {limit} that leave room for the response; shorten or remove the row, lower "
            "max_response_tokens of rollout or of the held-out set, or use a model with more context."
        ), True
    return "", False


class PromptStream:
    """Endless stream of batches of rows, which a sampler chooses. A batch may span several epochs.

    The position of a stream consists of these parts:

    - `drawn`: for each source, the number of rows that have been drawn from it;
    - the history of the rows, if the sampler or `group_sizes` reads rewards;
    - the state that the sampler keeps in `SamplerInputs.state`.
    """

    def __init__(  # noqa: PLR0913 - the data set, its position, and the rules of drawing
        self,
        num_rows: int,
        batch_size: int,
        seed: int,
        shuffle: bool,
        mixture: Sequence[MixtureSource] = (),
        fingerprint: str = "",
        *,
        rules: PromptDrawing | None = None,
        examples: Sequence[PromptExample] = (),
    ) -> None:
        """Create a stream from which no row has been drawn yet.

        Args:
            num_rows: number of rows of all sources.
            batch_size: number of rows of a batch.
            seed: seed of the run.
            shuffle: whether the default sampler changes the order of rows in each epoch.
            mixture: the sources in the order of their rows. If it is empty, all rows are one source.
            fingerprint: identifies the data set.
            rules: sampler and group sizes of the user.
            examples: the rows, which samplers of the user may read.
        """
        if num_rows < 1:
            raise ValueError("a stream needs at least one row, got none.")
        self.mixture = tuple(mixture) or (MixtureSource("", num_rows),)
        assert sum(source.rows for source in self.mixture) == num_rows, f"{self.mixture} do not have {num_rows} rows"
        self.num_rows, self.batch_size, self.seed, self.shuffle = num_rows, batch_size, seed, shuffle
        self.fingerprint, self.rules = fingerprint, rules or PromptDrawing()
        self.drawn = [0] * len(self.mixture)  # number of rows that have been drawn from each source
        self._table = PromptTable(self.mixture, examples)
        self._history = PromptHistory(num_rows if self.rules.needs_history else 0)
        self._sampler_state: dict[str, Any] = {}

    def __iter__(self) -> Iterator[NDArray[np.int64]]:
        return self

    def __next__(self) -> NDArray[np.int64]:
        """Return the indices of the next `batch_size` rows in the data set."""
        return self.take(self.batch_size)

    def take(self, count: int) -> NDArray[np.int64]:
        """Return the indices of the next `count` rows in the data set. Raises ValueError if the user's sampler fails a check."""
        if not count:
            return np.empty(0, np.int64)
        sampler = self.rules.sampler or Shuffled(self.shuffle)
        inputs = SamplerInputs(self._table, count, self.seed, tuple(self.drawn), self._history, self._sampler_state)
        rows = self._checked(sampler(inputs), count)
        for source, num_rows in enumerate(
            np.bincount(self._table.sources_of(rows), minlength=len(self.drawn)).tolist()
        ):
            self.drawn[source] += num_rows
        if self.rules.needs_history:
            self._history.count_drawn(rows)
        return rows

    def group_sizes(self, rows: NDArray[np.int64], size: int) -> list[int] | None:
        """Return the number of responses to each of these rows; None: each row gets `size` (rollout.responses_per_prompt).

        Raises ValueError if the user's function returns invalid sizes.
        """
        if self.rules.group_sizes is None or not len(rows):
            return None
        sizes = self.rules.group_sizes(GroupSizeInputs(rows, size, self._history.mean_reward[rows], self._table))
        return check_sizes(sizes, len(rows), size, largest_size(self.rules.group_sizes, size))

    def record_rewards(self, rewards: Iterable[tuple[int, float]]) -> None:
        """Record the rewards of a step: (row, mean reward of a group) for each sampled group."""
        if self.rules.needs_history:
            self._history.record_rewards(rewards)

    def _checked(self, rows: Any, count: int) -> NDArray[np.int64]:
        """Return the rows that a sampler chose, as an array. Raises ValueError if they, or the sampler's state, are invalid."""
        found = np.asarray(rows)
        if found.shape != (count,) or found.dtype.kind not in "iu":
            raise ValueError(f"data.sampler returned {rows!r:.80}; expected the indices of {count} rows.")
        if not (found.min() >= 0 and found.max() < self.num_rows):
            raise ValueError(
                f"data.sampler returned rows from {found.min()} to {found.max()}; the training data has the rows 0 to "
                f"{self.num_rows - 1}."
            )
        if self._sampler_state and json.loads(json.dumps(self._sampler_state, default=repr)) != self._sampler_state:
            raise ValueError(
                "data.sampler: inputs.state must hold JSON only: lists, finite numbers, texts, and dicts whose keys are texts; "
                f"got {self._sampler_state!r:.200}."
            )
        return found.astype(np.int64)

    def _identity(self) -> dict[str, Any]:
        """Return the properties of the stream. A saved position is valid only for a stream with the same properties."""
        return {
            "seed": self.seed,
            "shuffle": self.shuffle,
            "sources": [source.name for source in self.mixture],
            "rows": [source.rows for source in self.mixture],
            "weights": [source.weight for source in self.mixture],
            "data": self.fingerprint,
            **({"sampler": self.rules.name} if self.rules.name else {}),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the position and the properties of the stream, as lists, texts and numbers."""
        history = {"history": self._history.state_dict()} if self.rules.needs_history else {}
        own = {"sampler_state": json.loads(json.dumps(self._sampler_state))} if self._sampler_state else {}
        return {"drawn": list(self.drawn), **self._identity(), **history, **own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the position of a stream with equal properties (see `_identity`). The batch size may differ.

        Raises:
            ValueError: the stream that saved the state has other properties. The message names the difference.
        """
        for name, ours in {"sampler": "", **self._identity()}.items():
            if (saved := state.get(name, "" if name == "sampler" else None)) != ours:
                raise ValueError(
                    f"the saved position in the prompts does not fit this run: {name} was {saved!r:.200}, and is now "
                    f"{ours!r:.200}; continue with the same data, weights, data.sampler and run.seed, or start a new run."
                )
        drawn = state.get("drawn")
        if not isinstance(drawn, list) or len(drawn) != len(self.drawn) or min(drawn) < 0:
            raise ValueError(
                f"the saved position in the prompts is {drawn!r:.200}; expected {len(self.drawn)} numbers, one for each source."
            )
        self.drawn = list(drawn)
        self._sampler_state = json.loads(json.dumps(state.get("sampler_state", {})))
        self._history = PromptHistory(self._history.num_rows)
        if self.rules.needs_history and "history" in state:
            self._history.load_state_dict(state["history"])
