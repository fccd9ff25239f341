"""`mrl convert`: conversions are bit-exact, use bounded memory, resume after interruptions and validate their inputs."""

import io
import json
import random
import re
import shutil
from pathlib import Path

import pytest
import torch
from mrl_runs import wait_until
from safetensors.torch import load_file, save_file
from tiny_families import FAMILIES, SIZES, make_family

from models.conversion import convert_checkpoint, resumable_folder
from models.conversion.hf_reader import HFWeights, check_hf_folder
from models.conversion.hf_writer import write_export
from models.conversion.megatron_checkpoint import torch_save_tensor
from models.hf_config import HFConfig
from mrl.commands.convert import main
from parallel import durable_files


class Watcher:
    """Progress display that counts bytes and raises KeyboardInterrupt after `limit` bytes."""

    def __init__(self, limit: float = float("inf")) -> None:
        self.limit, self.begun_with, self.done = limit, 0, 0

    def begin(self, total_bytes: int, done_bytes: int) -> None:
        self.total, self.begun_with, self.done = total_bytes, done_bytes, done_bytes

    def advance(self, num_bytes: int) -> None:
        self.done += num_bytes
        if self.done > self.limit:
            raise KeyboardInterrupt


def to_megatron(folder, output, watcher=None, **options) -> None:
    convert_checkpoint.to_megatron(HFConfig.load(folder), output, watcher or Watcher(), **options)


def to_hf(checkpoint, folder, output, watcher=None, **options) -> None:
    convert_checkpoint.to_hf(checkpoint, HFConfig.load(folder), output, watcher or Watcher(), **options)


def tensors_of(folder) -> dict[str, torch.Tensor]:
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def assert_same_tensors(found, expected) -> None:
    a, b = tensors_of(found), tensors_of(expected)
    assert a.keys() == b.keys()
    for name, tensor in b.items():
        assert convert_checkpoint.is_bit_equal(a[name], tensor), name


@pytest.mark.extended_after(1)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_converts_to_megatron_and_back_bit_exactly(tmp_path, name):
    model = make_family(name, tmp_path / "model")
    to_megatron(model, tmp_path / "megatron", max_shard_bytes=20_000)
    to_hf(tmp_path / "megatron", model, tmp_path / "back", max_shard_bytes=30_000)
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 1
    assert_same_tensors(tmp_path / "back", model)
    assert convert_checkpoint.check_round_trip(HFConfig.load(tmp_path / "back")).passed
    assert convert_checkpoint.check_against_checkpoint(HFConfig.load(model), tmp_path / "megatron").passed
    assert sorted(p.name for p in tmp_path.iterdir()) == ["back", "megatron", "model"]  # no partial folder is left


def test_dtype_converts_the_weights_and_the_config(tmp_path):
    model = make_family("qwen3", tmp_path / "model")
    to_megatron(model, tmp_path / "megatron", dtype=torch.bfloat16)
    to_hf(tmp_path / "megatron", model, tmp_path / "back")
    expected = {name: tensor.bfloat16() for name, tensor in tensors_of(model).items()}
    found = tensors_of(tmp_path / "back")
    assert all(convert_checkpoint.is_bit_equal(found[name], tensor) for name, tensor in expected.items())
    assert json.loads((tmp_path / "back/config.json").read_text())["dtype"] == "bfloat16"
    finding = convert_checkpoint.check_against_checkpoint(HFConfig.load(model), tmp_path / "megatron")
    assert finding.passed and "float32 -> bfloat16" in finding.name


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.layers.0.self_attn.q_proj.weight", "q_proj.weight': 'BF16', .*k_proj.weight': 'F32'.* dtype="),
        (
            "model.layers.1.self_attn.q_norm.weight",
            r"0.self_attn.q_norm.weight \(torch.float32\) and .*1.self_attn.*dtype=",
        ),
    ],
)
def test_mixed_dtypes_in_one_megatron_tensor_raise_an_error(tmp_path, name, message):
    model = make_family("qwen3", tmp_path / "model")
    change(model, lambda tensors: tensors.update({name: tensors[name].bfloat16()}))
    with pytest.raises(ValueError, match=message):
        to_megatron(model, tmp_path / "out")
    to_megatron(model, tmp_path / "out", dtype=torch.float32)
    assert convert_checkpoint.check_against_checkpoint(HFConfig.load(model), tmp_path / "out").passed


def test_a_buffer_stays_in_float32(tmp_path):
    model = make_family("deepseek_v3", tmp_path / "model")
    to_megatron(model, tmp_path / "megatron", dtype=torch.bfloat16)
    to_hf(tmp_path / "megatron", model, tmp_path / "back")
    dtypes = HFWeights(tmp_path / "back").dtypes()
    assert {dtype for name, dtype in dtypes.items() if "correction_bias" in name} == {"F32"}
    assert {dtype for name, dtype in dtypes.items() if "correction_bias" not in name} == {"BF16"}
    assert json.loads((tmp_path / "back/config.json").read_text())["dtype"] == "bfloat16"


