"""`mrl samples` and samples.jsonl: which responses of a step are kept, and how they are shown."""

import io
import json
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console
from sampled_groups import group, trajectory

from mrl import cli
from mrl.core.sample_file import (
    MAX_CHARACTERS,
    MAX_TOKENS,
    SAMPLES_FILE,
    SampleFile,
    TextSample,
    best_and_worst_text,
    read_samples,
    shortened,
    spread,
)
from mrl.rewards.reward_types import Score
from mrl.rollout.rollout_log import text_samples
from mrl.rollout.trajectory import Group, Sample
from mrl.tracking.console import ConsoleSink


def sample(reward, **fields):
    return TextSample(
        f"prompt of {reward}", f"response of {reward}", reward, 7, 3, 5, **({"truncated": False} | fields)
    )


@pytest.fixture
def run_dir(tmp_path):
    """Write three steps. The responses of a step have the rewards step + 0.9, step + 0.5 and step + 0.1."""
    file = SampleFile(tmp_path)
    for step in (1, 2, 3):
        file.write(step, [sample(step + part) for part in (0.9, 0.5, 0.1)])
    return tmp_path


def rewards_shown(capsys):
    return [float(line.split()[1]) for line in capsys.readouterr().out.splitlines() if line.startswith("reward ")]


@pytest.mark.parametrize(
    "arguments, rewards",
    [
        ([], [3.9, 3.5, 3.1]),
        (["--step", "2"], [2.9, 2.5, 2.1]),
        (["--step", "2", "--worst", "-n", "1"], [2.1]),
        (["--best", "-n", "2"], [3.9, 3.5]),
        (["-n", "2"], [3.9, 3.1]),
        (["--best", "--worst", "-n", "2"], [3.9, 3.1]),
    ],
)
@pytest.mark.parametrize("form", ["{}", "run.dir={}"])
def test_the_command_shows_the_chosen_responses(run_dir, capsys, arguments, rewards, form):
    assert cli.main(["samples", form.format(run_dir), *arguments]) == 0
    assert rewards_shown(capsys) == rewards


