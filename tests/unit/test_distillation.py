"""Distillation: its loss, the choice of teachers, teachers that SGLang serves, and configs that are refused."""

import json
from base64 import b64encode
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from http_engines import BROKEN, HttpEngine
from loss_cases import loss_inputs, make_case
from planned_runs import config_of, folder_of, memory_of

from mrl.algorithms.advantages import GDPO, GRPO, NoAdvantage, OnPolicyDistillation
from mrl.algorithms.corrections import ImportanceSampling
from mrl.algorithms.distillation import Distillation, reads_rewards
from mrl.algorithms.inputs import AdvantageInputs
from mrl.algorithms.losses import KLCov, PPOClip
from mrl.algorithms.objective import Objective
from mrl.algorithms.parts import build_algorithm, refuse_distillation
from mrl.config.validate import roles_of, teachers_of
from mrl.controller.plan_distillation import (
    check_distillation,
    check_taught_sources,
    taught_responses,
    teacher_output_layer_folders,
)
from mrl.controller.plan_models import plan_models
from mrl.controller.plan_train import learning_settings
from mrl.core.types import TeacherPart, TokenBlock, TrainBatch, teacher_outputs_by_row
from mrl.rollout.client import EngineClient, EngineError
from mrl.rollout.served_models import top_k_of_rows
from mrl.workers.dp_partition import Packing
from mrl.workers.group import ComputedColumns
from mrl.workers.model_trainers import RoleScorer
from mrl.workers.worker import TrainWorker

# The loss.


def with_divergence(case, logprobs, values):
    inputs = loss_inputs(case, logprobs)
    masses = {name: torch.full_like(values, 0.9).detach() for name in ("teacher_mass", "policy_mass")}
    return inputs.__class__(**{**vars(inputs), "columns": {**inputs.columns, "divergence": values, **masses}})


def test_the_loss_is_the_divergence_times_its_coefficient_plus_the_other_loss():
    case, values = make_case(0), torch.rand(15, dtype=torch.float64, requires_grad=True)
    logprobs = torch.tensor(case.logprobs, requires_grad=True)
    inputs = with_divergence(case, logprobs, values)
    alone, metrics = Distillation(coef=0.5)(inputs)
    torch.testing.assert_close(alone, 0.5 * values)
    assert metrics.keys() == {"distill/divergence"} and not metrics["distill/divergence"].requires_grad
    other, other_metrics = PPOClip()(inputs)
    both, metrics = Distillation(coef=2.0, top_k=4, reward_loss=PPOClip())(inputs)
    torch.testing.assert_close(both, 2 * values + other)
    assert metrics.keys() == {"distill/divergence", "distill/teacher_mass", "distill/policy_mass", *other_metrics}
    both.sum().backward()
    assert (values.grad == 2).all() and logprobs.grad.any()


def test_the_loss_declares_what_it_reads_and_whether_log_probabilities_get_a_gradient():
    assert Distillation().required_inputs == {"teacher_hidden"}
    assert Distillation(top_k=3).required_inputs == {"teacher_top_k"}
    both = Distillation(reward_loss=KLCov())
    assert both.required_inputs == {"teacher_hidden", "old_logprobs"}
    assert both.uses_logprobs and not both.zero_at_zero_advantage
    batch = AdvantageInputs(np.zeros(3), np.zeros(1, int), np.array([3]), {"old_logprobs": np.zeros(3, np.float32)})
    found = both.precomputed_columns(batch, np.ones(3, np.float32), np.random.default_rng(0))
    assert list(found) == ["kl_cov"] and Distillation().precomputed_columns(batch, np.ones(3), None) == {}
    assert not Objective(Distillation()).uses_logprobs and Objective(both).distillation is both
    assert Objective(PPOClip()).uses_logprobs and Objective(PPOClip()).distillation is None
    assert Distillation(divergence="js") == Distillation(divergence="js", beta=0.5)


