"""mrl.data.images: prompts with images have the tokens and pixels of the model's own processor, and bad images are reported."""

import base64
import io
import random
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mrl.core.types import ImageInputs, TokenBlock
from mrl.data.images import ImageFile, ImagePrompts, read_images
from mrl.data.prompts import PromptConstraints, PromptDataset
from mrl.data.row_files import RowError
from mrl.data.shapes_task import draw_shapes, make_tiny_image_model, shapes_problem
from mrl.data.sources import PromptSource
from mrl.data.supervised_dataset import SftDataset

VOCABULARY = 1000


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    make_tiny_image_model(folder, context=256, initializer_range=0.1, seed=0, kind=request.param)
    return folder


def image_token(model) -> int:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(model).image_token_id


def load(model, folder, rows, limit=256, reads_images=True) -> PromptDataset:
    pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
    images = ImagePrompts(str(model), image_token(model), 2) if reads_images else None
    constraints = PromptConstraints(limit, VOCABULARY, images=images)
    return PromptDataset.load([PromptSource((str(folder / "rows.parquet"),))], model, constraints)


def png(width=48, height=32) -> bytes:
    file = io.BytesIO()
    draw_shapes([("circle", "red")] * 9).resize((width, height)).save(file, format="PNG")
    return file.getvalue()


def jpeg() -> bytes:
    file = io.BytesIO()
    rng = np.random.default_rng(0)
    from PIL import Image

    Image.fromarray(rng.integers(0, 255, (64, 64, 3), np.uint8)).save(file, format="JPEG")
    return file.getvalue()


def from_data_url(url: str):
    """Return the image in the data URL of a PNG file."""
    from PIL import Image

    head, _, content = url.partition(",")
    assert head == "data:image/png;base64"
    return Image.open(io.BytesIO(base64.b64decode(content, validate=True)))


def row(text="<image>?", images=(), **changed):
    problem = shapes_problem(random.Random(0))
    return problem | dict(prompt=[{"role": "user", "content": text}], images=list(images), videos=[]) | changed


@pytest.mark.extended_after(1)
def test_tokens_and_pixels_are_those_of_the_processor(model, tmp_path):
    """One row has two images of different sizes with text between them, one row has one image, and one row has none."""
    from PIL import Image
    from transformers import AutoImageProcessor, AutoProcessor

    files = [png(48, 32), png(20, 70), png(64, 64)]
    image = [{"bytes": file, "path": None} for file in files]
    data = load(model, tmp_path, [row("a<image>b<image>c", image[:2]), row("<image>", image[2:]), row("none", [])])
    assert len(data) == 3 and data.has_images
    processor = AutoProcessor.from_pretrained(model)
    processor.image_processor = AutoImageProcessor.from_pretrained(model, backend="pil")
    parts = [
        [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}, {"type": "image"}]
        + [{"type": "text", "text": "c"}],
        [{"type": "image"}],
    ]
    for number, (content, own) in enumerate(zip(parts, (files[:2], files[2:]), strict=True)):
        text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        pictures = [Image.open(io.BytesIO(file)) for file in own]
        expected = processor(text=[text], images=pictures, return_tensors="np")
        found = data.image_inputs(number)
        assert data.encode(number) == expected["input_ids"][0].tolist()
        np.testing.assert_array_equal(found.pixel_values, expected["pixel_values"])
        np.testing.assert_array_equal(found.grid_thw, expected["image_grid_thw"])
        assert data.encode(number).count(image_token(model)) == found.grid_thw.prod(1).sum() // 4
        request = data.request_images(number)
        sent = [from_data_url(url) for url in request.files]
        assert [image.tobytes() for image in sent] == [image.convert("RGB").tobytes() for image in pictures]
        assert processor.decode(request.request_tokens(data.encode(number))) == text
    assert data.image_inputs(2) is None and data.request_images(2) is None


def test_a_jpeg_file_is_sent_as_a_png_file_with_the_same_pixels():
    """JPEG files in base64 begin with "/", and SGLang would take them for paths. It turns images as their metadata say."""
    from PIL import Image

    file, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = 6  # orientation: turned by 90 degrees
    Image.open(io.BytesIO(jpeg())).crop((0, 0, 64, 32)).save(file, format="JPEG", exif=exif)
    image = ImageFile("", file.getvalue())
    sent = from_data_url(image.data_url())
    assert (sent.format, sent.mode, sent.size) == ("PNG", "RGB", (64, 32)) and not sent.getexif()
    assert sent.tobytes() == image.open().tobytes()


def test_the_digest_of_an_image_file_depends_on_its_content(tmp_path):
    image = ImageFile(str(tmp_path / "a.png"))
    (tmp_path / "a.png").write_bytes(png())
    before = image.digest()
    assert before == ImageFile("", png()).digest()
    (tmp_path / "a.png").write_bytes(jpeg())
    assert image.digest() != before


def test_images_without_a_token_between_them_are_refused():
    """SGLang reads a run of image tokens as one image."""
    prompts = ImagePrompts("folder", 9, 2)
    assert prompts.expand([9, 1, 9], [2, 1], "prompt") == [9, 9, 1, 9]
    with pytest.raises(RowError, match=r"two image tokens .* between which there is no token"):
        prompts.expand([1, 9, 9], [2, 1], "prompt")


