"""A run whose policy calls a calculator: engine and trainer agree on all tokens, and no step trains on tool results."""

import numpy as np
import pytest

from mrl.core.sample_file import TextSample, read_samples
from mrl.data.tokenizer import load_tokenizer

SMALL = [
    "experiment=calculator",
    "tracking.backends=[]",
    "rollout.prompts_per_step=8",
    "rollout.responses_per_prompt=4",
    "trainer.eval_rows=8",
    "trainer.save=false",
]


@pytest.fixture(scope="module")
def calculator(tmp_path_factory):
    """The input files of the experiment. More rows than usual call the tool, because the tests run only a few steps."""
    from mrl.data.synthetic_tasks import make_calculator_task

    folder = tmp_path_factory.mktemp("calculator") / "inputs"
    make_calculator_task(folder, call_fraction=0.5)
    return folder


@pytest.fixture(scope="module")
def run(start_mrl, calculator):
    """An asynchronous run of two recorded steps after a supervised warm start, with two trainer ranks and two engine ranks."""
    small = [
        *SMALL,
        f"data.inputs.folder={calculator}",
        "data.inputs.call_fraction=0.5",
        "sft.steps=40",
        "rollout.record=true",
        "rollout.mode=async",
        "rollout.max_staleness=0",
        "parallel.tp=2",
        "rollout.engine_tp=2",
    ]
    done = start_mrl("train", *small, "trainer.max_steps=2").finish()
    assert done.process.returncode == 0, done.output()
    return done


def test_trainer_and_engine_agree_on_every_token_of_conversations(run):
    steps = run.metrics()
    assert [step["rollout/weight_version"] for step in steps] == [0, 1] and run.leftovers() == []
    for step in steps:
        assert step["mismatch/logprob_abs_max"] <= 1e-4
        assert step["rollout/tool_calls_mean"] > 0.1 and step["rollout/turns_mean"] > 1.1
        assert 0 < step["rollout/cached_tokens_fraction"] < 1, "later turns find earlier turns in the prefix cache"


def test_tool_results_are_in_the_response_but_are_not_trained(run, calculator):
    tokenizer = load_tokenizer(calculator / "model")
    start, end, stop = (tokenizer.convert_tokens_to_ids(mark) for mark in ("<result>", "</result>", "</call>"))
    num_calls = 0
    for number, metrics in enumerate(run.metrics()):
        with np.load(run.folder / f"rollouts/step_{number:06d}.npz") as file:
            step = dict(file)
        assert step["sampled"].sum() == metrics["rollout/tokens"] == len(step["rollout_logprobs"])
        rows = (np.split(step[name], step["cu_seqlens"][1:-1]) for name in ("tokens", "sampled"))
        for tokens, sampled, length in zip(*rows, step["prompt_lengths"], strict=True):
            response, is_sampled = tokens[length:].tolist(), sampled[length:].tolist()
            assert not sampled[:length].any()
            result = [token for token, own in zip(response, is_sampled, strict=True) if not own]
            if not result:
                continue
            num_calls += 1
            assert response[is_sampled.index(False) - 1] == stop, "the turn ends with the token that stopped the engine"
            assert (result[0], result[-1]) == (start, end) and is_sampled[-1]
            call = tokenizer.decode(response[: is_sampled.index(False)])
            text = tokenizer.decode(result[1:-1])
            factors = call.removeprefix("<call>").removesuffix("</call>").split("*")
            if all(factor.isdigit() and factor[0] != "0" for factor in factors) and len(factors) == 2:
                assert text.startswith(str(int(factors[0]) * int(factors[1]))[:8]), (call, text)
    assert num_calls > 5


@pytest.mark.extended
def test_another_layout_trains_recorded_conversations_with_the_same_loss(run, start_mrl, calculator):
    again = [f"data.inputs.folder={calculator}", "sft.train=null", f"model.path={calculator / 'warm'}", "parallel.cp=2"]
    replay = [f"rollout.replay={run.folder / 'rollouts'}", "trainer.max_steps=1"]
    found = start_mrl("train", *SMALL, *again, *replay).finish()
    assert found.process.returncode == 0, found.output()
    for name in ("loss/policy", "optim/grad_norm", "reward/mean", "rollout/tokens"):
        assert found.metrics()[0][name] == pytest.approx(run.metrics()[0][name], abs=1e-5), name


def token_baselines(group: list[TextSample]) -> list[float]:
    """Return the baseline at each token index: the reward minus the advantage.

    The index of a token counts only sampled tokens, not those of tool results. Checks that all responses of the group have the
    same baseline at an index. If only one response has a token at an index, the baseline there must be 0, and is not in the
    result.
    """
    by_index: dict[int, list[float]] = {}
    for sample in group:
        advantages = [value for value, own in zip(sample.advantages, sample.trained, strict=True) if own]
        for index, advantage in enumerate(advantages):
            by_index.setdefault(index, []).append(sample.reward - advantage)
    for index, baselines in by_index.items():
        assert np.ptp(baselines) < 1e-5, (index, baselines)
        assert len(baselines) > 1 or baselines[0] == pytest.approx(0, abs=1e-5)
    return [float(np.mean(baselines)) for baselines in by_index.values() if len(baselines) > 1]


@pytest.mark.extended
def test_a_run_with_tool_turns_has_a_baseline_for_each_sampled_token(run, start_mrl, calculator, tmp_path):
    """The reward depends on the text, so that rewards differ. After the short warm start, the policy solves only few tasks."""
    (tmp_path / "rewards.py").write_text(
        "def compute_score(*, solution_str, **others):\n    return sum(map(ord, solution_str)) % 7 / 6\n"
    )
    again = [f"data.inputs.folder={calculator}", "sft.train=null", f"model.path={calculator / 'warm'}"]
    again += ["reward=function", f"reward.path={tmp_path / 'rewards.py'}"]
    options = ["algorithm=otb", "tracking.samples_per_step=32", "trainer.max_steps=3"]
    found = start_mrl("train", *SMALL, *again, *options).finish()
    assert found.process.returncode == 0, found.output()
    num_groups = 0  # groups with different rewards and with tool results
    for _, samples in read_samples(found.folder):
        for number in {sample.group for sample in samples}:
            group = [sample for sample in samples if sample.group == number]
            rewards, baselines = [sample.reward for sample in group], token_baselines(group)
            if np.ptp(rewards) and any(0 in sample.trained for sample in group):
                num_groups += 1
                assert min(rewards) <= min(baselines) and max(baselines) <= max(rewards)
                assert np.ptp(baselines) > 1e-4, "the baseline of GRPO is the same for all tokens"
    assert num_groups and all(step["optim/grad_norm"] > 0 for step in found.metrics())
