"""Draws of a run: tokens under sampling settings, prompts from a user's sampler, groups of different sizes, and offline rows."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from live_engines import PROMPTS
from run_comparison import check_equal_runs

from mrl.core.sample_file import read_samples
from mrl.rollout.client import SamplingParams

TEMPERATURE = 0.7
TOLERANCE = 1e-4


@torch.no_grad()
def next_logits(model, prompt, response) -> torch.Tensor:
    """Return the logits [R, V] that predict each token of the response."""
    return model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]


def kept(probs: torch.Tensor, top_p=1.0, top_k=32, min_p=0.0) -> torch.Tensor:
    """Return [R, V]: whether a token can be sampled (Fan et al. 2018; Holtzman et al. 2020; Nguyen et al. 2024)."""
    ordered, index = probs.sort(-1, descending=True)
    inside = (ordered.cumsum(-1) - ordered <= top_p + 1e-5) & (torch.arange(probs.shape[-1]) < top_k)
    inside &= ordered >= min_p * ordered[:, :1] - 1e-6
    return torch.zeros_like(inside).scatter(1, index, inside)


@pytest.mark.extended
@pytest.mark.parametrize("left_out", [dict(top_p=0.5), dict(top_k=3), dict(min_p=0.4), dict(top_p=0.8, top_k=5)])
def test_the_engine_leaves_tokens_out_and_returns_logprobs_of_the_whole_distribution(engine, left_out):
    sampling = SamplingParams(12, temperature=TEMPERATURE, ignore_eos=True, **left_out)
    mass = []
    for prompt, done in zip(PROMPTS, engine.client.generate(PROMPTS, sampling), strict=True):
        logprobs = (next_logits(engine.model, prompt, done.token_ids) / TEMPERATURE).log_softmax(-1)
        tokens = torch.tensor(done.token_ids)[:, None]
        assert torch.allclose(logprobs.gather(1, tokens)[:, 0], torch.tensor(done.logprobs), atol=TOLERANCE)
        inside = kept(logprobs.exp(), **left_out)
        assert inside.gather(1, tokens).all()
        mass += (logprobs.exp() * inside).sum(-1).tolist()
    assert np.mean(mass) < 0.9, "the log-probabilities of the kept tokens alone would differ"


@pytest.mark.extended
def test_the_engine_returns_logprobs_with_the_repetition_penalty(engine):
    sampling = SamplingParams(12, temperature=TEMPERATURE, repetition_penalty=1.8, ignore_eos=True)
    differences = []
    for prompt, done in zip(PROMPTS, engine.client.generate(PROMPTS, sampling), strict=True):
        logits = next_logits(engine.model, prompt, done.token_ids)
        penalised = logits.clone()
        for position in range(len(done.token_ids)):
            earlier = sorted(set(done.token_ids[:position]))  # tokens of the response only
            values = logits[position, earlier]
            penalised[position, earlier] = torch.where(values < 0, values * 1.8, values / 1.8)
        tokens = torch.tensor(done.token_ids)[:, None]
        with_penalty, without = (
            (each / TEMPERATURE).log_softmax(-1).gather(1, tokens)[:, 0] for each in (penalised, logits)
        )
        assert torch.allclose(with_penalty, torch.tensor(done.logprobs), atol=TOLERANCE)
        differences += (with_penalty - without).abs().tolist()
    assert max(differences) > 0.1


OWN = '''
import os
import signal
from pathlib import Path

import numpy as np


def seldom_drawn(inputs, killed=""):
    """Prefers rows that were drawn seldom and solved seldom, counts its calls, and kills the driver in the third step, once."""
    inputs.state["calls"] = inputs.state.get("calls", 0) + 1
    if killed and inputs.num_drawn == 12 and not Path(killed).exists():
        Path(killed).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    rewards = np.nan_to_num(inputs.history.mean_reward)
    score = 10 * inputs.history.times_drawn + rewards + inputs.rng.random(inputs.prompts.num_rows)
    return np.argsort(score)[: inputs.count]
'''


@pytest.fixture(scope="module")
def files(inputs, tmp_path_factory):
    """Folder with twelve training rows, and with ten offline rows for five of their prompts, some with log-probabilities."""
    folder = tmp_path_factory.mktemp("draws")
    rows = pq.read_table(inputs / "train.parquet").slice(0, 12).to_pylist()
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    lines = []
    for number, row in enumerate(rows[:5]):
        right = row["reward_model"]["ground_truth"]
        for response, reward in ((right, 1.0), ("12", 0.0)):
            logprobs = [-0.5] * (len(response) + 1) if number % 2 else None
            lines.append(dict(prompt=row["prompt"], response=response, reward=reward, logprobs=logprobs))
    (folder / "offline.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def overrides(files, *more: str) -> list[str]:
    return [
        f"data.train=[{files}/train.parquet]",
        "++data.sampler._target_=own_sampler.seldom_drawn",
        f"data.offline.path={files}/offline.jsonl",
        "data.offline.rows_per_step=4",
        "++rollout.group_sizes._target_=mrl.data.samplers.ByDifficulty",
        "++rollout.group_sizes.least=2",
        "++rollout.group_sizes.most=12",
        "rollout.top_p=0.9",
        "rollout.stop=['4']",
        "++algorithm.correction._target_=mrl.algorithms.corrections.ImportanceSampling",
        "++algorithm.correction.mode=reject",  # the last digits of the engine's log-probabilities then change no weight
        "trainer.epochs=2",
        "trainer.max_steps=100",
        "checkpoint.every=1",
        "checkpoint.asynchronous=false",
        "tracking.samples_per_step=24",
        *more,
    ]


@pytest.mark.extended
def test_a_killed_run_with_a_sampler_group_sizes_top_p_and_rows_of_a_file_equals_an_uninterrupted_run(
    start_mrl, quickstart, files, tmp_path, user_module
):
    user_module("own_sampler", OWN)
    whole = start_mrl("train", *quickstart, *overrides(files)).finish()
    killed = start_mrl("train", *quickstart, *overrides(files, f"++data.sampler.killed={tmp_path / 'killed'}")).finish()
    assert whole.process.returncode == killed.process.returncode == 0, whole.output() + killed.output()
    assert (tmp_path / "killed").exists() and "restart 1 of 5" in killed.output()
    check_equal_runs(killed.folder, whole.folder)
    written = [run.folder / "checkpoints/step_000004/state.json" for run in (whole, killed)]
    states = [json.loads(file.read_text())["state"] for file in written]
    for state in states:
        del state["prompts"]["sampler"]  # contains the argument `killed`, which only one of the runs has
    assert states[0]["prompts"] == states[1]["prompts"] and states[0]["prompts"]["history"]["rows"] == list(range(12))
    assert "rollout.top_p=0.9: the engines leave out unlikely tokens" in " ".join(whole.output().split())
    check_steps(whole)
    check_trained_tokens(whole, files)


def check_steps(run) -> None:
    """Check that the run ended after two passes over 12 rows in steps of 6, and that its steps follow the config."""
    metrics, ledger = (
        run.metrics(),
        [json.loads(line) for line in (run.folder / "ledger.jsonl").read_text().splitlines()],
    )
    assert [line["rollout/epoch"] for line in metrics] == [0.5, 1.0, 1.5, 2.0]
    assert [line["rollout/samples"] for line in metrics] == [24.0] * 4
    assert [line["batch/offline_samples"] for line in metrics] == [4.0] * 4
    assert [line["batch/offline_reward_mean"] for line in metrics] == [0.5] * 4
    sizes = [[len(group) for group in line["lengths"]] for line in ledger]
    assert sizes[:2] == [[4] * 6] * 2 and all(sum(of_step) == 24 and min(of_step) >= 2 for of_step in sizes)
    assert any(len(set(of_step)) > 1 for of_step in sizes[2:]), "rewards decide the sizes of the second pass"
    assert all(len(line["offline"]) == 4 and len(line["requests"]) == 6 for line in ledger)
    offline = [number for line in ledger for number in line["offline"]]
    assert sorted(offline[:8]) != sorted(offline[8:]) and set(offline) == set(range(10))
    for name in ("mismatch/logprob_abs_max", "mismatch/nan_tokens"):
        assert max(line[name] for line in metrics) < 1e-3, "rows of the file do not count as samples of the engine"
    check_responses(run)


def check_trained_tokens(run, files) -> None:
    """Check that each step trains on all its offline rows, and on the groups of the engines whose rewards differ.

    The ledger counts only the trained tokens that the engines have sampled. The trainer ranks count all trained tokens.
    """
    rows = [json.loads(line) for line in (files / "offline.jsonl").read_text().splitlines()]
    ledger = [json.loads(line) for line in (run.folder / "ledger.jsonl").read_text().splitlines()]
    for line, metrics, (_, samples) in zip(ledger, run.metrics(), read_samples(run.folder), strict=True):
        differ = {sample.group for sample in samples if len(set(sample.group_rewards)) > 1}
        sampled = sum(sum(lengths) for group, lengths in enumerate(line["lengths"]) if group in differ)
        offline = sum(len(rows[number]["response"]) + 1 for number in line["offline"])  # the end mark is one token more
        assert sum(count for update in line["updates"] for count, _ in update.values()) == sampled
        assert metrics["batch/trained_tokens"] == sampled + offline


def check_responses(run) -> None:
    for step, samples in read_samples(run.folder):
        rewards = {sample.group: np.mean(sample.group_rewards) for sample in samples}
        assert run.metrics()[step - 1]["reward/mean"] == pytest.approx(np.mean(list(rewards.values())))
        stopped = [sample for sample in samples if "4" in sample.response]
        assert len(samples) == 24 and stopped
        assert all(sample.response.endswith("4") and not sample.truncated for sample in stopped)
        assert all(sample.trained[-1] == 1 and sample.tokens[-1] == "4" for sample in stopped)
