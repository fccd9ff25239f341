"""Prompts of reinforcement learning: checked rows as tokens, and the order in which they are drawn."""

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
from mrl.data.columns import Example
from mrl.data.row_files import BadRow, Row, RowError, RowReport, RowTable, convert_rows
from mrl.data.sources import PromptSource
from mrl.data.tokenizer import ChatTemplate, Messages

CHUNK = 4096  # prompts tokenised at a time: what the tokenizer library keeps of each is many times its tokens


@dataclass(frozen=True)
class PromptConstraints:
    """What a prompt's tokens must fit."""

    max_prompt_tokens: int
    vocab_size: int  # of the model
    chat: ChatTemplate = field(default_factory=ChatTemplate)


@dataclass(frozen=True)
class SourceShare:
    """The rows of one source: a range of row numbers, and how often they are drawn relative to others."""

    name: str
    rows: int
    weight: float = 1.0


@dataclass(frozen=True, eq=False)
class PromptDataset:
    """The rows that can be used, numbered from 0, source after source; tokenised once and light to send."""

    examples: list[Example]  # [R]
    numbers: NDArray[np.int64]  # [R] of each row in its own file, from 0
    tokens: NDArray[np.int32]  # [T] of all prompts
    cu_seqlens: NDArray[np.int64]  # [R+1] where each prompt begins in `tokens`
    shares: tuple[SourceShare, ...]  # one per source
    report: RowReport
    model_path: str  # whose tokenizer this is

    @classmethod
    def load(cls, sources: Sequence[PromptSource], model_path: str | Path, rules: PromptConstraints) -> "PromptDataset":
        """Read every row of every source; bad and overlong ones are left out and are in `report`, see `enforce_row_policies`.

        Raises:
            ValueError: a file cannot be read at all; the tokenizer or its chat template cannot be used.
        """
        tokenizer = text.load_tokenizer(model_path, rules.chat)
        examples: list[Example] = []
        numbers: list[int] = []
        tokens: list[NDArray[np.int32]] = []
        shares, report = [], RowReport(0, 0)
        for source in sources:
            found = [_FilePrompts.read(table, source, tokenizer, rules) for table in source.tables()]
            of_source = sum((part.report for part in found), RowReport(0, 0))
            shares.append(SourceShare(source.name, of_source.kept, source.weight))
            report += of_source
            examples += (example for part in found for example in part.examples)
            numbers += (number for part in found for number in part.numbers)
            tokens += (ids for part in found for ids in part.tokens)
        cu_seqlens = np.cumsum([0, *map(len, tokens)], dtype=np.int64)
        flat = np.concatenate([np.empty(0, np.int32), *tokens])
        own = np.array(numbers, np.int64)
        return cls(examples, own, flat, cu_seqlens, tuple(shares), report, str(Path(model_path).resolve()))

    def enforce_row_policies(self, path: Path, *, bad_rows: str, overlong: str) -> None:
        """List the rows left out in `path`; `bad_rows` and `overlong` are "error" or "skip".

        Raises:
            ValueError: rows were left out that may not be, or of a source no row is left.
        """
        self.report.enforce_row_policies(path, bad_rows=bad_rows, overlong=overlong)
        for share in self.shares:
            if not share.rows:
                of = f"source {share.name!r}" if share.name else "the files"
                raise ValueError(f"{of}: no row is left ({self.report}); {path} says why.")

    def __len__(self) -> int:
        return len(self.examples)

    def encode(self, row: int) -> list[int]:
        """Token ids of a prompt, ready for the response."""
        return self.tokens[self.cu_seqlens[row] : self.cu_seqlens[row + 1]].tolist()

    def decode(self, responses: Sequence[Sequence[int]]) -> list[str]:
        """Text of each response, special tokens left out."""
        return text.decode(self.model_path, responses)

    def messages(self, row: int) -> Messages:
        """The prompt before the chat template, the system message included."""
        return self.examples[row].messages

    def ground_truth(self, row: int) -> Any:
        """A text, or the list or object that the row has."""
        return self.examples[row].ground_truth

    def data_source(self, row: int) -> str:
        return self.examples[row].data_source

    def extra_info(self, row: int) -> dict[str, Any]:
        return self.examples[row].extra_info

    def sets(self) -> dict[str, range]:
        """The row numbers of each source by its name; a source without a name is `""`."""
        ends = list(accumulate(share.rows for share in self.shares))
        return {share.name: range(end - share.rows, end) for share, end in zip(self.shares, ends, strict=True)}

    @cached_property
    def fingerprint(self) -> str:
        """Of the tokens, in their order: two data sets with the same one give the same prompts."""
        digest = hashlib.blake2b(self.tokens.tobytes(), digest_size=16)
        digest.update(self.cu_seqlens.tobytes())
        return digest.hexdigest()

    def stream(self, batch_size: int, seed: int, shuffle: bool) -> "PromptStream":
        """Row numbers without end, sources in proportion to their weights."""
        return PromptStream(len(self), batch_size, seed, shuffle, self.shares, self.fingerprint)


