"""Synthetic task with images: count the shapes of one form and color in a picture. The module also writes a tiny image model.

PIL draws the pictures. Nothing is downloaded.
"""

import io
import random
from pathlib import Path
from typing import Any

from mrl.core.code_locations import quick_imports
from mrl.data.tokenizer import byte_tokenizer
from parallel.durable_files import apply_umask, atomic_folder

COLORS = {"red": (220, 40, 40), "green": (40, 170, 60), "blue": (50, 80, 220)}  # name -> RGB
SHAPES = ("circle", "square", "triangle")
# A picture has CELLS x CELLS cells of CELL_PIXELS x CELL_PIXELS pixels, with at most one shape each.
CELLS, CELL_PIXELS = 3, 16
MAX_COUNT = 3  # largest answer; also the largest number of other shapes in a picture
SHAPES_NUM_TRAIN, SHAPES_NUM_TEST = 2048, 128  # number of problems in train.parquet and in test.parquet
CONTEXT_TOKENS = 128  # largest number of tokens of prompt and response together

_SPECIAL = ("<|vision_start|>", "<|image_pad|>", "<|video_pad|>", "<|vision_end|>")  # special tokens
_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
_TEXT = dict(hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
_VISION = dict(depth=2, hidden_size=32, intermediate_size=64, num_heads=2, patch_size=4, out_hidden_size=64)
# Model type of transformers -> (prefix of its class names, fields of the text config, fields of the vision config)
TINY_IMAGE_MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        _TEXT | dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 3, 3])),
        _VISION | dict(window_size=16, fullatt_block_indexes=[1]),
    ),
    "qwen3_vl": (
        "Qwen3VL",
        _TEXT
        | dict(
            head_dim=16,
            rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[4, 2, 2], mrope_interleaved=True),
        ),
        _VISION | dict(num_position_embeddings=16, deepstack_visual_indexes=[0]),
    ),
}
"""The tiny models have about 0.2 million parameters."""


def make_shapes_task(folder: str | Path, seed: int = 0, model: str = "qwen3_vl") -> None:
    """Create in `folder` the task of counting shapes: train and test parquet files, and `model/`.

    No problem is in both parquet files. Their column `images` has the image files. `model` is a key of TINY_IMAGE_MODELS. Does
    nothing if `folder` exists. The folder is created atomically, so several processes may call this function at the same time.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    with atomic_folder(folder) as partial:
        if partial is None:
            return
        rng = random.Random(seed)
        train = [shapes_problem(rng, "train") for _ in range(SHAPES_NUM_TRAIN)]
        known, test = {_content(row) for row in train}, []
        while len(test) < SHAPES_NUM_TEST:
            row = shapes_problem(rng, "test")
            if _content(row) not in known:
                test.append(row)
        for split, rows in (("train", train), ("test", test)):
            pq.write_table(pa.Table.from_pylist(rows), partial / f"{split}.parquet")
        make_tiny_image_model(partial / "model", context=CONTEXT_TOKENS, initializer_range=0.06, seed=seed, kind=model)


def shapes_problem(rng: random.Random, split: str = "train") -> dict[str, Any]:
    """Return an RL row with verl's columns: a random picture, and the question how many shapes of one form and color it has.

    The answers 0 to MAX_COUNT have the same probability.
    """
    pairs = [(shape, color) for shape in SHAPES for color in COLORS]
    shape, color = asked = rng.choice(pairs)
    count, num_others = rng.randint(0, MAX_COUNT), rng.randint(0, MAX_COUNT)
    others = [pair for pair in pairs if pair != asked]
    drawn = [asked] * count + rng.choices(others, k=num_others) + [None] * (CELLS * CELLS - count - num_others)
    rng.shuffle(drawn)
    return {
        "data_source": "shapes",
        "prompt": [{"role": "user", "content": f"<image>{color} {shape}s="}],
        "images": [{"bytes": _png(draw_shapes(drawn)), "path": None}],
        "ability": "vision",
        "reward_model": {"style": "rule", "ground_truth": str(count)},
        "extra_info": {"split": split, "shape": shape, "color": color},
    }


def _content(row: dict[str, Any]) -> tuple[bytes, str]:
    """Return the picture and the question of a row."""
    return row["images"][0]["bytes"], row["prompt"][0]["content"]


def draw_shapes(drawn: list[tuple[str, str] | None]) -> Any:
    """Return a PIL image of CELLS x CELLS cells. `drawn`: (shape, color) of each cell, row after row; None: an empty cell."""
    from PIL import Image, ImageDraw  # imported only where images are drawn

    image = Image.new("RGB", (CELLS * CELL_PIXELS, CELLS * CELL_PIXELS), "white")
    canvas = ImageDraw.Draw(image)
    for cell, content in enumerate(drawn):
        if content is None:
            continue
        shape, color = content
        row, column = divmod(cell, CELLS)
        left, top = column * CELL_PIXELS + 2, row * CELL_PIXELS + 2
        right, bottom = left + CELL_PIXELS - 5, top + CELL_PIXELS - 5
        if shape == "circle":
            canvas.ellipse((left, top, right, bottom), fill=COLORS[color])
        elif shape == "square":
            canvas.rectangle((left, top, right, bottom), fill=COLORS[color])
        else:
            canvas.polygon([(left, bottom), (right, bottom), ((left + right) // 2, top)], fill=COLORS[color])
    return image


def _png(image: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format="PNG")
    return file.getvalue()


def make_tiny_image_model(
    folder: str | Path, *, context: int, initializer_range: float, seed: int, kind: str = "qwen3_vl"
) -> None:
    """Write config, random float32 model weights, tokenizer and processor to `folder`. The same seed gives the same bytes.

    Raises ValueError if `kind` is not a key of TINY_IMAGE_MODELS.
    """
    if kind not in TINY_IMAGE_MODELS:
        raise ValueError(f"no tiny image model of kind {kind!r}; choose from {', '.join(TINY_IMAGE_MODELS)}.")
    with quick_imports():  # these imports take seconds
        import torch
        import transformers
        from transformers.utils import logging

    logging.disable_progress_bar()
    prefix, text, vision = TINY_IMAGE_MODELS[kind]
    tokenizer = image_tokenizer(context)
    ids = dict(zip(_SPECIAL, tokenizer.convert_tokens_to_ids(list(_SPECIAL)), strict=True))
    config = getattr(transformers, f"{prefix}Config")(
        text_config=text
        | dict(
            vocab_size=len(tokenizer),
            max_position_embeddings=context,
            initializer_range=initializer_range,
            pad_token_id=None,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        ),
        vision_config=vision | dict(initializer_range=initializer_range),
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, f"{prefix}ForConditionalGeneration")(config)
    model.save_pretrained(folder)
    sizes = dict(patch_size=vision["patch_size"], size=dict(shortest_edge=16 * 16, longest_edge=64 * 64))
    processors = (
        transformers.Qwen2VLImageProcessor(**sizes),
        tokenizer,
        transformers.Qwen3VLVideoProcessor(**sizes)
        if kind == "qwen3_vl"
        else transformers.Qwen2VLVideoProcessor(**sizes),
    )
    getattr(transformers, f"{prefix}Processor")(*processors, chat_template=_TEMPLATE).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    apply_umask(Path(folder))


def image_tokenizer(context: int) -> Any:
    """Return a tokenizer with one token for each byte, and the special tokens and the chat template of an image model."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|start|>", "<|end|>", *_SPECIAL]})
    tokenizer.chat_template = _TEMPLATE
    tokenizer.model_max_length = context
    return tokenizer
