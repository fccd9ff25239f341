"""A run that goes on from a checkpoint is the run that was never stopped: under the same layout bit by bit."""

import json
import signal
import time

import pytest
from test_train import wait_for

NOT_NUMBERS_OF_LEARNING = ("time/", "spent/", "throughput/", "weight_sync/", "batch/")


def learning(path) -> list[dict]:
    """What a metrics file says of learning, step by step; clocks and the layout's own numbers left out."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(NOT_NUMBERS_OF_LEARNING)} for line in lines]


@pytest.fixture(scope="module")
def recorded(start_mrl, quickstart):
    """Four steps of responses, with their run's ledger."""
    run = start_mrl("train", *quickstart, "trainer.max_steps=4", "rollout.record=true", "trainer.save=false").finish()
    assert run.process.returncode == 0, run.output()
    return run


@pytest.fixture(scope="module")
def replays(start_mrl, quickstart, recorded):
    """`replays(layout...)`: a run of four steps on the recorded responses, mini-batches, old log-probabilities and all."""

    def run(*overrides: str):
        done = start_mrl(
            "train",
            *quickstart,
            f"rollout.replay={recorded.folder / 'rollouts'}",
            "trainer.max_steps=4",
            "algorithm.mini_batches=2",
            "optim.lr=1e-4",
            "++algorithm.kl_in_loss.coef=0.01",
            *overrides,
        ).finish()
        assert done.process.returncode == 0, done.output()
        return done

    return run


@pytest.fixture(scope="module")
def whole(replays):
    """tp 2 x pp 2, never stopped; its checkpoint of the second step is kept."""
    return replays("parallel.tp=2", "parallel.pp=2", "checkpoint.every=2", "checkpoint.keep_last=9")


def test_the_same_layout_goes_on_bit_by_bit(replays, whole):
    import torch
    from safetensors.torch import load_file

    resume = f"resume={whole.folder / 'checkpoints/step_000002'}"
    resumed = replays(resume, "parallel.tp=2", "parallel.pp=2")
    assert learning(resumed.folder / "metrics.jsonl") == learning(whole.folder / "metrics.jsonl")[2:]
    ours, theirs = (load_file(run.folder / "hf/model.safetensors") for run in (resumed, whole))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    ledgers = [(run.folder / "ledger.jsonl").read_text().splitlines() for run in (resumed, whole)]
    assert ledgers[0] == ledgers[1][2:]


@pytest.mark.extended
def test_another_layout_goes_on_with_the_same_losses(replays, whole):
    """tp 2 x pp 2 into dp 2 x cp 2, optimizer state, reference policy and position included."""
    resume = f"resume={whole.folder / 'checkpoints/step_000002'}"
    resumed = replays(resume, "parallel.dp=2", "parallel.cp=2")
    found, expected = (learning(run.folder / "metrics.jsonl") for run in (resumed, whole))
    for ours, theirs in zip(found, expected[2:], strict=True):
        assert ours["step"] == theirs["step"]
        for name in ("loss/policy", "optim/grad_norm", "policy/kl_ref", "policy/entropy_mean"):
            assert ours[name] == pytest.approx(theirs[name], abs=2e-5, rel=2e-5), (ours["step"], name)


SLOW = """
import time
from pathlib import Path

def compute_score(data_source, solution_str, ground_truth, extra_info, **args):
    if Path(args["slow"]).exists():
        time.sleep(3)
    return float(str(ground_truth) in solution_str)
"""


@pytest.mark.extended
def test_a_run_that_is_asked_to_leave_abandons_a_long_step_and_goes_on(start_mrl, quickstart, tmp_path):
    """Rewards take a minute by then: the step's samples are in the rollout log, its weights as they were."""
    (tmp_path / "slow.py").write_text(SLOW)
    slow = tmp_path / "slow"
    long = [
        *quickstart,
        "trainer.save=false",
        "rollout.deterministic=true",
        "fault_tolerance.preemption_grace_s=0",
        "reward=function",
    ]
    long += [f"reward.path={tmp_path / 'slow.py'}", f"++reward.args.slow={slow}", "scoring.workers=1"]
    run = start_mrl("train", *long, "trainer.max_steps=100000", "checkpoint.every=0")
    wait_for(lambda: (run.folder / "metrics.jsonl").exists() and len(run.metrics()) > 2)
    slow.touch()
    time.sleep(4)
    run.process.send_signal(signal.SIGTERM)
    assert run.finish(60).process.returncode == 75, run.output()
    (checkpoint,) = (run.folder / "checkpoints").iterdir()
    assert f"step_{len(run.metrics()):06d}" == checkpoint.name
    assert list((run.folder / "rollout_log").rglob("*.completions")), "what engines had answered is kept"
    assert run.leftovers() == []
    slow.unlink()
    again = start_mrl("train", *long, f"run.dir={run.folder}", f"trainer.max_steps={len(run.metrics()) + 2}").finish()
    assert again.process.returncode == 0, again.output()
    assert [line["step"] for line in run.metrics()] == list(range(1, len(run.metrics()) + 1))
    ledger = [json.loads(line) for line in (run.folder / "ledger.jsonl").read_text().splitlines()]
    assert [line["drawn"] for line in ledger] == [[6 * line["step"]] for line in ledger]
    assert "answers of an earlier process are taken up" in (run.folder / "logs/rollout.log").read_text()
