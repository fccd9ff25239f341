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
from mrl.evaluation.evaluation_summary import choose_k, student_t_mean
from mrl.evaluation.response_store import ResponseStore, read_responses
from mrl.rewards.rule_based import ExactMatch


@dataclass(frozen=True)
class LastWord:
    """A reward with an `answer` method. The answer is the last word, if it is a number."""

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


TEXTS = {  # (data source, row) -> four responses; the ground truth is "7"
    ("a", 0): ["it is 7", "7", "so 8", "no idea"],
    ("a", 1): ["8", "8", "so 8", "7"],
    ("b", 0): ["", "none", "I pass", "maybe"],
    ("b", 1): ["7", "7", "x 7", "= 7"],
    ("b", 2): ["7", "8", "9", "5"],
}


@pytest.fixture
def folder(tmp_path):
    """Return the folder of a finished generation that contains TEXTS and no scores."""
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


@pytest.mark.extended
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
    assert (b.prompts, b.responses, b.truncated_fraction, b.unanswered_fraction) == (3, 12, 1 / 12, 4 / 12)
    assert b.mean_score.value == pytest.approx(0.25 + 0.75 * 5 / 12) and b.failed_fraction == 0


@pytest.mark.extended
def test_a_threshold_decides_what_passes(folder):
    everything = evaluate(folder, config_of(**{"evaluate.threshold": 0.25, "evaluate.k": [3, 1]})).summaries[-1]
    assert list(everything.pass_at) == [1, 3] and everything.pass_at[1].value == 1.0


@pytest.mark.extended
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


@pytest.mark.extended
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
    """A reward of whole groups. The score is the number of responses in the group."""

    whole_groups = in_process = True

    def __call__(self, responses):
        groups = [response.group for response in responses]
        return [float(groups.count(group)) for group in groups]


@pytest.mark.extended
def test_prompts_of_two_sets_over_one_file_are_kept_apart(folder):
    """The sets have the same files and rows, or data sets of the same class. Only their file numbers differ."""
    change_rows(folder, lambda row: dict(file="same.parquet", set=row["data_source"]))
    reward = {"_target_": f"{__name__}.Copies"}
    found = evaluate(folder, config_of(reward=reward))
    assert [(s.name, s.prompts, s.responses) for s in found.summaries] == [
        ("a", 2, 8),
        ("b", 3, 12),
        ("overall", 5, 20),
    ]
    assert [row["score"] for row in found.rows] == [4.0] * 20, "a group is the responses to one prompt"


@pytest.mark.extended
def test_a_set_is_scored_again_by_its_own_reward(folder):
    change_rows(folder, lambda row: dict(set=row["data_source"]))
    sets = {"a": {"files": ["a.parquet"], "reward": {"_target_": "mrl.rewards.rule_based.Length", "max_tokens": 100}}}
    manifest = json.loads((folder / "_generate.json").read_text())
    for stored, given in (({}, sets), (sets, {})):  # the set is in the config, or in the settings of the generation
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
        command.evaluate_or_submit(config_of(**bad))


@pytest.mark.extended
def test_the_output_names_the_reward_above_the_table(folder, tmp_path, capsys):
    command.evaluate_or_submit(config_of(**{"evaluate.input": str(folder), "evaluate.output": str(tmp_path / "out")}))
    shown = capsys.readouterr().out
    assert shown.index(f'reward: {{"_target_": "{__name__}.LastWord"}}') < shown.index("overall")


@pytest.mark.extended
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
    """The only other file in the folder is the manifest. The parts of a score are a list of {name, value}."""
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


def write_jsonl(path, rows) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.extended
def test_validation_dumps_of_verl_are_scored(tmp_path, capsys):
    """Each row has one response, and the responses to a prompt are not adjacent."""
    lines = [
        dict(input=f"user\n{row}+{row}=\nassistant\n", output=text, gts="7", score=0.0, step=60)
        for texts in zip(*list(TEXTS.values())[:2], strict=True)
        for row, text in enumerate(texts)
    ]
    file = write_jsonl(tmp_path / "dumps/60.jsonl", lines)
    command.evaluate_or_submit(config_of(**{"evaluate.input": file, "evaluate.output": str(tmp_path / "out")}))
    (summary,) = json.loads((tmp_path / "out/evaluation.json").read_text())["summaries"]
    assert (summary["name"], summary["prompts"], summary["responses"]) == ("60", 2, 8)
    expected = np.mean([brute_force(texts, 2) for texts in list(TEXTS.values())[:2]], axis=0)
    found = (summary["pass_at"]["2"]["value"], summary["maj_at"]["2"]["value"])
    assert found == pytest.approx(tuple(expected))
    assert summary["mean_tokens"] is None and summary["truncated_fraction"] is None
    shown = capsys.readouterr().out
    assert "60: 8 responses; 0.0% not scored" in shown


