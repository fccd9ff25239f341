"""Images of prompts: reads them from rows, checks them, counts their tokens, and computes the input of the vision tower.

A row has its images in the column `images`. Its messages have a placeholder `<image>` for each image, as in data sets for verl.
The chat template writes one image token for each image. This module repeats this token, so that there is one token for each
output of the vision tower. The image processor of the model decides how many tokens an image has, and computes its pixel values.
"""

import base64
import hashlib
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import numpy as np

from models.architecture import VisionTower
from mrl.core.types import ImageInputs
from mrl.data.row_files import Row, RowError
from mrl.data.tokenizer import Messages

PLACEHOLDER = "<image>"
"""Text in the messages of a prompt that stands for the next image of the row."""
PROCESSOR_BACKEND = "pil"
"""Backend of the image processor in rollout worker and engines. The other backend, torchvision, gives other pixels on a GPU."""
_EXPECTED = "a path, the bytes of an image file, or an object with bytes or path"


@dataclass(frozen=True)
class ImageFile:
    """An image file: its path, or its bytes."""

    path: str  # absolute; "" if there are bytes
    content: bytes | None = None

    def read(self) -> bytes:
        """Return the bytes of the file. Raises OSError if the file cannot be read."""
        return Path(self.path).read_bytes() if self.content is None else self.content

    def open(self) -> Any:
        """Return the image as a PIL image in RGB. Raises OSError, or another error of PIL, if the file has no valid image."""
        from PIL import Image  # imported only where images are decoded

        return Image.open(io.BytesIO(self.read())).convert("RGB")

    def data_url(self) -> str:
        """Return the image as a PNG file in a data URL, for a request to SGLang.

        A data URL is needed instead of plain base64, because SGLang (0.5.23) reads a text that begins with "/" as a path, and
        JPEG files in base64 begin with "/". PNG is needed, because SGLang decodes JPEG files on a GPU with nvJPEG, which gives
        other pixels than PIL.
        """
        image, file = self.open(), io.BytesIO()
        image.info.clear()  # removes orientation and color profile, because the trainer does not read them
        image.save(file, format="PNG", compress_level=1)
        return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()

    def digest(self) -> bytes:
        """Return a hash of the bytes of the file."""
        return hashlib.blake2b(self.read(), digest_size=16).digest()


def read_images(value: Any, column: str, folder: Path) -> tuple[ImageFile, ...]:
    """Return the images of a row. `value` is the row's value in the column `column`: None, an image, or a list of images.

    Relative paths start at `folder`. Raises RowError if `value` has another form.
    """
    if value is None:
        return ()
    values = value if isinstance(value, list | tuple) else [value]
    return tuple(_read_image(each, f"{column}[{number}]", folder) for number, each in enumerate(values))


def _read_image(value: Any, name: str, folder: Path) -> ImageFile:
    if isinstance(value, dict):  # as data sets of Hugging Face store images
        content, path = value.get("bytes"), value.get("path")
        value = content if content is not None else path
    if isinstance(value, bytes | bytearray):
        return ImageFile("", bytes(value))
    if isinstance(value, str) and value.startswith(("http://", "https://", "data:")):
        raise RowError(name, f"URLs are not read; expected {_EXPECTED}, got {value!r:.80}.")
    if isinstance(value, str) and value:
        return ImageFile(str((folder / value).resolve()))
    if hasattr(value, "save") and hasattr(value, "getbands"):  # a PIL image, as user-defined data sets may return it
        file = io.BytesIO()
        value.save(file, format="PNG")
        return ImageFile("", file.getvalue())
    raise RowError(name, f"expected {_EXPECTED}, got {value!r:.80}.")


def refuse_images(row: Row) -> None:
    """Raise RowError if a row that contains a response also has images or videos, because mrl cannot train on such rows."""
    for column in ("images", "videos"):
        if row.get(column):
            raise RowError(
                column, f"rows with a response cannot have {column}; only prompts for sampling can have images."
            )


def check_image(image: ImageFile, name: str) -> tuple[int, int]:
    """Decode an image, and return (height, width) in pixels.

    To save time, JPEG images are decoded at a reduced size; this still finds truncated files. Raises RowError with the column
    `name` if the file is missing or is not a complete image.
    """
    from PIL import Image, UnidentifiedImageError  # imported only where images are decoded

    where = f"{image.path}: " if image.path else ""
    try:
        found = Image.open(io.BytesIO(image.read()))
        width, height = found.size
        found.draft("RGB", (1, 1))
        found.load()
    except FileNotFoundError:
        raise RowError(name, f"{where}no such file.") from None
    except UnidentifiedImageError:
        raise RowError(name, f"{where}not an image that PIL can read.") from None
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise RowError(name, f"{where}the image is damaged or cannot be read ({error}).") from error
    return height, width


