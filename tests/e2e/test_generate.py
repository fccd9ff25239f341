"""Generating and evaluating as a user does: killed in the middle, taken up again, and every number computed again."""

import json
import signal
import time
from collections import Counter
from itertools import combinations

import numpy as np
import pyarrow.parquet as pq
import pytest

pytestmark = pytest.mark.extended

SAMPLES, ROWS = 4, 192


def rows_of(folder) -> list[dict]:
    return [row for path in sorted(folder.glob("responses_*.parquet")) for row in pq.read_table(path).to_pylist()]


@pytest.fixture(scope="module")
def keys(inputs, warm) -> list[str]:
    """Four samples of some held-out prompts by the warm model."""
    return [
        "experiment=quickstart",
        f"data.inputs.folder={inputs}",
        f"model.path={warm}",
        f"generate.samples={SAMPLES}",
        f"generate.rows={ROWS}",
        "generate.logprobs=true",
    ]


@pytest.fixture(scope="module")
def continued(start_mrl, keys, tmp_path_factory):
    """Overrides of a generation that was killed with SIGKILL in the middle and then finished, and its folder."""
    folder = tmp_path_factory.mktemp("continued") / "answers"
    keys = [*keys, f"generate.output={folder}", "generate.prompts_per_file=8"]
    run = start_mrl("generate", *keys, "generate.requests_in_flight=4")
    end = time.monotonic() + 600
    while len(list(folder.glob("responses_*.parquet"))) < 3:
        assert time.monotonic() < end and run.process.poll() is None, run.output()
        time.sleep(0.01)
    run.process.send_signal(signal.SIGKILL)
    run.process.wait()
    assert run.leftovers(within_s=30) == [], "its engine ended with it"
    there = len(list(folder.glob("responses_*.parquet")))
    assert 3 <= there < ROWS / 8 and json.loads((folder / "generate.json").read_text())["finished"] is None
    again = start_mrl("generate", *keys).finish()
    assert again.process.returncode == 0, again.output()
    assert f"continuing: {there * 8 * SAMPLES} of {ROWS * SAMPLES} responses are done" in again.output()
    assert again.leftovers(within_s=30) == []
    return keys, folder


@pytest.fixture(scope="module")
def evaluated(start_mrl, keys):
    """The same by `mrl evaluate` alone, in other batches."""
    run = start_mrl("evaluate", *keys, "generate.requests_in_flight=512").finish()
    assert run.process.returncode == 0, run.output()
    assert run.leftovers(within_s=30) == []
    return run


def test_a_killed_generation_equals_one_that_was_not(continued, evaluated):
    found, expected = rows_of(continued[1]), rows_of(evaluated.folder / "generated")
    places = [(row, sample) for row in range(ROWS) for sample in range(SAMPLES)]
    assert [(r["row"], r["sample"]) for r in found] == [(r["row"], r["sample"]) for r in expected] == places
    different = sum(a["token_ids"] != b["token_ids"] for a, b in zip(found, expected, strict=True))
    assert different <= 1, "other batches round differently, and hardly ever across a draw"
    distinct = [len({tuple(r["token_ids"]) for r in found[at : at + SAMPLES]}) for at in range(0, len(found), SAMPLES)]
    assert np.mean(distinct) > 2, "samples of a prompt have seeds of their own"


def test_seeded_draws_follow_the_models_probabilities(evaluated):
    """How often the likeliest first token was drawn, against its probability: within five standard errors."""
    rows = rows_of(evaluated.folder / "generated")
    first = np.exp([row["logprobs"][0] for row in rows]).reshape(ROWS, SAMPLES)
    likeliest = first.max(axis=1, keepdims=True)
    sure = likeliest[:, 0] > 0.5  # nothing else can be likelier
    p = likeliest[sure]
    drawn = (np.abs(first[sure] - p) < 1e-4).sum()
    assert sure.sum() > ROWS / 2
    # a prompt of which all samples missed the likeliest token is left out: at most 1 of 16, where it has probability 0.5
    assert (
        abs(drawn - SAMPLES * p.sum())
        < 5 * np.sqrt(SAMPLES * (p * (1 - p)).sum()) + SAMPLES * ((1 - p) ** SAMPLES).sum()
    )


def brute_force(rows: list[dict], k: int) -> tuple[float, float]:
    """pass@k and maj@k of one prompt's responses, from every subset."""
    passes, majorities = [], []
    for subset in combinations(rows, k):
        passes.append(any(row["response"].strip() == row["ground_truth"] for row in subset))
        votes = Counter(row["response"].strip() for row in subset if row["response"].strip())
        winners = [answer for answer, count in votes.items() if count == max(votes.values())]
        majorities.append(winners.count(rows[0]["ground_truth"]) / max(1, len(winners)))
    return float(np.mean(passes)), float(np.mean(majorities))


def test_an_evaluation_reports_what_the_files_say(evaluated):
    report = json.loads((evaluated.folder / "evaluation.json").read_text())
    (summary,) = report["summaries"]
    rows = rows_of(evaluated.folder / "generated")
    prompts = [rows[at : at + SAMPLES] for at in range(0, len(rows), SAMPLES)]
    for k in (1, 2, 4):
        passes, majority = np.mean([brute_force(of, k) for of in prompts], axis=0)
        found = summary["pass_at"][str(k)], summary["maj_at"][str(k)]
        assert (found[0]["value"], found[1]["value"]) == pytest.approx((passes, majority), abs=1e-9)
        assert f"{passes:.3f} [{found[0]['low']:.3f}, {found[0]['high']:.3f}]" in evaluated.output()
    scores = [float(row["response"].strip() == row["ground_truth"]) for row in rows]
    assert [row["score"] for row in rows] == scores and summary["mean_score"]["value"] == pytest.approx(np.mean(scores))
    assert sum(scores) > 0 and (evaluated.folder / "evaluation.png").stat().st_size > 10_000
    assert pq.read_table(evaluated.folder / "scores.parquet").num_rows == len(rows)


def test_a_finished_generation_is_evaluated_without_being_done_again(start_mrl, continued, evaluated):
    keys, folder = continued
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    refused = start_mrl("generate", *keys, "generate.temperature=0.7").finish()
    assert refused.process.returncode == 2 and "generate.temperature=1.0 then, 0.7 now" in refused.output()
    run = start_mrl("evaluate", *keys).finish()
    assert run.process.returncode == 0, run.output()
    assert f"is finished: {ROWS * SAMPLES} responses to {ROWS} prompts" in run.output()
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    reports = [json.loads((of.folder / "evaluation.json").read_text()) for of in (run, evaluated)]
    assert reports[0]["summaries"] == reports[1]["summaries"]
