"""Evaluation: summaries per data source and overall, stored and new scores, and the report files."""

import json
import re
from dataclasses import dataclass
from itertools import combinations

import datasets
import numpy as np
import pandas
import pyarrow.parquet as pq
import pytest
from omegaconf import OmegaConf

from mrl.commands import evaluate as command
from mrl.config.schema import Config
from mrl.config.validate import from_hydra
from mrl.evaluation.evaluate_responses import evaluate, write_evaluation
from mrl.evaluation.evaluation_summary import choose_k
from mrl.evaluation.response_store import ResponseStore, read_responses
from mrl.rewards.rule_based import ExactMatch


@dataclass(frozen=True)
class LastWord:
    """A reward with an `answer` method: the last word, if it is a number."""

    def answer(self, response):
        words = response.text.split()
        return words[-1] if words and words[-1].isdigit() else None

    def __call__(self, responses):
        return [0.25 + 0.75 * (self.answer(r) == r.ground_truth) for r in responses]


LAST_WORD = {"_target_": f"{__name__}.LastWord"}


def config_of(**overrides) -> Config:
    base = OmegaConf.create(OmegaConf.to_container(OmegaConf.structured(Config)))
    needed = {
        "run.dir": "unused",
        "model.path": "unused",
        "reward": LAST_WORD,
        "algorithm.advantage": {"_target_": "mrl.algorithms.advantages.GRPO"},
        "algorithm.loss": {"_target_": "mrl.algorithms.losses.PPOClip"},
    }
    for key, value in (needed | overrides).items():
        OmegaConf.update(base, key, value, force_add=True)
    return from_hydra(base)


TEXTS = {  # (data source, row) -> four responses; the truth is "7"
    ("a", 0): ["it is 7", "7", "so 8", "no idea"],
    ("a", 1): ["8", "8", "so 8", "7"],
    ("b", 0): ["", "none", "I pass", "maybe"],
    ("b", 1): ["7", "7", "x 7", "= 7"],
    ("b", 2): ["7", "8", "9", "5"],
}


@pytest.fixture
def folder(tmp_path):
    """Return the folder of a finished generation of these texts, without scores."""
    rows = [
        dict(
            set="",
            file=f"{source}.parquet",
            file_number="ab".index(source),
            row=row,
            sample=sample,
            data_source=source,
            prompt=[{"role": "user", "content": "?"}],
            response=text,
            token_ids=[4] * (len(text) + 1),
            num_tokens=len(text) + 1,
            logprobs=None,
            finish_reason="length" if text == "maybe" else "stop",
            ground_truth="7",
            ground_truth_is_json=False,
            extra_info="{}",
            ability="",
            style="",
            score=None,
            failure=None,
            parts=None,
        )
        for (source, row), texts in TEXTS.items()
        for sample, text in enumerate(texts)
    ]
    with ResponseStore(
        tmp_path / "answers", {"generate.samples": 4, "reward": None, "model.path": "some/model"}
    ) as store:
        store.write(0, rows[:12])
        store.write(1, rows[12:])
        store.finish(dict(responses=20, prompts=5, files=2))
    return tmp_path / "answers"


def brute_force(texts: list[str], k: int) -> tuple[float, float]:
    """Return pass@k and maj@k of one prompt by enumerating all subsets."""
    answers = [LastWord().answer(type("R", (), {"text": text})) for text in texts]
    passes, majorities = [], []
    for subset in combinations(answers, k):
        passes.append("7" in subset)
        voted = [answer for answer in subset if answer]
        most = max(map(voted.count, voted), default=0)
        winners = {answer for answer in voted if voted.count(answer) == most}
        majorities.append(("7" in winners) / max(1, len(winners)))
    return float(np.mean(passes)), float(np.mean(majorities))


@pytest.mark.parametrize("k", [1, 2, 4])
def test_a_summary_equals_the_enumeration_of_all_subsets(folder, k):
    found = evaluate(folder, config_of())
    assert [summary.name for summary in found.summaries] == ["a", "b", "overall"]
    for summary in found.summaries:
        of = [texts for (source, _), texts in TEXTS.items() if summary.name in (source, "overall")]
        expected = np.mean([brute_force(texts, k) for texts in of], axis=0)
        assert (summary.pass_at[k].value, summary.maj_at[k].value) == pytest.approx(tuple(expected))
        for estimate in (summary.pass_at[k], summary.maj_at[k]):
            assert 0 <= estimate.low <= estimate.value <= estimate.high <= 1
    b = found.summaries[1]
    assert (b.prompts, b.responses, b.cut_fraction, b.unanswered_fraction) == (3, 12, 1 / 12, 4 / 12)
    assert b.mean_score.value == pytest.approx(0.25 + 0.75 * 5 / 12) and b.failed_fraction == 0


