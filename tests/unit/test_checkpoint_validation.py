"""parallel.checkpoint_validation refuses pickles that could run code, without running them, and accepts real checkpoints."""

import io
import os
import pickle
from argparse import Namespace
from collections import OrderedDict
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from parallel.checkpoint_validation import ForeignPickleError, validate_checkpoint


class Harm:
    """Object whose pickle creates a folder when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.fixture
def checkpoint(tmp_path):
    """A distributed checkpoint with a tensor and with the kinds of objects that Megatron stores."""
    state = {
        "weight": torch.arange(6.0).view(2, 3),
        "common": {"args": Namespace(lr=1e-3), "step": 3, "path": Path("a"), "groups": OrderedDict(betas=(0.9, 0.95))},
        "random": [np.random.RandomState(0).get_state(), torch.get_rng_state(), np.float32(1.5), {1, 2}],
        "extra": io.BytesIO(b"of a linear layer"),
    }
    dcp.save(state, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    (tmp_path / "checkpoint/metadata.json").write_text(
        '{"sharded_backend": "torch_dist", "sharded_backend_version": 1}'
    )
    return tmp_path / "checkpoint"


def harm_metadata(folder, harm):
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.planner_data = {"x": harm}
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def harm_object(folder, harm):
    """Replace an object that is stored next to the tensors by `harm`."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    index = next(index for index in metadata.storage_data if index.fqn.startswith("common"))
    text = io.BytesIO()
    torch.save(harm, text)
    with (folder / "objects.distcp").open("wb") as file:
        file.write(text.getvalue())
    metadata.storage_data[index].relative_path = "objects.distcp"
    metadata.storage_data[index].offset, metadata.storage_data[index].length = 0, len(text.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def harm_common(folder, harm):
    torch.save({"iteration": harm}, folder / "common.pt")


FORGERIES = {".metadata": harm_metadata, "objects.distcp": harm_object, "common.pt": harm_common}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_pickle_that_calls_a_function_is_refused_by_name_and_not_run(checkpoint, tmp_path, name):
    FORGERIES[name](checkpoint, Harm(tmp_path / "harm"))
    with pytest.raises(ForeignPickleError, match=rf"{name}: its pickle names posix\.mkdir"):
        validate_checkpoint(checkpoint)
    assert not (tmp_path / "harm").exists()


def test_torch_alone_would_run_the_forged_pickle(checkpoint, tmp_path):
    harm_metadata(checkpoint, Harm(tmp_path / "harm"))
    dcp.FileSystemReader(checkpoint).read_metadata()
    assert (tmp_path / "harm").exists()


@pytest.mark.parametrize("name", ["storage_data", "state_dict_metadata"])
def test_a_forged_attribute_cannot_hide_the_content_of_a_metadata_table(checkpoint, tmp_path, name):
    """A pickle can set attributes of a dict subclass, such as an `items` or `get` that returns nothing."""
    harm_object(checkpoint, Harm(tmp_path / "harm"))
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    table = OrderedDict(getattr(metadata, name))
    table.items = table.get = torch.Size
    setattr(metadata, name, table)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ForeignPickleError, match=r"\.metadata: its pickle names collections\.OrderedDict"):
        validate_checkpoint(checkpoint)
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize("name", ["storage_data", "state_dict_metadata"])
def test_a_metadata_table_that_is_not_a_dict_is_refused(checkpoint, name):
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    setattr(metadata, name, torch.Size())
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match=rf"its {name} is a Size, expected a plain dict"):
        validate_checkpoint(checkpoint)


def test_the_content_of_a_real_checkpoint_is_accepted(checkpoint):
    assert validate_checkpoint(checkpoint).state_dict_metadata.keys() >= {"weight"}
    torch.save({"args": Namespace(lr=1e-3), "took": timedelta(1), "weight": torch.ones(2)}, checkpoint / "common.pt")
    validate_checkpoint(checkpoint)


def test_a_file_outside_the_folder_is_not_read(checkpoint):
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    next(iter(metadata.storage_data.values())).relative_path = "../elsewhere.distcp"
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match=r"\.\./elsewhere\.distcp, expected a file of the same folder"):
        validate_checkpoint(checkpoint)


def test_a_pickle_outside_an_archive_is_refused(checkpoint, tmp_path):
    (checkpoint / "common.pt").write_bytes(pickle.dumps(Harm(tmp_path / "harm")))
    with pytest.raises(ValueError, match=r"common\.pt: no archive of torch\.save"):
        validate_checkpoint(checkpoint)
    assert not (tmp_path / "harm").exists()


def test_a_torchscript_program_is_refused(checkpoint):
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), checkpoint / "common.pt")
    with pytest.raises(ForeignPickleError, match=r"common.pt: holds a program"):
        validate_checkpoint(checkpoint)