def test_config_and_tokenizer_files_are_copied(tmp_path):
    from mrl.data.synthetic_tasks import make_tiny_model
    from mrl.data.tokenizer import byte_tokenizer

    make_tiny_model(tmp_path / "model", byte_tokenizer(), context=64, initializer_range=0.1, seed=0)
    (tmp_path / "model/chat_template.jinja").write_text("{{ messages }}")
    to_megatron(tmp_path / "model", tmp_path / "megatron")
    to_hf(tmp_path / "megatron", tmp_path / "model", tmp_path / "back", max_shard_bytes=500_000)
    without_weights = {p.name for p in (tmp_path / "model").iterdir()} - {"model.safetensors"}
    assert {"chat_template.jinja", "tokenizer.json", "generation_config.json"} <= without_weights
    for name in without_weights - {"config.json"}:
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "model" / name).read_bytes()


def test_transformers_loads_the_shards(tmp_path):
    from transformers import AutoModelForCausalLM

    model = make_family("qwen3_moe", tmp_path / "model")
    to_megatron(model, tmp_path / "megatron")
    to_hf(tmp_path / "megatron", model, tmp_path / "back", max_shard_bytes=20_000)
    theirs, ours = (AutoModelForCausalLM.from_pretrained(p).state_dict() for p in (model, tmp_path / "back"))
    assert theirs.keys() == ours.keys() and all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


@pytest.mark.extended_after(2)
@pytest.mark.parametrize("kind", ["to-megatron", "to-hf"])
@pytest.mark.parametrize("seed", range(3))
def test_an_interrupted_conversion_resumes(tmp_path, kind, seed):
    model = make_family("qwen3", tmp_path / "model")
    to_megatron(model, tmp_path / "megatron")
    total, size = sum(t.nbytes for t in tensors_of(model).values()), 15_000

    def run(watcher: Watcher) -> None:
        if kind == "to-hf":
            to_hf(tmp_path / "megatron", model, tmp_path / "out", watcher, max_shard_bytes=size)
        else:
            to_megatron(model, tmp_path / "out", watcher, max_shard_bytes=size)

    with pytest.raises(KeyboardInterrupt):
        run(Watcher(random.Random(seed).uniform(0.3, 0.95) * total))
    assert not (tmp_path / "out").exists()
    kept = {p.name: p.stat().st_ino for p in (tmp_path / "out.partial").glob("*[0-9]*.*") if p.suffix != ".unfinished"}
    again = Watcher()
    run(again)
    assert kept and again.begun_with > 0 and again.done == total
    assert all((tmp_path / "out" / name).stat().st_ino == inode for name, inode in kept.items()), "written twice"
    assert not (tmp_path / "out.partial").exists()
    if kind == "to-megatron":
        assert convert_checkpoint.check_against_checkpoint(HFConfig.load(model), tmp_path / "out").passed
    else:
        assert_same_tensors(tmp_path / "out", model)


class FullDisk(io.BytesIO):
    """File that accepts some bytes and then raises `error`."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def write(self, data) -> int:
        if self.tell() > 500:
            raise self.error
        return super().write(data)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=repr)
def test_the_cause_of_a_failed_write_is_raised(error):
    with pytest.raises(type(error)) as raised:
        torch_save_tensor(torch.ones(10**6), FullDisk(error))
    assert raised.value is error


def test_a_partial_output_of_other_inputs_raises_an_error(tmp_path):
    model = make_family("qwen3", tmp_path / "model")
    with pytest.raises(KeyboardInterrupt):
        to_megatron(model, tmp_path / "out", Watcher(50_000), max_shard_bytes=15_000)
    with pytest.raises(ValueError, match=r"out\.partial .*dtype: 'None' before, 'torch.bfloat16' now.*remove it"):
        to_megatron(model, tmp_path / "out", max_shard_bytes=15_000, dtype=torch.bfloat16)
    make_family("qwen3", model, initializer_range=0.1)
    with pytest.raises(ValueError, match=r"out\.partial .*model.safetensors has changed.*remove it"):
        to_megatron(model, tmp_path / "out", max_shard_bytes=15_000)


def test_a_second_writer_of_an_output_raises_an_error(tmp_path):
    model = make_family("qwen3", tmp_path / "model")
    with (
        resumable_folder.ResumableFolder.beside(tmp_path / "out", {}),
        pytest.raises(ValueError, match="being written by another process"),
    ):
        to_megatron(model, tmp_path / "out")


def test_a_full_disk_is_detected_before_anything_is_written(tmp_path, monkeypatch):
    model = make_family("qwen3", tmp_path / "model")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6, 1000))
    with pytest.raises(ValueError, match=r"0\.00 GB are free"):
        to_megatron(model, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def peak_allocation(run) -> int:
    """Return the peak of the bytes that tensors allocate during `run`, without memory-mapped files."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    held = peak = 0
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def test_memory_is_independent_of_the_model_size(tmp_path):
    sizes = dict(vocab_size=64, hidden_size=64, intermediate_size=256)
    peaks = {}
    for layers in (2, 12):
        model = make_family("qwen3", tmp_path / f"model{layers}", num_hidden_layers=layers, **sizes)
        megatron, back = tmp_path / f"megatron{layers}", tmp_path / f"back{layers}"
        peaks[layers] = [
            peak_allocation(lambda m=model, o=megatron: to_megatron(m, o)),
            peak_allocation(lambda c=megatron, m=model, o=back: to_hf(c, m, o)),
        ]
    largest = 2 * 256 * 64 * 4  # bytes of the largest tensor, which has the gate and up projections
    for few, many in zip(peaks[2], peaks[12], strict=True):
        assert largest <= many <= 2.5 * largest and many < few + largest / 10