def test_a_threshold_decides_what_passes(folder):
    everything = evaluate(folder, config_of(**{"evaluate.threshold": 0.25, "evaluate.k": [3, 1]})).summaries[-1]
    assert list(everything.pass_at) == [1, 3] and everything.pass_at[1].value == 1.0


def test_stored_scores_are_used_unless_rescore_is_set(folder):
    manifest = json.loads((folder / "_generate.json").read_text())
    manifest["settings"]["reward"] = LAST_WORD
    (folder / "_generate.json").write_text(json.dumps(manifest))
    for path in folder.glob("*.parquet"):
        rows = pq.read_table(path).to_pylist()
        ResponseStore(folder, manifest["settings"]).write(
            int(path.stem[-6:]), [r | dict(score=1.0, parts={}) for r in rows]
        )
    exact = {"reward": {"_target_": "mrl.rewards.rule_based.ExactMatch"}}
    kept = evaluate(folder, config_of(**exact))
    assert kept.reward == LAST_WORD and kept.summaries[-1].mean_score.value == 1.0
    assert kept.answers[0] == "7", "the reward that scored also says what the answers are"
    again = evaluate(folder, config_of(**exact, **{"evaluate.rescore": True}))
    assert again.reward == exact["reward"] and again.summaries[-1].mean_score.value == pytest.approx(5 / 20)
    assert again.answers[0] == "it is 7" and again.answers[8] is None, "without `answer` a response's text is its vote"
    assert not hasattr(ExactMatch(), "answer")


def test_an_evaluation_writes_report_picture_and_scores(folder, tmp_path, capsys):
    config = config_of()
    found = evaluate(folder, config)
    write_evaluation(found, tmp_path / "out", config)
    report = json.loads((tmp_path / "out/evaluation.json").read_text())
    assert report["reward"] == LAST_WORD and report["confidence"] == 0.95
    assert report["summaries"][2]["pass_at"]["2"]["value"] == found.summaries[2].pass_at[2].value
    assert (tmp_path / "out/evaluation.png").read_bytes()[:4] == b"\x89PNG"
    scores = pq.read_table(tmp_path / "out/scores.parquet").to_pylist()
    assert (
        len(scores) == 20
        and scores[0]["answer"] == "7"
        and scores[0]["score"] == 1.0
        and scores[0]["file"] == "a.parquet"
    )
    command.print_table(found.summaries, "title", 0.95)
    shown = capsys.readouterr().out
    assert f"{found.summaries[2].pass_at[4].value:.3f} [" in shown and "overall: 20 responses" in shown


def change_rows(folder, change) -> None:
    settings = json.loads((folder / "_generate.json").read_text())["settings"]
    for path in folder.glob("*.parquet"):
        rows = pq.read_table(path).to_pylist()
        ResponseStore(folder, settings).write(int(path.stem[-6:]), [row | change(row) for row in rows])


@dataclass(frozen=True)
class Copies:
    """A reward of whole groups: the number of responses in the group."""

    whole_groups = in_process = True

    def __call__(self, responses):
        groups = [response.group for response in responses]
        return [float(groups.count(group)) for group in groups]


def test_prompts_of_two_sets_over_one_file_are_kept_apart(folder):
    """The sets have the same files and rows, or data sets of one class; only the file number differs."""
    change_rows(folder, lambda row: dict(file="same.parquet", set=row["data_source"]))
    reward = {"_target_": f"{__name__}.Copies"}
    found = evaluate(folder, config_of(reward=reward))
    assert [(s.name, s.prompts, s.responses) for s in found.summaries] == [
        ("a", 2, 8),
        ("b", 3, 12),
        ("overall", 5, 20),
    ]
    assert [row["score"] for row in found.rows] == [4.0] * 20, "a group is the responses to one prompt"


