"""The page of `mrl report`: what it says about runs, and that no content of a run can break the page."""

import json
from pathlib import Path

import pytest

from mrl.commands.report import main, page_data
from mrl.core.jsonl import JsonLinesFile, write_json
from mrl.tracking.report.answers import answers
from mrl.tracking.report.charts import interval, thinned
from mrl.tracking.report.page import PAGE_BYTES, render
from mrl.tracking.report.recorded_run import RecordedRun
from mrl.tracking.timeline import ProcessTimeline, Span, summarize, trainer_ranks


def make_run(folder: Path, steps: int = 3, config=None, samples=(), **metrics) -> Path:
    """Write the files of a run."""
    folder.mkdir()
    write_json(folder / "run.json", {"command": "train", "config": {"run": {"name": "toy"}, **(config or {})}})
    file, kept = JsonLinesFile(folder / "metrics.jsonl"), JsonLinesFile(folder / "samples.jsonl", 1 << 60)
    for step in range(1, steps + 1):
        values = {
            "reward/mean": 0.0,
            "time/step_s": 2.0,
            "component_time/engine_s": 1.5,
            "component_time/controller_s": 0.5,
        }
        file.write(step, values | {name.replace("__", "/"): value for name, value in metrics.items()})
        if samples:
            kept.write(step, {"samples": list(samples)})
    return folder


def answer(data, question: str) -> str:
    """Return the answer to the question that contains a text."""
    return next(each["text"] for each in data["answers"] if question in each["question"])


def test_a_reward_of_0_is_explained_by_truncation_and_names_the_key(tmp_path):
    config = {"rollout": {"max_response_tokens": 7}}
    data = page_data([make_run(tmp_path / "run", config=config, rollout__truncated_fraction=1.0)])
    assert "rollout.max_response_tokens=7" in answer(data, "Why is the reward")
    assert data["health"]["state"] == "bad" and "truncated" in " ".join(data["health"]["lines"])


def test_a_reward_of_0_is_explained_by_rewards_that_failed(tmp_path):
    sample = {"prompt": "p", "response": "r", "reward": 0.0, "failure": "KeyError: 'answer'"}
    data = page_data([make_run(tmp_path / "run", samples=[sample], reward__failed_fraction=1.0)])
    assert "KeyError: 'answer'" in answer(data, "Why is the reward")


def test_what_takes_the_time_is_the_largest_part_of_the_steps(tmp_path):
    data = page_data([make_run(tmp_path / "run")])
    assert "75%, is sampling in the engines" in answer(data, "What takes the time")
    assert "Not recorded" in answer(data, "Which rank is slow")


def test_the_largest_part_of_a_step_can_be_less_than_half_of_it(tmp_path):
    data = page_data([make_run(tmp_path / "run", component_time__engine_s=0.9, component_time__megatron_s=0.6)])
    assert "The largest part, 45%, is sampling in the engines" in answer(data, "What takes the time")


def trainer_rank(rank: int, computing_s: float, pp: int = 0) -> ProcessTimeline:
    """Return the timeline of an actor rank with one step."""
    passes = Span("forward and backward", "phase", 100.0, 10.0, 1)
    work = Span("forward", "micro_batch", 100.0, computing_s, 1, {"tokens": 100})
    return ProcessTimeline(f"actor rank {rank}", "actor", rank, "a", {"pp": pp}, [passes, work])


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([trainer_rank(0, 6.0), trainer_rank(1, 6.0), trainer_rank(2, 9.0)], "actor rank 2 computes 50% longer than"),
        ([trainer_rank(0, 6.0), trainer_rank(1, 6.1)], "No rank is clearly slower than the others."),
        ([trainer_rank(0, 6.0), trainer_rank(1, 9.0, pp=1)], "No two ranks compute the same pipeline stage"),
        ([trainer_rank(0, 6.0)], "The run has only one trainer rank."),
    ],
)
def test_which_rank_is_slow_names_a_slow_rank_or_says_that_there_is_none(tmp_path, ranks, text):
    driver = ProcessTimeline("driver", "driver", 0, spans=[Span("weight_sync", "phase", 110.0, 1.0, 1)])
    run = RecordedRun(tmp_path, timeline=summarize([driver, *ranks]), ranks=trainer_ranks(ranks))
    assert answer({"answers": answers(run)}, "Which rank is slow").startswith(text)
    run = RecordedRun(tmp_path, ranks=trainer_ranks(ranks * 2))
    assert "no complete step" in answer({"answers": answers(run)}, "Which rank is slow")


