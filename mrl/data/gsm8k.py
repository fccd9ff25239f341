"""GSM8K-style files -> the five columns; a template for other sources."""

import re
from pathlib import Path

from mrl.data.table import Row, read_rows

INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
_ANSWER = re.compile(r"####\s*(-?[\d,]*\.?\d+)\s*$")


def convert(source: str | Path, target: str | Path, instruction: str = INSTRUCTION, split: str = "train") -> int:
    """Turn rows of `question` and `answer` (ending in `#### NUMBER`) into prompts; returns the number of rows.

    Raises:
        ValueError: names file, row, column and reason; nothing is written then.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        _convert_row(source, number, row, instruction, split)
        for number, row in enumerate(read_rows(source, ("question", "answer")))
    ]
    target = Path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(target.name + ".partial")
    pq.write_table(pa.Table.from_pylist(rows), partial)
    partial.rename(target)
    return len(rows)


def _convert_row(source: str | Path, number: int, row: Row, instruction: str, split: str) -> Row:
    for column in ("question", "answer"):
        if not isinstance(row[column], str):
            raise ValueError(f"{source}, row {number}, column {column!r}: expected text, got {row[column]!r:.80}.")
    found = _ANSWER.search(row["answer"])
    if not found:
        raise ValueError(
            f"{source}, row {number}, column 'answer': expected it to end in '#### NUMBER', got {row['answer'][-60:]!r}."
        )
    question = f"{row['question']} {instruction}".strip()
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": found[1].replace(",", "")},
        "extra_info": {"split": split, "index": number},
    }
