"""Prompt data sets for RL: checked and tokenised rows, and an endless stream that draws them."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, batched
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mrl.data import tokenizer as text
from mrl.data.columns import PromptExample
from mrl.data.row_files import BadRow, Row, RowError, RowReport, RowTable, convert_rows
from mrl.data.sources import PromptSource
from mrl.data.tokenizer import ChatTemplate, Messages

CHUNK = 4096  # prompts tokenised at once; the tokenizer library needs many times the memory of their tokens


@dataclass(frozen=True)
class PromptConstraints:
    """Limits on the tokens of a prompt, and the chat template that renders prompts."""

    max_prompt_tokens: int
    vocab_size: int  # size of the model's vocabulary
    chat: ChatTemplate = field(default_factory=ChatTemplate)


@dataclass(frozen=True)
class SourceShare:
    """The number of rows of one source, and its weight in the mixture."""

    name: str
    rows: int
    weight: float = 1.0


@dataclass(frozen=True, eq=False)
class PromptDataset:
    """The usable rows of all sources, numbered from 0, source after source. Rows are tokenised once, into flat arrays."""

    examples: list[PromptExample]  # [R]
    row_numbers: NDArray[np.int64]  # [R] row number in its own file, from 0
    tokens: NDArray[np.int32]  # [T] tokens of all prompts
    cu_seqlens: NDArray[np.int64]  # [R+1] start of each prompt in `tokens`
    shares: tuple[SourceShare, ...]  # one per source
    report: RowReport
    model_path: str  # folder of the tokenizer

    @classmethod
    def load(
        cls, sources: Sequence[PromptSource], model_path: str | Path, constraints: PromptConstraints
    ) -> "PromptDataset":
        """Read and tokenise every row of every source.

        Bad and overlong rows are omitted and listed in `report`; enforce_row_policies checks whether the config allows
        them.

        Raises:
            ValueError: a file cannot be read; the tokenizer or its chat template cannot be used.
        """
        tokenizer = text.load_tokenizer(model_path, constraints.chat)
        examples: list[PromptExample] = []
        numbers: list[int] = []
        tokens: list[NDArray[np.int32]] = []
        shares, report = [], RowReport(0, 0)
        for source in sources:
            files = [_FilePrompts.read(table, source, tokenizer, constraints) for table in source.tables()]
            of_source = sum((part.report for part in files), RowReport(0, 0))
            shares.append(SourceShare(source.name, of_source.kept, source.weight))
            report += of_source
            examples += (example for part in files for example in part.examples)
            numbers += (number for part in files for number in part.numbers)
            tokens += (ids for part in files for ids in part.tokens)
        cu_seqlens = np.cumsum([0, *map(len, tokens)], dtype=np.int64)
        flat = np.concatenate([np.empty(0, np.int32), *tokens])
        return cls(
            examples,
            np.array(numbers, np.int64),
            flat,
            cu_seqlens,
            tuple(shares),
            report,
            str(Path(model_path).resolve()),
        )

    def enforce_row_policies(self, path: Path, *, bad_rows: str, overlong: str) -> None:
        """Write the omitted rows to `path`, and raise if a policy forbids them. A policy is "error" or "skip".

        Raises:
            ValueError: a row was omitted under the policy "error", or a source has no usable row.
        """
        self.report.enforce_row_policies(path, bad_rows=bad_rows, overlong=overlong)
        for share in self.shares:
            if not share.rows:
                source = f"source {share.name!r}" if share.name else "the files"
                raise ValueError(f"{source}: no row is left ({self.report}); {path} lists the reasons.")

    def __len__(self) -> int:
        return len(self.examples)

    def encode(self, row: int) -> list[int]:
        """Return the token ids of a prompt, up to the start of the response."""
        return self.tokens[self.cu_seqlens[row] : self.cu_seqlens[row + 1]].tolist()

    def decode(self, responses: Sequence[Sequence[int]]) -> list[str]:
        """Return the text of each response, without special tokens."""
        return text.decode(self.model_path, responses)

    def messages(self, row: int) -> Messages:
        """Return the messages of the prompt, with the system message."""
        return self.examples[row].messages

    def ground_truth(self, row: int) -> Any:
        """Return the ground truth: a text, list or object."""
        return self.examples[row].ground_truth

    def data_source(self, row: int) -> str:
        return self.examples[row].data_source

    def extra_info(self, row: int) -> dict[str, Any]:
        return self.examples[row].extra_info

    def sets(self) -> dict[str, range]:
        """Return the row numbers of each source by name; a source without a name has the key `""`."""
        ends = list(accumulate(share.rows for share in self.shares))
        return {share.name: range(end - share.rows, end) for share, end in zip(self.shares, ends, strict=True)}

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the tokens in order. Data sets with the same fingerprint have the same prompts."""
        digest = hashlib.blake2b(self.tokens.tobytes(), digest_size=16)
        digest.update(self.cu_seqlens.tobytes())
        return digest.hexdigest()

    def stream(self, batch_size: int, seed: int, shuffle: bool) -> "PromptStream":
        """Return an endless stream of row numbers that draws from the sources in proportion to their weights."""
        return PromptStream(len(self), batch_size, seed, shuffle, self.shares, self.fingerprint)


