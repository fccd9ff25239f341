"""Malformed rows of many kinds are each reported with file, row, column and reason."""

import json
import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mrl.data.prompts import PromptConstraints, PromptDataset
from mrl.data.row_files import SHOWN
from mrl.data.sources import PromptSource
from mrl.data.synthetic_tasks import make_doubling_task
from mrl.data.tokenizer import ChatTemplate

LIMIT = 12  # longest prompt, in tokens; each character is a token
VOCABULARY = 30  # of the model; the tokenizer has 32 tokens, so <r28> and <r29> have ids that the model lacks
GOOD = "good"

TEMPLATE = (
    "{% for message in messages %}{% if message['content'] == '99999' %}{{ raise_exception('not that one') }}{% endif %}"
    "{{ message['content'] }}{% endfor %}"
)


def row(content: Any = "1+2=", **changed: Any) -> dict[str, Any]:
    """Return a valid row with some values changed."""
    return {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": content}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "3"},
        "extra_info": {"index": 0},
    } | changed


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in row().items() if key != name}


def truth(value: Any) -> dict[str, Any]:
    return row(reward_model={"style": "rule", "ground_truth": value})


def nested(depth: int) -> list[Any]:
    return [nested(depth - 1)] if depth > 1 else []


def line(value: Any) -> bytes:
    return json.dumps(value).encode()


ANY = (None, 3, 2.5, True, {"a": 1})

# kind of row -> (function that makes a line with a random source, reported column, part of the reported reason)
KINDS = {
    "no prompt": (lambda r: line(without("prompt")), "prompt", "is missing; found data_source, ability"),
    "misnamed prompt": (lambda r: line(without("prompt") | {"promt": "1"}), "prompt", "did you mean 'promt'?"),
    "no reward model": (
        lambda r: line(without("reward_model")),
        "reward_model",
        "is missing; found data_source, prompt",
    ),
    "prompt of no use": (
        lambda r: line(row(prompt=r.choice(ANY))),
        "prompt",
        "expected a text or a list of {role, content}",
    ),
    "empty list": (
        lambda r: line(row(prompt=[])),
        "prompt",
        "expected a text or a list of {role, content} messages, got []",
    ),
    "message without role": (
        lambda r: line(row(prompt=[{"content": "1"}])),
        "prompt",
        "text in role and content, got {'co",
    ),
    "message without content": (lambda r: line(row(prompt=[{"role": "user"}])), "prompt", "text in role and content"),
    "content not text": (lambda r: line(row(r.choice(ANY))), "prompt", "a message with text in role and content"),
    "message is text": (lambda r: line(row(prompt=["1+2="])), "prompt", "role and content, got '1+2='"),
    "unknown role": (
        lambda r: line(row(prompt=[{"role": "usr", "content": "1"}])),
        "prompt",
        "unknown role 'usr'; expected",
    ),
    "source not text": (lambda r: line(row(data_source=r.choice(ANY))), "data_source", "expected text, got "),
    "reward model of no use": (
        lambda r: line(row(reward_model=r.choice([None, 3, "3", [3]]))),
        "reward_model",
        "an object",
    ),
    "no ground truth": (
        lambda r: line(row(reward_model={"style": "rule"})),
        "reward_model.ground_truth",
        "is missing; found",
    ),
    "ground truth null": (
        lambda r: line(truth(r.choice([None, True]))),
        "reward_model.ground_truth",
        "expected text, a number",
    ),
    "extra info of no use": (
        lambda r: line(row(extra_info=r.choice([3, "x", [1], False]))),
        "extra_info",
        "expected an object",
    ),
    "not JSON": (
        lambda r: r.choice([b"{oops", b"data_source: sums", b"{'a': 1}", b'{"a": 1} {"a": 2}']),
        "",
        "not a JSON object",
    ),
    "cut off": (lambda r: line(row())[: r.randrange(1, 150)], "", "not a JSON object"),
    "not an object": (
        lambda r: r.choice([b"[1]", b"3", b'"text"', b"null", b"true"]),
        "",
        "expected a JSON object, got",
    ),
    "not UTF-8": (lambda r: line(row("1X2=")).replace(b"X", bytes([r.randrange(0x80, 0x100)])), "", "not valid UTF-8"),
    "raw NUL byte": (lambda r: line(row("1X2=")).replace(b"X", b"\0"), "", "control character"),
    "half a character": (lambda r: line(row("1\ud800")), "", "surrogate"),
    "repeated key": (lambda r: line(row())[:-1] + b', "prompt": "1"}', "", "key 'prompt' occurs more than once"),
    "repeated inner key": (
        lambda r: line(row()).replace(b'"index"', b'"i": 1, "i"'),
        "",
        "key 'i' occurs more than once",
    ),
    "NaN": (lambda r: line(truth(float(r.choice(["nan", "inf", "-inf"])))), "", "not a JSON object"),
    "infinite number": (lambda r: line(truth(3)).replace(b": 3}", b": 1e999}"), "", "not a JSON object"),
    "too deep": (lambda r: line(truth(nested(r.randint(101, 900)))), "", "deep, more than 100"),
    "refused by the template": (
        lambda r: line(row("99999")),
        "prompt",
        "the chat template refused the messages: not that one",
    ),
    "no token": (lambda r: line(row("")), "prompt", "the chat template gave no tokens"),
    "unknown token": (
        lambda r: line(row("1" + chr(0x2460))),
        "prompt",
        "gives token 31, but the model's vocabulary ends at 29",
    ),
}
LONG = "overlong"