def test_a_sample_is_shown_with_prompt_response_parts_truncation_and_weight_version(tmp_path, capsys):
    shown = sample(0.25, truncated=True, parts={"format": 1.0}, failure="boxd is missing", ground_truth="42")
    SampleFile(tmp_path).write(1, [shown])
    assert cli.main(["samples", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    for text in (
        "reward 0.25  (row 7, 5 sampled tokens, truncated, weight version 3, format 1)",
        "not scored: boxd is missing",
    ):
        assert text in out
    assert "prompt:\n    prompt of 0.25\n  expected answer:\n    42\n  response:\n    response of 0.25\n" in out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--step", "9"], "--step 9: .* has samples of the steps 1 to 3"),
        (["-n", "0"], "-n 0: expected 1 or more"),
    ],
)
def test_a_step_that_is_not_there_is_one_line(run_dir, capsys, arguments, message):
    assert cli.main(["samples", str(run_dir), *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(message, line)


def test_a_folder_without_samples_says_what_was_expected(tmp_path, capsys):
    assert cli.main(["samples", str(tmp_path)]) == 2
    assert "expected the run directory of `mrl train`" in capsys.readouterr().err


def test_a_line_that_is_being_written_is_not_read(run_dir):
    with (run_dir / SAMPLES_FILE).open("a") as file:
        file.write('{"step": 4, "samples": [{"prom')
    assert [step for step, _ in read_samples(run_dir)] == [1, 2, 3]


def test_repeated_steps_replace_their_samples_also_after_a_restart(run_dir):
    file = SampleFile(run_dir)
    for _ in range(2):
        file.write(2, [sample(0.0)])
        assert [(step, len(found)) for step, found in read_samples(run_dir)] == [(1, 3), (2, 1)]
        file.write(3, [sample(0.0)])


def test_kept_responses_cover_the_range_of_rewards():
    assert spread([0.1, 0.9, 0.5, 0.7, 0.3], 3) == [1, 2, 0]
    assert spread([0.0, 1.0, 0.0], 8) == [1, 0, 2]
    assert spread([0.0, 1.0], 1) == [1] and spread([], 3) == []


def test_long_texts_keep_their_start_and_end():
    text = shortened("a" * 5000 + "z" * 5000)
    assert text.startswith("aaa") and text.endswith("zzz") and "[... 6000 characters ...]" in text
    assert shortened("b" * MAX_CHARACTERS) == "b" * MAX_CHARACTERS


def test_control_characters_of_a_response_do_not_act_on_the_terminal():
    text = TextSample("p", "\x1b[2Jhidden\rshown\ttab", 0.0, 0, 0, 1, False).text()
    assert "\x1b" not in text and r"\x1b[2Jhidden" in text and "shown\ttab" in text


def test_the_rollout_worker_turns_groups_into_text():
    groups = [group(4, Score(0.0), Score(1.0, parts={"exact": 1.0})), group(5, Score.failed("too slow"))]
    best, worst = text_samples(groups, [1, 2], worker_data(), {})
    assert (best.reward, best.row, best.prompt, best.response) == (1.0, 4, "4 7", "100 101 102")
    assert (best.parts, best.weight_version, best.num_tokens) == ({"exact": 1.0}, 3, 3)
    assert worst.row == 5 and worst.failure == "too slow"
    assert best.ground_truth == "7" and worst.ground_truth == '["1", "2"]'
    (without,) = text_samples([group(6, Score(0.0))], [0], worker_data(), {})
    assert without.ground_truth is None


def test_a_truncated_response_of_an_agent_says_that_the_limit_counts_tool_results():
    turns = [{"role": "assistant", "text": "1+1"}, {"role": "tool", "text": "2"}]
    assert (
        "5 sampled tokens, truncated (the limit also counts tool results)"
        in sample(0.0, truncated=True, turns=turns).text()
    )


def test_a_failure_that_is_no_valid_unicode_is_kept(tmp_path):
    found = text_samples([group(5, Score.failed("no file \udcff.json"))], [0], worker_data(), {})
    SampleFile(tmp_path).write(1, found)
    assert [one.failure for _, samples in read_samples(tmp_path) for one in samples] == ["no file ?.json"]


@pytest.mark.parametrize("terminal", [False, True])
def test_the_terminal_shows_the_best_and_the_worst_response_every_few_steps(run_dir, terminal):
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=terminal, width=200)
    sink = ConsoleSink(
        4, every_s=3600, samples_every=3, read_samples=lambda s: best_and_worst_text(run_dir, s), console=console
    )
    for step in (1, 2, 3, 4):
        sink.log(step, {"reward/mean": 0.5})
    sink.close()
    text = screen.getvalue()
    assert "best of step 3: reward 3.9" in text and "worst of step 3: reward 3.1" in text and "response of 3.1" in text
    assert "of step 2" not in text and "reward 3.5" not in text


def test_samples_of_another_step_are_not_shown(run_dir, tmp_path):
    assert best_and_worst_text(run_dir, 2) == "", "the file has step 3 already"
    assert best_and_worst_text(tmp_path / "none", 1) == ""


def worker_data(source=""):
    """Return a stand-in for a PromptDataset, whose tokens decode to their numbers."""
    return SimpleNamespace(
        decode=lambda rows: [" ".join(map(str, row)) for row in rows],
        token_texts=lambda token_ids: list(map(str, token_ids)),
        data_source=lambda row: source,
        ground_truth=lambda row: {4: "7", 5: ["1", "2"]}.get(row, ""),
    )


def test_a_sample_has_the_values_of_its_own_tokens():
    first, second = group(4, Score(0.0), Score(1.0)), group(5, Score(0.5), sampled=[True, False])
    columns = {"advantages": np.arange(6.0) - 3, "old_logprobs": np.array([0, -1, -2, -3, np.nan, -5])}
    rewards = [sample.score.value for each in (first, second) for sample in each.samples]
    best, middle, worst = text_samples([first, second], spread(rewards, 3), worker_data("sums"), columns)
    assert best.tokens == ["100", "101", "102"] and best.trained == [1, 1, 1] and best.group == 0
    assert best.advantages == [-1, 0, 1] and best.trainer_logprobs == [-2, -3, None], "tokens 2 to 4 of the step"
    assert best.logprobs == [0, -0.1, -0.2] and best.versions == [3, 3, 3] and best.source == "sums"
    assert best.mismatches == [-2.0, pytest.approx(-2.9), None]
    assert middle.group == 1 and middle.trained == [1, 0] and middle.versions == [3, None]
    assert middle.advantages == [2, None] and middle.logprobs == [0, None] and worst.advantages == [-3, -2]
    assert [turn["role"] for turn in middle.turns] == ["assistant", "tool"] and best.turns == []


def test_tokens_of_several_weight_versions_name_their_version():
    mixed = trajectory(4, sampled=[True, True, False, True])
    mixed = replace(mixed, versions=((3, 1), (4, 2)))
    (found,) = text_samples([Group([Sample(0, [1], mixed, Score(1.0))])], [0], worker_data(), {})
    assert found.versions == [3, 4, None, 4] and found.trainer_logprobs == [None] * 4 == found.advantages


def test_a_long_response_keeps_the_tokens_of_its_start_and_end():
    long = trajectory(MAX_TOKENS + 10)
    (found,) = text_samples([Group([Sample(0, [1], long, Score(1.0))])], [0], worker_data(), {})
    assert len(found.tokens) == len(found.logprobs) == MAX_TOKENS and found.omitted_tokens == 10
    assert found.tokens[0] == "100" and found.tokens[-1] == str(100 + MAX_TOKENS + 9)
    assert found.logprobs[-1] == pytest.approx(-0.1 * (MAX_TOKENS + 9))


def test_samples_of_older_versions_of_mrl_are_read(run_dir):
    path = run_dir / SAMPLES_FILE
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    old = {"prompt", "response", "reward", "row", "weight_version", "num_tokens", "truncated", "parts", "failure"}
    for line in lines:
        line["samples"] = [{name: one[name] for name in old} for one in line["samples"]]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run_dir / f".{SAMPLES_FILE}.hashes").unlink()
    (step, found), *_ = read_samples(run_dir)
    assert step == 1 and found[0].reward == 1.9 and not found[0].tokens