@dataclass(frozen=True)
class _FilePrompts:
    """What one file contributes."""

    examples: list[Example]
    numbers: list[int]  # of each in the file
    tokens: list[NDArray[np.int32]]
    report: RowReport

    @classmethod
    def read(cls, table: RowTable, source: PromptSource, tokenizer: Any, rules: PromptConstraints) -> "_FilePrompts":
        from jinja2 import TemplateError

        name = source.data_source(table)

        def convert(number: int, row: Row) -> tuple[int, Example, str]:
            example = source.columns(row, name, source.system)
            try:
                rendered = text.render(tokenizer, example.messages, rules.chat.args)
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
                reason, overlong = _fault(ids, rules)
                if reason:
                    left_out.append(BadRow(table.file, number, source.columns.prompt, reason, overlong))
                else:
                    examples.append(example)
                    numbers.append(number)
                    tokens.append(np.array(ids, np.int32))
        left_out.sort(key=lambda bad: bad.row)
        return cls(examples, numbers, tokens, RowReport(len(table), len(examples), tuple(left_out)))


def _check_text(column: str, value: Any) -> None:
    """Raise RowError for a text that has no UTF-8, as one with half a character; files have none, a user's objects may."""
    try:
        value.encode() if isinstance(value, str) else None
    except UnicodeEncodeError as error:
        raise RowError(column, f"not a text of whole characters ({error}).") from error


def _fault(ids: list[int], rules: PromptConstraints) -> tuple[str, bool]:
    """Why these tokens are no prompt of the model (empty: they are), and whether that is their number alone."""
    if not ids:
        return "the chat template made no token of it.", False
    if max(ids) >= rules.vocab_size:
        return (
            f"the tokenizer gives token {max(ids)}, but the model's vocabulary ends at {rules.vocab_size - 1}; the "
            "tokenizer in the model's folder belongs to another model, or the text names a token that was added to it."
        ), False
    if len(ids) > rules.max_prompt_tokens:
        return (
            f"{len(ids)} tokens are more than the {rules.max_prompt_tokens} that fit beside the response; shorten or remove "
            "the row, lower rollout.max_response_tokens, or use a model with more context."
        ), True
    return "", False


class PromptStream:
    """Row numbers in batches, epoch after epoch, without end; no row is left out at an epoch's border.

    Sources are drawn in proportion to their weights: of n rows from the start, a source of share w has given fewer than
    w n + 1, and as many as w n in the long run. Each goes through epochs of its own; an epoch's order depends on (seed,
    epoch, source) alone, and who is next on the numbers drawn so far. So a position is one number per source.
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
        """`shares`: of sources whose rows follow each other; none: one source. `fingerprint`: of the rows themselves."""
        if num_rows < 1:
            raise ValueError("a stream needs at least one row, got none.")
        self.shares = tuple(shares) or (SourceShare("", num_rows),)
        assert sum(share.rows for share in self.shares) == num_rows, f"{self.shares} have not {num_rows} rows"
        self.num_rows, self.batch_size, self.seed, self.shuffle = num_rows, batch_size, seed, shuffle
        self.fingerprint = fingerprint
        self.drawn = [0] * len(self.shares)  # rows of each source so far
        self._orders: dict[int, tuple[int, NDArray[np.int64]]] = {}  # the epoch that each source is in

    def __iter__(self) -> Iterator[NDArray[np.int64]]:
        return self

    def __next__(self) -> NDArray[np.int64]:
        """The next `batch_size` row numbers."""
        return self.take(self.batch_size)

    def take(self, count: int) -> NDArray[np.int64]:
        """The next `count` row numbers."""
        whose = self._whose(count)
        batch = np.empty(count, np.int64)
        for source in range(len(self.shares)):
            places = whose == source
            batch[places] = self._take(source, int(places.sum()))
        return batch

    def _whose(self, count: int) -> NDArray[np.int64]:
        """[count] the source of each place: always the one furthest behind its share; the first of equals."""
        if len(self.shares) == 1:
            return np.zeros(count, np.int64)
        total = sum(share.weight for share in self.shares)
        weights = [share.weight / total for share in self.shares]
        drawn, first = list(self.drawn), sum(self.drawn) + 1
        whose = np.empty(count, np.int64)
        for place in range(count):
            behind = [weight * (first + place) - had for weight, had in zip(weights, drawn, strict=True)]
            whose[place] = source = behind.index(max(behind))
            drawn[source] += 1
        return whose

    def _take(self, source: int, count: int) -> NDArray[np.int64]:
        """The next `count` rows of a source, over as many epochs as that takes."""
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
        """What a position means something for."""
        return {
            "seed": self.seed,
            "shuffle": self.shuffle,
            "sources": [share.name for share in self.shares],
            "rows": [share.rows for share in self.shares],
            "weights": [share.weight for share in self.shares],
            "data": self.fingerprint,
        }

    def state_dict(self) -> dict[str, Any]:
        """Where the stream is, and of what; plain lists, texts and numbers."""
        return {"drawn": list(self.drawn), **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where another stream of the same rows, seed and weights was; the batch size may be another.

        Raises:
            ValueError: the state belongs to another stream; names what differs.
        """
        for name, ours in self._identity().items():
            if name not in state or state[name] != ours:
                raise ValueError(
                    f"the position in the prompts belongs to other {name}: it has {state.get(name)!r:.200}, this run "
                    f"{ours!r:.200}; go on with the same data, weights and run.seed, or start a new run."
                )
        drawn = state.get("drawn")
        if not isinstance(drawn, list) or len(drawn) != len(self.drawn) or min(drawn) < 0:
            raise ValueError(
                f"the position in the prompts is {drawn!r:.200}; expected {len(self.drawn)} counts of rows."
            )
        self.drawn = list(drawn)
