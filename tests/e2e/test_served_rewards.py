"""Rewards from real SGLang servers: a reward model gives Transformers' scores, and a judge grades over HTTP and in a run."""

from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from mrl_runs import is_alive, select_processes, wait_until

from mrl.config.secrets import ENGINE_KEY
from mrl.core.sample_file import read_samples
from mrl.data.tokenizer import byte_tokenizer
from mrl.hang_report.process_registry import REGISTRY_NAME_ENV
from mrl.rewards.remote_models import Judge, RewardModel
from mrl.rewards.reward_types import Response, Turn
from mrl.rewards.scorer import Scorer
from mrl.rollout.engines.server import EngineServer
from mrl.rollout.engines.server_args import default_server_args

pytestmark = pytest.mark.extended

SIZES = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
TEXTS = ["4", "It is 4.", "I do not know", "x" * 150, "ä🦆"]


def make_model(folder: Path, family: str, head: str):
    """Write a tiny model with random weights and its tokenizer in Hugging Face format, and return the model."""
    import transformers

    tokenizer = byte_tokenizer()
    config = getattr(transformers, f"{family}Config")(
        **SIZES,
        head_dim=16,
        vocab_size=len(tokenizer),
        num_labels=1,
        max_position_embeddings=512,
        initializer_range=0.3,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}For{head}")(config).float().eval()
    tokenizer.model_max_length = 512
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


@contextmanager
def served(folder: Path, log: Path, **more):
    """Context with the URL of an SGLang server that serves the model in `folder`. `more`: server arguments."""
    args = default_server_args("float32", 512) | {"model_path": str(folder), "random_seed": 0} | more
    with EngineServer(args, log) as server:
        server.wait_ready(timeout_s=480)
        yield server.url


@torch.no_grad()
@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
def test_a_reward_model_scores_as_with_transformers(tmp_path, family):
    """For Qwen2 and Qwen3, the scores differ by a constant: in SGLang, the heads have a bias, which no checkpoint sets."""
    model = make_model(tmp_path / "model", family, "SequenceClassification")
    prompt = [dict(role="user", content="2 + 2?")]
    responses = [Response("s", text, "4", prompt=prompt) for text in TEXTS]
    responses.append(Response("s", "4", "4", prompt=prompt, turns=(Turn("assistant", "?"), Turn("assistant", "4"))))
    with served(tmp_path / "model", tmp_path / "engine.log", is_embedding=True) as url:
        reward = RewardModel(url=url, tokenizer=str(tmp_path / "model"), attempts=1, api_key_env=ENGINE_KEY)
        with Scorer(reward) as scorer:
            scores = scorer(responses)
            too_long = scorer([Response("s", "x" * 600, "4", prompt=prompt)])[0]
    expected = np.array([model(torch.tensor([reward.encode(r)])).logits[0, 0].item() for r in responses])
    found = np.array([s.value for s in scores])
    assert [s.failure for s in scores] == [None] * len(responses)
    assert np.ptp(expected) > 0.1, "equal scores would prove nothing"
    offset = 0.0 if family == "Llama" else found[0] - expected[0]
    assert np.abs(found - offset - expected).max() < 1e-4
    assert "answered 400" in too_long.failure


def test_a_judge_grades_responses_over_http(tmp_path):
    """The tiny random model answers nonsense. So the first pattern accepts any digit as a grade."""
    make_model(tmp_path / "model", "Qwen3", "CausalLM")
    responses = [Response("s", text, "4", prompt=[dict(role="user", content="2 + 2?")]) for text in TEXTS * 2]
    template = "Grade {response} as an answer to {prompt}."
    with served(tmp_path / "model", tmp_path / "engine.log", skip_tokenizer_init=False) as url:
        common = dict(url=url, model="any", template=template, attempts=1, max_tokens=64, api_key_env=ENGINE_KEY)
        with Scorer(Judge(**common, pattern=r"([0-9])", high=9.0, temperature=1.0)) as scorer:
            graded = scorer(responses)
        with Scorer(Judge(**common, pattern=r"Final grade: ([0-9]+)")) as scorer:
            ungraded = scorer(responses)
        with Scorer(Judge(**common | dict(max_tokens=100_000))) as scorer:
            refused = scorer(responses[:1])[0]
    assert any(s.failure is None and 0 <= s.value <= 1 for s in graded)
    assert all("the judge's answer has no match of Final grade" in s.failure for s in ungraded)
    assert "answered 400" in refused.failure


QUESTION = "Grade {response} as an answer; {ground_truth} is right."
JUDGE = [
    "reward=served_judge",
    f'reward.template="{QUESTION}"',
    'reward.pattern="([0-9])"',
    "reward.high=9.0",
    "reward.max_tokens=1",
]


def make_judge(folder: Path):
    """Write a tiny model that answers every question with a digit, and return the model.

    In the output layer, the rows of the digits are five random vectors and their negatives, and all other rows are 0. So the
    largest logit is always that of a digit.
    """
    model, digits = make_model(folder, "Qwen3", "CausalLM"), byte_tokenizer().convert_tokens_to_ids(list("0123456789"))
    rows = torch.randn(len(digits) // 2, SIZES["hidden_size"])
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.lm_head.weight[digits] = torch.cat([rows, -rows])
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def greedy_digit(model, question: str) -> int:
    """Return the digit with which a model of `make_judge` answers a question. Transformers computes the digit."""
    tokenizer, message = byte_tokenizer(), dict(role="user", content=question)
    text = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return int(tokenizer.decode([model(torch.tensor([ids])).logits[0, -1].argmax().item()]))


def test_a_run_serves_a_judge_whose_answers_are_the_rewards(start_mrl, quickstart, tmp_path):
    judge = make_judge(tmp_path / "judge")
    overrides = [*quickstart, *JUDGE, f"roles.judge.path={tmp_path / 'judge'}", "tracking.samples_per_step=24"]
    run = start_mrl("train", *overrides, "trainer.max_steps=2", "trainer.save=false")

    def servers() -> list:
        return select_processes(run.tagged(), lambda process: process.environ().get(REGISTRY_NAME_ENV) == "judge_0")

    wait_until(lambda: servers() or run.process.poll() is not None)
    started = servers()
    run.finish(400)
    assert run.process.returncode == 0 and started, run.output()
    steps = dict(read_samples(run.folder))
    for metrics, samples in zip(run.metrics(), steps.values(), strict=True):
        questions = [QUESTION.format(response=one.response, ground_truth=one.ground_truth) for one in samples]
        expected = [greedy_digit(judge, question) / 9 for question in questions]
        assert [one.reward for one in samples] == pytest.approx(expected) and len(samples) == 24
        assert len(set(expected)) > 1, "equal rewards would prove nothing"
        assert metrics["reward/failed_fraction"] == 0 and metrics["reward/mean"] == pytest.approx(np.mean(expected))
    assert len(steps) == 2 and (run.folder / "logs/judge_0.log").exists()
    assert not select_processes(started, is_alive) and run.leftovers() == []
