"""`mrl generate` and `mrl evaluate`: a killed generation is continued, and the tests compute each reported number again."""

import json
import signal
from collections import Counter
from itertools import combinations

import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest
from mrl_runs import tagged, wait_until

pytestmark = pytest.mark.extended

SAMPLES, ROWS = 4, 192


def rows_of(folder) -> list[dict]:
    return [row for path in sorted(folder.glob("responses_*.parquet")) for row in pq.read_table(path).to_pylist()]


@pytest.fixture(scope="module")
def keys(inputs, warm) -> list[str]:
    """Overrides with which the model of `warm` samples four responses to each of 192 held-out prompts."""
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
    """Overrides and output folder of a generation that was killed with SIGKILL, continued and finished.

    The killed command had only one request in flight. So most of the 768 responses were missing on any machine.
    """
    folder = tmp_path_factory.mktemp("continued") / "answers"
    keys = [*keys, f"generate.output={folder}", "generate.prompts_per_file=8"]
    run = start_mrl("generate", *keys, "generate.requests_in_flight=1")
    wait_until(
        lambda: len(list(folder.glob("responses_*.parquet"))) >= 3 or run.process.poll() is not None, poll_s=0.01
    )
    assert run.process.poll() is None, run.output()
    run.process.send_signal(signal.SIGKILL)
    run.process.wait()
    assert run.leftovers(within_s=30) == [], "the engine ended with the command"
    num_files = len(list(folder.glob("responses_*.parquet")))
    assert 3 <= num_files < ROWS / 8 and json.loads((folder / "_generate.json").read_text())["finished"] is None
    again = start_mrl("generate", *keys).finish()
    assert again.process.returncode == 0, again.output()
    assert f"continuing: {num_files * 8 * SAMPLES} of {ROWS * SAMPLES} responses are done" in again.output()
    assert again.leftovers(within_s=30) == []
    return keys, folder


@pytest.fixture(scope="module")
def evaluated(start_mrl, keys):
    """An evaluation that generates the same responses itself, with more requests in flight."""
    run = start_mrl("evaluate", *keys, "generate.requests_in_flight=512").finish()
    assert run.process.returncode == 0, run.output()
    assert run.leftovers(within_s=30) == []
    return run


def test_a_continued_generation_equals_an_uninterrupted_one(continued, evaluated):
    found, expected = rows_of(continued[1]), rows_of(evaluated.folder / "generated")
    places = [(row, sample) for row in range(ROWS) for sample in range(SAMPLES)]
    assert [(r["row"], r["sample"]) for r in found] == [(r["row"], r["sample"]) for r in expected] == places
    different = sum(a["token_ids"] != b["token_ids"] for a, b in zip(found, expected, strict=True))
    assert different <= 1, "other batches round differently, which rarely changes a sampled token"
    distinct = [len({tuple(r["token_ids"]) for r in found[at : at + SAMPLES]}) for at in range(0, len(found), SAMPLES)]
    assert np.mean(distinct) > 2, "each sample of a prompt has its own seed"


def test_seeded_draws_follow_the_models_probabilities(evaluated):
    """The frequency of the likeliest first token agrees with its probability, within five standard errors."""
    rows = rows_of(evaluated.folder / "generated")
    first = np.exp([row["logprobs"][0] for row in rows]).reshape(ROWS, SAMPLES)
    likeliest = first.max(axis=1, keepdims=True)
    certain = likeliest[:, 0] > 0.5  # no other token can be likelier
    p = likeliest[certain]
    drawn = (np.abs(first[certain] - p) < 1e-4).sum()
    assert certain.sum() > ROWS / 2
    # `certain` does not contain prompts for which no sample drew the likeliest token: at most 1 of 16 if its probability is 0.5.
    assert (
        abs(drawn - SAMPLES * p.sum())
        < 5 * np.sqrt(SAMPLES * (p * (1 - p)).sum()) + SAMPLES * ((1 - p) ** SAMPLES).sum()
    )


def metrics_over_all_subsets(rows: list[dict], k: int) -> tuple[float, float]:
    """Return pass@k and maj@k of one prompt: averages over all subsets of k responses."""
    passes, majorities = [], []
    for subset in combinations(rows, k):
        passes.append(any(row["response"].strip() == row["ground_truth"] for row in subset))
        votes = Counter(row["response"].strip() for row in subset if row["response"].strip())
        winners = [answer for answer, count in votes.items() if count == max(votes.values())]
        majorities.append(winners.count(rows[0]["ground_truth"]) / max(1, len(winners)))
    return float(np.mean(passes)), float(np.mean(majorities))


