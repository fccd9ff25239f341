"""Synthetic tasks and tiny models, created locally without a download.

The quickstart uses the doubling task, and the agent example uses the calculator task. In both tasks, each character is one
token. In the calculator task, each of TOOL_MARKS is one token, too. The experiment smollm2 uses the sums task, with a
pretrained model.
"""

import random
from pathlib import Path
from typing import Any

from mrl.core.code_locations import quick_imports
from mrl.data.tokenizer import character_tokenizer
from parallel.durable_files import apply_umask, atomic_folder

DOUBLING_NUMBERS = range(1000, 5000)  # the numbers to double, one for each problem
DOUBLING_NUM_TEST = 512  # number of problems in test.parquet
CONTEXT_TOKENS = 64  # largest number of tokens of prompt and response together


def make_doubling_task(folder: str | Path, seed: int = 0, model: str = "qwen3") -> None:
    """Create in `folder` the task of doubling four-digit numbers: train, test, sft and pairs parquet files, and `model/`.

    Does nothing if `folder` exists. The folder is created atomically, so several processes may call this function at the same
    time. `model` is a key of TINY_MODELS. Each model needs its own folder.
    """
    with atomic_folder(folder) as partial:
        if partial is None:
            return
        numbers = list(DOUBLING_NUMBERS)
        random.Random(seed).shuffle(numbers)
        write_prompts(partial / "test.parquet", "test", numbers[:DOUBLING_NUM_TEST])
        write_prompts(partial / "train.parquet", "train", numbers[DOUBLING_NUM_TEST:])
        write_supervised(partial / "sft.parquet", numbers[DOUBLING_NUM_TEST:])
        write_preferences(partial / "pairs.parquet", numbers[DOUBLING_NUM_TEST:], seed)
        make_tiny_model(
            partial / "model",
            character_tokenizer(),
            context=CONTEXT_TOKENS,
            initializer_range=0.06,
            seed=seed,
            kind=model,
        )


def doubling_question(number: int) -> list[dict[str, str]]:
    """Return the prompt of one problem, as messages."""
    return [{"role": "user", "content": f"2*{number}="}]


def write_prompts(path: Path, split: str, numbers: list[int]) -> None:
    """Write RL prompts with the columns of verl: data_source, prompt, ability, reward_model, extra_info."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        {
            "data_source": "doubling",
            "prompt": doubling_question(number),
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(2 * number)},
            "extra_info": {"split": split, "index": index},
        }
        for index, number in enumerate(numbers)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)


SUMMANDS = range(10, 100)  # the numbers to add, two for each problem
SUMS_NUM_TEST = 256  # number of problems in test.parquet


def make_sums_task(folder: str | Path, seed: int = 0) -> None:
    """Create in `folder` the task of adding two-digit numbers: train and test parquet files, for a pretrained chat model.

    The chat template of the model renders the prompts. Does nothing if `folder` exists. The folder is created atomically, so
    several processes may call this function at the same time.
    """
    with atomic_folder(folder) as partial:
        if partial is None:
            return
        problems = [(a, b) for a in SUMMANDS for b in SUMMANDS]
        random.Random(seed).shuffle(problems)
        test, train = problems[:SUMS_NUM_TEST], problems[SUMS_NUM_TEST:]
        _write_parquet(partial / "test.parquet", [_sum_prompt("test", *problem) for problem in test])
        _write_parquet(partial / "train.parquet", [_sum_prompt("train", *problem) for problem in train])


def _sum_prompt(split: str, a: int, b: int) -> dict:
    """Return an RL row with the same columns as in `write_prompts`."""
    return {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": f"What is {a} + {b}? Answer with the number only."}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(a + b)},
        "extra_info": {"split": split, "numbers": [a, b]},
    }


def write_supervised(path: Path, numbers: list[int]) -> None:
    """Write one row with prompt and response for each problem, for the supervised warm start."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"prompt": doubling_question(number), "response": str(2 * number)} for number in numbers]
    pq.write_table(pa.Table.from_pylist(rows), path)


def write_preferences(path: Path, numbers: list[int], seed: int) -> None:
    """Write one pair for each problem: the right answer is chosen, and an answer with one wrong digit is rejected."""
    rng, rows = random.Random(seed), []
    for number in numbers:
        right = str(2 * number)
        place = rng.randrange(len(right))
        digit = rng.choice([other for other in "0123456789" if other != right[place]])
        wrong = right[:place] + digit + right[place + 1 :]
        rows.append({"prompt": doubling_question(number), "chosen": right, "rejected": wrong})
    _write_parquet(path, rows)


PRODUCT_NUMBERS = range(320, 1000)  # the factors; every product has six digits
PRODUCT_NUM_TRAIN, PRODUCT_NUM_TEST = 8192, 512  # number of problems in train.parquet and in test.parquet