@dataclass(frozen=True)
class Files:
    model: str
    folder: Any
    rules: PromptConstraints


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bad_rows")
    make_doubling_task(folder / "made")
    model = folder / "made/model"
    tokenizer = orjson.loads((model / "tokenizer.json").read_bytes())
    words = tokenizer["model"]["vocab"]
    last = max(words, key=words.get)
    words[chr(0x2460)] = words.pop(last)  # a character whose id the model lacks
    assert words[chr(0x2460)] == 31
    (model / "tokenizer.json").write_bytes(orjson.dumps(tokenizer))
    (folder / "template.jinja").write_text(TEMPLATE)
    return Files(str(model), folder, PromptConstraints(LIMIT, VOCABULARY, ChatTemplate(str(folder / "template.jinja"))))


def made(kind: str, source: random.Random) -> bytes:
    if kind == GOOD:
        return line(row("".join(source.choices("0123456789+-*=", k=source.randint(1, LIMIT)))))
    if kind == LONG:
        return line(row("1" * source.randint(LIMIT + 1, 40)))
    return KINDS[kind][0](source)


@pytest.mark.extended
def test_ten_thousand_malformed_rows_are_each_reported_with_place_and_reason(files):
    pushed: Counter[str] = Counter()  # number of rows of each kind

    @settings(max_examples=80, suppress_health_check=list(HealthCheck))
    @given(
        kinds=st.lists(st.sampled_from([GOOD, LONG, *KINDS]), min_size=150, max_size=250),
        blanks=st.lists(st.integers(0, 149), max_size=5),
        seed=st.integers(0, 2**32),
    )
    def push(kinds, blanks, seed):
        check_file(files, kinds, blanks, random.Random(seed))
        pushed.update(kinds)

    push()
    bad = {kind: count for kind, count in pushed.items() if kind != GOOD}
    assert sum(bad.values()) >= 10_000, bad
    assert len(bad) >= 20 and min(bad.values()) >= 50, bad
    assert bad.keys() == {LONG, *KINDS}


def check_file(files, kinds, blanks, source):
    """Write rows of these kinds with blank lines in between, and compare the report with the rows."""
    lines = [made(kind, source) for kind in kinds]
    where = list(range(len(kinds)))  # line number of each row
    for blank in sorted(blanks, reverse=True):
        lines.insert(blank, source.choice([b"", b"  ", b"\r"]))
        where = [number + (place >= blank) for place, number in enumerate(where)]
    path = files.folder / "rows.jsonl"
    path.write_bytes(b"\n".join(lines))

    data = PromptDataset.load([PromptSource((str(path),))], files.model, files.rules)

    expected = {number: kind for number, kind in zip(where, kinds, strict=True) if kind != GOOD}
    assert [bad.row for bad in data.report.omitted] == sorted(expected)
    for bad in data.report.omitted:
        _, column, reason = KINDS.get(expected[bad.row], (None, "prompt", f"more than the {LIMIT} that leave room"))
        assert (bad.file, bad.column, bad.overlong) == (str(path), column, expected[bad.row] == LONG)
        assert reason in bad.reason, (expected[bad.row], bad)
    assert (data.report.rows, data.report.kept, data.report.num_overlong) == (
        len(kinds), kinds.count(GOOD), kinds.count(LONG)
    )  # fmt: skip
    assert len(data) == kinds.count(GOOD) == len(data.cu_seqlens) - 1


PARQUET = {
    "prompt is a number": ("prompt", [1, 2, 3], "expected a text or a list"),
    "prompt is null": ("prompt", [None, None, None], "expected a text or a list"),
    "messages are null": ("prompt", [[None], [None], [None]], "text in role and content"),
    "ground truth is a flag": ("reward_model", [{"ground_truth": True}] * 3, "expected text, a number"),
    "ground truth is not finite": (
        "reward_model",
        [{"ground_truth": float("nan")}, {"ground_truth": float("inf")}, {"ground_truth": float("-inf")}],
        "expected finite numbers",
    ),
    "ground truth holds what is not finite": (
        "reward_model",
        [{"ground_truth": [1.0, float("nan")]}] * 3,
        "expected finite numbers",
    ),
    "reward model is text": ("reward_model", ["3", "4", "5"], "expected an object"),
    "source is a number": ("data_source", [1, 2, 3], "expected text"),
    "extra info is text": ("extra_info", ["a", "b", "c"], "expected an object"),
}


