"""A capsule's folder gives back what was put into it, or says what is wrong with it; no process is started."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mrl.commands import replay as command
from mrl.core.types import TokenBlock, TrainBatch
from mrl.diagnostics.step_dump import Capsule, Content, Weights, complete, write_steps
from mrl.hang_report.ray_wait import RankLostError
from mrl.workers.capsule import BATCH
from mrl.workers.dp_partition import split
from parallel.dims import ParallelDims

CONTENT = Content(
    step=7,
    why="asked for (step_dump.steps)",
    weights=Weights("weights", 6),
    mini_batch=1,
    lrs=[1e-3, 5e-4],
    aggregation="token_mean",
    longest=40,
    temperature=0.7,
    kl_coef=0.01,
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


def write(folder: Path, content: Content = CONTENT) -> Path:
    """A capsule as a run writes it, with a stand-in for the weights' file."""
    block = block_of_three()
    (folder / "weights").mkdir(parents=True)
    (folder / "weights/model.safetensors").write_bytes(b"12345678")
    block.save(folder / BATCH)
    whole = replace(TrainBatch.of(block, np.array([0, 0, 1])), rows=np.array([0, 2]))
    write_steps(folder, split(whole, 2))
    complete(folder, content)
    return folder


def test_a_capsule_gives_back_the_step(tmp_path):
    capsule = Capsule.read(write(tmp_path / "step_000007"))
    assert repr(capsule.content) == repr(CONTENT) and capsule.content.dims == ParallelDims(tp=2, dp=2)
    assert {"torch", "megatron-core", "sglang", "python"} <= capsule.versions.keys()
    block, expected = capsule.block(), block_of_three()
    for name in ("tokens", "cu_seqlens", "prompt_lengths", "rollout_logprobs", "routed_experts", "sampled"):
        np.testing.assert_array_equal(getattr(block, name), getattr(expected, name), err_msg=name)
    assert block.columns.keys() == {"advantages"}
    np.testing.assert_array_equal(block.columns["advantages"], expected.columns["advantages"])
    batch = capsule.batch(block)
    assert batch.rows.tolist() == [2] and batch.counted.tolist() == [2], "the second mini-batch is the second group"
    assert batch.groups.tolist() == [0, 0, 1] and batch.sampled_lengths.tolist() == [1, 2, 1]


def flip_a_byte(path: Path) -> None:
    found = bytearray(path.read_bytes())
    found[-1] ^= 1
    path.write_bytes(found)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda f: (f / BATCH).unlink(), "batch.npz is missing"),
        (lambda f: flip_a_byte(f / BATCH), "batch.npz is not what was written"),
        (lambda f: flip_a_byte(f / "mini_batches.npz"), "mini_batches.npz is not what was written"),
        (lambda f: (f / "weights/model.safetensors").write_bytes(b"1234"), "has 4 bytes, was written with 8"),
        (lambda f: (f / "capsule.json").unlink(), "no whole capsule; name a folder"),
        (lambda f: (f / "capsule.json").write_text("{"), "cannot be read"),
        (lambda f: (f / "capsule.json").write_text(json.dumps({"format": 9})), "format 9, this version of mrl reads 1"),
    ],
)
def test_what_is_wrong_with_a_capsule_is_said(tmp_path, harm, message):
    folder = write(tmp_path / "step")
    harm(folder)
    with pytest.raises(ValueError, match=message):
        Capsule.read(folder)


def test_weights_that_are_gone_are_asked_for(tmp_path):
    gone = Weights(str(tmp_path / "checkpoints/step_000004"), 4, checkpoint=True)
    capsule = Capsule.read(write(tmp_path / "step", replace(CONTENT, weights=gone)))
    with pytest.raises(ValueError, match=r"step_000004, are not there any more; .* weights=FOLDER"):
        capsule.folder_of(gone)


def test_older_weights_are_said_to_be_older(tmp_path):
    capsule, one = Capsule.read(write(tmp_path / "step")), ParallelDims()
    text = command._introduction(capsule, Weights("/checkpoints/step_000004/actor", 4, checkpoint=True), one, one)
    assert "those after step 4: 2 steps lie between" in text
    assert "lie between" not in command._introduction(capsule, CONTENT.weights or Weights("", 0), one, one)


def test_no_array_of_python_objects_is_read(tmp_path):
    """Reading one would run code of whoever wrote it."""
    folder = write(tmp_path / "step")
    np.savez(folder / BATCH, tokens=np.array([{"an": "object"}], object))
    complete(folder, CONTENT)
    with pytest.raises(ValueError, match="allow_pickle=False"):
        Capsule.read(folder).block()


def test_the_command_line_names_two_layouts():
    words = ["cap", "parallel.tp=2", "parallel.sp=false", "model.dtype=float32", "against", "parallel.pp=4"]
    request = command.Request.parse(words)
    assert request.capsule == Path("cap") and request.options == {"model.dtype": "float32"}
    assert request.layout == dict(tp=2, sp=False) and request.against == dict(pp=4)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["parallel.tp=2"], "name a capsule first"),
        (["cap", "parallel.tb=2"], r"'parallel.tb=2': expected one of parallel.tp"),
        (["cap", "parallel.tp=two"], "expected a number of processes"),
        (["cap", "against", "against"], "'against': expected"),
        (["cap", "optim.lr=1"], "'optim.lr=1': expected against, parallel.KEY=N, or one of model.dtype"),
    ],
)
def test_a_mistake_on_the_command_line_is_named(capsys, words, message):
    with pytest.raises(ValueError, match=message):
        command.Request.parse(words)
    with pytest.raises(SystemExit) as ended:
        command.main(words)
    assert ended.value.code == 2 and capsys.readouterr().err.startswith("mrl: ")


def test_a_process_that_is_lost_is_no_difference_between_layouts(capsys, monkeypatch, tmp_path):
    """Status 1 says that layouts do not agree; and a diagnosis needs no traceback."""

    def lose(*_):
        raise RankLostError("trace() on 2 trainer ranks: a process died. rank 1 (tp 1) died", tmp_path)

    for owner, name in ((command, "_config"), (command, "build_objective"), (command.planning, "plan_replay")):
        monkeypatch.setattr(owner, name, lambda *_: None)  # of a whole run's config
    monkeypatch.setattr(command.build, "replay", lose)
    monkeypatch.setattr(command.signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit) as ended:
        command.main([str(write(tmp_path / "step", replace(CONTENT, kl_coef=None)))])
    assert ended.value.code == 2
    assert capsys.readouterr().err == "mrl: trace() on 2 trainer ranks: a process died. rank 1 (tp 1) died\n"


def test_help_teaches(capsys):
    assert command.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert "against" in text and "step_dump.steps" in text and "exit status" in text