def test_a_set_is_scored_again_by_its_own_reward(folder):
    change_rows(folder, lambda row: dict(set=row["data_source"]))
    sets = {"a": {"files": ["a.parquet"], "reward": {"_target_": "mrl.rewards.rule_based.Length", "max_tokens": 100}}}
    manifest = json.loads((folder / "_generate.json").read_text())
    for stored, given in (({}, sets), (sets, {})):  # the config names the set, or the generation did
        manifest["settings"]["data.test_sets"] = stored
        (folder / "_generate.json").write_text(json.dumps(manifest))
        found = evaluate(folder, config_of(**{"data.test_sets": given}))
        of_a, of_b = ([row for row in found.rows if row["set"] == name] for name in "ab")
        assert [row["score"] for row in of_a] == pytest.approx([1 - row["num_tokens"] / 100 for row in of_a])
        assert {row["score"] for row in of_b} == {0.25, 1.0}, "the scores of LastWord"
        assert found.answers[0] == "it is 7" and found.answers[8] in ("7", None), "each set votes by its own reward"


def test_without_the_stored_reward_maj_at_k_compares_texts(folder, caplog):
    manifest = json.loads((folder / "_generate.json").read_text())
    manifest["settings"]["reward"] = {"_target_": "gone.Reward"}
    (folder / "_generate.json").write_text(json.dumps(manifest))
    change_rows(folder, lambda row: dict(score=1.0, parts={}))
    found = evaluate(folder, config_of())
    assert found.summaries[-1].mean_score.value == 1.0 and found.answers[0] == "it is 7"
    assert "gone.Reward: cannot be imported" in caplog.text and "the texts of the responses" in caplog.text


def test_the_reward_of_the_evaluation_is_checked_before_the_generation(monkeypatch):
    monkeypatch.setattr(command, "plan_generation", lambda config: None)
    monkeypatch.setattr(command.generate, "run_generation", lambda plan: pytest.fail("engines were started"))
    bad = {"generate.score": False, "reward": {"_target_": "mrl.rewards.rule_based.ExactMatc"}}
    with pytest.raises(SystemExit):
        command.job(config_of(**bad))


def test_the_output_names_the_reward_above_the_table(folder, tmp_path, capsys):
    command.job(config_of(**{"evaluate.input": str(folder), "evaluate.output": str(tmp_path / "out")}))
    shown = capsys.readouterr().out
    assert shown.index(f'reward: {{"_target_": "{__name__}.LastWord"}}') < shown.index("overall")


def test_inputs_that_cannot_be_evaluated_are_errors_with_the_reason(folder, tmp_path):
    with pytest.raises(ValueError, match=re.escape("evaluate.k=[8]: there are 4 responses to a prompt")):
        evaluate(folder, config_of(**{"evaluate.k": [8]}))
    with pytest.raises(ValueError, match=r"no _generate\.json there"):
        evaluate(tmp_path, config_of())
    old = pq.read_table(folder / "responses_000000.parquet")
    pq.write_table(old.drop_columns(["file_number"]), folder / "responses_000000.parquet")
    with pytest.raises(ValueError, match="has no column file_number; another version of mrl wrote it"):
        evaluate(folder, config_of())
    pq.write_table(old, folder / "responses_000000.parquet")
    (folder / "responses_000001.parquet").unlink()
    with pytest.raises(ValueError, match=r"found 12 responses, but _generate\.json says 20"):
        evaluate(folder, config_of())


@pytest.mark.parametrize(("samples", "ks"), [(1, [1]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])])
def test_k_doubles_up_to_all_samples(samples, ks):
    assert choose_k([], samples) == ks


def test_pandas_and_datasets_read_the_folder_of_a_generation(folder):
    """The folder has one other file, the manifest. The parts of a score are a list of {name, value}."""
    change_rows(folder, lambda row: dict(score=0.5, parts={"correct": 0.0, "length": 0.5}))
    frame = pandas.read_parquet(folder)
    assert len(frame) == 20 and frame["parts"][3][1] == {"name": "length", "value": 0.5}
    cache = str(folder.parent / "cache")
    for where in (dict(path=str(folder)), dict(path="parquet", data_files=f"{folder}/*.parquet")):
        rows = datasets.load_dataset(**where, cache_dir=cache)["train"]
        assert len(rows) == 20 and rows[0]["parts"] == [
            {"name": "correct", "value": 0.0},
            {"name": "length", "value": 0.5},
        ]
    assert read_responses(folder)[1][0]["parts"] == {"correct": 0.0, "length": 0.5}