@pytest.mark.parametrize(
    ("advantage", "required_inputs", "reads"),
    [
        (GRPO(), set(), True),
        (NoAdvantage(), {"old_logprobs"}, True),
        (NoAdvantage(), {"teacher_hidden"}, False),
        (GRPO(), {"teacher_hidden", "old_logprobs"}, True),
        (None, {"teacher_top_k"}, False),
        (OnPolicyDistillation(), {"teacher_logprobs"}, False),
        (OnPolicyDistillation(reward=GRPO()), {"teacher_logprobs"}, True),
    ],
)
def test_distillation_alone_reads_no_rewards(advantage, required_inputs, reads):
    assert reads_rewards(advantage, frozenset(required_inputs)) == reads


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(divergence="kl"), "divergence='kl': expected forward_kl, reverse_kl, js"),
        (dict(divergence="js", beta=1.0), "beta=1.0: must be between 0 and 1"),
        (dict(top_k=0), "top_k=0: must be greater than 0"),
        (dict(temperature=0.0), "temperature=0.0: must be greater than 0"),
        (dict(coef=-1.0), "coef=-1.0: must be greater than 0"),
    ],
)
def test_a_mistake_in_the_loss_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Distillation(**arguments)


def test_without_advantage_every_response_has_advantage_0():
    inputs = AdvantageInputs(np.arange(5.0), np.array([0, 0]), np.array([2, 3]))
    assert NoAdvantage()(inputs).tolist() == [0, 0]


# The config.


def planned(tmp_path, *overrides, teacher="Qwen3-8B", algorithm="distill_vocab"):
    """Return (config, algorithm, models) of a run of Qwen3-4B with a teacher."""
    paths = [f"roles.teacher.path={folder_of(teacher, tmp_path)}"] if teacher else []
    config = config_of("Qwen3-4B", tmp_path, f"algorithm={algorithm}", *paths, *overrides)
    parts = build_algorithm(config)
    return config, parts, plan_models(config, parts.required_inputs, weights=False)


@pytest.mark.extended
def test_the_teacher_is_a_model_beside_the_actor_and_its_folder_has_the_output_layer(tmp_path):
    config, algorithm, models = planned(tmp_path, "roles.teacher.parallel.tp=2")
    check_distillation(config, algorithm, models)
    assert list(models) == ["actor", "teacher"] and models["teacher"].dims.tp == 2
    folders = teacher_output_layer_folders(config, algorithm, {"teacher": models["teacher"]})
    assert folders == {"teacher": str(tmp_path / "Qwen3-8B")}
    assert not learning_settings(config, algorithm).reads_rewards
    assert algorithm.objective.correction is None
    top_k = planned(tmp_path, algorithm="distill_top_k")
    check_distillation(*top_k)
    assert top_k[1].required_inputs == {"teacher_top_k"} and not teacher_output_layer_folders(top_k[0], top_k[1], {})


@pytest.mark.extended
def test_the_host_memory_of_a_node_includes_the_output_layer_of_the_teacher(tmp_path):
    """Qwen3-8B has an output layer of 151936 x 4096 in bfloat16. With tp=2, each of the 8 ranks keeps half of it."""
    layout = ["cluster=h100", "cluster.nodes=1", "parallel.tp=2", "trainer.max_tokens_per_micro_batch=4096"]
    hosts = {}
    for algorithm in ("distill_vocab", "distill_top_k"):
        config, _, _ = planned(tmp_path, *layout, algorithm=algorithm)
        hosts[algorithm] = memory_of(config).host
    assert hosts["distill_vocab"].teachers >= config.cluster.gpus_per_node * 151_936 // 2 * 4096 * 2
    assert hosts["distill_top_k"].teachers == 0


def test_only_a_loss_that_reads_sampled_tokens_is_corrected_by_default(tmp_path):
    both = "++algorithm.loss.reward_loss._target_=mrl.algorithms.losses.PPOClip"
    assert planned(tmp_path, "rollout.mode=async")[1].objective.correction is None
    assert planned(tmp_path, "rollout.mode=async", both)[1].objective.correction == ImportanceSampling()


def write_other_vocabulary(tmp_path, size: int):
    folder = folder_of("Qwen3-8B", tmp_path)
    fields = json.loads((folder / "config.json").read_text()) | dict(vocab_size=size)
    (tmp_path / "other").mkdir(exist_ok=True)
    (tmp_path / "other" / "config.json").write_text(json.dumps(fields))
    return f"roles.teacher.path={tmp_path / 'other'}"


SERVED = "roles.teacher.num_engines=1"


