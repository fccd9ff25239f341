"""Recipes for known data sets: the answer is extracted, and rows without an answer are reported."""

import orjson
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mrl.commands import data as command
from mrl.data.prompts import PromptConstraints, PromptDataset
from mrl.data.recipes import RECIPES, last_boxed, prepare
from mrl.data.sources import PromptSource
from mrl.data.tokenizer import character_tokenizer


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        (r"so $\boxed{7}$.", "7"),
        (r"first \boxed{1}, then \boxed{2}.", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\left\{ x \mid x^{2^{3}} \right\}}", r"\left\{ x \mid x^{2^{3}} \right\}"),
        (r"\boxed{\left\{ x \right.} and }", r"\left\{ x \right."),
        (r"\boxed{ (1, 2) }", "(1, 2)"),
        (r"\boxed {3}", "3"),
        (r"\boxed 9", "9"),
        (r"\fbox{4}", "4"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed{\text{line\\two}}", r"\text{line\\two}"),
        (r"\boxed{}", ""),
        (r"\boxed{never ends", None),
        (r"\boxed{\frac{1}{2}", None),
        (r"\boxed", None),
        (r"no box {1}", None),
        ("", None),
    ],
)
def test_the_answer_is_the_content_of_the_last_box(solution, answer):
    assert last_boxed(solution) == answer


PLAIN = st.text("ab1 ^", max_size=4) | st.sampled_from([r"\frac ", r"\{", r"\}", r"\\"])
NESTED = st.recursive(
    PLAIN, lambda inner: st.lists(inner, max_size=3).map(lambda parts: "".join(f"{{{p}}}" for p in parts))
)


@given(NESTED, st.text("ab $}", max_size=5))
def test_nested_braces_are_kept(inside, after):
    assert last_boxed(rf"thus \boxed{{{inside}}}{after}") == inside.strip()


MATH = {"problem": "What is $1/2$?", "solution": r"It is $\boxed{\frac{1}{2}}$.", "level": "Level 1", "type": "Algebra"}
GSM8K = {"question": "How many?", "answer": "one\n#### 1,002"}


def test_math_rows_become_five_columns(tmp_path):
    source = tmp_path / "math.jsonl"
    source.write_bytes(b"\n".join(map(orjson.dumps, [MATH, MATH | {"subject": "x"}])))
    argv = ["prepare", "math", str(source), str(tmp_path / "out/math.parquet"), "--split", "test"]
    assert command.main(argv) == 0
    first, second = pq.read_table(tmp_path / "out/math.parquet").to_pylist()
    assert list(first) == ["data_source", "prompt", "ability", "reward_model", "extra_info"]
    assert first["prompt"][0]["content"].startswith("What is $1/2$? Let's think step by step")
    assert first["reward_model"] == {"style": "rule", "ground_truth": r"\frac{1}{2}"}
    assert first["extra_info"] == {"split": "test", "index": 0, "level": "Level 1", "type": "Algebra", "subject": None}
    assert second["extra_info"]["subject"] == "x" and second["data_source"] == "math"


@pytest.mark.parametrize(("recipe", "row"), [("math", MATH), ("gsm8k", GSM8K)])
def test_the_output_of_a_recipe_loads_as_a_prompt_data_set(tmp_path, recipe, row):
    (tmp_path / "a.jsonl").write_bytes(orjson.dumps(row))
    assert prepare(recipe, tmp_path / "a.jsonl", tmp_path / "a.parquet") == 1
    tokenizer = character_tokenizer()
    tokenizer.save_pretrained(tmp_path / "model")
    data = PromptDataset.load(
        [PromptSource((str(tmp_path / "a.parquet"),))], tmp_path / "model", PromptConstraints(1000, 32)
    )
    assert data.report.omitted == () and data.ground_truth(0) == {"math": r"\frac{1}{2}", "gsm8k": "1002"}[recipe]
    assert data.messages(0)[0]["content"].endswith(RECIPES[recipe].instruction)


def test_rows_without_an_answer_are_counted_and_named_and_nothing_is_written(tmp_path, capsys):
    rows = [MATH, MATH | {"solution": "none"}, {"problem": "p"}, MATH | {"problem": 3}]
    (tmp_path / "math.jsonl").write_bytes(b"\n".join([b"", *map(orjson.dumps, rows), b"{oops"]))
    assert command.main(["prepare", "math", str(tmp_path / "math.jsonl"), str(tmp_path / "out.parquet")]) == 2
    shown = capsys.readouterr().err
    assert "4 of 5 rows cannot be used" in shown and not list(tmp_path.glob("out*"))
    for reason in (
        "row 2, column 'solution': expected the answer in \\boxed{...}, got 'none'",
        "row 3, column 'solution': is missing; found problem",
        "row 4, column 'problem': expected text, got 3",
        "row 5: not a JSON object",
    ):
        assert reason in shown


def test_an_unknown_recipe_lists_the_known_ones(tmp_path):
    with pytest.raises(ValueError, match="no recipe 'mth'; choose from gsm8k, math"):
        prepare("mth", tmp_path / "a", tmp_path / "b")


def test_an_instruction_may_be_left_out(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(orjson.dumps(GSM8K))
    prepare("gsm8k", tmp_path / "a.jsonl", tmp_path / "a.parquet", instruction="")
    assert pq.read_table(tmp_path / "a.parquet").to_pylist()[0]["prompt"][0]["content"] == "How many?"
