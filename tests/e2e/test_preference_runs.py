"""`mrl sft` on preferences: accuracies rise, and a trained reward model is served by SGLang as the reward of a run."""

import json
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.extended


def steps_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "sft.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def train_on_pairs(start_mrl, inputs, warm, tmp_path_factory):
    """`train_on_pairs(objective, *overrides)` -> (metrics of the steps, folder of the trained model)."""

    def train(objective: str, *overrides: str) -> tuple[list[dict], Path]:
        output = tmp_path_factory.mktemp(objective) / "model"
        files = [f"data.inputs.folder={inputs}", f"model.path={warm}"]
        if not any(override.startswith("sft.train=") for override in overrides):
            files.append(f"sft.train={inputs / 'pairs.parquet'}")
        start = ["experiment=quickstart", f"objective={objective}", f"sft.output={output}", "trainer.save=false"]
        run = start_mrl("sft", *start, *files, "sft.batch_size=64", *overrides).finish(600)
        assert run.process.returncode == 0 and run.leftovers() == [], run.output()
        return steps_of(run.folder), output

    return train


def means(steps: list[dict], name: str) -> tuple[float, float]:
    """Return the mean of a metric over the first and over the last fifth of the steps."""
    values = [step[name] for step in steps]
    fifth = len(values) // 5
    return float(np.mean(values[:fifth])), float(np.mean(values[-fifth:]))


@pytest.mark.parametrize("layout", [[], ["parallel.tp=2", "parallel.dp=2"]], ids=["one process", "tp2 dp2"])
def test_dpo_learns_to_prefer_the_right_answers(train_on_pairs, layout):
    steps, output = train_on_pairs("dpo", "sft.steps=50", "sft.optim.lr=3e-4", "sft.objective.beta=0.3", *layout)
    first = steps[0]
    assert first["loss/sft"] == pytest.approx(np.log(2), abs=1e-3), "at the start, the policy is the reference"
    assert first["preference/margin"] == pytest.approx(0, abs=1e-3)
    assert first["preference/chosen_logprob"] < 0
    _, accuracy = means(steps, "preference/accuracy")
    begin, end = means(steps, "loss/sft")
    assert accuracy > 0.75 and end < 0.9 * begin
    assert (output / "config.json").exists()


@pytest.mark.parametrize("objective", ["ipo", "hinge", "orpo", "simpo"])
def test_every_objective_over_pairs_trains(train_on_pairs, objective):
    steps, _ = train_on_pairs(objective, "sft.steps=20", "sft.optim.lr=3e-4")
    begin, end = means(steps, "preference/margin")
    assert end > begin and all(np.isfinite(list(step.values())).all() for step in steps)


@pytest.fixture(scope="module")
def labels(inputs, tmp_path_factory) -> Path:
    """A file with one labeled response to each problem. Every second problem has a right response, the others a wrong one."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    pairs = pq.read_table(inputs / "pairs.parquet").to_pylist()
    rows = [dict(prompt=pair["prompt"], completion=pair["chosen"], label=True) for pair in pairs[::2]]
    rows += [dict(prompt=pair["prompt"], completion=pair["rejected"], label=False) for pair in pairs[1::2]]
    path = tmp_path_factory.mktemp("labels") / "labels.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def test_kto_learns_from_labeled_responses(train_on_pairs, labels):
    steps, _ = train_on_pairs("kto", f"sft.train={labels}", "sft.steps=40", "sft.optim.lr=3e-4")
    begin, end = means(steps, "preference/margin")
    assert end > begin and steps[0]["preference/reference_point"] == pytest.approx(0, abs=1e-3)
    assert all(step["preference/reference_point"] >= 0 for step in steps)


@pytest.fixture(scope="module")
def reward_model(train_on_pairs, inputs, tmp_path_factory) -> tuple[list[dict], Path]:
    import pyarrow.parquet as pq

    pairs = pq.read_table(inputs / "pairs.parquet")
    folder = tmp_path_factory.mktemp("split")
    pq.write_table(pairs.slice(0, 3000), folder / "train.parquet")
    pq.write_table(pairs.slice(3000), folder / "test.parquet")
    files = [f"sft.train={folder / 'train.parquet'}", f"sft.test={folder / 'test.parquet'}", "trainer.eval_every=50"]
    return train_on_pairs("reward_model", *files, "sft.steps=150", "sft.optim.lr=1e-3")


def test_a_reward_model_learns_the_order_of_pairs(reward_model):
    steps, folder = reward_model
    _, end = means(steps, "preference/accuracy")
    assert steps[0]["preference/accuracy"] < 0.7 < end
    held_out = [(step["step"], step["preference/held_out_accuracy"]) for step in steps if "loss/sft_held_out" in step]
    assert [step for step, _ in held_out] == [50, 100, 150] and 0.6 < held_out[-1][1] <= 1
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForSequenceClassification"] and len(config["id2label"]) == 1


def test_a_reward_model_learns_labels(train_on_pairs, inputs, labels):
    """Transformers computes the scores of responses that are not in the training file."""
    import pyarrow.parquet as pq
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    steps, folder = train_on_pairs("outcome_reward_model", f"sft.train={labels}", "sft.steps=150", "sft.optim.lr=1e-3")
    begin, end = means(steps, "preference/accuracy")
    assert begin < 0.7 < end and means(steps, "loss/sft")[1] < means(steps, "loss/sft")[0]
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)

    @torch.no_grad()
    def mean_score(pairs: list[dict], response: str) -> float:
        turns = [[*pair["prompt"], dict(role="assistant", content=pair[response])] for pair in pairs]
        texts = [tokenizer.apply_chat_template(messages, tokenize=False) for messages in turns]
        ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        return float(np.mean([model(torch.tensor([each])).logits[0, 0].item() for each in ids]))

    pairs = pq.read_table(inputs / "pairs.parquet").to_pylist()[:128]
    assert mean_score(pairs[1::2], "chosen") > 0.2 and mean_score(pairs[::2], "rejected") < -0.2


def test_a_language_model_is_not_trained_from_a_reward_model(start_mrl, quickstart, reward_model):
    run = start_mrl("train", *quickstart, f"model.path={reward_model[1]}", "trainer.max_steps=1").finish(120)
    assert run.process.returncode != 0 and "is a reward model, which has no output layer" in run.output()


def test_a_trained_reward_model_is_the_reward_of_a_run(start_mrl, quickstart, reward_model):
    """SGLang serves the reward model. The rewards in the samples equal the scores that Transformers computes.

    The run is not deterministic, so that each group is scored as soon as it is sampled.
    """
    import torch
    from transformers import AutoModelForSequenceClassification

    from mrl.core.sample_file import read_samples
    from mrl.data.tokenizer import load_tokenizer

    folder = reward_model[1]
    reward = ["reward=served_reward_model", f"roles.reward_model.path={folder}", "rollout.deterministic=false"]
    run = start_mrl("train", *quickstart, *reward, "trainer.max_steps=2").finish(600)
    assert run.process.returncode == 0 and run.leftovers() == [], run.output()
    assert sum(step["component_time/reward_overlap_s"] for step in run.metrics()) > 0
    samples = [sample for _, found in read_samples(run.folder) for sample in found]
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = load_tokenizer(folder)
    assert samples
    for sample in samples:
        ids = tokenizer(sample.prompt + sample.response, add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            expected = model(torch.tensor([ids])).logits[0, 0].item()
        assert sample.reward == pytest.approx(expected, abs=1e-4)