@pytest.mark.parametrize(
    ("outcome", "words"), [("interrupted", "was interrupted"), ("failed", "failed"), ("finished", "finished")]
)
def test_the_headline_says_how_the_run_ended(tmp_path, outcome, words):
    folder = make_run(tmp_path / "run")
    (folder / "starts.jsonl").write_text(json.dumps({"event": "end", "time": 1, "step": 3, "outcome": outcome}))
    assert f"3 steps; the run {words}" in page_data([folder])["health"]["headline"].replace(", no problem found", "")


ADVANTAGES, DISTILLATION = "mrl.algorithms.advantages.", "mrl.algorithms.distillation.Distillation"


@pytest.mark.parametrize(
    ("algorithm", "is_problem"),
    [
        ({"advantage": {"_target_": f"{ADVANTAGES}NoAdvantage"}, "loss": {"_target_": DISTILLATION}}, False),
        ({"advantage": {"_target_": f"{ADVANTAGES}OnPolicyDistillation"}}, False),
        (
            {
                "advantage": {
                    "_target_": f"{ADVANTAGES}OnPolicyDistillation",
                    "reward": {"_target_": f"{ADVANTAGES}GRPO"},
                }
            },
            True,
        ),
        ({"advantage": {"_target_": f"{ADVANTAGES}GRPO"}}, True),
        ({"advantage": {"_target_": f"{ADVANTAGES}GRPO", "no_such_argument": 1}}, True),
        ({"advantage": {"_target_": "os.abort"}}, True),
    ],
)
@pytest.mark.parametrize("zero_advantage", [1.0, 0.5])
def test_equal_rewards_are_no_problem_of_a_distillation_without_rewards(
    tmp_path, algorithm, is_problem, zero_advantage
):
    values = {
        "reward__std": 0.0,
        "batch__zero_advantage_fraction": zero_advantage,
        "rollout__kept_groups_fraction": 1.0,
    }
    folder = make_run(
        tmp_path / "run", config={"algorithm": algorithm, "rollout": {"responses_per_prompt": 4}}, **values
    )
    lines = page_data([folder])["health"]["lines"]
    assert any("every reward of the step is 0" in line.lower() for line in lines) == is_problem


def test_a_single_response_to_each_prompt_explains_why_a_run_learns_nothing(tmp_path):
    config = {
        "algorithm": {"advantage": {"_target_": f"{ADVANTAGES}GRPO"}},
        "rollout": {"responses_per_prompt": 1},
    }
    folder = make_run(tmp_path / "run", config=config, reward__std=1.0, batch__zero_advantage_fraction=1.0)
    assert "rollout.responses_per_prompt=1, but GRPO compares" in " ".join(page_data([folder])["health"]["lines"])


def test_charts_and_problems_are_described_in_sentences(tmp_path):
    data = page_data([make_run(tmp_path / "run", rollout__truncated_fraction=1.0, optim__grad_norm=1.0)])
    good = {chart["title"]: chart["good"] for chart in data["charts"]}
    assert good["Reward"] == "In a healthy run, the value rises over the run."
    assert good["Gradient norm"] == "In a healthy run, the value is constant, without jumps."
    assert any(
        line.endswith(". The problem “truncated responses” was present in 3 of 3 steps, from step 1 to step 3.")
        for line in data["health"]["lines"]
    )