def test_images_are_paths_bytes_or_objects(tmp_path):
    (tmp_path / "a.png").write_bytes(png())
    whole = ImageFile(str(tmp_path / "a.png"))
    for value in ("a.png", str(tmp_path / "a.png"), {"path": "a.png"}, {"path": "a.png", "bytes": None}):
        assert read_images([value], "images", tmp_path) == (whole,)
    for value in (png(), {"bytes": png()}, {"bytes": png(), "path": "elsewhere.png"}):
        assert read_images(value, "images", tmp_path)[0].read() == whole.read()
    from_pil = read_images([whole.open()], "images", tmp_path)[0]
    assert from_pil.open().tobytes() == whole.open().tobytes()
    assert read_images(None, "images", tmp_path) == ()
    with pytest.raises(RowError, match=r"images\[1\].*expected a path, the bytes of an image file"):
        read_images([png(), 3], "images", tmp_path)
    with pytest.raises(RowError, match=r"images\[0\].*URLs are not read"):
        read_images("https://example.com/a.png", "images", tmp_path)


@pytest.mark.extended_after(5)
@pytest.mark.parametrize(
    ("bad", "column", "reason"),
    [
        (row("<image>", [{"path": "none.png", "bytes": None}]), "images[0]", "none.png: no such file"),
        (row("<image>", [{"path": None, "bytes": b"no image"}]), "images[0]", "not an image that PIL can read"),
        (row("<image>", [{"path": None, "bytes": png()[:-40]}]), "images[0]", "the image is damaged"),
        (row("<image>", [{"path": None, "bytes": jpeg()[:1500]}]), "images[0]", "the image is damaged"),
        (row("<image>", [{"path": None, "bytes": png(801, 3)}]), "images[0]", "refuses an image of 801 x 3 pixels"),
        (
            row("?", [{"path": None, "bytes": png()}]),
            "images",
            "1 images, but the messages have 0 placeholders <image>",
        ),
        (
            row("<image><image>", [{"path": None, "bytes": png()}]),
            "images",
            "1 images, but the messages have 2 placeholders <image>",
        ),
        (row("<|image_pad|>"), "prompt", "the rendered prompt has 1 image tokens"),
        (row("?", videos=["a.mp4"]), "videos", "videos are not supported"),
    ],
)
def test_a_bad_image_is_reported_with_row_and_column(model, tmp_path, bad, column, reason):
    report = load(model, tmp_path, [row("<image>", [{"bytes": png(), "path": None}]), bad]).report
    (found,) = report.omitted
    assert (found.row, found.column) == (1, column) and reason in found.reason and "\n" not in str(found)


def test_the_tokens_of_images_count_for_the_longest_prompt(model, tmp_path):
    report = load(model, tmp_path, [row("<image>", [{"bytes": png(), "path": None}])], limit=30).report
    (found,) = report.omitted
    assert found.overlong and "are more than the 30" in found.reason


def test_a_model_without_images_refuses_rows_with_images(model, tmp_path):
    report = load(model, tmp_path, [row("<image>", [{"bytes": png(), "path": None}])], reads_images=False).report
    assert "1 images, but nothing reads them here: the model has no vision tower" in report.omitted[0].reason


def test_a_placeholder_in_a_row_without_images_is_text(model, tmp_path):
    data = load(model, tmp_path, [row("<image>")])
    assert len(data) == 1 and not data.has_images


def test_other_images_give_another_fingerprint(model, tmp_path):
    rows = [[row("<image>", [{"bytes": content, "path": None}])] for content in (png(), jpeg())]
    (tmp_path / "same").mkdir()
    first, again = load(model, tmp_path, rows[0]), load(model, tmp_path / "same", rows[0])
    resized = load(model, tmp_path, [row("<image>", [{"bytes": png(48, 33), "path": None}])])
    assert first.fingerprint == again.fingerprint
    assert resized.encode(0) == first.encode(0) and resized.fingerprint != first.fingerprint


def test_rows_with_a_response_cannot_have_images(model, tmp_path):
    pq.write_table(pa.Table.from_pylist([row(response="1", images=["a.png"])]), tmp_path / "sft.parquet")
    with pytest.raises(ValueError, match="row 0, column 'images': rows with a response cannot have images"):
        SftDataset.load(tmp_path / "sft.parquet", model, 256)


def test_a_saved_block_has_its_images(tmp_path):
    rng = np.random.default_rng(0)
    first, second = (ImageInputs(rng.normal(size=(n, 6)).astype(np.float32), np.array([[1, 2, n]])) for n in (2, 4))
    block = TokenBlock.from_lists([[1], [1], [2], [3]], [[4], [5], [6], [7]])
    replace(block, images={0: first, 1: first, 3: second}).save(tmp_path / "block.npz", other=np.zeros(1))
    found, extra = TokenBlock.load(tmp_path / "block.npz")
    assert found.images.keys() == {0, 1, 3} and found.images[0] is found.images[1] and extra.keys() == {"other"}
    for row, image in ((0, first), (3, second)):
        np.testing.assert_array_equal(found.images[row].pixel_values, image.pixel_values)
        np.testing.assert_array_equal(found.images[row].grid_thw, image.grid_thw)
    block.save(tmp_path / "without.npz")
    assert TokenBlock.load(tmp_path / "without.npz")[0].images == {}


def test_a_selection_of_a_block_keeps_the_images_of_its_rows():
    block = TokenBlock.from_lists([[1], [2], [3]], [[4], [5], [6]])
    images = {0: object(), 2: object()}
    chosen = replace(block, images=images).select(np.array([2, 1]))
    assert chosen.images == {0: images[2]}
