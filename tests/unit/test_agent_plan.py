"""Planning checks `rollout.agent`, and adapts the engines' settings to the agent."""

import pytest

from mrl.config import hydra_entry
from mrl.controller.plan_train import TrainPlan, plan_training
from mrl.rollout.agents.tools import Calculator, MarkerParser


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    from mrl.data import synthetic_tasks

    folder = tmp_path_factory.mktemp("calculator") / "inputs"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(synthetic_tasks, "PRODUCT_NUM_TRAIN", 64)
        synthetic_tasks.make_calculator_task(folder)
    return folder


def plan(inputs, tmp_path, *overrides: str) -> TrainPlan:
    ours = ["experiment=calculator", f"data.inputs.folder={inputs}", f"run.dir={tmp_path / 'run'}"]
    return plan_training(hydra_entry.compose_config([*ours, *overrides]))


@pytest.mark.extended
def test_the_calculator_experiment_has_an_agent_and_a_prefix_cache(inputs, tmp_path):
    made = plan(inputs, tmp_path)
    assert made.agent is not None and made.agent.max_turns == 2
    assert made.agent.tools == {"calculator": Calculator()} and made.agent.parser == MarkerParser("calculator")
    assert made.server_args["disable_radix_cache"] is False


@pytest.mark.extended
@pytest.mark.parametrize(
    "override",
    ["+sglang.disable_radix_cache=true", "weight_sync.pause_mode=in_place", "rollout.agent=null"],
    ids=["the user says so", "weights change under a kept cache", "there is no agent"],
)
def test_the_prefix_cache_is_off(inputs, tmp_path, override):
    assert plan(inputs, tmp_path, override).server_args["disable_radix_cache"] is True


@pytest.mark.extended_after(1)
@pytest.mark.parametrize(
    ("override", "why"),
    [
        (
            "+rollout.agent.parser.end='</tool>'",
            "rollout.agent.parser: '</tool>' should end a turn, but this model has no single token for it",
        ),
        (
            "+rollout.agent.max_turn=3",
            "rollout.agent.max_turn: mrl.rollout.agents.tool_agent.ToolAgent has no argument 'max_turn'; did",
        ),
        ("rollout.agent.max_turns=0", "max_turns=0: must be greater than 0"),
        ("rollout.agent.parser.tool=abacus", "parser.tool='abacus' is not a tool; the tools are calculator"),
        ("+rollout.agent.result_role=nobody", "it puts nothing around a result"),
        (
            "rollout.agent._target_=argparse.Namespace",
            "expected mrl.rollout.agents.tool_agent.ToolAgent or a subclass",
        ),
        ("rollout.agent.tools.calculator._target_=mrl.nowhere.Tool", "rollout.agent.tools.calculator._target_"),
    ],
)
def test_a_mistake_in_the_agent_is_an_error_before_any_process_starts(inputs, tmp_path, override, why):
    with pytest.raises(ValueError) as raised:
        plan(inputs, tmp_path, override)
    assert why in str(raised.value)
    assert not (tmp_path / "run").exists()