@pytest.mark.parametrize(
    ("algorithm", "overrides", "message"),
    [
        (
            "distill_top_k",
            ["algorithm.loss.top_k=200000"],
            "algorithm.loss.top_k=200000: the vocabulary has only 151936",
        ),
        (
            "distill_vocab",
            [SERVED],
            "roles.teacher.num_engines=1: SGLang returns the most probable tokens, not the whole",
        ),
        ("distill_top_k", [SERVED, "rollout.temperature=0.7"], "num_engines=1: SGLang returns .* has temperature 0.7"),
        (
            "distill_top_k",
            [SERVED, "roles.teacher.sglang.context_length=99"],
            "its context is 99 tokens, but the actor",
        ),
    ],
)
def test_a_teacher_that_cannot_work_is_refused(tmp_path, algorithm, overrides, message):
    config, parts, models = planned(tmp_path, *overrides, algorithm=algorithm)
    with pytest.raises(ValueError, match=message):
        check_distillation(config, parts, models)


@pytest.mark.extended
@pytest.mark.parametrize("overrides", [[], [SERVED]])
def test_a_teacher_with_another_vocabulary_is_refused(tmp_path, overrides):
    larger = write_other_vocabulary(tmp_path, 151_937)
    found = planned(tmp_path, larger, *overrides, teacher=None, algorithm="distill_top_k")
    with pytest.raises(ValueError, match="its vocabulary has 151937 tokens, the policy's 151936"):
        check_distillation(*found)
    check_distillation(*planned(tmp_path, larger, teacher=None, algorithm="distill"))  # needs no common vocabulary


def test_a_teacher_with_other_tokens_is_refused(tmp_path):
    found = planned(tmp_path)
    for model, token in (("Qwen3-4B", "a"), ("Qwen3-8B", "b")):
        text = json.dumps({"model": {"vocab": {token: 0}}})
        (tmp_path / model / "tokenizer.json").write_text(text)
    with pytest.raises(ValueError, match=r"Qwen3-8B: its tokenizer.json has other tokens"):
        check_distillation(*found)
    (tmp_path / "Qwen3-8B" / "tokenizer.json").write_text((tmp_path / "Qwen3-4B" / "tokenizer.json").read_text())
    check_distillation(*found)


def test_a_loss_without_a_teacher_and_commands_without_one_are_refused(tmp_path):
    loss = "algorithm.loss._target_=mrl.algorithms.distillation.Distillation"
    config = config_of("Qwen3-4B", tmp_path, "algorithm=grpo", loss)
    with pytest.raises(
        ValueError, match=r"roles.teacher.path must name a Hugging Face folder: algorithm.loss compares"
    ):
        build_algorithm(config)
    with pytest.raises(ValueError, match="mrl certify has no outputs of a teacher"):
        refuse_distillation(Objective(Distillation()), "mrl certify")
    refuse_distillation(Objective(PPOClip()), "mrl certify")


# Several teachers.

SEVERAL = [
    "++roles.math.path=m",
    "++roles.math.teacher_for=[gsm8k,math]",
    "++roles.code.path=c",
    "++roles.code.teacher_for=[code]",
]


def rollouts_of(*sources: str) -> SimpleNamespace:
    return SimpleNamespace(rows=np.arange(len(sources)), groups=np.arange(len(sources)))


def test_each_teacher_teaches_its_data_sources_and_the_role_teacher_all_others(tmp_path):
    config = config_of(
        "Qwen3-4B", tmp_path, "algorithm=distill", "roles.teacher.path=t", *SEVERAL, "++roles.reference.path=r"
    )
    assert {name: role.column for name, role in roles_of(config).items()} == dict(
        teacher="teacher_logprobs", math="teacher_logprobs", code="teacher_logprobs", reference="ref_logprobs"
    )
    assert teachers_of(config).keys() == {"teacher", "math", "code"}
    sources = ["math", "code", "other", "gsm8k"]
    rows = {
        name: taught_responses(config, name, sources.__getitem__)(rollouts_of(*sources)) for name in roles_of(config)
    }
    assert {name: np.flatnonzero(taught).tolist() for name, taught in rows.items()} == dict(
        math=[0, 3], code=[1], teacher=[2], reference=[0, 1, 2, 3]
    )


