"""The synthetic tasks, tiny models and tokenizers, the GSM8K recipe, and the rewards for them."""

import hashlib

import orjson
import pyarrow.parquet as pq
import pytest

from mrl.commands import data as command
from mrl.data.synthetic_tasks import make_doubling_task
from mrl.data.tokenizer import byte_tokenizer, encode_messages, load_tokenizer
from mrl.rewards.reward_types import Response
from mrl.rewards.rule_based import GSM8K, ExactMatch


def digests(folder):
    return {p.relative_to(folder): hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.rglob("*") if p.is_file()}


def test_quickstart_inputs_are_the_same_bytes_each_time(tmp_path):
    make_doubling_task(tmp_path / "a")
    make_doubling_task(tmp_path / "b")
    assert digests(tmp_path / "a") == digests(tmp_path / "b")
    before = digests(tmp_path / "a")
    make_doubling_task(tmp_path / "a")
    assert digests(tmp_path / "a") == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"], "nothing half-made is left"


def test_held_out_problems_are_in_no_training_file(tmp_path):
    make_doubling_task(tmp_path / "a")
    prompts = {
        name: {row["prompt"][0]["content"] for row in pq.read_table(tmp_path / f"a/{name}.parquet").to_pylist()}
        for name in ("train", "test", "sft")
    }
    assert len(prompts["train"]) == 3488 and len(prompts["test"]) == 512
    assert not prompts["test"] & (prompts["train"] | prompts["sft"])


def test_ground_truths_are_right(tmp_path):
    make_doubling_task(tmp_path / "a")
    for row in pq.read_table(tmp_path / "a/test.parquet").to_pylist():
        two, number = row["prompt"][0]["content"].rstrip("=").split("*")
        assert int(two) * int(number) == int(row["reward_model"]["ground_truth"])


def test_the_tiny_mixture_of_experts_has_ordinary_names(tmp_path):
    """Each expert has its own tensor per projection, as in released checkpoints. Transformers itself stacks the experts."""
    from safetensors import safe_open

    make_doubling_task(tmp_path / "a", model="qwen3_moe")
    config = orjson.loads((tmp_path / "a/model/config.json").read_bytes())
    assert config["architectures"] == ["Qwen3MoeForCausalLM"] and config["num_experts_per_tok"] == 2
    with safe_open(tmp_path / "a/model/model.safetensors", "pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 (not a dict)
    mlp = {name: shape for name, shape in shapes.items() if name.startswith("model.layers.3.mlp.")}
    assert mlp == {"model.layers.3.mlp.gate.weight": (8, 128)} | {
        f"model.layers.3.mlp.experts.{e}.{part}.weight": shape
        for e in range(8)
        for part, shape in {"gate_proj": (192, 128), "up_proj": (192, 128), "down_proj": (128, 192)}.items()
    }
    with pytest.raises(ValueError, match="no tiny model of kind 'qwen9'; choose from qwen3, qwen3_moe"):
        make_doubling_task(tmp_path / "b", model="qwen9")
    assert not (tmp_path / "b").exists()


TEXTS = ["plain", "quotes \"' and $5.00", "naïve — ☃ 漢字 🙂\n\ttabs  two spaces", "", "<|start|>user"]


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_round_trip_any_text(text):
    tokenizer = byte_tokenizer()
    ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text


def test_the_byte_chat_template_marks_turns_and_opens_the_answer(tmp_path):
    assert command.main(["tiny-model", str(tmp_path / "tiny"), "--context", "128"]) == 0
    tokenizer = load_tokenizer(tmp_path / "tiny")
    (ids,) = encode_messages(tokenizer, [[{"role": "user", "content": "3 × $4?"}]])
    assert tokenizer.decode(ids) == "<|start|>user\n3 × $4?<|end|>\n<|start|>assistant\n"
    assert command.main(["tiny-model", str(tmp_path / "tiny")]) == 2  # an existing folder is refused


def gsm8k(tmp_path, *rows):
    source = tmp_path / "rows.jsonl"
    source.write_bytes(b"\n".join(orjson.dumps(row) for row in rows))
    return command.main(["prepare", "gsm8k", str(source), str(tmp_path / "out.parquet"), "--instruction", "Go."])


def test_gsm8k_rows_become_five_columns(tmp_path):
    assert gsm8k(tmp_path, {"question": 'How much is "$2"?', "answer": "so <<1+1=2>>\n#### 1,002"}) == 0
    (row,) = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert row["prompt"] == [{"role": "user", "content": 'How much is "$2"? Go.'}]
    assert row["reward_model"] == {"style": "rule", "ground_truth": "1002"}
    assert list(row) == ["data_source", "prompt", "ability", "reward_model", "extra_info"]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"question": "q", "answer": "no number"}, "row 1, column 'answer': expected it to end in '#### NUMBER'"),
        ({"question": 3, "answer": "#### 1"}, "row 1, column 'question': expected text, got 3"),
        ({"question": "q"}, "row 1, column 'answer': is missing; found question"),
    ],
)
def test_a_bad_gsm8k_row_is_named_and_nothing_is_written(tmp_path, capsys, row, reason):
    assert gsm8k(tmp_path, {"question": "q", "answer": "#### 1"}, row) == 2
    assert reason in capsys.readouterr().err
    assert not list(tmp_path.glob("out.parquet*"))


@pytest.mark.parametrize(
    ("reward", "text", "truth", "expected"),
    [
        (ExactMatch(), " 12\n", "12", 1.0),
        (ExactMatch(), "12.", "12", 0.0),
        (GSM8K(), "thus\n#### 1,234", "1234", 1.0),
        (GSM8K(), "#### 3 no #### 4", "4", 1.0),
        (GSM8K(), "it is 4", "4", 0.0),
        (GSM8K(strict=False), "first 3, then 4.0", "4", 1.0),
        (GSM8K(strict=False), "none", "4", 0.0),
        (GSM8K(), "#### -2.50", "-2.5", 1.0),
    ],
)
def test_rewards(reward, text, truth, expected):
    assert reward([Response("source", text, truth)]) == [expected]