def resident_bytes(path) -> int:
    """Return the bytes of the file's pages that are in this process's memory."""
    lines, inside, total = Path("/proc/self/smaps").read_text().splitlines(), False, 0
    for line in lines:
        if "-" in line.split()[0] and not line.split()[0].endswith(":"):
            inside = line.endswith(str(path))
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def test_released_pages_leave_memory_and_can_be_read_again(tmp_path):
    save_file({"a": torch.randn(1 << 20), "b": torch.randn(1 << 20)}, tmp_path / "model.safetensors")
    weights = HFWeights(tmp_path)
    a = weights["a"]
    expected = a.sum()
    # If memory is short, the operating system may evict pages at any time.
    wait_until(lambda: a.sum() == expected and resident_bytes(tmp_path / "model.safetensors") >= a.nbytes, 60)
    weights.release("a")
    assert resident_bytes(tmp_path / "model.safetensors") < a.nbytes / 10
    assert a.sum() == expected  # the pages are read again


def test_reading_a_slice_reads_only_its_pages(tmp_path):
    tensors = {"a": torch.randn(5, 7, 3), "odd": torch.randn(9).bfloat16(), "b": torch.randn(4)}
    save_file(tensors, tmp_path / "model.safetensors")
    weights = HFWeights(tmp_path)
    assert torch.equal(weights.read("a", (1, 2, 0), (3, 4, 2)), tensors["a"][1:4, 2:6, 0:2])
    assert torch.equal(weights["odd"], tensors["odd"]) and torch.equal(weights["b"], tensors["b"])
    with pytest.raises(AssertionError, match="no slice"):
        weights.read("b", (2,), (3,))


def test_an_export_accepts_tensors_in_any_order_and_holds_one_at_a_time(tmp_path):
    import weakref

    model = make_family("qwen3_moe", tmp_path / "model")
    alive: list[weakref.ref] = []

    def tensors():
        for name, tensor in reversed(tensors_of(model).items()):
            tensor = tensor.clone()
            alive.append(weakref.ref(tensor))
            assert (
                sum(ref() is not None for ref in alive) <= 3
            )  # the first tensor (`write_export` keeps it), the previous one and the current one
            yield name, tensor

    write_export(tensors(), HFConfig.load(model), tmp_path / "export", {"note.txt": "hello"})
    assert_same_tensors(tmp_path / "export", model)
    assert (tmp_path / "export/note.txt").read_text() == "hello\n"


def flip_bit(path) -> None:
    content = bytearray(path.read_bytes())
    content[-7] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "mrl_hashes.json"])
def test_a_changed_bit_of_an_exported_folder_is_found_where_the_folder_is_loaded(tmp_path, name):
    model, export = make_family("qwen3", tmp_path / "model"), tmp_path / "export"
    write_export(iter(tensors_of(model).items()), HFConfig.load(model), export, {"note.txt": "hello"})
    check_hf_folder(export)
    assert durable_files.read_hashes(export).keys() == {path.name for path in export.iterdir()} - {"mrl_hashes.json"}
    flip_bit(export / name)
    with pytest.raises(ValueError, match=re.escape(name)):
        check_hf_folder(export)