@pytest.mark.extended
def test_samples_of_lm_evaluation_harness_count_once_for_all_filters(tmp_path):
    def line(number: int, response_filter: str) -> dict:
        return dict(
            doc_id=number,
            doc={"question": f"{number}?"},
            target="7",
            arguments={"gen_args_0": {"arg_0": f"Q: {number}?", "arg_1": {"until": ["Q:"]}}},
            resps=[["so 7", "8"]],
            filtered_resps=["7"],
            filter=response_filter,
            exact_match=1.0,
        )

    lines = [line(number, name) for name in ("strict", "flexible") for number in range(3)]
    chat = line(3, "strict") | dict(
        arguments={"gen_args_0": {"arg_0": ['[{"role": "user", "content": "Q: 3?", "type": "text"}]']}}
    )
    write_jsonl(tmp_path / "samples_gsm8k_cot_2025-01-31T10-00-00.123.jsonl", [*lines, chat])
    (tmp_path / "results_2025.json").write_text("{}")
    found = evaluate(tmp_path, config_of())
    (summary,) = found.summaries
    assert (summary.name, summary.prompts, summary.responses) == ("gsm8k_cot", 4, 8)
    assert summary.pass_at[1].value == 0.5 and summary.pass_at[2].value == 1.0
    assert found.rows[0]["prompt"] == [{"role": "user", "content": "Q: 0?"}]
    assert found.rows[-1]["prompt"][0]["content"] == "Q: 3?" and json.loads(found.rows[0]["extra_info"]) == {
        "question": "0?"
    }


@pytest.mark.extended
def test_rows_of_other_tools_get_the_reward_of_their_source_or_ability(tmp_path):
    rows = [
        dict(prompt="a?", response="it is 7", ground_truth="7", data_source="words", kind="number"),
        dict(prompt="b?", response="it is 7", ground_truth="it is 7", data_source="texts", kind="exact"),
    ]
    write_jsonl(tmp_path / "mine.jsonl", rows)
    exact = {"ability": "exact", "reward": {"_target_": "mrl.rewards.rule_based.ExactMatch"}}
    by_source = {"_target_": "mrl.rewards.by_source.BySource", "rewards": {"words": LAST_WORD, "exact": exact}}
    config = config_of(**{"reward": by_source, "evaluate.columns": {"ability": "kind"}})
    found = evaluate(tmp_path / "mine.jsonl", config)
    assert [(row["ability"], row["score"]) for row in found.rows] == [("number", 1.0), ("exact", 1.0)]
    assert found.answers == ["7", "it is 7"], "LastWord says what the answers of its rows are"


@pytest.mark.extended
def test_details_of_lighteval_are_scored_against_the_right_choice(tmp_path):
    rows = [
        dict(
            doc=dict(query=f"Q{row}", choices=["5", "7"], gold_index=[1], id=str(row)),
            model_response=dict(text=["it is 7", "it is 5"]),
            metric=dict(extractive_match=1.0),
        )
        for row in range(2)
    ]
    import pyarrow as pa

    path = tmp_path / "details_lighteval|gsm8k|0_2025-01-31T10-00-00.123456.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    (summary,) = evaluate(path, config_of()).summaries
    assert (summary.name, summary.prompts, summary.responses) == ("lighteval|gsm8k|0", 2, 4)
    assert summary.pass_at[1].value == 0.5


@pytest.mark.extended
def test_columns_of_any_name_are_mapped_and_data_sources_are_kept_apart(tmp_path):
    lines = [
        dict(question="a?", completions=["7", "8"], answer=7, task="x", n=3),
        dict(question="a?", completions=["7", "7", "7"], answer=7, task="y", n=5),
    ]
    file = write_jsonl(tmp_path / "mine.jsonl", lines)
    names = dict(prompt="question", response="completions", ground_truth="answer", data_source="task", num_tokens="n")
    found = evaluate(tmp_path / "mine.jsonl", config_of(**{"evaluate.columns": names}))
    assert [(s.name, s.responses, s.mean_tokens) for s in found.summaries] == [
        ("x", 2, 3.0),
        ("y", 3, 5.0),
        ("overall", 5, 21 / 5),
    ]
    assert list(found.summaries[0].pass_at) == [1, 2], "k is at most the smallest number of responses"
    plain = [dict(prompt="a?", response=text, ground_truth="7") for text in ("7", "8")]
    write_jsonl(tmp_path / "folder/b.jsonl", plain)
    write_jsonl(tmp_path / "folder/a.jsonl", plain)
    both = evaluate(tmp_path / "folder", config_of()).summaries
    assert [(s.name, s.prompts, s.responses) for s in both] == [("a", 1, 2), ("b", 1, 2), ("overall", 2, 4)]
    with pytest.raises(ValueError, match=re.escape(f"{file}, row 0, column 'completion': is missing")) as wrong:
        evaluate(tmp_path / "mine.jsonl", config_of(**{"evaluate.columns": names | dict(response="completion")}))
    assert "did you mean 'completions'?" in str(wrong.value) and "name others with evaluate.columns" in str(wrong.value)