@dataclass(frozen=True)
class _FilePrompts:
    """The usable rows of one file."""

    examples: list[PromptExample]
    numbers: list[int]  # row number of each example in the file
    tokens: list[NDArray[np.int32]]
    report: RowReport

    @classmethod
    def read(
        cls, table: RowTable, source: PromptSource, tokenizer: Any, constraints: PromptConstraints
    ) -> "_FilePrompts":
        from jinja2 import TemplateError

        name = source.data_source(table)

        def convert(number: int, row: Row) -> tuple[int, PromptExample, str]:
            example = source.columns(row, name, source.system)
            try:
                rendered = text.render(tokenizer, example.messages, constraints.chat.args)
            except (TemplateError, TypeError) as error:
                raise RowError(source.columns.prompt, f"the chat template refused it: {error}") from error
            _check_text(source.columns.prompt, rendered)
            _check_text(source.columns.ground_truth or "", example.ground_truth)
            return number, example, rendered

        found, left_out = convert_rows(table, convert)
        examples, numbers, tokens = [], [], []
        for chunk in batched(found, CHUNK):
            encoded = text.encode_texts(tokenizer, [rendered for *_, rendered in chunk])
            for (number, example, _), ids in zip(chunk, encoded, strict=True):
                reason, overlong = _token_fault(ids, constraints)
                if reason:
                    left_out.append(BadRow(table.file, number, source.columns.prompt, reason, overlong))
                else:
                    examples.append(example)
                    numbers.append(number)
                    tokens.append(np.array(ids, np.int32))
        left_out.sort(key=lambda bad: bad.row)
        return cls(examples, numbers, tokens, RowReport(len(table), len(examples), tuple(left_out)))


def _check_text(column: str, value: Any) -> None:
    """Raise RowError for a text that UTF-8 cannot encode, such as a lone surrogate. Only user-defined data sets have these."""
    try:
        value.encode() if isinstance(value, str) else None
    except UnicodeEncodeError as error:
        raise RowError(column, f"not valid Unicode ({error}).") from error


def _token_fault(ids: list[int], constraints: PromptConstraints) -> tuple[str, bool]:
    """Return (why these tokens cannot be a prompt, whether they are only too many); the reason is empty if they can."""
    if not ids:
        return "the chat template gave no tokens.", False
    if max(ids) >= constraints.vocab_size:
        return (
            f"the tokenizer gives token {max(ids)}, but the model's vocabulary ends at {constraints.vocab_size - 1}; the "
            "tokenizer in the model's folder belongs to another model, or the text names a token that was added to it."
        ), False
    if len(ids) > constraints.max_prompt_tokens:
        return (
            f"{len(ids)} tokens are more than the {constraints.max_prompt_tokens} that leave room for the response; shorten or "
            "remove the row, lower rollout.max_response_tokens, or use a model with more context."
        ), True
    return "", False