# Special tokens around a call of the calculator, and around its result
TOOL_MARKS = ("<call>", "</call>", "<result>", "</result>")
# Chat template of the calculator task
CALCULATOR_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'tool' %}<result>{{ message['content'] }}</result>"
    "{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
)


def make_calculator_task(folder: str | Path, seed: int = 0, model: str = "qwen3", call_fraction: float = 0.15) -> None:
    """Create in `folder` the task of multiplying three-digit numbers: train, test and sft parquet files, and `model/`.

    The model can answer correctly only if it calls the calculator tool. `call_fraction` is the fraction of supervised rows
    that call the tool. The other rows do not call it, and give a wrong answer.

    Does nothing if `folder` exists. The folder is created atomically, so several processes may call this function at the same
    time. `model` is a key of TINY_MODELS. Each model needs its own folder.
    """
    with atomic_folder(folder) as partial:
        if partial is None:
            return
        rng = random.Random(seed)
        problems = [(a, b) for a in PRODUCT_NUMBERS for b in PRODUCT_NUMBERS]
        chosen = rng.sample(problems, PRODUCT_NUM_TRAIN + PRODUCT_NUM_TEST)
        _write_parquet(
            partial / "test.parquet", [_product_prompt("test", *problem) for problem in chosen[:PRODUCT_NUM_TEST]]
        )
        _write_parquet(
            partial / "train.parquet", [_product_prompt("train", *problem) for problem in chosen[PRODUCT_NUM_TEST:]]
        )
        _write_parquet(
            partial / "sft.parquet",
            [_product_demonstration(rng, call_fraction, *problem) for problem in chosen[PRODUCT_NUM_TEST:]],
        )
        tokenizer = character_tokenizer()
        tokenizer.add_special_tokens({"additional_special_tokens": list(TOOL_MARKS)})
        tokenizer.chat_template = CALCULATOR_TEMPLATE
        make_tiny_model(
            partial / "model", tokenizer, context=CONTEXT_TOKENS, initializer_range=0.06, seed=seed, kind=model
        )


def product_question(a: int, b: int) -> list[dict[str, str]]:
    """Return the prompt of one problem, as messages."""
    return [{"role": "user", "content": f"{a}*{b}="}]


def _product_prompt(split: str, a: int, b: int) -> dict:
    """Return an RL row with the same columns as in `write_prompts`."""
    return {
        "data_source": "products",
        "prompt": product_question(a, b),
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(a * b)},
        "extra_info": {"split": split, "numbers": [a, b]},
    }


def _product_demonstration(rng: random.Random, call_fraction: float, a: int, b: int) -> dict:
    """Return a supervised row.

    The response calls the tool and repeats the result, or gives a wrong answer that consists of the two factors.
    """
    if rng.random() >= call_fraction:
        turns = [("assistant", f" {a}{b}")]
    else:
        turns = [("assistant", f"<call>{a}*{b}</call>"), ("tool", str(a * b)), ("assistant", str(a * b))]
    return {"prompt": product_question(a, b), "response": [{"role": role, "content": text} for role, text in turns]}


def _write_parquet(path: Path, rows: list[dict]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(rows), path)


# Config fields of the tiny models
TINY_SIZES = dict(
    hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2
)
# Further config fields of the tiny model with experts
TINY_EXPERTS = dict(
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=192,  # two experts together are as wide as the dense MLP
    norm_topk_prob=True,
    decoder_sparse_step=1,
    mlp_only_layers=[],
)
TINY_MODELS: dict[str, dict[str, Any]] = {"qwen3": TINY_SIZES, "qwen3_moe": TINY_SIZES | TINY_EXPERTS}
"""Model type of transformers -> fields of its config. The dense model has 0.8 million parameters, the MoE model 2.6 million."""


def make_tiny_model(
    folder: str | Path,
    tokenizer: Any,
    *,
    context: int,
    initializer_range: float,
    seed: int,
    kind: str = "qwen3",
) -> None:
    """Write config, random float32 model weights and `tokenizer` to `folder`. The same seed gives the same bytes.

    Raises ValueError if `kind` is not a key of TINY_MODELS.
    """
    if kind not in TINY_MODELS:
        raise ValueError(f"no tiny model of kind {kind!r}; choose from {', '.join(TINY_MODELS)}.")
    with quick_imports():  # takes seconds
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.utils import logging

    logging.disable_progress_bar()

    config = AutoConfig.for_model(
        kind,
        **TINY_MODELS[kind],
        vocab_size=len(tokenizer),
        head_dim=32,
        max_position_embeddings=context,
        initializer_range=initializer_range,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        # A padding token would have an embedding of zeros, at which the gradient of RMSNorm is huge: 1 / sqrt(eps).
        pad_token_id=None,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    tokenizer.model_max_length = context
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    apply_umask(Path(folder))