def test_the_reported_metrics_equal_those_computed_from_the_files(evaluated):
    report = json.loads((evaluated.folder / "evaluation.json").read_text())
    (summary,) = report["summaries"]
    rows = rows_of(evaluated.folder / "generated")
    prompts = [rows[at : at + SAMPLES] for at in range(0, len(rows), SAMPLES)]
    for k in (1, 2, 4):
        passes, majority = np.mean([metrics_over_all_subsets(responses, k) for responses in prompts], axis=0)
        found = summary["pass_at"][str(k)], summary["maj_at"][str(k)]
        assert (found[0]["value"], found[1]["value"]) == pytest.approx((passes, majority), abs=1e-9)
        assert f"{passes:.3f} [{found[0]['low']:.3f}, {found[0]['high']:.3f}]" in evaluated.output()
    scores = [float(row["response"].strip() == row["ground_truth"]) for row in rows]
    assert [row["score"] for row in rows] == scores and summary["mean_score"]["value"] == pytest.approx(np.mean(scores))
    assert sum(scores) > 0 and (evaluated.folder / "evaluation.png").stat().st_size > 10_000
    assert pq.read_table(evaluated.folder / "scores.parquet").num_rows == len(rows)


def test_a_finished_generation_is_evaluated_without_generating_again(start_mrl, continued, evaluated):
    keys, folder = continued
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    refused = start_mrl("generate", *keys, "generate.temperature=0.7").finish()
    assert refused.process.returncode == 2 and "generate.temperature was 1.0 and is 0.7" in refused.output()
    run = start_mrl("evaluate", *keys).finish()
    assert run.process.returncode == 0, run.output()
    assert f"is finished: {ROWS * SAMPLES} responses to {ROWS} prompts" in run.output()
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    reports = [json.loads((of.folder / "evaluation.json").read_text()) for of in (run, evaluated)]
    assert reports[0]["summaries"] == reports[1]["summaries"]


def engine_processes(run) -> list:
    """Return the main process of each engine of a command."""
    return [process for process in tagged(run.tag) if "mrl.rollout.engines.launch_sglang" in process.cmdline()]


def number_of_differences(found: list[dict], expected: list[dict]) -> int:
    places = [(row["row"], row["sample"]) for row in expected]
    assert [(row["row"], row["sample"]) for row in found] == places
    return sum(a["token_ids"] != b["token_ids"] for a, b in zip(found, expected, strict=True))


def test_a_generation_on_two_engines_outlives_an_engine_and_is_continued(start_mrl, keys, evaluated, tmp_path):
    """First one of two engines is killed, and later the command. The continued generation has the same responses."""
    folder = tmp_path / "answers"
    two = [*keys, f"generate.output={folder}", "generate.prompts_per_file=8", "rollout.num_engines=2"]
    run = start_mrl("generate", *two, "generate.requests_in_flight=2")

    def num_files() -> int:
        return len(list(folder.glob("responses_*.parquet")))

    wait_until(lambda: num_files() >= 1 or run.process.poll() is not None, poll_s=0.01)
    first, *_ = engine_processes(run)
    first.kill()
    before = num_files()
    wait_until(lambda: num_files() >= before + 3 or run.process.poll() is not None, poll_s=0.01)
    assert run.process.poll() is None, run.output()
    run.process.kill()
    run.process.wait()
    assert run.leftovers(within_s=30) == []
    kept = {path: path.read_bytes() for path in folder.glob("responses_*.parquet")}
    again = start_mrl("generate", *two).finish()
    assert again.process.returncode == 0, again.output()
    assert all(path.read_bytes() == content for path, content in kept.items())
    assert number_of_differences(rows_of(folder), rows_of(evaluated.folder / "generated")) <= 2


def test_engines_of_a_ray_cluster_sample_and_a_lost_node_is_survived(start_mrl, keys, evaluated, tmp_path):
    """The two engines run on two of three nodes with one CPU each. When a node is lost, its engine starts on the third node."""
    from ray.cluster_utils import Cluster

    folder = tmp_path / "answers"
    cluster = Cluster(initialize_head=True, head_node_args=dict(num_cpus=0, include_dashboard=False))
    nodes = [cluster.add_node(num_cpus=1) for _ in range(3)]
    try:
        on_cluster = [f"cluster.address={cluster.address}", "rollout.num_engines=2", f"generate.output={folder}"]
        run = start_mrl("generate", *keys, *on_cluster, "generate.prompts_per_file=8", "generate.requests_in_flight=2")
        wait_until(lambda: any(folder.glob("responses_*.parquet")) or run.process.poll() is not None)
        assert run.process.poll() is None, run.output()
        lost = next(node for node in nodes if serving(node))
        cluster.remove_node(lost, allow_graceful=False)
        assert run.finish().process.returncode == 0, run.output()
    finally:
        cluster.shutdown()
    assert number_of_differences(rows_of(folder), rows_of(evaluated.folder / "generated")) <= 2
    assert run.leftovers(within_s=30) == []


def serving(node) -> bool:
    """Return whether the node's raylet has started an engine."""
    raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
    return any("mrl.rollout.engines.launch_sglang" in each.cmdline() for each in raylet.children(recursive=True))
