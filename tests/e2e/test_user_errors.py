"""A mistake of the user ends a command before it starts anything: one line says what to do, and the exit status is 2."""

import pyarrow.parquet as pq
import pytest


@pytest.fixture(scope="module")
def bad_files(inputs, tmp_path_factory):
    """The quickstart's prompt file, once without a required column and once with a prompt that is too long."""
    folder = tmp_path_factory.mktemp("bad")
    table = pq.read_table(inputs / "train.parquet").slice(0, 5)
    pq.write_table(table.drop_columns(["reward_model"]), folder / "column.parquet")
    rows = table.to_pylist()
    rows[3]["prompt"][0]["content"] = "1" * 70
    pq.write_table(table.from_pylist(rows), folder / "long.parquet")
    return folder


MISTAKES = {
    "an unknown key": (["algorithm.lr_typo=1"], "unknown key 'algorithm.lr_typo'; did you mean 'optim.lr'?"),
    "a missing model": (
        ["sft.train=null", "model.path=/nowhere/model"],
        "model.path=/nowhere/model: the folder is missing",
    ),
    "a missing column": (
        ["data.train=[{bad}/column.parquet]"],
        "row 0, column 'reward_model': is missing; found data_source, prompt, ability, extra_info",
    ),
    "a long prompt": (
        ["data.train=[{bad}/long.parquet]"],
        "row 3, column 'prompt': 70 tokens are more than the 57 that leave room for the response",
    ),
    "a layout that does not fit": (["parallel.tp=3"], "parallel.tp=3 does not divide num_attention_heads=4"),
    "stages that do not divide the layers": (
        ["parallel.pp=3"],
        "parallel.pp=3 does not divide num_hidden_layers=4 of this model; use 1, 2, 4.",
    ),
    "expert parallelism without experts": (
        ["parallel.ep=2"],
        "parallel.ep=2: this model has no experts; use 1.",
    ),
    "a world size that is not a multiple of a replica": (
        ["parallel.tp=2", "parallel.cp=2", "parallel.world_size=6"],
        "parallel.world_size=6 is not a multiple of a replica: one replica is tp=2 x cp=2 x pp=1 = 4 processes; use 4 or 8.",
    ),
    "a role without a pool": (
        ["placement.pools={{all: [actor]}}"],
        "this run has engines, which no pool contains (pools: all)",
    ),
    "router replay without experts": (["rollout.routing_replay=true"], "has no experts; leave it false"),
    "a learning-rate schedule without an end": (["optim.lr_schedule=cosine"], "lr_decay_steps=0"),
    "an unknown SGLang argument": (["sglang.mem_fraction=0.5"], "did you mean sglang.mem_fraction_static?"),
    "missing recorded rollouts": (["rollout.replay=/nowhere"], "step_000000.npz is missing"),
    "a warm start with other settings": (["sft.output={inputs}/model"], "was made from other settings"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_reported_in_one_line_before_anything_starts(start_mrl, inputs, bad_files, mistake):
    overrides, message = MISTAKES[mistake]
    filled = [o.format(bad=bad_files, inputs=inputs) for o in overrides]
    run = start_mrl("train", "experiment=quickstart", f"data.inputs.folder={inputs}", *filled).finish(60)
    assert run.process.returncode == 2, run.output()
    assert message in run.output() and "Traceback" not in run.output()
    assert not (run.folder / "run.json").exists() and not (run.folder / "logs").exists(), "nothing was started"
