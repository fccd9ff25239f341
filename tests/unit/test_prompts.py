"""Reading prompts: every mistake names file, row, column and reason; streams resume exactly."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mrl.data.columns import Columns
from mrl.data.prompts import PromptConstraints, PromptDataset, PromptStream
from mrl.data.sources import PromptSource
from mrl.data.supervised_dataset import SftDataset
from mrl.data.synthetic_tasks import make_doubling_task

GOOD = {
    "data_source": "sums",
    "prompt": [{"role": "user", "content": "1+2="}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "3"},
    "extra_info": {"index": 0},
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs") / "made"
    make_doubling_task(folder)
    return folder


def write(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def load(path, inputs, limit=60, vocab_size=32):
    data = PromptDataset.load([PromptSource((str(path),))], inputs / "model", PromptConstraints(limit, vocab_size))
    data.enforce_row_policies(path.parent / "bad_rows.jsonl", bad_rows="error", overlong="error")
    return data


def test_prompts_are_encoded_and_responses_decoded(inputs, tmp_path):
    data = load(write(tmp_path / "a.parquet", [GOOD, GOOD]), inputs)
    assert len(data) == 2
    assert data.decode([data.encode(1)]) == ["1+2="]
    with_special = [*data.encode(1), 0, *data.encode(1)]
    for _ in range(2):  # the second call decodes nothing
        assert data.token_texts(with_special) == data.decode([[token] for token in with_special])
    assert (data.ground_truth(0), data.data_source(0), data.extra_info(0)) == ("3", "sums", {"index": 0})


def test_jsonl_is_read_like_parquet(inputs, tmp_path):
    import orjson

    (tmp_path / "a.jsonl").write_bytes(orjson.dumps(GOOD) + b"\n\n" + orjson.dumps(GOOD) + b"\n")
    assert len(load(tmp_path / "a.jsonl", inputs)) == 2


@pytest.mark.parametrize("column", ["prompt", "reward_model"])
def test_a_missing_column_is_named(inputs, tmp_path, column):
    path = write(tmp_path / "bad.parquet", [{k: v for k, v in GOOD.items() if k != column}])
    with pytest.raises(ValueError, match=rf"bad.parquet, row 0, column '{column}': is missing; found data_source"):
        load(path, inputs)


def test_optional_columns_have_defaults(inputs, tmp_path):
    data = load(write(tmp_path / "sums.parquet", [{k: GOOD[k] for k in ("prompt", "reward_model")}]), inputs)
    assert (data.data_source(0), data.extra_info(0)) == ("sums", {})


def test_ability_and_style_are_read_if_a_row_has_them(inputs, tmp_path):
    import orjson

    rows = [
        GOOD,
        GOOD | {"ability": None, "reward_model": {"ground_truth": "3"}},
        GOOD | {"ability": ["math"], "reward_model": {"ground_truth": "3", "style": None}},
        {k: v for k, v in GOOD.items() if k != "ability"},
    ]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(map(orjson.dumps, rows)))
    data = load(tmp_path / "a.jsonl", inputs)
    found = [(example.ability, example.style) for example in data.examples]
    assert found == [("math", "rule"), ("", ""), ("", ""), ("", "rule")]
    assert data.reward_fields(0) == dict(
        data_source="sums",
        ground_truth="3",
        extra_info={"index": 0},
        prompt=GOOD["prompt"],
        ability="math",
        style="rule",
    )


def test_columns_of_ability_and_style_that_the_user_names_must_have_a_text(inputs, tmp_path):
    path = write(tmp_path / "a.parquet", [{"q": "1", "truth": "1", "topic": "sums", "kind": "rule"}])

    def read(**columns):
        source = PromptSource(
            (str(path),), Columns.of({"prompt": "q", "ground_truth": "truth", **columns}, "data.columns")
        )
        return PromptDataset.load([source], inputs / "model", PromptConstraints(60, 32))

    (example,) = read(ability="topic", style="kind").examples
    assert (example.ability, example.style) == ("sums", "rule")
    assert read(ability=None).examples[0].ability == ""
    assert read(ability="subject").report.omitted[0].column == "subject"


def test_a_misspelled_column_gets_a_hint(inputs, tmp_path):
    row = {("promt" if k == "prompt" else k): v for k, v in GOOD.items()}
    with pytest.raises(ValueError, match=r"column 'prompt': is missing.*'promt'"):
        load(write(tmp_path / "bad.parquet", [row]), inputs)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"prompt": []}, "column 'prompt': expected a text or a list"),
        (
            {"prompt": [{"role": "user", "content": None}]},
            "column 'prompt': expected a message with text in role and content",
        ),
        (
            {"reward_model": {"style": "rule", "ground_truth": None}},
            "column 'reward_model.ground_truth': expected text",
        ),
        ({"data_source": None}, "column 'data_source'"),
    ],
)
def test_a_wrong_value_names_row_and_column(inputs, tmp_path, change, reason):
    path = write(tmp_path / "bad.parquet", [GOOD, GOOD | change])
    with pytest.raises(ValueError, match=f"1 of 2 rows cannot be used:\n.*row 1, {reason}"):
        load(path, inputs)


def test_a_prompt_longer_than_the_context_is_named_with_its_length(inputs, tmp_path):
    long = GOOD | {"prompt": [{"role": "user", "content": "1" * 61}]}
    with pytest.raises(ValueError, match=r"row 2, column 'prompt': 61 tokens are more than the 60 that leave room"):
        load(write(tmp_path / "bad.parquet", [GOOD, GOOD, long]), inputs)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("none.parquet", None, "no such file"),
        ("rows.csv", b"a,b", "files of type '.csv' are not supported"),
        ("rows.parquet", b"not parquet", "not a readable parquet file"),
        ("rows.jsonl", b'{"a": 1}\n{oops', "row 1: not a JSON object"),
        ("list.jsonl", b"[1]", "row 0: expected a JSON object, got list"),
        ("empty.jsonl", b"\n", "the file has no rows"),
    ],
)
def test_an_unreadable_file_is_refused_with_the_reason(inputs, tmp_path, name, content, reason):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=reason):
        load(tmp_path / name, inputs)


def test_a_folder_without_tokenizer_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"tokenizer.json is missing"):
        load(write(tmp_path / "a.parquet", [GOOD]), tmp_path)


def test_supervised_rows_end_with_the_end_of_sequence(inputs, tmp_path):
    rows = [{"prompt": GOOD["prompt"], "response": "3"}]
    data = SftDataset.load(write(tmp_path / "s.parquet", rows), inputs / "model", 64)
    assert data.responses[0][-1] == 2 and len(data.prompts[0]) == 4
    with pytest.raises(
        ValueError, match=r"row 0: prompt and response have 6 tokens, more than the 5 of the model's context"
    ):
        SftDataset.load(tmp_path / "s.parquet", inputs / "model", 5)
    with pytest.raises(ValueError, match=r"column 'response': is missing"):
        SftDataset.load(write(tmp_path / "t.parquet", [{"prompt": GOOD["prompt"]}]), inputs / "model", 5)


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_stream_visits_every_row_once_per_epoch_across_batch_borders(shuffle):
    stream = PromptStream(10, 4, seed=3, shuffle=shuffle)
    drawn = np.concatenate([next(stream) for _ in range(5)])
    assert sorted(drawn[:10]) == sorted(drawn[10:]) == list(range(10))
    assert (drawn[:10].tolist() != drawn[10:].tolist()) == shuffle


def test_a_restored_stream_continues_at_its_position():
    stream = PromptStream(7, 5, seed=1, shuffle=True)
    for _ in range(3):
        next(stream)
    other = PromptStream(7, 5, seed=1, shuffle=True)
    other.load_state_dict(stream.state_dict())
    for _ in range(5):
        np.testing.assert_array_equal(next(stream), next(other))


def test_a_batch_may_be_larger_than_the_data():
    assert sorted(next(PromptStream(2, 5, seed=0, shuffle=True)).tolist())[:2] == [0, 0]


def test_a_tokenizer_of_another_model_is_refused(inputs, tmp_path):
    path = write(tmp_path / "a.parquet", [GOOD])
    with pytest.raises(ValueError, match=r"row 0.*gives token 17, but the model's vocabulary ends at 5"):
        load(path, inputs, vocab_size=6)