def test_a_changed_bit_of_a_checkpoint_is_found_before_it_is_converted(tmp_path):
    model = make_family("qwen3", tmp_path / "model")
    to_megatron(model, tmp_path / "checkpoint")
    assert convert_checkpoint.check_against_checkpoint(HFConfig.load(model), tmp_path / "checkpoint").passed
    shard = next((tmp_path / "checkpoint").glob("__0_*.distcp"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    with pytest.raises(ValueError, match=rf"{shard.name} is damaged: its hash is"):
        convert_checkpoint.check_against_checkpoint(HFConfig.load(model), tmp_path / "checkpoint")


def test_a_failed_export_leaves_nothing(tmp_path):
    model = make_family("qwen3", tmp_path / "model")

    def tensors():
        yield from list(tensors_of(model).items())[:3]
        raise FloatingPointError("the run ended")

    with pytest.raises(FloatingPointError):
        write_export(tensors(), HFConfig.load(model), tmp_path / "export", {})
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def change(folder, edit) -> None:
    tensors = tensors_of(folder)
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_invalid_checkpoints_raise_an_error(tmp_path):
    model = make_family("qwen3", tmp_path / "model")
    with pytest.raises(ValueError, match="distributed checkpointing"):
        to_hf(tmp_path / "nothing", model, tmp_path / "out")
    to_megatron(model, tmp_path / "megatron")
    other = make_family("qwen3", tmp_path / "other", vocab_size=SIZES["vocab_size"] + 1)
    with pytest.raises(
        ValueError, match=r"a checkpoint of another model.*word_embeddings.weight is \[41, 32\], config.json"
    ):
        to_hf(tmp_path / "megatron", other, tmp_path / "out")
    biased = make_family("qwen3_biased", tmp_path / "biased")
    with pytest.raises(ValueError, match=r"linear_qkv\.bias is missing"):
        to_hf(tmp_path / "megatron", biased, tmp_path / "out")
    file = tmp_path / "megatron/__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"__0_0.distcp has \d+ bytes, expected \d+"):
        to_hf(tmp_path / "megatron", model, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_check_detects_a_changed_weight(tmp_path, capsys):
    model = make_family("qwen3", tmp_path / "model")
    to_megatron(model, tmp_path / "megatron")
    change(model, lambda tensors: tensors["model.layers.1.self_attn.q_proj.weight"][3, 4].add_(1e-6))
    assert main(["check", f"model.path={model}", f"checkpoint={tmp_path / 'megatron'}", "logits=false"]) == 1
    assert "1 of 19 tensors differ: decoder.layers.1.self_attention.linear_qkv.weight" in " ".join(
        capsys.readouterr().out.split()
    )


@pytest.mark.extended
def test_check_computes_logits_in_a_new_process(tmp_path, capfd):
    model = make_family("qwen3", tmp_path / "model")
    assert main(["check", f"model.path={model}"]) == 0
    assert "logits / transformers" in capfd.readouterr().out


def test_the_logits_of_a_reward_model_cannot_be_checked(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3ForSequenceClassification"]}')
    assert main(["check", f"model.path={tmp_path}"]) == 2
    error = capsys.readouterr().err
    assert "Qwen3ForSequenceClassification has a score head" in error and "logits=false skips this check" in error


def test_the_command_converts_there_and_back(tmp_path, capsys):
    model = make_family("llama", tmp_path / "model")
    there, back = tmp_path / "there", tmp_path / "back"
    assert main(["to-megatron", f"model.path={model}", f"output={there}"]) == 0
    assert main(["to-hf", f"checkpoint={there}", f"model.path={model}", f"output={back}", "max_shard_bytes=2e4"]) == 0
    assert_same_tensors(back, model)
    assert main(["to-megatron", f"model.path={model}", f"output={there}"]) == 2
    assert "exists already and is never replaced" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["to-megatorn"], "did you mean 'to-megatron'?"),
        (["to-hf", "modle.path=a"], "unknown key 'modle.path' of mrl convert to-hf; did you mean 'model.path'?"),
        (["to-hf", "model.path=a"], "needs checkpoint=DIR"),
        (["to-hf", "model"], "expected KEY=VALUE"),
        (["check", "model.path=a", "model.path=b"], "model.path= is given twice"),
        (["check", "model.path=a", "logits=no"], "logits=no: expected true or false"),
        (["to-megatron", "model.path=a", "output=b", "dtype=int8"], "dtype=int8: expected float32"),
        (["to-megatron", "model.path=a", "output=b", "max_shard_bytes=0"], "expected a number of bytes above 0"),
    ],
)
def test_command_line_errors_are_explained(capsys, arguments, message):
    assert main(arguments) == 2
    assert message in capsys.readouterr().err.replace("\n", " ")


def test_help_has_examples(capsys):
    assert main(["--help"]) == 0 == main(["to-hf", "--help"])
    assert "Examples:" in capsys.readouterr().out
