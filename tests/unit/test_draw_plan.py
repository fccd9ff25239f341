"""Planning what steps draw: sampling, samplers, group sizes, rows of a file and epochs are checked before any process starts."""

import json
import re
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
from test_data_plan import config_of, inputs  # noqa: F401

from mrl.algorithms.parts import build_algorithm
from mrl.config.instantiate import instantiate_callable
from mrl.controller.plan_models import plan_model
from mrl.controller.plan_prompts import load_prompt_datasets, plan_evaluations
from mrl.controller.plan_step import (
    check_epochs,
    check_sampling,
    num_steps,
    plan_offline,
    plan_prompt_drawing,
    plan_sampling,
    prompt_stream,
    tokenizer_args,
    warn_of_sampling,
)
from mrl.core.types import OFFLINE
from mrl.rollout.client import SamplingParams
from mrl.rollout.trajectory import (
    driver_columns,
    known_rollout_logprobs,
    offline_groups,
    to_block,
    with_offline_column,
)


@pytest.fixture
def config(inputs, tmp_path):  # noqa: F811
    """`config(override, ...)` -> the config of the quickstart, which has 40 training rows, with these overrides."""

    def get(*overrides):
        return config_of(inputs, tmp_path, *overrides)

    return get


@pytest.fixture
def warnings(caplog):
    caplog.set_level("WARNING", logger="mrl.tracking.console")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "mrl.tracking.console"]


def prompts_of(config):
    reward = instantiate_callable(config.reward, "reward")
    return load_prompt_datasets(config, plan_model(config, config.model.path), reward, plan_evaluations(config))[0]


@pytest.mark.extended
def test_the_keys_of_sampling_have_sglangs_names(config):
    assert plan_sampling(config()) == SamplingParams(7)
    own = plan_sampling(
        config(
            "rollout.temperature=0.8", "rollout.top_p=0.9", "rollout.top_k=20", "rollout.min_p=0.05",
            "rollout.repetition_penalty=1.1", "rollout.stop=['###']", "rollout.stop_token_ids=[3]",
        )
    )  # fmt: skip
    body = dict(max_new_tokens=7, temperature=0.8, top_p=0.9, top_k=20, min_p=0.05, repetition_penalty=1.1)
    assert own.body() == body | dict(stop=["###"], stop_token_ids=[3])


@pytest.mark.extended_after(1)
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.top_p=0", "rollout.top_p=0.0: must be greater than 0 and at most 1"),
        ("rollout.top_k=0", "rollout.top_k=0: expected a whole number, 1 or more, or -1 for all tokens"),
        ("rollout.min_p=2", "rollout.min_p=2.0: must be 0 or more and at most 1"),
        ("rollout.repetition_penalty=3", "rollout.repetition_penalty=3.0: must be greater than 0 and at most 2"),
        ("rollout.stop=['']", r"rollout.stop=\(''?,?\)|rollout.stop=.*expected a text or a list of at most 32 texts"),
        ("rollout.stop_token_ids=[-1]", "rollout.stop_token_ids=.*expected a list of token ids|must be"),
        ("rollout.stop_token_ids=[32]", "rollout.stop_token_ids=.32.: token 32 is outside the vocabulary.*ends at 31"),
        (
            "rollout.min_p=0.1",
            "rollout.min_p=0.1 with rollout.deterministic=true: SGLang cannot sample with min_p and a seed",
        ),
    ],
)
def test_sampling_that_the_engines_would_refuse_is_refused_before_they_start(config, override, message):
    with pytest.raises(ValueError, match=message):
        wrong = config(override)
        check_sampling(wrong, plan_sampling(wrong), plan_evaluations(wrong), vocab_size=32)


def test_min_p_of_a_held_out_set_is_refused_too(config, inputs):  # noqa: F811
    own = config(f"data.test_sets={{aime: {{files: [{inputs}/test.parquet], min_p: 0.2}}}}")
    with pytest.raises(ValueError, match=r"data.test_sets.aime.min_p=0.2 with rollout.deterministic=true"):
        check_sampling(own, plan_sampling(own), plan_evaluations(own), vocab_size=32)


