"""Compares metrics, ledgers and weights of two runs. Ignores metrics that depend on time, layout, placement or faults."""

import json
from pathlib import Path

from safetensors import deserialize

NOT_LEARNING = ("time/", "component_time/", "throughput/", "placement/", "weight_sync/", "batch/")
NOT_REPRODUCIBLE = (
    "mismatch/",
    "rollout/cached",
    "rollout/replaced",
    "rollout/retried",
)  # depend on batching and on faults


def learning_metrics(path: Path) -> list[dict]:
    """Return the metrics of each step, without times and without metrics that depend on layout or placement."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(NOT_LEARNING)} for line in lines]


def reproducible_metrics(path: Path) -> list[dict]:
    """Return the metrics of each step that are bit-exact in a run whose processes failed and restarted."""
    return [{k: v for k, v in line.items() if not k.startswith(NOT_REPRODUCIBLE)} for line in learning_metrics(path)]


def check_equal_weights(found: Path, expected: Path) -> None:
    """Check that the final weights of two runs have the same bytes."""
    ours, theirs = (dict(deserialize((run_dir / "hf/model.safetensors").read_bytes())) for run_dir in (found, expected))
    assert ours and ours == theirs


def check_equal_runs(disturbed: Path, undisturbed: Path) -> None:
    """Check that two runs trained on the same samples with the same metrics, and that their final weights are bit-equal."""
    ledgers = [(run_dir / "ledger.jsonl").read_text() for run_dir in (disturbed, undisturbed)]
    assert ledgers[0] == ledgers[1], "no sample is lost, and none is trained twice"
    for name in ("metrics.jsonl", "eval.jsonl"):
        assert reproducible_metrics(disturbed / name) == reproducible_metrics(undisturbed / name), name
    check_equal_weights(disturbed, undisturbed)
