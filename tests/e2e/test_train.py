"""Training runs that start from the command line: which files they write, and how they end."""

import signal

import numpy as np
import pytest
from mrl_runs import wait_until

from mrl.checkpoint.run_dir import read_events
from mrl.core.sample_file import read_samples
from mrl.tracking.live_view import LiveRun

PHASES = ("rollout", "score", "advantage", "update", "weight_sync")


def served_logprob_difference(folder, model, prompt: list[int]) -> float:
    """Return the largest difference between log-probabilities of `model` and of a new SGLang server that serves `folder`."""
    import torch

    from mrl.rollout.client import EngineClient, SamplingParams
    from mrl.rollout.engines.server import EngineServer
    from mrl.rollout.engines.server_args import default_server_args

    args = default_server_args("float32", 64) | {"model_path": str(folder)}
    with EngineServer(args, folder.parent / "logs/new_engine.log") as server:
        server.wait_ready(timeout_s=480)
        (done,) = EngineClient(server.url).generate([prompt], SamplingParams(max_new_tokens=6, ignore_eos=True))
    with torch.no_grad():
        logits = model(torch.tensor([prompt + done.token_ids])).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(done.token_ids)[:, None])[:, 0]
    return (expected - torch.tensor(done.logprobs)).abs().max().item()


def check_samples(folder, mean_rewards: list[float]) -> None:
    """Check samples.jsonl, which contains 8 responses of each step."""
    found = dict(read_samples(folder))
    assert list(found) == list(range(1, len(mean_rewards) + 1))
    for step, samples in found.items():
        rewards = [sample.reward for sample in samples]
        assert rewards == sorted(rewards, reverse=True) and len(samples) == 8
        for sample in samples:
            assert "".join(sample.tokens) == sample.response and len(sample.tokens) == sample.num_tokens
            assert set(sample.versions) == {step - 1} and set(sample.trained) == {1} and sample.group in range(6)
            assert all(-20 < value <= 0 for value in sample.logprobs) and len(sample.logprobs) == len(sample.tokens)
            assert len(set(sample.advantages)) == 1, "GRPO gives all tokens of a response the same advantage"
        of_group = {sample.group: sample.advantages[0] for sample in samples if sample.reward == rewards[0]}
        assert all(advantage >= 0 for advantage in of_group.values()), "the best responses are not made less likely"


def test_a_run_writes_metrics_a_curve_a_checkpoint_and_a_model_that_loads(recorded, warm):
    import torch
    from safetensors.torch import load_file
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = recorded
    steps = run.metrics()
    assert [s["step"] for s in steps] == [1, 2, 3, 4, 5]
    for step in steps:
        assert all(step[f"time/{phase}_s"] >= 0 for phase in PHASES)
        assert 0 <= step["reward/mean"] <= 1 and step["rollout/tokens"] > 0
        assert step["mismatch/logprob_abs_max"] <= 1e-4
        assert step["weight_sync/version"] == step["step"]
        assert step["rollout/weight_version"] == step["step"] - 1, "as reported by the engine"
        model_bytes = sum(t.nbytes for t in load_file(warm / "model.safetensors").values())
        assert step["weight_sync/bytes"] == model_bytes
    check_samples(run.folder, [step["reward/mean"] for step in steps])
    start, end = read_events(run.folder)
    assert (start.event, start.step) == ("start", 0) and start.hosts and "torch" in start.packages
    assert start.command is not None and "trainer.max_steps=5" in start.command
    assert (end.event, end.step, end.outcome, end.error) == ("end", 5, "finished", None)
    assert "held-out reward sampled" in run.output()
    view = LiveRun(run.folder).read()
    assert (view.state, view.step, view.num_steps, view.processes) == ("finished", 5, 5, [])
    assert (run.folder / "curve.png").stat().st_size > 10_000
    assert (run.folder / "checkpoints/step_000005/actor/metadata.json").exists()
    assert list(run.folder.glob("wandb/offline-run-*")) and (run.folder / "mlflow_run_id").exists()
    scalars = EventAccumulator(str(run.folder / "tensorboard")).Reload().Scalars("reward/mean")
    assert [(point.step, point.value) for point in scalars] == [
        (step["step"], pytest.approx(step["reward/mean"])) for step in steps
    ]
    model = AutoModelForCausalLM.from_pretrained(run.folder / "hf", dtype=torch.float32)
    tokens = AutoTokenizer.from_pretrained(run.folder / "hf")("12", return_tensors="pt")["input_ids"]
    assert torch.isfinite(model(tokens).logits).all()
    changed = load_file(run.folder / "hf/model.safetensors")
    before = load_file(warm / "model.safetensors")
    assert sum(step["reward/mean"] for step in steps) > 0, "without a correct response nothing is learned"
    assert any(not torch.equal(changed[name], before[name]) for name in before)


