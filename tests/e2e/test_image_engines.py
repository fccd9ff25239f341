"""A real SGLang server of an image model: it reads JPEG and PNG files, and its log-probabilities equal those of Transformers."""

import io
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from models.families import family_of
from models.hf_config import HFConfig
from mrl.controller.plan_prompts import image_args
from mrl.data.images import ImagePrompts
from mrl.data.prompts import PromptConstraints, PromptDataset
from mrl.data.shapes_task import draw_shapes, make_tiny_image_model
from mrl.data.sources import PromptSource
from mrl.rollout.client import EngineClient, SamplingParams

pytestmark = pytest.mark.extended

CONTEXT, TOLERANCE = 256, 1e-3


def row(kind: str, color: str) -> dict:
    """Return a row with one image file of this kind."""
    file = io.BytesIO()
    draw_shapes([("circle", color), None, ("square", color)] * 3).save(file, format=kind)
    return dict(
        prompt=[{"role": "user", "content": "<image>How many?"}],
        images=[{"bytes": file.getvalue(), "path": None}],
        data_source="shapes",
        reward_model={"ground_truth": "3"},
    )


def test_an_engine_reads_jpeg_and_png_files(tmp_path):
    from transformers import AutoModelForImageTextToText

    from mrl.rollout.engines.server import EngineServer
    from mrl.rollout.engines.server_args import default_server_args

    folder = tmp_path / "model"
    make_tiny_image_model(folder, context=CONTEXT, initializer_range=0.1, seed=0)
    hf = HFConfig.load(folder)
    arch = family_of(hf).read(hf)
    pq.write_table(pa.Table.from_pylist([row("JPEG", "red"), row("PNG", "blue")]), tmp_path / "rows.parquet")
    constraints = PromptConstraints(CONTEXT, arch.vocab_size, images=ImagePrompts.of(folder, arch.vision))
    data = PromptDataset.load([PromptSource((str(tmp_path / "rows.parquet"),))], folder, constraints)
    prompts, images = [data.encode(row) for row in range(2)], [data.request_images(row) for row in range(2)]

    args = default_server_args("float32", CONTEXT) | image_args(SimpleNamespace(arch=arch))
    args |= {"model_path": str(folder), "random_seed": 0}
    with EngineServer(args, tmp_path / "engine.log") as server:
        server.wait_ready(timeout_s=480)
        client = EngineClient(server.url, timeout_s=240)
        answers = client.generate(prompts, SamplingParams(max_new_tokens=12, ignore_eos=True), images=images)

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    for number, (prompt, done) in enumerate(zip(prompts, answers, strict=True)):
        pixels, ids = data.image_inputs(number), torch.tensor(prompt + done.token_ids)
        model.model.rope_deltas = None  # transformers keeps it from the last call
        with torch.no_grad():
            logits = model(
                ids[None],
                pixel_values=torch.from_numpy(pixels.pixel_values),
                image_grid_thw=torch.from_numpy(pixels.grid_thw),
                mm_token_type_ids=(ids == arch.vision.image_token).int()[None],
            ).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, ids[len(prompt) :, None])[:, 0]
        torch.testing.assert_close(torch.tensor(done.logprobs), expected, rtol=0, atol=TOLERANCE)