@pytest.mark.extended
def test_stop_texts_of_the_run_need_engines_with_a_tokenizer(config):
    own = config("rollout.stop=['4']")
    assert tokenizer_args(own, plan_sampling(own), ()) == {"skip_tokenizer_init": False}
    assert tokenizer_args(config(), plan_sampling(config()), ()) == {}
    without = config("rollout.stop=['4']", "+sglang.skip_tokenizer_init=true")
    with pytest.raises(ValueError, match=r"sglang.skip_tokenizer_init=true: .* the texts of rollout.stop"):
        tokenizer_args(without, plan_sampling(without), ())


IMPORTANCE = "++algorithm.correction._target_=mrl.algorithms.corrections.ImportanceSampling"


@pytest.mark.extended_after(1)
@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), []),
        (("rollout.stop=['4']", "rollout.temperature=0.5"), []),
        (
            ("rollout.top_p=0.9", "rollout.top_k=5"),
            ["rollout.top_p=0.9, rollout.top_k=5: the engines leave out unlikely"],
        ),
        (("rollout.min_p=0.1", IMPORTANCE), ["rollout.min_p=0.1: the engines leave out unlikely tokens"]),
        (("rollout.repetition_penalty=1.2",), ["rollout.repetition_penalty=1.2: .*Set algorithm.correction"]),
        (("rollout.repetition_penalty=1.2", IMPORTANCE), []),
        (("rollout.repetition_penalty=1.2", "algorithm.old_logprobs=rollout"), []),
    ],
)
def test_what_training_does_not_correct_for_is_shown(config, warnings, overrides, expected):
    own = config(*overrides)
    warn_of_sampling(own, build_algorithm(own).objective)
    found = warnings()
    assert len(found) == len(expected)
    for text, pattern in zip(found, expected, strict=True):
        assert re.search(pattern, text)


@pytest.mark.extended
def test_a_sampler_and_group_sizes_are_built_and_identified_by_their_node(config):
    own = config(
        "++data.sampler._target_=mrl.data.samplers.Curriculum", "++data.sampler.column=index",
        "++data.sampler.stages=4", "rollout.prompts_per_step=10",
        "++rollout.group_sizes._target_=mrl.data.samplers.ByDifficulty",
    )  # fmt: skip
    train = prompts_of(own)
    prompt_drawing = plan_prompt_drawing(own, train)
    rows = prompt_stream(own, train, prompt_drawing).take(10)
    assert sorted(train.extra_info(row)["index"] for row in rows.tolist()) == list(range(10))
    assert json.loads(prompt_drawing.name) == own.data.sampler and prompt_drawing.needs_history
    assert (
        plan_prompt_drawing(config(), train).sampler is None and not plan_prompt_drawing(config(), train).needs_history
    )


def broken_sampler(chosen):
    raise RuntimeError("no rows today")


@pytest.mark.extended_after(1)
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["++data.sampler._target_=mrl.data.samplers.Curriculum"],
            "data.sampler: .*Curriculum rejects its arguments.*column",
        ),
        (
            ["++data.sampler._target_=test_draw_plan.broken_sampler"],
            "data.sampler: test_draw_plan.broken_sampler failed: .*no rows",
        ),
        (
            ["++data.sampler._target_=mrl.data.samplers.Shuffled", "data.shuffle=false"],
            "data.shuffle=false: only the default",
        ),
        (
            ["++data.sampler._target_=mrl.data.samplers.Curriculum", "++data.sampler.column=hard"],
            "data.sampler: mrl.data.samplers.Curriculum failed: row 0 of the training prompts has no hard in extra_info",
        ),
        (
            ["++rollout.group_sizes._target_=mrl.data.samplers.ByDifficulty", "++rollout.group_sizes.least=9"],
            "rollout.group_sizes: least=9, most=32, but rollout.responses_per_prompt=8",
        ),
    ],
)
def test_a_sampler_or_group_sizes_that_cannot_be_used_are_refused(config, overrides, message):
    own = config(*overrides)
    with pytest.raises(ValueError, match=message):
        plan_prompt_drawing(own, prompts_of(own))