class PromptStream:
    """Endless stream of row numbers in batches. A batch may span two epochs, so every row is drawn in every epoch.

    A source with a fraction w of the total weight has on average w n of the first n rows, and always fewer than
    w n + 1. Each source has its own epochs. The order within an epoch depends only on (seed, epoch, source), and the
    choice of the next source depends only on the number of rows drawn from each source. So the position of a stream is
    one number per source.
    """

    def __init__(
        self,
        num_rows: int,
        batch_size: int,
        seed: int,
        shuffle: bool,
        shares: Sequence[SourceShare] = (),
        fingerprint: str = "",
    ) -> None:
        """Start at the first row.

        `shares` are the sources, in the order of their rows; empty: one source. `fingerprint` identifies the data set.
        """
        if num_rows < 1:
            raise ValueError("a stream needs at least one row, got none.")
        self.shares = tuple(shares) or (SourceShare("", num_rows),)
        assert sum(share.rows for share in self.shares) == num_rows, f"{self.shares} do not have {num_rows} rows"
        self.num_rows, self.batch_size, self.seed, self.shuffle = num_rows, batch_size, seed, shuffle
        self.fingerprint = fingerprint
        self.drawn = [0] * len(self.shares)  # rows drawn from each source so far
        # source -> (its current epoch, order of its rows in this epoch)
        self._orders: dict[int, tuple[int, NDArray[np.int64]]] = {}

    def __iter__(self) -> Iterator[NDArray[np.int64]]:
        return self

    def __next__(self) -> NDArray[np.int64]:
        """Return the next `batch_size` row numbers."""
        return self.take(self.batch_size)

    def take(self, count: int) -> NDArray[np.int64]:
        """Return the next `count` row numbers."""
        sources = self._next_sources(count)
        batch = np.empty(count, np.int64)
        for source in range(len(self.shares)):
            places = sources == source
            batch[places] = self._take(source, int(places.sum()))
        return batch

    def _next_sources(self, count: int) -> NDArray[np.int64]:
        """Return the source of each of the next `count` rows: the one that is furthest behind its weight (first of equals)."""
        if len(self.shares) == 1:
            return np.zeros(count, np.int64)
        total = sum(share.weight for share in self.shares)
        weights = [share.weight / total for share in self.shares]
        drawn, first = list(self.drawn), sum(self.drawn) + 1
        sources = np.empty(count, np.int64)
        for place in range(count):
            behind = [weight * (first + place) - had for weight, had in zip(weights, drawn, strict=True)]
            sources[place] = source = behind.index(max(behind))
            drawn[source] += 1
        return sources

    def _take(self, source: int, count: int) -> NDArray[np.int64]:
        """Return the next `count` rows of a source; they may span several epochs."""
        rows = self.shares[source].rows
        parts = [np.empty(0, np.int64)]
        while count:
            epoch, position = divmod(self.drawn[source], rows)
            parts.append(self._order(source, epoch)[position : position + count])
            count -= len(parts[-1])
            self.drawn[source] += len(parts[-1])
        return np.concatenate(parts) + sum(share.rows for share in self.shares[:source])

    def _order(self, source: int, epoch: int) -> NDArray[np.int64]:
        rows = self.shares[source].rows
        if not self.shuffle:
            return np.arange(rows)
        if self._orders.get(source, (-1,))[0] != epoch:
            order = np.random.default_rng([self.seed, epoch, source]).permutation(rows)
            self._orders[source] = (epoch, order)
        return self._orders[source][1]

    def _identity(self) -> dict[str, Any]:
        """Return the properties on which a position depends; a position is valid only for a stream with the same values."""
        return {
            "seed": self.seed,
            "shuffle": self.shuffle,
            "sources": [share.name for share in self.shares],
            "rows": [share.rows for share in self.shares],
            "weights": [share.weight for share in self.shares],
            "data": self.fingerprint,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the position and identity of the stream, as plain lists, texts and numbers."""
        return {"drawn": list(self.drawn), **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the position of a stream with the same rows, seed and weights. The batch size may differ.

        Raises:
            ValueError: the state belongs to another stream; the message names the difference.
        """
        for name, ours in self._identity().items():
            if name not in state or state[name] != ours:
                raise ValueError(
                    f"the saved position in the prompts belongs to other {name}: it has {state.get(name)!r:.200}, this run "
                    f"has {ours!r:.200}; continue with the same data, weights and run.seed, or start a new run."
                )
        drawn = state.get("drawn")
        if not isinstance(drawn, list) or len(drawn) != len(self.drawn) or min(drawn) < 0:
            raise ValueError(
                f"the saved position in the prompts is {drawn!r:.200}; expected {len(self.drawn)} counts of rows."
            )
        self.drawn = list(drawn)
