"""Planning reads the data section of the config: overrides, policies for bad rows, and defaults."""

import json
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mrl.config import hydra_entry
from mrl.config.instantiate import instantiate_callable
from mrl.controller.plan_models import plan_model
from mrl.controller.plan_prompts import load_prompt_datasets, plan_evaluations
from mrl.controller.plan_step import plan_sampling
from mrl.controller.plan_supervised import warm_start_settings
from mrl.controller.plan_train import _server_args
from mrl.data.synthetic_tasks import make_doubling_task


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan") / "made"
    make_doubling_task(folder)
    for name, rows in (("train", 40), ("test", 10)):
        pq.write_table(pq.read_table(folder / f"{name}.parquet").slice(0, rows), folder / f"{name}.parquet")
    lines = [json.dumps({"q": f"{n}+1=", "a": n + 1}) for n in range(20)]
    (folder / "plain.jsonl").write_text("\n".join([*lines, "{oops", json.dumps({"q": "1" * 70, "a": 1})]))
    return folder


def config_of(inputs, tmp_path, *overrides):
    """Return the config of the quickstart with these overrides."""
    argv = hydra_entry.check_overrides(
        ["experiment=quickstart", f"data.inputs.folder={inputs}", f"run.dir={tmp_path / 'run'}", *overrides]
    )
    return hydra_entry.compose_config(argv)


def plan(inputs, tmp_path, *overrides):
    """Return the training set and the held-out set of the quickstart with these overrides."""
    config = config_of(inputs, tmp_path, *overrides)
    reward = instantiate_callable(config.reward, "reward")
    return load_prompt_datasets(config, plan_model(config, config.model.path), reward, plan_evaluations(config))


def plain(inputs):
    return [f"data.train=[{inputs}/plain.jsonl]", "data.columns={prompt:q,ground_truth:a}", "data.test=[]"]


@pytest.mark.extended
def test_the_quickstart_has_training_and_held_out_prompts(inputs, tmp_path):
    train, test = plan(inputs, tmp_path)
    assert (len(train), len(test)) == (40, 10) and test.rows_by_source() == {"": range(10)}
    assert not (tmp_path / "run").exists(), "nothing to list"


@pytest.mark.extended
def test_bad_and_overlong_rows_are_errors_unless_the_config_skips_them(inputs, tmp_path):
    listed = tmp_path / "run/bad_rows_train.jsonl"
    with pytest.raises(ValueError, match=r"2 of 22 rows cannot be used:\n.*row 20: not a JSON.*\n.*row 21.*70 tokens"):
        plan(inputs, tmp_path, *plain(inputs))
    assert len(listed.read_text().splitlines()) == 2
    with pytest.raises(
        ValueError, match=r"1 of 22 rows.*\n.*70 tokens are more than the 57(.|\n)*set data.overlong=skip"
    ):
        plan(inputs, tmp_path, *plain(inputs), "data.bad_rows=skip")
    train, test = plan(inputs, tmp_path, *plain(inputs), "data.bad_rows=skip", "data.overlong=skip")
    assert (train.report.rows, train.report.kept, train.report.num_bad, train.report.num_overlong) == (22, 20, 1, 1)
    assert [json.loads(line)["overlong"] for line in listed.read_text().splitlines()] == [False, True]
    assert test is None and train.ground_truth(19) == "20"


@pytest.mark.extended
def test_a_mixture_and_named_test_sets_can_be_set_on_the_command_line(inputs, tmp_path):
    doubling = f"doubling:{{files:[{inputs}/train.parquet],weight:3}}"
    sums = f"sums:{{files:[{inputs}/plain.jsonl],columns:{{prompt:q,ground_truth:a}}}}"
    train, test = plan(
        inputs, tmp_path, "data.train=[]", f"data.mixture={{{doubling},{sums}}}",
        f"data.test_sets.held_out=[{inputs}/test.parquet]", "data.bad_rows=skip", "data.overlong=skip",
    )  # fmt: skip
    assert test.rows_by_source() == {"": range(10), "held_out": range(10, 20)} and test.data_source(10) == "doubling"
    assert train.rows_by_source() == {"doubling": range(40), "sums": range(40, 60)}
    rows = next(train.stream(64, seed=0, shuffle=True))
    assert (rows < 40).sum() == 48
    with pytest.raises(ValueError, match=r"data.train and data.mixture are set"):
        plan(inputs, tmp_path, f"data.mixture={{{doubling}}}")


@pytest.mark.extended_after(1)
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.overlong=filter", "data.overlong='filter': expected error or skip"),
        ("data.bad_rows=skp", "data.bad_rows='skp': expected error or skip; did you mean skip"),
        ("data.template_args.thinking=true", "data.template_args.thinking: not a variable of the chat template"),
        ("data.chat_template=/nowhere.jinja", "data.chat_template=/nowhere.jinja: no such file"),
        ("data.train=[]", "data.train must name at least one"),
        (
            "data.test=[/nowhere.parquet]",
            "/nowhere.parquet: no such file; expected a .jsonl or .parquet file, or a folder",
        ),
    ],
)
def test_a_mistake_in_the_data_section_names_its_key(inputs, tmp_path, override, message):
    with pytest.raises(ValueError, match=message):
        plan(inputs, tmp_path, override)


@pytest.mark.extended
def test_prompts_leave_room_for_the_response(inputs, tmp_path):
    with pytest.raises(
        ValueError, match=r"40 of 40 rows cannot be used:\n.*7 tokens are more than the 4 that leave room"
    ):
        plan(inputs, tmp_path, "data.max_prompt_tokens=4")
    with pytest.raises(ValueError, match=r"the files: no row is left \(0 of 40 rows kept, 0 bad, 40 overlong\)"):
        plan(inputs, tmp_path, "data.max_prompt_tokens=4", "data.overlong=skip")
    assert len((tmp_path / "run/bad_rows_train.jsonl").read_text().splitlines()) == 40