@pytest.mark.extended
def test_mistakes_in_foreign_files_name_file_row_and_column(folder, tmp_path):
    good = dict(prompt="a?", response="7", ground_truth="7")
    file = write_jsonl(
        tmp_path / "mine.jsonl", [good, good | dict(response=[[-1.5, False]]), dict(prompt="b?", response="7")]
    )
    with pytest.raises(ValueError, match="2 of 3 rows cannot be used") as wrong:
        evaluate(tmp_path / "mine.jsonl", config_of())
    assert f"{file}, row 1, column 'response': expected a response as text, or a list of such texts" in str(wrong.value)
    assert f"{file}, row 2, column 'ground_truth': is missing; found prompt, response" in str(wrong.value)
    for columns, message in [
        ({"responses": "x"}, "evaluate.columns.responses: unknown key; did you mean 'response'?"),
        ({"response": None}, "evaluate.columns.response=None: expected the name of a column"),
    ]:
        with pytest.raises(ValueError, match=re.escape(message)):
            evaluate(tmp_path / "mine.jsonl", config_of(**{"evaluate.columns": columns}))
    with pytest.raises(ValueError, match="names columns of other tools, but `mrl generate` wrote"):
        evaluate(folder, config_of(**{"evaluate.columns": {"response": "text"}}))


@pytest.mark.extended
def test_a_comparison_pairs_the_prompts(folder, tmp_path, capsys):
    """Two models answer the same prompts. The earlier evaluation has one more prompt, and its rows have another order."""
    now = {"p0": ["7", "7", "8", "7"], "p1": ["8", "8", "8", "7"], "p2": ["7", "8", "8", "8"]}
    before = {"p3": ["7"] * 4, "p2": ["8"] * 4, "p1": ["8"] * 4, "p0": ["8", "7", "8", "8"]}
    keys = {}
    for name, texts in (("before", before), ("now", now)):
        lines = [
            dict(prompt=prompt, responses=each, ground_truth="7", data_source="s") for prompt, each in texts.items()
        ]
        file = write_jsonl(tmp_path / f"{name}.jsonl", lines)
        keys[name] = {"evaluate.input": file, "evaluate.output": str(tmp_path / name)}
    command.evaluate_or_submit(config_of(**keys["before"]))
    command.evaluate_or_submit(config_of(**keys["now"], **{"evaluate.compare": str(tmp_path / "before")}))
    report = json.loads((tmp_path / "now/evaluation.json").read_text())["comparison"]
    assert (report["only_now"], report["only_before"]) == (0, 1)
    (difference,) = report["differences"]
    passed = np.array([3 / 4 - 1 / 4, 1 / 4, 1 / 4])
    expected = student_t_mean(passed, 0.95)
    found = difference["pass_at"]["1"]
    assert difference["name"] == "s" and difference["prompts"] == 3
    assert (found["value"], found["low"], found["high"]) == pytest.approx((expected.value, expected.low, expected.high))
    assert difference["mean_score"]["value"] == pytest.approx(0.75 * passed.mean())
    assert difference["pass_at"]["4"]["value"] == pytest.approx(2 / 3), "p1 and p2 pass now"
    shown = capsys.readouterr().out
    assert (
        f"difference from {tmp_path / 'before'}" in shown
        and "0 only in this evaluation, 1 only in the earlier one" in shown
    )
    assert f"{expected.value:+.3f} [{expected.low:+.3f}, {expected.high:+.3f}]" in shown
    other = dict(keys["now"]) | {"evaluate.compare": str(tmp_path / "other")}
    write_evaluation(evaluate(folder, config_of()), tmp_path / "other", config_of())
    with pytest.raises(ValueError, match="none of its 5 prompts is among the 3 prompts of this evaluation"):
        evaluate(tmp_path / "now.jsonl", config_of(**other))
    with pytest.raises(ValueError, match=r"no scores\.parquet there; expected a folder that `mrl evaluate` wrote"):
        evaluate(tmp_path / "now.jsonl", config_of(**other | {"evaluate.compare": str(tmp_path / "nowhere")}))


@pytest.mark.extended
def test_a_generation_equals_itself_in_a_comparison(folder, tmp_path):
    config = config_of(**{"evaluate.compare": str(tmp_path / "first")})
    write_evaluation(evaluate(folder, config_of()), tmp_path / "first", config_of())
    found = evaluate(folder, config)
    assert [each.name for each in found.comparison.differences] == ["a", "b", "overall"]
    for each in found.comparison.differences:
        assert each.mean_score.value == 0 and all(
            value.value == 0 for value in (*each.pass_at.values(), *each.maj_at.values())
        )
    assert found.comparison.only_now == found.comparison.only_before == 0
    write_evaluation(found, tmp_path / "second", config)
    first, second = ((tmp_path / name / "evaluation.png").read_bytes() for name in ("first", "second"))
    assert first != second, "the picture shows the earlier evaluation, too"