@pytest.mark.parametrize("kind", PARQUET)
def test_a_parquet_column_of_the_wrong_type_makes_every_row_bad(files, tmp_path, kind):
    name, values, reason = PARQUET[kind]
    table = pa.table(pa.Table.from_pylist([row()] * 3).drop_columns([name]).to_pydict() | {name: pa.array(values)})
    pq.write_table(table, tmp_path / "a.parquet")
    report = PromptDataset.load([PromptSource((str(tmp_path / "a.parquet"),))], files.model, files.rules).report
    assert (report.rows, report.kept, [bad.row for bad in report.omitted]) == (3, 0, [0, 1, 2])
    assert all(bad.column.startswith(name) and reason in bad.reason for bad in report.omitted), report


@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(broken=st.lists(st.booleans(), min_size=1, max_size=40))
def test_a_parquet_text_that_is_not_utf8_is_one_bad_row(files, broken):
    texts = pa.array([b"1\xff" if bad else b"1+1=" for bad in broken], pa.binary())
    unchecked = pa.Array.from_buffers(pa.string(), len(broken), texts.buffers())
    rest = pa.Table.from_pylist([{"reward_model": {"ground_truth": "2"}}] * len(broken))
    pq.write_table(rest.append_column("prompt", unchecked), files.folder / "utf8.parquet")
    report = PromptDataset.load([PromptSource((str(files.folder / "utf8.parquet"),))], files.model, files.rules).report
    assert [bad.row for bad in report.omitted] == [number for number, bad in enumerate(broken) if bad]
    assert {(bad.column, bad.reason[:9]) for bad in report.omitted} <= {("prompt", "not UTF-8")}
    assert report.kept == broken.count(False)


def test_the_policy_error_lists_all_bad_rows_in_a_file_and_the_first_in_the_message(files, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n".join([line(row()), *[b"{oops"] * 7, line(row("1" * 20))]))
    data = PromptDataset.load([PromptSource((str(path),))], files.model, files.rules)
    listed = tmp_path / "run/bad_rows.jsonl"

    with pytest.raises(ValueError, match="8 of 9 rows cannot be used") as caught:
        data.enforce_row_policies(listed, bad_rows="error", overlong="error")
    message = str(caught.value)
    assert message.count("not a JSON object") == SHOWN and "... and 3 more" in message
    assert f"All are listed in {listed}" in message and "set data.bad_rows=skip and data.overlong=skip" in message
    rows = [orjson.loads(entry) for entry in listed.read_bytes().splitlines()]
    assert [(entry["row"], entry["overlong"]) for entry in rows] == [*((n, False) for n in range(1, 8)), (8, True)]
    assert all(entry["file"] == str(path) and entry["reason"] for entry in rows)

    with pytest.raises(ValueError, match=r"1 of 9 rows.*\n.*row 8.*20 tokens are more than") as caught:
        data.enforce_row_policies(listed, bad_rows="skip", overlong="error")
    assert "data.overlong=skip" in str(caught.value) and "data.bad_rows=skip" not in str(caught.value)
    data.enforce_row_policies(listed, bad_rows="skip", overlong="skip")
    assert str(data.report) == "1 of 9 rows kept, 7 bad, 1 overlong"


def test_a_source_without_usable_rows_is_an_error_under_any_policy(files, tmp_path):
    (tmp_path / "good.jsonl").write_bytes(line(row()))
    (tmp_path / "bad.jsonl").write_bytes(b"[]")
    sources = [PromptSource((str(tmp_path / f"{name}.jsonl"),), name=name) for name in ("good", "bad")]
    data = PromptDataset.load(sources, files.model, files.rules)
    with pytest.raises(ValueError, match=r"source 'bad': no row is left"):
        data.enforce_row_policies(tmp_path / "list.jsonl", bad_rows="skip", overlong="skip")
    assert (tmp_path / "list.jsonl").is_file()


def test_the_list_of_bad_rows_of_an_earlier_attempt_is_removed(files, tmp_path):
    (tmp_path / "good.jsonl").write_bytes(line(row()))
    (tmp_path / "list.jsonl").write_text("old")
    data = PromptDataset.load([PromptSource((str(tmp_path / "good.jsonl"),))], files.model, files.rules)
    data.enforce_row_policies(tmp_path / "list.jsonl", bad_rows="error", overlong="error")
    assert not (tmp_path / "list.jsonl").exists()


@pytest.mark.parametrize(
    ("name", "make", "reason"),
    [
        ("cut.parquet", lambda path: path.write_bytes(path.read_bytes()[:-20]), "not a readable parquet file"),
        ("empty.parquet", lambda path: path.write_bytes(b""), "not a readable parquet file"),
        ("two.parquet", lambda path: pq.write_table(pa.table([[1], [2]], names=["a", "a"]), path), "Multiple matches"),
    ],
)
def test_an_unreadable_file_is_an_error_with_the_reason(files, tmp_path, name, make, reason):
    pq.write_table(pa.Table.from_pylist([row()]), tmp_path / name)
    make(tmp_path / name)
    with pytest.raises(ValueError, match=reason):
        PromptDataset.load([PromptSource((str(tmp_path / name),))], files.model, files.rules)