@pytest.fixture
def token_run(tmp_path):
    """Write one step. Group 0 has the rewards 1 and 0, and group 1 has two equal rewards."""
    lists = dict(tokens=["2", "0\n"], trained=[1, 1], logprobs=[-2.0, -1.0], trainer_logprobs=[-2.5, None])
    lists |= dict(advantages=[1.0, 1.0], versions=[3, 4])
    samples = [sample(reward, group=number, source=source, **lists) for reward, number, source in SAMPLES]
    SampleFile(tmp_path).write(1, samples)
    return tmp_path


SAMPLES = [(1.0, 0, "sums"), (0.5, 1, "products"), (0.5, 1, "products"), (0.0, 0, "sums")]


@pytest.mark.parametrize(
    "arguments, rewards",
    [
        (["--group", "0"], [1.0, 0.0]),
        (["--equal"], [0.5, 0.5]),
        (["--source", "sums"], [1.0, 0.0]),
        (["--search", "of 0.0"], [0.0]),
    ],
)
def test_samples_are_filtered(token_run, capsys, arguments, rewards):
    assert cli.main(["samples", str(token_run), *arguments]) == 0
    assert rewards_shown(capsys) == rewards


def test_filters_that_match_nothing_are_one_line(token_run, capsys):
    assert cli.main(["samples", str(token_run), "--search", "no such text"]) == 2
    assert "no sample of step 1 (4 are kept) matches the filters" in capsys.readouterr().err


RED, BLUE = "\x1b[38;2;214;69;65m", "\x1b[38;2;38;130;196m"


@pytest.mark.parametrize("coloring, legend", [("logprob", "-2"), ("version", "3"), ("mismatch", "-0.5")])
def test_tokens_are_colored_by_their_values_with_a_legend(token_run, capsys, monkeypatch, coloring, legend):
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert cli.main(["samples", str(token_run), "--color", coloring]) == 0
    out = capsys.readouterr().out
    assert f"from {RED}{legend}" in out or coloring == "mismatch"
    if coloring == "mismatch":
        assert "\x1b[38;2;128;128;128m2" in out, "a single value is in the middle of the range"
    else:
        assert f"{RED}2\x1b[0m{BLUE}0\x1b[0m" in out


def test_no_color_leaves_out_the_escape_codes(token_run, capsys, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    assert cli.main(["samples", str(token_run), "--color", "logprob"]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_a_color_without_values_says_why(run_dir, capsys):
    assert cli.main(["samples", str(run_dir), "--color", "advantage"]) == 2
    assert "an older version of mrl wrote the samples" in capsys.readouterr().err