@pytest.mark.extended_after(1)
@pytest.mark.parametrize(
    ("overrides", "sources", "message"),
    [
        (SEVERAL, ["gsm8k", "math", "code", "chat"], "no teacher teaches the data source 'chat'"),
        (
            SEVERAL,
            ["gsm8k", "code"],
            "roles.math.teacher_for=.*no training prompt has the data source 'math'; .* 'code', 'gsm8k'",
        ),
        (
            [*SEVERAL, "++roles.x.path=x", "++roles.x.teacher_for=[code]"],
            [],
            "roles.x.teacher_for=.*: roles.code teaches",
        ),
    ],
)
def test_data_sources_without_a_teacher_or_with_two_are_refused(tmp_path, overrides, sources, message):
    loss = "algorithm.loss._target_=mrl.algorithms.distillation.Distillation"
    config = config_of("Qwen3-4B", tmp_path, "algorithm=grpo", loss, *overrides)
    with pytest.raises(ValueError, match=message):
        check_taught_sources(config, build_algorithm(config), sources)
    with_default = config_of("Qwen3-4B", tmp_path, "algorithm=grpo", loss, *SEVERAL, "++roles.teacher.path=t")
    check_taught_sources(with_default, build_algorithm(with_default), ["gsm8k", "math", "code", "chat"])


@pytest.mark.extended_after(1)
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            [SERVED],
            "roles.teacher.num_engines=1: the algorithm reads teacher_logprobs, .* or use algorithm=distill_top_k",
        ),
        ([*SEVERAL, "++roles.math.num_engines=1"], "roles.math.num_engines=1: the algorithm reads teacher_logprobs"),
        (
            [*SEVERAL, "++roles.teacher.column=x"],
            "roles.teacher.column=x: the algorithm reads teacher_logprobs of each",
        ),
        (
            [*SEVERAL, "++roles.math.column=a"],
            "roles.math.column=a: the algorithm reads teacher_logprobs of each",
        ),
        (
            ["++roles.mine.path=m", "++roles.mine.column=teacher_logprobs"],
            "roles.mine.column=.*: roles.teacher computes",
        ),
        (
            ["++roles.mine.path=m", "++roles.mine.column=ref_logprobs"],
            "column=ref_logprobs: the run computes this column",
        ),
        (["++roles.old.path=m"], "roles.old.column=old_logprobs: the run computes this column already"),
    ],
)
def test_a_column_that_nothing_computes_or_that_two_models_compute_is_refused(tmp_path, overrides, message):
    config = config_of("Qwen3-4B", tmp_path, "algorithm=distill", "roles.teacher.path=t", *overrides)
    with pytest.raises(ValueError, match=message):
        build_algorithm(config)


class RecordingGroup:
    """Stands in for a WorkerGroup. Records the rows of each forward pass."""

    def __init__(self):
        self.calls = []

    def begin_columns(self, method, batch, packing, **options):
        self.calls.append((method, batch.rows.tolist(), options))
        parts = [TeacherPart(batch.rows, None)]
        return SimpleNamespace(
            then=lambda convert: SimpleNamespace(result=lambda: convert(ComputedColumns({}, 1.0, {"": parts})))
        )


def test_a_teacher_computes_only_its_responses():
    group = RecordingGroup()
    scorer = RoleScorer(group, Packing(100), 0.9, "teacher_logprobs", lambda rollouts: rollouts.groups % 2 == 1)
    block = TokenBlock.from_lists([[1]] * 4, [[2]] * 4)
    batch = vars(TrainBatch.of(block, np.arange(4)))
    rollouts = SimpleNamespace(**{name: batch[name] for name in batch if name != "columns"})
    found = scorer.begin_teacher_outputs(rollouts, "math", None, 5).result()
    assert found.teachers["math"][0].rows.tolist() == [1, 3] and found.columns == {}
    assert group.calls == [(TrainWorker.compute_teacher_outputs, [1, 3], dict(temperature=0.9, top_k=5))]
    rollouts.groups = np.zeros(4, int)
    assert scorer.begin_teacher_outputs(rollouts, "math", 0.5, 5).result().teachers == {"math": ()}
    assert len(group.calls) == 1, "no pass without rows"


def test_outputs_of_a_teacher_follow_their_rows():
    lengths = np.array([2, 0, 3, 1])
    outputs = {"hidden": np.arange(8.0).reshape(4, 2)}
    by_row = teacher_outputs_by_row(np.array([2, 3]), outputs, lengths)
    assert by_row[2]["hidden"].tolist() == [[0, 1], [2, 3], [4, 5]] and by_row[3]["hidden"].tolist() == [[6, 7]]
    assert np.shares_memory(by_row[2]["hidden"], outputs["hidden"])
    block = TokenBlock.from_lists([[1]] * 4, [[1] * n for n in lengths])
    block = block.__class__(**{**vars(block), "teachers": {"math": by_row, "code": {}}})
    part = block.select(np.array([3, 0]))
    assert part.teachers["math"].keys() == {0} and part.teachers["math"][0] is by_row[3] and not part.teachers["code"]