BY_SOURCE = ["reward=by_source", "reward.rewards.doubling.source=dou*", "reward.rewards.doubling.ability=math"]
EXACT = "reward.rewards.doubling.reward._target_=mrl.rewards.rule_based.ExactMatch"


@pytest.mark.extended
def test_a_row_that_no_pattern_of_the_reward_matches_is_refused(inputs, tmp_path):
    train, test = plan(inputs, tmp_path, *BY_SOURCE, EXACT)
    assert (len(train), len(test)) == (40, 10)
    sums = [*plain(inputs), "data.bad_rows=skip", "data.overlong=skip"]
    with pytest.raises(ValueError, match=r"no row is left \(0 of 22 rows kept, 22 bad, 0 overlong"):
        plan(inputs, tmp_path, *BY_SOURCE, EXACT, *sums)
    with pytest.raises(ValueError) as error:
        plan(inputs, tmp_path, *BY_SOURCE, EXACT, *plain(inputs), f"data.test=[{inputs}/test.parquet]")
    assert (
        f"{inputs}/plain.jsonl, row 0, column 'data_source': no pattern of the reward matches data_source 'plain'; the patterns "
        "are openai/gsm8k, math*, doubling (source dou*, ability math). Add a pattern to rewards, or set default."
    ) in str(error.value)
    default = "reward.default._target_=mrl.rewards.rule_based.ExactMatch"
    assert len(plan(inputs, tmp_path, *BY_SOURCE, EXACT, *sums, default)[0]) == 20


@pytest.mark.extended
def test_the_longest_responses_of_a_set_limit_its_prompts(inputs, tmp_path):
    def sets(limit: int) -> str:
        return f"data.test_sets={{long: {{files: [{inputs}/test.parquet], max_response_tokens: {limit}}}}}"

    with pytest.raises(
        ValueError, match=r"10 of 20 rows cannot be used:\n.*7 tokens are more than the 4 that leave room"
    ):
        plan(inputs, tmp_path, sets(60))
    assert len(plan(inputs, tmp_path, sets(57))[1]) == 20
    with pytest.raises(
        ValueError, match=r"data.test_sets.long.max_response_tokens=64: the model's context of 64 tokens"
    ):
        plan(inputs, tmp_path, sets(64))


@pytest.mark.extended
def test_each_set_needs_a_reward_that_scores_its_rows(inputs, tmp_path):
    none = "{_target_: mrl.rewards.by_source.BySource, rewards: {aime: {_target_: mrl.rewards.rule_based.GSM8K}}}"
    with pytest.raises(
        ValueError, match=r"10 of 20 rows cannot be used:\n.*no pattern .* 'doubling'.* the patterns are aime"
    ):
        plan(inputs, tmp_path, f"data.test_sets={{x: {{files: [{inputs}/test.parquet], reward: {none}}}}}")


@pytest.mark.extended
@pytest.mark.parametrize(
    ("node", "message"),
    [
        ("temprature: 1", "data.test_sets.x.temprature: unknown key; did you mean 'temperature'?"),
        ("max_tokens: 1", "data.test_sets.x.max_tokens: unknown key; did you mean"),
        ("weight: 2", "data.test_sets.x.weight: unknown key"),
    ],
)
def test_a_misspelled_key_of_a_set_has_a_hint(inputs, tmp_path, node, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        plan(inputs, tmp_path, f"data.test_sets={{x: {{files: [{inputs}/test.parquet], {node}}}}}")


@pytest.mark.extended
def test_more_than_20_data_sources_are_a_warning_that_is_seen(inputs, tmp_path, caplog):
    rows = pq.read_table(inputs / "train.parquet").to_pylist()
    for number, row in enumerate(rows):
        row["data_source"] = f"source {number % 21}"
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "many.parquet")
    with caplog.at_level("WARNING", logger="mrl.tracking.console"):
        plan(inputs, tmp_path)
        assert not caplog.records
        plan(inputs, tmp_path, f"data.train=[{tmp_path}/many.parquet]")
    (record,) = caplog.records
    assert "the training data has 21 data sources; only the 20 with the most rows get metrics" in record.getMessage()
    assert record.name == "mrl.tracking.console", (
        "mrl.core.run_warnings shows the warnings of this logger on the terminal"
    )


@pytest.mark.extended
def test_stop_texts_need_engines_with_a_tokenizer(inputs, tmp_path):
    def server_args(*overrides):
        config = config_of(inputs, tmp_path, *overrides)
        return _server_args(config, 64, plan_sampling(config), plan_evaluations(config))

    stop = f"data.test_sets={{x: {{files: [{inputs}/test.parquet], stop: [a, b]}}}}"
    assert server_args()["skip_tokenizer_init"] is True
    assert server_args(stop)["skip_tokenizer_init"] is False
    with pytest.raises(ValueError, match=r"sglang.skip_tokenizer_init=true: .* the texts of data.test_sets.x.stop"):
        server_args(stop, "+sglang.skip_tokenizer_init=true")


@pytest.mark.extended
def test_another_chat_template_makes_another_warm_start(inputs, tmp_path):
    def made_from(*overrides):
        return warm_start_settings(config_of(inputs, tmp_path, *overrides))

    assert len({str(made_from(o)) for o in ("run.seed=0", "data.template_args.x=1", "data.chat_template=a.jinja")}) == 3