@pytest.mark.extended
def test_a_new_engine_serves_the_exported_model(recorded):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = recorded.folder / "hf"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = AutoTokenizer.from_pretrained(folder)("12")["input_ids"]
    assert served_logprob_difference(folder, model, tokens) < 1e-4


@pytest.mark.extended
def test_the_run_directory_of_another_run_is_refused(start_mrl, quickstart, recorded):
    again = start_mrl("train", *quickstart, f"run.dir={recorded.folder}", "resume=never").finish()
    assert again.process.returncode == 2 and "name another folder" in again.output()


@pytest.mark.extended
def test_another_layout_trains_recorded_rollouts_with_the_same_loss(start_mrl, quickstart, recorded):
    expected = recorded.metrics()[0]
    replay = [f"rollout.replay={recorded.folder / 'rollouts'}", "trainer.max_steps=1", "trainer.save=false"]
    run = start_mrl("train", *quickstart, "parallel.dp=2", *replay).finish()
    assert run.process.returncode == 0, run.output()
    found = run.metrics()[0]
    for name in ("loss/policy", "optim/grad_norm"):
        assert found[name] == pytest.approx(expected[name], abs=1e-5), name
    assert found["reward/mean"] == expected["reward/mean"]


@pytest.mark.extended
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGKILL], ids=lambda s: s.name)
def test_no_process_is_left_after_a_signal(start_mrl, quickstart, sign):
    run = start_mrl("train", *quickstart, "trainer.max_steps=100000", "trainer.save=false")
    wait_until(lambda: run.process.poll() is not None or ((run.folder / "metrics.jsonl").exists() and run.metrics()))
    assert run.process.poll() is None, run.output()
    run.process.send_signal(sign)
    run.finish(60)
    assert run.process.returncode != 0
    assert [p.cmdline() for p in run.leftovers()] == []


@pytest.mark.extended
def test_real_text_reaches_the_engine_unchanged(start_mrl, tmp_path):
    """The tokens of long prompts with quotes, dollar signs and unicode decode to the text of their rows."""
    import orjson
    from transformers import AutoTokenizer

    from mrl.commands import data

    texts = ['She said "buy 3 for $4.50" — so what is 3 × 4.50 in €? ☃ ' + "and again " * 60 + str(i) for i in range(4)]
    rows = [{"question": text, "answer": f"It is <<1+1=2>> so\n#### {i},000"} for i, text in enumerate(texts)]
    source = tmp_path / "rows.jsonl"
    source.write_bytes(b"\n".join(orjson.dumps(row) for row in rows))
    assert data.main(["prepare", "gsm8k", str(source), str(tmp_path / "train.parquet")]) == 0
    assert data.main(["tiny-model", str(tmp_path / "model")]) == 0
    run = start_mrl(
        "train",
        "experiment=gsm8k",
        f"model.path={tmp_path / 'model'}",
        "model.dtype=float32",
        f"data.train=[{tmp_path / 'train.parquet'}]",
        "rollout.prompts_per_step=4",
        "rollout.responses_per_prompt=2",
        "rollout.max_response_tokens=16",
        "rollout.record=true",
        "trainer.max_steps=3",
    ).finish()
    assert run.process.returncode == 0, run.output()
    assert len(run.metrics()) == 3
    assert max(step["mismatch/logprob_abs_max"] for step in run.metrics()) <= 1e-4
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    with np.load(run.folder / "rollouts/step_000000.npz") as file:
        rows_sent = set()
        for row, start, length in zip(file["rows"], file["cu_seqlens"], file["prompt_lengths"], strict=False):
            decoded = tokenizer.decode(file["tokens"][start : start + length].tolist())
            assert texts[row] in decoded
            rows_sent.add(int(row))
    assert rows_sent == {0, 1, 2, 3}