def with_image_parts(messages: Messages, num_images: int, column: str) -> list[dict[str, Any]]:
    """Return the messages in the form that chat templates of image models expect.

    The content of a message is a list of parts: texts, and one image part for each placeholder. Raises RowError with the column
    `column` if the number of placeholders is not `num_images`.
    """
    count = sum(message["content"].count(PLACEHOLDER) for message in messages)
    if count != num_images:
        raise RowError(
            column,
            f"{num_images} images, but the messages have {count} placeholders {PLACEHOLDER}; write one placeholder for each "
            "image.",
        )
    return [{**message, "content": list(_parts(message["content"]))} for message in messages]


def _parts(text: str) -> Iterator[dict[str, str]]:
    for number, part in enumerate(text.split(PLACEHOLDER)):
        if number:
            yield {"type": "image"}
        if part:
            yield {"type": "text", "text": part}


@dataclass(frozen=True)
class RequestImages:
    """The images of one prompt in a request to an engine."""

    files: tuple[str, ...]  # data URLs, see ImageFile.data_url
    image_token: int  # id of the image token

    def request_tokens(self, prompt: Sequence[int]) -> list[int]:
        """Return `prompt` with the tokens of each image replaced by a single image token, as SGLang expects it."""
        pairs = zip([None, *prompt], prompt, strict=False)
        return [token for before, token in pairs if token != self.image_token or before != token]


@cache
def _image_processor(folder: str) -> Any:
    from transformers import AutoImageProcessor  # imports torch and torchvision

    try:
        return AutoImageProcessor.from_pretrained(folder, backend=PROCESSOR_BACKEND)
    except (OSError, ValueError, ImportError) as error:
        raise ValueError(
            f"model.path={folder}: the image processor of the model cannot be loaded ({error}); the folder of an image model has "
            "the file preprocessor_config.json or processor_config.json."
        ) from error


def processor_settings(folder: str | Path) -> dict[str, Any]:
    """Return the settings of the image processor of the model in this folder."""
    return _image_processor(str(Path(folder).resolve())).to_dict()


@dataclass(frozen=True)
class ImagePrompts:
    """What is needed to put images into the prompts of one model: image processor, image token and merge size."""

    model_path: str  # Hugging Face folder, which has the settings of the image processor
    image_token: int  # id of the token that stands for an output of the vision tower
    merge_size: int  # merge_size**2 patches of an image become one token

    @classmethod
    def of(cls, model_path: str | Path, vision: VisionTower | None) -> Self | None:
        """Return the ImagePrompts of the model in this folder; None: the model has no vision tower."""
        return cls(str(Path(model_path).resolve()), vision.image_token, vision.merge_size) if vision else None

    def num_tokens(self, images: Sequence[ImageFile], column: str) -> list[int]:
        """Return the number of tokens of each image. Raises RowError for an image that cannot be used."""
        counts = []
        for number, image in enumerate(images):
            name = f"{column}[{number}]"
            size = check_image(image, name)
            try:
                patches = _image_processor(self.model_path).get_number_of_image_patches(*size, {})
            except ValueError as error:  # an extreme aspect ratio
                raise RowError(
                    name, f"the model's image processor refuses an image of {size[1]} x {size[0]} pixels ({error})."
                ) from error
            counts.append(patches // self.merge_size**2)
        return counts

    def expand(self, ids: Sequence[int], counts: Sequence[int], column: str) -> list[int]:
        """Return the token ids with the image token of image i repeated `counts[i]` times.

        Raises RowError if the number of image tokens in `ids` is not the number of images, or if two image tokens are adjacent.
        """
        found = sum(token == self.image_token for token in ids)
        if found != len(counts):
            raise RowError(
                column,
                f"the rendered prompt has {found} image tokens (id {self.image_token}) for {len(counts)} images; the chat "
                "template must write one for each image, and texts must not contain it.",
            )
        if any(pair == (self.image_token, self.image_token) for pair in pairwise(ids)):
            raise RowError(
                column,
                f"the rendered prompt has two image tokens (id {self.image_token}) between which there is no token, and SGLang "
                "reads them as one image; use a chat template that separates images.",
            )
        remaining, expanded = iter(counts), list[int]()
        for token in ids:
            expanded += [token] * (next(remaining) if token == self.image_token else 1)
        return expanded

    def inputs(self, images: Sequence[ImageFile]) -> ImageInputs:
        """Return the pixel values of the images, as the vision tower expects them. The model's image processor computes them."""
        found = _image_processor(self.model_path)([image.open() for image in images], return_tensors="np")
        return ImageInputs(
            np.ascontiguousarray(found["pixel_values"], np.float32), np.asarray(found["image_grid_thw"], np.int64)
        )
