"""A resumed run equals an uninterrupted run: bit by bit under the same layout, and in its losses under another layout."""

import json
import signal

import pytest
from mrl_runs import KILLING_FILTER, wait_until
from run_comparison import check_equal_runs, check_equal_weights, learning_metrics

from mrl.checkpoint.run_dir import read_events
from mrl.core.sample_file import read_samples

KINDS = {"colocated": ["placement=colocated"], "asynchronous": ["rollout.mode=async", "rollout.max_staleness=0"]}


@pytest.mark.extended_except("colocated")
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_whose_driver_is_killed_equals_an_uninterrupted_synchronous_run(
    start_mrl, quickstart, recorded, tmp_path, user_module, kind
):
    """The supervisor starts the driver again. The new driver resumes from the checkpoint of step 2, which is already complete.

    In the uninterrupted run, models and engines have devices of their own.
    """
    user_module("killing_filter", KILLING_FILTER)
    kill = ["rollout.filter._target_=killing_filter.Killing", f"++rollout.filter.done={tmp_path / 'killed'}"]
    checkpoints = ["checkpoint.every=2", "checkpoint.asynchronous=false"]
    run = start_mrl("train", *quickstart, *kill, "trainer.max_steps=5", *KINDS[kind], *checkpoints).finish(400)
    assert run.process.returncode == 0, run.output()
    assert (tmp_path / "killed").exists() and "restart 1 of 5" in run.output()
    check_equal_runs(run.folder, recorded.folder)
    assert run.leftovers() == []
    assert all((step.get("placement/switches", 0) >= 2) == (kind == "colocated") for step in run.metrics())
    events = [(event.event, event.step, event.outcome) for event in read_events(run.folder)]
    assert events == [("start", 0, None), ("resume", 2, None), ("end", 5, "finished")], "a killed driver writes no end"
    assert [step for step, _ in read_samples(run.folder)] == [1, 2, 3, 4, 5]


@pytest.fixture(scope="module")
def replays(start_mrl, quickstart, recorded):
    """`replays(override, ...)`: a run of four steps on the recorded rollouts, with two mini-batches and all terms in the loss."""

    def run(*overrides: str):
        done = start_mrl(
            "train",
            *quickstart,
            f"rollout.replay={recorded.folder / 'rollouts'}",
            "trainer.max_steps=4",
            "algorithm.mini_batches=2",
            "optim.lr=1e-4",
            "++algorithm.kl_in_loss.coef=0.01",
            "algorithm.adaptive_entropy={target: 9, step: 0.01}",
            *overrides,
        ).finish()
        assert done.process.returncode == 0, done.output()
        return done

    return run


@pytest.fixture(scope="module")
def uninterrupted(replays):
    """An uninterrupted run with tp 2 x pp 2, which keeps its checkpoint of step 2."""
    return replays("parallel.tp=2", "parallel.pp=2", "checkpoint.every=2", "checkpoint.keep_last=9")


@pytest.mark.extended
def test_a_run_resumed_under_the_same_layout_is_bit_exact(replays, uninterrupted):
    resume = f"resume={uninterrupted.folder / 'checkpoints/step_000002'}"
    resumed = replays(resume, "parallel.tp=2", "parallel.pp=2")
    found, expected = (learning_metrics(run.folder / "metrics.jsonl") for run in (resumed, uninterrupted))
    assert found == expected[2:]
    coefs = [step["policy/entropy_coef"] for step in expected]
    assert coefs == pytest.approx([0.0, 0.01, 0.02, 0.03]), (
        "the checkpoint has the coefficient and the measured entropy"
    )
    check_equal_weights(resumed.folder, uninterrupted.folder)
    ledgers = [(run.folder / "ledger.jsonl").read_text().splitlines() for run in (resumed, uninterrupted)]
    assert ledgers[0] == ledgers[1][2:]


@pytest.mark.extended
def test_a_run_resumed_under_another_layout_has_the_same_losses(replays, uninterrupted):
    """The layout changes from tp 2 x pp 2 to dp 2 x cp 2. Optimizer state, reference and position in the data are restored."""
    resume = f"resume={uninterrupted.folder / 'checkpoints/step_000002'}"
    resumed = replays(resume, "parallel.dp=2", "parallel.cp=2")
    found, expected = (learning_metrics(run.folder / "metrics.jsonl") for run in (resumed, uninterrupted))
    for ours, theirs in zip(found, expected[2:], strict=True):
        assert ours["step"] == theirs["step"]
        for name in ("loss/policy", "optim/grad_norm", "policy/kl_ref", "policy/entropy_mean", "policy/entropy_coef"):
            assert ours[name] == pytest.approx(theirs[name], abs=2e-5, rel=2e-5), (ours["step"], name)


SLOW = """
import time
from pathlib import Path

def compute_score(data_source, solution_str, ground_truth, extra_info, **args):
    if Path(args["slow"]).exists():
        Path(args["slow"] + ".scoring").touch()
        time.sleep(3)
    return float(str(ground_truth) in solution_str)
"""


@pytest.mark.extended
def test_a_preempted_run_abandons_a_long_step_and_resumes(start_mrl, quickstart, tmp_path):
    """SIGTERM arrives while the rewards of a step take a minute. The rollout log keeps the responses of this step."""
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
    wait_until(lambda: (run.folder / "metrics.jsonl").exists() and len(run.metrics()) > 2)
    slow.touch()
    wait_until((tmp_path / "slow.scoring").exists)
    run.process.send_signal(signal.SIGTERM)
    assert run.finish(60).process.returncode == 75, run.output()
    (checkpoint,) = (run.folder / "checkpoints").iterdir()
    assert f"step_{len(run.metrics()):06d}" == checkpoint.name
    assert list((run.folder / "rollout_log").rglob("*.completions")), "sampled responses are kept"
    assert run.leftovers() == []
    slow.unlink()
    again = start_mrl("train", *long, f"run.dir={run.folder}", f"trainer.max_steps={len(run.metrics()) + 2}").finish()
    assert again.process.returncode == 0, again.output()
    assert [line["step"] for line in run.metrics()] == list(range(1, len(run.metrics()) + 1))
    ledger = [json.loads(line) for line in (run.folder / "ledger.jsonl").read_text().splitlines()]
    assert [line["drawn"] for line in ledger] == [[6 * line["step"]] for line in ledger]
    assert "completions of an earlier process are used" in (run.folder / "logs/rollout.log").read_text()
