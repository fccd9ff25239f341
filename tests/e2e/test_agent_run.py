"""A policy that calls a calculator, in the whole loop: engine and trainer see the same tokens, tool results are no targets."""

import numpy as np
import pytest

from mrl.data.tokenizer import load_tokenizer

SMALL = [
    "experiment=calculator",
    "tracking.wandb=false",
    "rollout.prompts_per_step=8",
    "rollout.responses_per_prompt=4",
    "trainer.eval_rows=8",
    "trainer.save=false",
]


@pytest.fixture(scope="module")
def calculator(tmp_path_factory):
    """The experiment's files, with more rows that call: the test is short."""
    from mrl.data.synthetic_tasks import make_calculator_task

    folder = tmp_path_factory.mktemp("calculator") / "inputs"
    make_calculator_task(folder, calls=0.5)
    return folder


@pytest.fixture(scope="module")
def run(start_mrl, calculator):
    """Two recorded steps behind a short warm start."""
    small = [*SMALL, f"data.inputs.folder={calculator}", "data.inputs.calls=0.5", "sft.steps=40", "rollout.record=true"]
    done = start_mrl("train", *small, "trainer.max_steps=2").finish()
    assert done.process.returncode == 0, done.output()
    return done


def test_trainer_and_engine_agree_on_every_token_of_conversations(run):
    steps = run.metrics()
    assert len(steps) == 2 and run.leftovers() == []
    for step in steps:
        assert step["mismatch/logprob_abs_max"] <= 1e-4
        assert step["rollout/tool_calls_mean"] > 0.1 and step["rollout/turns_mean"] > 1.1
        assert 0 < step["rollout/cached_tokens_fraction"] < 1, "later turns find the earlier ones in the prefix cache"


def test_tool_results_are_in_the_response_and_not_among_what_is_trained(run, calculator):
    tokenizer = load_tokenizer(calculator / "model")
    start, end, stop = (tokenizer.convert_tokens_to_ids(mark) for mark in ("<result>", "</result>", "</call>"))
    answered = 0
    for number, metrics in enumerate(run.metrics()):
        with np.load(run.folder / f"rollouts/step_{number:06d}.npz") as file:
            step = dict(file)
        assert step["sampled"].sum() == metrics["rollout/tokens"] == len(step["rollout_logprobs"])
        pieces = (np.split(step[name], step["cu_seqlens"][1:-1]) for name in ("tokens", "sampled"))
        for tokens, mine, length in zip(*pieces, step["prompt_lengths"], strict=True):
            response, chosen = tokens[length:].tolist(), mine[length:].tolist()
            assert not mine[:length].any()
            heard = [token for token, own in zip(response, chosen, strict=True) if not own]
            if not heard:
                continue
            answered += 1
            assert response[chosen.index(False) - 1] == stop, "the turn ends with the token that stopped the engine"
            assert (heard[0], heard[-1]) == (start, end) and chosen[-1]
            call = tokenizer.decode(response[: chosen.index(False)])
            said = tokenizer.decode(heard[1:-1])
            asked = call.removeprefix("<call>").removesuffix("</call>").split("*")
            if all(number.isdigit() and number[0] != "0" for number in asked) and len(asked) == 2:
                assert said.startswith(str(int(asked[0]) * int(asked[1]))[:8]), (call, said)
    assert answered > 5


@pytest.mark.extended
def test_recorded_conversations_are_trained_again_under_another_layout(run, start_mrl, calculator):
    again = [f"data.inputs.folder={calculator}", "sft.train=null", f"model.path={calculator / 'warm'}", "parallel.cp=2"]
    replay = [f"rollout.replay={run.folder / 'rollouts'}", "trainer.max_steps=1"]
    found = start_mrl("train", *SMALL, *again, *replay).finish()
    assert found.process.returncode == 0, found.output()
    for name in ("loss/policy", "optim/grad_norm", "reward/mean", "rollout/tokens"):
        assert found.metrics()[0][name] == pytest.approx(run.metrics()[0][name], abs=1e-5), name