def test_no_text_of_a_sample_can_end_the_script_of_the_page(tmp_path):
    evil = "</script><script>alert(1)</script>\u2028\x00\x1b[31m"
    page = render(page_data([make_run(tmp_path / "run", samples=[{"prompt": evil, "response": evil, "reward": 1.0}])]))
    text = page.split(b'type="application/json">')[1].split(b"</script>")[0]
    assert json.loads(text)["samples"]["prompts"] == [evil]


def test_a_folder_that_is_no_run_is_an_error_with_a_hint(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2 and "expected a folder with" in capsys.readouterr().err
    assert main(["a", "b", "c"]) == 2 and main([str(tmp_path / "gone")]) == 2


def test_a_run_that_failed_before_its_first_step_says_so(tmp_path):
    folder = make_run(tmp_path / "run", steps=0)
    end = {"event": "end", "time": 1, "step": 0, "outcome": "failed", "error": "out of memory"}
    (folder / "starts.jsonl").write_text(json.dumps(end) + "\nnot json\n")
    data = page_data([folder])
    assert (
        data["health"]["headline"] == "The run failed before its first step."
        and "out of memory" in data["health"]["lines"][0]
    )


def test_damaged_lines_and_nan_are_reported_and_do_not_break_the_page(tmp_path):
    folder = make_run(tmp_path / "run", steps=5, optim__grad_norm=float("nan"))
    lines = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_bytes(b"".join([lines[0], b"{broken\n", *lines[2:]]))
    data = page_data([folder])
    assert len(data["charts"][0]["series"][0]["points"]) == 4 and "metrics.jsonl" in answer(data, "Did anything fail")
    assert render(data)


@pytest.mark.extended
def test_a_large_run_stays_within_the_limit_and_says_what_is_left_out(tmp_path):
    tokens = [f"t{n}" for n in range(100)]
    samples = [
        {
            "prompt": f"question {n} " * 20,
            "response": "word " * 150,
            "reward": 1 - n / 100,
            "group": n,
            "tokens": tokens,
        }
        | {"logprobs": [-0.1 * k for k in range(100)]}
        for n in range(100)
    ]
    data = page_data([make_run(tmp_path / "run", steps=100, samples=samples)])
    assert len(render(data)) <= PAGE_BYTES and "of the 10,000 samples" in data["samples"]["left_out"]
    steps = {row[0] for row in data["samples"]["rows"]}
    assert len(steps) == 100 and data["samples"]["tokens"]


def test_two_runs_are_compared_by_config_reward_and_samples(tmp_path):
    sample = {"prompt": "same", "response": "r", "reward": 0.0}
    first = make_run(tmp_path / "a", config={"optim": {"lr": 1e-4}}, samples=[sample])
    second = make_run(tmp_path / "b", config={"optim": {"lr": 3e-4}}, samples=[sample], reward__mean=1.0)
    data = page_data([first, second])
    assert answer(data, "What changed") == "optim.lr from 0.0001 to 0.0003." and data["step"] == 3
    assert answer(data, "higher reward").startswith("toy b") and [pair["prompt"] for pair in data["pairs"]] == ["same"]


def test_a_sweep_names_the_best_point_and_what_matters(tmp_path):
    points = [(f"optim.lr={lr}", f"run.seed={seed}") for lr in (1, 2) for seed in (0, 1)]
    sweep = dict(group="g", metric="reward/mean", maximize=True, shared_overrides=[], points=points)
    write_json(tmp_path / "sweep.json", sweep)
    for n, reward in enumerate((0.1, 0.2, 0.8, 0.9)):
        run = make_run(tmp_path / str(n), reward__mean=reward, rollout__truncated_fraction=float(n == 0))
        write_json(run / "status.json", {"status": 0, "seconds": 1.0})
    data = page_data([tmp_path])
    key, fraction = data["explained_variance"][0]
    assert data["best"] == 3 and key == "optim.lr" and fraction == pytest.approx(0.98)
    assert "by construction" not in answer(data, "Which key changes the result most")
    assert answer(data, "Why is this point the best").startswith(
        "The mean reward of point 3 (optim.lr=2 run.seed=1) stayed at 0.9. "
        "The mean reward of point 0 (optim.lr=1 run.seed=0) stayed at 0.1, "
        "with the problem “truncated responses” in 3 of 3 steps, from step 1 to step 3. "
    )
    assert answer(data, "How much better").startswith("By 0.1: the nearest other result of a finished point is 0.8")
    assert render(data)


def test_the_curves_of_a_sweep_have_the_labels_and_colors_of_their_points(tmp_path):
    points = [(f"optim.lr={lr}",) for lr in (1, 2, 3)]  # the first point has not started
    sweep = dict(group="g", metric="reward/mean", maximize=True, shared_overrides=[], points=points)
    write_json(tmp_path / "sweep.json", sweep)
    for n in (1, 2):
        make_run(tmp_path / str(n), reward__mean=n / 10)
    data = page_data([tmp_path])
    assert data["labels"] == [f"point {n} (optim.lr={n + 1})" for n in range(3)]
    series = [(curve["run"], curve["label"]) for curve in data["charts"][0]["series"]]
    assert series == [(1, "point 1 (optim.lr=2)"), (2, "point 2 (optim.lr=3)")]


def test_a_key_with_as_many_values_as_measured_points_explains_everything_by_construction(tmp_path):
    points = [(f"optim.lr={lr}",) for lr in (1, 2, 3, 3)]  # the last point has no result
    sweep = dict(group="g", metric="reward/mean", maximize=True, shared_overrides=[], points=points)
    write_json(tmp_path / "sweep.json", sweep)
    for n, reward in enumerate((0.1, 0.2, 0.8)):
        write_json(make_run(tmp_path / str(n), reward__mean=reward) / "status.json", {"status": 0, "seconds": 1.0})
    data = page_data([tmp_path])
    assert answer(data, "Which key changes the result most") == (
        "optim.lr explains 100% of the variance of the results of 3 points. "
        "With as many values as points, a key explains everything by construction."
    )
    assert answer(data, "How much of the sweep is done") == "Of 4 points: 3 done, 1 waiting."


def test_thinned_curves_keep_both_ends_and_the_extremes():
    points = [(step, 100.0 if step == 777 else 0.0) for step in range(10_000)]
    kept = thinned(points)
    assert len(kept) <= 602 and {points[0], points[777], points[-1]} <= set(kept)


def test_the_interval_of_a_mean_is_wilsons():
    assert interval(0.5, 100) == pytest.approx((0.4038, 0.5962), abs=1e-4)


def test_data_sources_and_held_out_sets_have_charts(tmp_path):
    config = {
        "data": {"test_sets": {"aime-24": {"files": ["a"], "rows": 30, "n": 4}, "b": ["b"]}},
        "trainer": {"eval_rows": 50},
    }
    sources = dict(
        reward__gsm8k__mean=0.5, reward__code__mean=0.25, reward__code__form_mean=1.0, reward__form_mean=0.75
    )
    run = make_run(tmp_path / "run", config=config, **sources)
    lines = [
        {"step": step, "eval/aime_24/reward": 0.5, "eval/aime_24/pass_at_4": 0.75, "eval/b/reward_greedy": 0.2}
        for step in (0, 3)
    ]
    (run / "eval.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = page_data([run])
    charts = {chart["title"]: {one["label"]: one["points"] for one in chart["series"]} for chart in data["charts"]}
    assert charts["Reward by data source"].keys() == {"gsm8k", "code"}
    assert charts["Parts of the reward"].keys() == {"form"}
    assert charts["Held-out reward"].keys() == {"aime 24 reward", "b reward greedy"}
    assert charts["Held-out pass@k and maj@k"].keys() == {"aime 24 pass at 4"}
    (first, _), (greedy, _) = charts["Held-out reward"].values()
    assert first == pytest.approx([0, 0.5, *interval(0.5, 30)], abs=1e-3), "rows of the set"
    assert greedy == pytest.approx([0, 0.2, *interval(0.2, 50)], abs=1e-3), "trainer.eval_rows"
    text = answer(data, "Is the model learning")
    assert "Held-out reward (aime_24): 0.5 at the first evaluation" in text
    assert "part form" not in answer(data, "Why is the reward") and "gsm8k" not in answer(data, "Why is the reward")


def test_an_error_before_the_first_step_comes_from_the_log(tmp_path):
    folder = tmp_path / "run"
    (folder / "hydra").mkdir(parents=True)
    (folder / "hydra" / "config.yaml").write_text("run: {name: toy}\noptim: {lr: 0.5}\n")
    lines = [
        "[t][mrl.a][INFO] - fine",
        "[t][mrl.b][ERROR] - reward: KeyError",
        "  Correct the function.",
        "[t][x][INFO] - end",
    ]
    (folder / "mrl.log").write_text("\n".join(lines))
    data = page_data([folder])
    assert data["health"]["lines"] == ["The run ended with an error: reward: KeyError. Correct the function"]
    assert "optim.lr" in {each["key"] for each in data["provenance"]["changed"]}


def test_resumes_and_the_agreement_of_trainer_and_engines_are_answered(tmp_path):
    folder = make_run(tmp_path / "run", mismatch__logprob_abs_mean=0.2)
    events = [("start", 0), ("end", 2), ("resume", 2)]
    lines = [json.dumps({"event": event, "time": 1, "step": step}) for event, step in events]
    (folder / "starts.jsonl").write_text("\n".join(lines))
    data = page_data([folder])
    assert answer(data, "resumed") == "Yes, once: from the checkpoint after step 2."
    assert answer(data, "agree").startswith("No: in step 3") and "0.05" in answer(data, "agree")
    assert answer(data, "Is the model learning").startswith("No: the mean reward of every step is 0.")


def test_few_whole_numbers_have_one_row_each_in_a_distribution(tmp_path):
    samples = [{"prompt": "p", "response": "r", "reward": 0.0, "num_tokens": count} for count in (3, 4, 4, 6)]
    chart = page_data([make_run(tmp_path / "run", steps=1, samples=samples)])["distributions"][0]
    assert chart["edges"] == [2.5, 3.5, 4.5, 5.5, 6.5] and chart["counts"] == [[1, 2, 0, 1]]


@pytest.mark.parametrize(
    ("commits", "changed", "text"),
    [
        (
            (None, None),
            0,
            "Unknown: at least one of the runs has no recorded commit. The recorded packages are the same.",
        ),
        (
            ("a1", None),
            0,
            "Unknown: at least one of the runs has no recorded commit. The recorded packages are the same.",
        ),
        (("a1", "a1"), 2, "Unknown: the commit and the recorded packages are the same, but there were changes"),
        (("a1", "a1"), 0, "Yes: the commit and the recorded packages are the same."),
        (("a1", "b2"), 0, "No: commit a1 in the first run, b2 in the second."),
    ],
)
def test_the_software_of_two_runs_is_unknown_without_commits(tmp_path, commits, changed, text):
    folders = [make_run(tmp_path / name) for name in "ab"]
    for folder, commit in zip(folders, commits, strict=True):
        start = {"event": "start", "time": 1, "step": 0, "commit": commit, "changed_files": changed}
        (folder / "starts.jsonl").write_text(json.dumps(start | {"packages": {"torch": "2"}}))
    assert answer(page_data(folders), "Was the software the same").startswith(text)


def test_the_page_shows_expected_answers_and_refers_to_them_if_all_rewards_are_0(tmp_path):
    sample = {"prompt": "1+1=", "response": "3", "reward": 0.0, "ground_truth": "2"}
    data = page_data([make_run(tmp_path / "run", samples=[sample])])
    (found,) = [each for each in data["answers"] if each["question"] == "Why is the reward what it is?"]
    assert "with the expected answers in the samples" in found["text"] and found["link"] == "samples"
    assert data["samples"]["rows"][0][data["samples"]["columns"].index("ground_truth")] == "2"
    assert answer(data, "What does the model write") == (
        "In step 3, all kept responses have the reward 0, for example: “3”."
    )


def test_a_problem_names_its_steps_and_the_step_of_its_values_once(tmp_path):
    folder = make_run(tmp_path / "run", batch__zero_advantage_fraction=1.0, reward__std=0.0, optim__grad_norm=0.0)
    data = page_data([folder])
    (line,) = data["health"]["lines"]
    assert line.startswith("Every advantage is 0, so") and line.endswith(
        "These are the values of step 2. The problem “no learning signal” was present in 3 of 3 steps, from step 1 to step 3."
    )
    assert answer(data, "Is the training stable").startswith(
        "The weights do not change, because the gradient norm is 0."
    )


def test_the_time_of_a_step_leaves_out_evaluation_and_checkpoints(tmp_path):
    times = dict(time__rollout_s=1.5, time__update_s=0.5, time__evaluate_s=10.0, time__checkpoint_s=1.0)
    data = page_data([make_run(tmp_path / "run", **times)])
    assert answer(data, "What takes the time").startswith(
        "A step takes 2 s on average, without evaluation and checkpoints."
    )
    assert data["time"]["phases"] == {"rollout": [1.5] * 3, "update": [0.5] * 3}
    assert data["sentences"][-1] == "Between the steps, evaluations took 30.00 s and checkpoints took 3.00 s in all."
    assert sum(seconds for _, seconds in data["components"]) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("last", "first", "text", "state"),
    [
        (0.0, 0.0, "No: 0% of", ""),
        (0.0, 0.6, "Hardly: 0% of", ""),
        (0.04, 0.04, "Hardly: 4% of", ""),
        (0.06, 0.0, "Yes: 6% of", "bad"),
    ],
)
def test_the_last_steps_decide_whether_truncation_matters(tmp_path, last, first, text, state):
    metrics = {step: {"rollout/truncated_fraction": first if step < 7 else last} for step in range(1, 10)}
    found = next(each for each in answers(RecordedRun(tmp_path, metrics=metrics)) if "cut off" in each["question"])
    assert found["text"].startswith(f"{text} the responses of the last 3 steps") and found["state"] == state


@pytest.mark.parametrize(
    ("parallel", "text"),
    [
        ({"tp": 1, "dp": 1}, "The run has only one trainer rank."),
        ({"tp": 1, "dp": None}, "The run has only one trainer rank."),
        (
            {"dp": 2},
            "No timeline was recorded (tracking.timeline=true records one). Estimated from the batches, one replica",
        ),
    ],
)
def test_a_run_with_one_rank_has_no_slow_rank_also_without_a_timeline(tmp_path, parallel, text):
    folder = make_run(tmp_path / "run", config={"parallel": parallel}, batch__imbalance=1.2)
    assert answer(page_data([folder]), "Which rank is slow").startswith(text)


def ended(folder: Path, outcome: str, error: str | None = None) -> Path:
    end = {"event": "end", "time": 1, "step": 3, "outcome": outcome, "error": error}
    (folder / "starts.jsonl").write_text(json.dumps(end))
    return folder


def test_a_run_that_reached_its_goal_says_so_and_continues_without_the_goal(tmp_path):
    config = {"trainer": {"max_steps": 60, "stop_reward": 0.92}}
    folder = ended(make_run(tmp_path / "run", config=config), "finished")
    (folder / "hydra").mkdir()
    (folder / "hydra" / "overrides.yaml").write_text("[optim.lr=1, trainer.stop_reward=0.92]")
    data = page_data([folder])
    assert "the run stopped at step 3 of 60: trainer.stop_reward=0.92 was reached" in data["health"]["headline"]
    command = f"mrl train optim.lr=1 run.dir={folder} trainer.max_steps=60 trainer.stop_reward=null"
    assert answer(data, "How do I go on") == command


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            "KeyError: 'a' (/x/reward.py:4, in broken)",
            "Correct the function broken in /x/reward.py, line 4. Then start",
        ),
        ("out of memory", "Correct the error that the top of this page shows. Then start the run again."),
    ],
)
def test_a_failed_run_goes_on_with_the_correction_of_its_error(tmp_path, error, text):
    folder = ended(make_run(tmp_path / "run", steps=0), "failed", f"\x1b[36m{error}\x1b[39m\n  ^^^^^^")
    (folder / "hydra").mkdir()
    (folder / "hydra" / "overrides.yaml").write_text("[scoring.rehearse=false]")
    data = page_data([folder])
    assert answer(data, "How do I go on").startswith(text) and error in data["health"]["lines"][0]
    assert "\x1b" not in data["provenance"]["events"][0]["error"] and "^^" not in data["health"]["lines"][0]
    assert data["provenance"]["next"] == [
        {"title": "Start the run again, after the error is corrected", "command": f"mrl train run.dir={folder}"}
    ]
    assert data["samples"]["left_out"] == "No samples were recorded: no step finished."


