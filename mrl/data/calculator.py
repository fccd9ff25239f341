"""Input of the calculator experiment, made locally: products of three-digit numbers, which only the tool knows."""

import random
from pathlib import Path

from mrl.data.tiny_model import make_tiny_model
from mrl.data.tokenizer import character_tokenizer
from mrl.data.whole import whole

NUMBERS = range(320, 1000)  # every product has six digits
NUM_TRAIN, NUM_TEST = 8192, 512
CONTEXT = 64
MARKS = ("<call>", "</call>", "<result>", "</result>")
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'tool' %}<result>{{ message['content'] }}</result>"
    "{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
)


def make_inputs(folder: str | Path, seed: int = 0, model: str = "qwen3", calls: float = 0.15) -> None:
    """Make `folder` with train, test and sft parquet files and `model/`, unless it is there.

    `calls`: the share of supervised rows that call the tool; the others answer at once, and never rightly.
    `model`: which tiny model, one of mrl.data.tiny_model.KINDS; each kind wants a folder of its own.
    The folder appears under its name only when it is complete; of two processes that make it at once, one wins.
    """
    with whole(folder) as partial:
        if partial is None:
            return
        rng = random.Random(seed)
        problems = [(a, b) for a in NUMBERS for b in NUMBERS]
        chosen = rng.sample(problems, NUM_TRAIN + NUM_TEST)
        _write(partial / "test.parquet", [_prompt("test", *problem) for problem in chosen[:NUM_TEST]])
        _write(partial / "train.parquet", [_prompt("train", *problem) for problem in chosen[NUM_TEST:]])
        _write(partial / "sft.parquet", [_shown(rng, calls, *problem) for problem in chosen[NUM_TEST:]])
        tokenizer = character_tokenizer()
        tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS)})
        tokenizer.chat_template = TEMPLATE
        make_tiny_model(partial / "model", tokenizer, context=CONTEXT, initializer_range=0.06, seed=seed, kind=model)


def question(a: int, b: int) -> list[dict[str, str]]:
    """The prompt of one problem, as messages."""
    return [{"role": "user", "content": f"{a}*{b}="}]


def _prompt(split: str, a: int, b: int) -> dict:
    """A row of reinforcement, in the field's five columns."""
    return {
        "data_source": "products",
        "prompt": question(a, b),
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(a * b)},
        "extra_info": {"split": split, "numbers": [a, b]},
    }


def _shown(rng: random.Random, calls: float, a: int, b: int) -> dict:
    """A supervised row: the tool is called and its result repeated; or, in place of a product, both numbers are."""
    if rng.random() >= calls:
        turns = [("assistant", f" {a}{b}")]
    else:
        turns = [("assistant", f"<call>{a}*{b}</call>"), ("tool", str(a * b)), ("assistant", str(a * b))]
    return {"prompt": question(a, b), "response": [{"role": role, "content": text} for role, text in turns]}


def _write(path: Path, rows: list[dict]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(rows), path)
