"""The quickstart's input, made locally: doubling four-digit numbers, one token per character."""

import random
from pathlib import Path

from mrl.data.tiny_model import make_tiny_model
from mrl.data.tokenizer import character_tokenizer
from mrl.data.whole import whole

NUMBERS = range(1000, 5000)
NUM_TEST = 512
CONTEXT = 64


def make_inputs(folder: str | Path, seed: int = 0, model: str = "qwen3") -> None:
    """Make `folder` with train, test and sft parquet files and `model/`, unless it is there.

    `model`: which tiny model, one of mrl.data.tiny_model.KINDS; each kind wants a folder of its own.
    The folder appears under its name only when it is complete; of two processes that make it at once, one wins.
    """
    with whole(folder) as partial:
        if partial is None:
            return
        numbers = list(NUMBERS)
        random.Random(seed).shuffle(numbers)
        write_prompts(partial / "test.parquet", "test", numbers[:NUM_TEST])
        write_prompts(partial / "train.parquet", "train", numbers[NUM_TEST:])
        write_supervised(partial / "sft.parquet", numbers[NUM_TEST:])
        make_tiny_model(
            partial / "model", character_tokenizer(), context=CONTEXT, initializer_range=0.06, seed=seed, kind=model
        )


def question(number: int) -> list[dict[str, str]]:
    """The prompt of one problem, as messages."""
    return [{"role": "user", "content": f"2*{number}="}]


def write_prompts(path: Path, split: str, numbers: list[int]) -> None:
    """RL prompts in the field's five columns."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        {
            "data_source": "doubling",
            "prompt": question(number),
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(2 * number)},
            "extra_info": {"split": split, "index": index},
        }
        for index, number in enumerate(numbers)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)


def write_supervised(path: Path, numbers: list[int]) -> None:
    """Prompt/response rows of the same problems, for the warm start."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"prompt": question(number), "response": str(2 * number)} for number in numbers]
    pq.write_table(pa.Table.from_pylist(rows), path)