def test_failed_tool_calls_are_failures(tmp_path):
    data = page_data([make_run(tmp_path / "run", rollout__tool_errors_fraction=0.13)])
    assert answer(data, "Did anything fail") == "Yes: up to 13% of the tool calls of a step failed."


def test_a_sweep_says_how_results_are_averaged_whether_the_lead_is_clear_and_which_points_have_problems(tmp_path):
    points = [("optim.lr=1",), ("optim.lr=2",), ("optim.lr=3",)]
    sweep = dict(group="g", metric="reward/mean", maximize=True, shared_overrides=[], points=points)
    write_json(tmp_path / "sweep.json", sweep)
    for n, rewards in enumerate(([0.5, 0.6, 0.7], [0.4, 0.6, 0.6], [0.0, 0.0, 0.0])):
        run = make_run(tmp_path / str(n), rollout__truncated_fraction=float(n == 2))
        write_rewards(run, rewards, truncated=float(n == 2))
        write_json(run / "status.json", {"status": 0, "seconds": 1.0})
    data = page_data([tmp_path])
    assert "result: mean of reward/mean over the last 5 steps; larger is better" in data["subtitle"]
    assert answer(data, "How much better").endswith(
        "The lead is within the noise: it is not more than twice the standard error of the difference, 0.088."
    )
    trouble = "problem “truncated responses” in 3 of 3 steps, from step 1 to step 3"
    assert [point["reason"] for point in data["points"]] == ["", "", trouble]
    assert answer(data, "Did a point fail") == f"No point failed, but point 2 (optim.lr=3) has the {trouble}."
    write_rewards(tmp_path / "0", [0.9, 0.9, 0.9])
    assert "The lead is clear" in answer(page_data([tmp_path]), "How much better")


def write_rewards(run: Path, rewards: list[float], truncated: float = 0.0) -> None:
    """Replace the metrics of a run by steps with these rewards."""
    (run / "metrics.jsonl").unlink()
    (run / ".metrics.jsonl.hashes").unlink(missing_ok=True)
    file = JsonLinesFile(run / "metrics.jsonl")
    for step, reward in enumerate(rewards, 1):
        file.write(step, {"reward/mean": reward, "rollout/truncated_fraction": truncated})