@pytest.mark.extended
def test_epochs_end_a_run_at_the_smaller_of_both_limits(config, warnings):
    assert num_steps(config("trainer.max_steps=9"), 40) == 9
    sizes = ["rollout.prompts_per_step=6"]
    own = config("trainer.max_steps=100", "trainer.epochs=2", *sizes)
    assert num_steps(own, 40) == 14, "80 prompts in steps of 6"
    check_epochs(own, 40)
    assert num_steps(config("trainer.max_steps=100", "trainer.epochs=0.1", "rollout.prompts_per_step=1"), 30) == 3
    assert not warnings()
    few = config("trainer.max_steps=10", "trainer.epochs=2", *sizes)
    check_epochs(few, 40)
    assert num_steps(few, 40) == 10
    assert "trainer.epochs=2.0 takes 14 steps, but trainer.max_steps=10 ends the run earlier" in warnings()[0]
    with pytest.raises(ValueError, match=r"trainer.epochs=2.0: a run with rollout.replay draws no prompts"):
        check_epochs(config("trainer.epochs=2", "rollout.replay=folder"), 40)


@pytest.fixture
def offline(config, inputs, tmp_path):  # noqa: F811
    """`offline(override, ..., logprobs=...)` -> the plan for a file of offline rows: three prompts, two responses to each."""

    def get(*overrides, logprobs=True, routing=False):
        rows = []
        for row in pq.read_table(inputs / "train.parquet").to_pylist()[:3]:
            for response, reward in ((row["reward_model"]["ground_truth"], 1.0), ("5", 0.0)):
                behavior = [-0.5] * (len(response) + 1) if logprobs and reward else None
                rows.append(dict(prompt=row["prompt"], response=response, reward=reward, logprobs=behavior))
        (tmp_path / "offline.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        own = config(f"data.offline.path={tmp_path}/offline.jsonl", *overrides)
        actor = plan_model(own, own.model.path)
        own = replace(own, rollout=replace(own.rollout, routing_replay=routing))
        return plan_offline(own, actor, build_algorithm(own))

    return get


@pytest.mark.extended
def test_rows_of_a_file_become_groups_of_a_step_with_the_prompts_of_training(offline, config):
    rows = offline("data.offline.rows_per_step=5", "data.offline.advantage=0.7")
    groups = offline_groups(rows, 1)
    assert [len(group.samples) for group in groups] == [2, 2] and offline_groups(None, 1) == []
    train = prompts_of(config())
    (sample, other) = groups[0].samples
    assert sample.prompt == other.prompt == train.encode((-1 - sample.row) // 2)
    block = with_offline_column(to_block(groups), 2)
    columns = driver_columns(groups)
    assert (columns["weight_versions"] == 1).all() and not columns["truncated"].any() and (columns["rows"] < 0).all()
    lengths = block.sampled_lengths
    np.testing.assert_array_equal(block.columns[OFFLINE], np.repeat([0, 0, 1, 1], lengths))
    old = np.full(len(block.rollout_logprobs), -2.0, np.float32)
    found = np.split(known_rollout_logprobs(block, old), np.cumsum(lengths)[:-1])
    assert (found[2] == -0.5).all() and (found[3] == -2.0).all() and np.isnan(found[1]).all()


@pytest.mark.extended
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm=remax"], "data.offline.path: algorithm.advantage compares with greedy responses"),
        (["algorithm.old_logprobs=rollout"], "some rows have no logprobs, which algorithm.old_logprobs=rollout needs"),
        (["data.offline.path=nowhere.jsonl"], "data.offline.path: nowhere.jsonl: no such file"),
        (["data.offline.path=null", "data.offline.advantage=1"], "data.offline.path must name a file"),
        (["data.offline.rows_per_step=1"], "data.offline.rows_per_step=1: 2 rows of .* have the prompt of row 0"),
    ],
)
def test_rows_of_a_file_that_the_run_cannot_train_are_refused(offline, overrides, message):
    with pytest.raises(ValueError, match=message):
        offline(*overrides)
    with pytest.raises(ValueError, match=r"rollout.routing_replay=true: the rows of data.offline.path have no experts"):
        offline(routing=True)
