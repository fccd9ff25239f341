"""For each damaged Hugging Face folder, `mrl convert` prints one clear error and writes nothing."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_families import make_family

from models.conversion.hf_reader import check_hf_folder
from models.conversion.hf_writer import HFFolderWriter
from models.conversion.resumable_folder import ResumableFolder
from mrl.commands.convert import main


def sharded(folder) -> None:
    """Rewrite the weights of the folder as several files with an index."""
    tensors = load_file(folder / "model.safetensors")
    specs = {name: ("F32", tuple(tensor.shape)) for name, tensor in tensors.items()}
    with ResumableFolder.beside(folder.with_name("sharded"), {}) as partial:
        writer = HFFolderWriter(partial, specs, 30_000)
        for name, tensor in tensors.items():
            writer.write(name, tensor)
        writer.complete(folder, {})
    shutil.rmtree(folder)
    folder.with_name("sharded").rename(folder)


def change(folder, edit) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def cut_file(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def cut_header(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])


def no_safetensors_file(folder):
    (folder / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n" * 3)


def lose_shard(folder):
    sharded(folder)
    min(folder.glob("model-00002*")).unlink()


def change_index(folder):
    sharded(folder)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = index["weight_map"]["model.embed_tokens.weight"]
    path.write_text(json.dumps(index))


def shorten_index(folder):
    sharded(folder)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"]["model.norm.weight"]
    path.write_text(json.dumps(index))


def remove_folder(folder):
    shutil.rmtree(folder)


def file_for_folder(folder):
    shutil.rmtree(folder)
    folder.write_text("no folder")


NORM, Q = "model.norm.weight", "model.layers.1.self_attn.q_proj.weight"
DAMAGES = {
    cut_file: r"model.safetensors: the file is damaged or incomplete: it has \d+ bytes, but its header says \d+ bytes; the first "
    r"truncated tensor is .*Download",
    cut_header: r"model.safetensors: the file is damaged.*it has 100 bytes",
    no_safetensors_file: r"model.safetensors: the file is damaged",
    lose_shard: r"model-00002-of-\d+.safetensors is missing; model.safetensors.index.json says that it contains \d+ tensors",
    change_index: r"index.json: model.norm.weight should be in model-00001.*, but it is in model-0",
    shorten_index: r"index.json: 1 tensors in the files are not in the index; the first is model.norm.weight",
    remove_folder: r"the folder is missing; expected a Hugging Face model folder",
    file_for_folder: r"the folder is a file; expected a Hugging Face model folder",
}
EDITS = {
    "another shape": (
        lambda t: t.update({Q: t[Q][:32].clone()}),
        rf"{Q} in model.safetensors is \[32, 32\], config.* \[64",
    ),
    "a tensor too few": (lambda t: t.pop(NORM), rf"{NORM} is missing \(expected \[32\]\)"),
    "a tensor too many": (
        lambda t: t.update(extra=torch.ones(2)),
        r"extra in model.safetensors \[2\] is not in the table",
    ),
    "numbers of no weight": (
        lambda t: t.update({NORM: t[NORM].int()}),
        rf"{NORM} in model.safetensors is I32, expected F64",
    ),
}


def assert_refused(folder, capsys, message) -> None:
    capsys.readouterr()  # discards the progress bars of transformers
    status = main(["to-megatron", f"model.path={folder}", f"output={folder.with_name('out')}"])
    error = capsys.readouterr().err
    assert status == 2 and error.count("\n") == 1, error
    assert re.search(message, error), error
    assert not list(folder.parent.glob("out*"))


@pytest.mark.extended_after(5)
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_folder_gives_one_error_and_no_output(tmp_path, capsys, damage):
    model = make_family("qwen3", tmp_path / "model")
    damage(model)
    assert_refused(model, capsys, DAMAGES[damage])
    with pytest.raises(ValueError, match=DAMAGES[damage]):
        check_hf_folder(model)


@pytest.mark.parametrize("edit", EDITS)
def test_weights_that_do_not_match_the_config_give_one_error(tmp_path, capsys, edit):
    model = make_family("qwen3", tmp_path / "model")
    change(model, EDITS[edit][0])
    assert_refused(model, capsys, EDITS[edit][1])


@pytest.mark.parametrize(("text", "message"), [("{", "config.json: not JSON"), ("[1]", "expected an object of fields")])
def test_an_unreadable_config_is_named_in_the_error(tmp_path, capsys, text, message):
    model = make_family("qwen3", tmp_path / "model")
    (model / "config.json").write_text(text)
    assert_refused(model, capsys, message)