# A teacher in an engine.


class Teacher(HttpEngine):
    """Answers like SGLang. After a token t, the token t + 1 has probability 0.5, t + 2 has 0.25, and so on."""

    def answers(self, body: dict) -> list[dict]:
        assert body["return_logprob"] and body["sampling_params"][0]["max_new_tokens"] == 0
        (tokens,), k = body["input_ids"], body["top_logprobs_num"]
        steps, known = np.arange(1, k + 1), np.array(tokens[body["logprob_start_len"] : -1])[:, None]
        values, ids = np.broadcast_to(np.log(0.5**steps), (len(known), k)), known + steps
        arrays = {"val": values.astype("<f4"), "idx": ids.astype("<i4")}
        fields = {f"input_top_logprobs_{name}_flat_b64": b64encode(x.tobytes()).decode() for name, x in arrays.items()}
        return [{"meta_info": fields | {"input_top_logprobs_shape": list(ids.shape)}}]


def test_a_served_teacher_returns_the_most_probable_tokens_of_each_sampled_token(monkeypatch):
    monkeypatch.setattr("mrl.rollout.served_models.RETRY_PAUSE_S", 0.01)
    servers = [Teacher(statuses=(BROKEN,)), Teacher()]
    block = TokenBlock.from_lists(
        [[10, 20], [30], [40]], [[11, 12, 13], [31], [41, 42]], sampled=[[True, False, True], [True], [True, True]]
    )
    try:
        urls = [server.url for server in servers]
        found = top_k_of_rows(lambda: urls, block, np.array([0, 2]), 3, 10.0)
    finally:
        [server.stop() for server in servers]
    # In row 0, 11 follows 20, a tool wrote 12, and 13 follows 12. In row 2, 41 follows 40, and 42 follows 41.
    assert found["top_ids"].tolist() == [[21, 22, 23], [13, 14, 15], [41, 42, 43], [42, 43, 44]]
    np.testing.assert_allclose(np.exp(found["top_logprobs"]), [[0.5, 0.25, 0.125, 0.125]] * 4, rtol=1e-6)
    assert found["top_logprobs"].dtype == np.float32 and found["top_ids"].dtype == np.int32
    asked = [tuple(tokens) for server in servers for tokens in server.inputs]
    assert set(asked) == {(10, 20, 11, 12, 13), (40, 41, 42)} and len(asked) == 3, "one request is repeated"
    none = top_k_of_rows(lambda: urls, block, np.array([], np.int64), 3, 10.0)
    assert none["top_logprobs"].shape == (0, 4) and none["top_ids"].shape == (0, 3)


@pytest.mark.extended
def test_a_served_teacher_that_refuses_or_does_not_answer_raises_an_error(monkeypatch):
    monkeypatch.setattr("mrl.rollout.served_models.RETRY_PAUSE_S", 0.01)
    server, block = Teacher(statuses=(400,)), TokenBlock.from_lists([[1]], [[2]])
    try:
        with pytest.raises(EngineError, match="answered 400"):
            top_k_of_rows(lambda: [server.url], block, np.array([0]), 2, 10.0)
        server.answers = lambda body: [{"meta_info": {"input_top_logprobs": [None]}}]
        with EngineClient(server.url) as client, pytest.raises(EngineError, match=r"of shape None; expected \[1, 2\]"):
            client.top_logprobs([1, 2], 1, 2)
    finally:
        server.stop()
    with pytest.raises(TimeoutError, match="the teacher did not answer in time"):
        top_k_of_rows(lambda: [server.url], block, np.array([0]), 2, 0.2)


@pytest.mark.extended
def test_an_estimator_beside_distillation_reads_rewards(tmp_path):
    loss = "++algorithm.loss.reward_loss._target_=mrl.algorithms.losses.PPOClip"
    for estimator, kind in (("GRPO", GRPO), ("GDPO", GDPO)):
        target = f"algorithm.advantage._target_=mrl.algorithms.advantages.{estimator}"
        config, algorithm, _ = planned(tmp_path, target, loss)
        assert isinstance(algorithm.advantage_pipeline.advantage, kind)
        assert learning_settings(config, algorithm).reads_rewards
