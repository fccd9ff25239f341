"""Writing, reading and checking a step dump, and the command line of `mrl replay`. The tests start no processes."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mrl.algorithms.losses import PPOClip
from mrl.algorithms.objective import Objective
from mrl.commands import replay as command
from mrl.core.types import TokenBlock, TrainBatch
from mrl.diagnostics.step_dump import StepDescription, StepDump, WeightsLocation, write_manifest, write_mini_batches
from mrl.hang_report.ray_wait import RankLostError
from mrl.workers.dp_partition import split_mini_batches
from mrl.workers.worker import DUMPED_BATCH
from parallel.dims import ParallelDims

DESCRIPTION = StepDescription(
    step=7,
    reason="requested (step_dump.steps)",
    weights=WeightsLocation("weights", 6),
    mini_batch=1,
    lrs=[1e-3, 5e-4],
    temperature=0.7,
    coefs={"kl_loss": 0.01},
    grad_norms=[1.5, 0.25],
    losses=[0.1, float("nan")],
    layout=vars(ParallelDims(tp=2, dp=2)),
    config={"model": {"path": "somewhere"}},
)


def block_of_three() -> TokenBlock:
    routing = [np.full((n, 2, 1), n, np.int16) for n in (3, 4, 2)]
    sampled = [[True], [True, False, True], [True]]
    block = TokenBlock.from_lists(
        [[1, 2], [3], [4]], [[5], [6, 7, 8], [9]], [[-1.0], [-2.0, -3.0], [-4.0]], routing, sampled
    )
    return block.with_columns(advantages=np.array([1, -1, -1, 0.5], np.float32))


def write(folder: Path, description: StepDescription = DESCRIPTION) -> Path:
    """Write a step dump as a run does, with a stand-in for the file of the weights."""
    block = block_of_three()
    (folder / "weights").mkdir(parents=True)
    (folder / "weights/model.safetensors").write_bytes(b"12345678")
    block.save(folder / DUMPED_BATCH)
    whole = replace(TrainBatch.of(block, np.array([0, 0, 1])), rows=np.array([0, 2]))
    write_mini_batches(folder, split_mini_batches(whole, 2))
    write_manifest(folder, description)
    return folder


def test_reading_a_step_dump_returns_what_was_written(tmp_path):
    dump = StepDump.read(write(tmp_path / "step_000007"))
    assert repr(dump.description) == repr(DESCRIPTION) and dump.description.dims == ParallelDims(tp=2, dp=2)
    assert {"torch", "megatron-core", "sglang", "python"} <= dump.versions.keys()
    block, expected = dump.block(), block_of_three()
    for name in ("tokens", "cu_seqlens", "prompt_lengths", "rollout_logprobs", "routed_experts", "sampled"):
        np.testing.assert_array_equal(getattr(block, name), getattr(expected, name), err_msg=name)
    assert block.columns.keys() == {"advantages"}
    np.testing.assert_array_equal(block.columns["advantages"], expected.columns["advantages"])
    batch = dump.batch(block)
    assert batch.rows.tolist() == [2] and batch.denominator_rows.tolist() == [2], (
        "the second mini-batch is the second group"
    )
    assert batch.groups.tolist() == [0, 0, 1] and batch.sampled_lengths.tolist() == [1, 2, 1]


def flip_a_byte(path: Path) -> None:
    found = bytearray(path.read_bytes())
    found[-1] ^= 1
    path.write_bytes(found)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda f: (f / DUMPED_BATCH).unlink(), "batch.npz is missing"),
        (lambda f: flip_a_byte(f / DUMPED_BATCH), "batch.npz has changed since it was written"),
        (lambda f: flip_a_byte(f / "mini_batches.npz"), "mini_batches.npz has changed since it was written"),
        (lambda f: (f / "weights/model.safetensors").write_bytes(b"1234"), "has 4 bytes but was written with 8"),
        (lambda f: (f / "step_dump.json").unlink(), "not a complete step dump; name a folder"),
        (lambda f: (f / "step_dump.json").write_text("{"), "cannot be read"),
        (
            lambda f: (f / "step_dump.json").write_text(json.dumps({"format": 9})),
            "format 9; this version of mrl reads 5",
        ),
    ],
)
def test_a_missing_or_changed_file_is_named(tmp_path, harm, message):
    folder = write(tmp_path / "step")
    harm(folder)
    with pytest.raises(ValueError, match=message):
        StepDump.read(folder)


def test_missing_weights_are_requested_from_the_user(tmp_path):
    gone = WeightsLocation(str(tmp_path / "checkpoints/step_000004"), 4, checkpoint=True)
    dump = StepDump.read(write(tmp_path / "step", replace(DESCRIPTION, weights=gone)))
    with pytest.raises(ValueError, match=r"step_000004, no longer exist; .* weights=FOLDER"):
        dump.weights_folder(gone)


def test_the_introduction_says_that_the_weights_are_from_an_earlier_step(tmp_path):
    dump, one = StepDump.read(write(tmp_path / "step")), ParallelDims()
    text = command._introduction(dump, WeightsLocation("/checkpoints/step_000004/actor", 4, checkpoint=True), one, one)
    assert "from step 4, 2 steps before" in text
    assert "before the weights" not in command._introduction(
        dump, DESCRIPTION.weights or WeightsLocation("", 0), one, one
    )


def test_arrays_of_python_objects_are_rejected(tmp_path):
    """Unpickling such an array would run code of its author."""
    folder = write(tmp_path / "step")
    np.savez(folder / DUMPED_BATCH, tokens=np.array([{"an": "object"}], object))
    write_manifest(folder, DESCRIPTION)
    with pytest.raises(ValueError, match="allow_pickle=False"):
        StepDump.read(folder).block()


def test_the_command_line_names_two_layouts():
    words = ["dump", "parallel.tp=2", "parallel.sp=false", "model.dtype=float32", "against", "parallel.pp=4"]
    arguments = command.ReplayArguments.parse(words)
    assert arguments.dump == Path("dump") and arguments.options == {"model.dtype": "float32"}
    assert arguments.layout == dict(tp=2, sp=False) and arguments.against == dict(pp=4)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["parallel.tp=2"], "the first argument must be a step dump"),
        (["dump", "parallel.tb=2"], r"'parallel.tb=2': expected one of parallel.tp"),
        (["dump", "parallel.tp=two"], "expected a number of processes"),
        (["dump", "against", "against"], "'against': expected"),
        (["dump", "optim.lr=1"], "'optim.lr=1': expected against, parallel.KEY=N, or one of model.dtype"),
    ],
)
def test_a_wrong_argument_is_named(capsys, words, message):
    with pytest.raises(ValueError, match=message):
        command.ReplayArguments.parse(words)
    with pytest.raises(SystemExit) as ended:
        command.main(words)
    assert ended.value.code == 2 and capsys.readouterr().err.startswith("mrl: ")


def test_a_lost_process_ends_the_command_with_status_2(capsys, monkeypatch, tmp_path):
    """Status 1 would mean that the layouts differ. The diagnosis is printed without a traceback."""

    def lose(*_):
        raise RankLostError("trace() on 2 trainer ranks: a process died. rank 1 (tp 1) died", tmp_path)

    for owner, name in ((command, "_replay_config"), (command.plan_tools, "plan_replay")):
        monkeypatch.setattr(owner, name, lambda *_: None)  # these need the config of a real run
    monkeypatch.setattr(command, "build_objective", lambda _: Objective(PPOClip()))
    monkeypatch.setattr(command.build, "replay", lose)
    monkeypatch.setattr(command.signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit) as ended:
        command.main([str(write(tmp_path / "step", DESCRIPTION))])
    assert ended.value.code == 2
    assert capsys.readouterr().err == "mrl: trace() on 2 trainer ranks: a process died. rank 1 (tp 1) died\n"


def test_the_help_text_explains_the_arguments(capsys):
    assert command.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert "against" in text and "step_dump.steps" in text and "exit status" in text
