"""Rewards built from config nodes: user functions and weighted sums, and the error messages for both."""

import pickle
import re
import textwrap
import time

import pytest
from hydra import compose, initialize_config_dir

from mrl.config import hydra_entry
from mrl.config.instantiate import instantiate, instantiate_callable
from mrl.config.validate import from_hydra
from mrl.data.tokenizer import byte_tokenizer
from mrl.rewards.reward_types import Response, Score, Weighted, as_score
from mrl.rewards.rule_based import GSM8K, ExactMatch
from mrl.rewards.scorer import Scorer, check_reward
from mrl.rewards.user_function import Function

# This file has the form of verl/utils/reward_score/gsm8k.py in verl, and of the functions that users of verl write.
VERL = """
import re


def extract_solution(solution_str):
    found = re.findall("#### (\\\\-?[0-9\\\\.\\\\,]+)", solution_str)
    return found[-1].replace(",", "").replace("$", "") if found else None


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    answer = extract_solution(solution_str=solution_str)
    if answer is None:
        return 0
    return 1.0 if answer == ground_truth else 0.1


def with_parts(data_source, solution_str, ground_truth, extra_info, method="strict", **kwargs):
    correct = compute_score(data_source, solution_str, ground_truth) == 1.0
    return {"score": correct - 0.5 * (method == "harsh"), "acc": correct, "pred": solution_str, "n/a": len(solution_str)}


async def later(data_source, solution_str, ground_truth, extra_info):
    import asyncio

    await asyncio.sleep(30 if solution_str == "hang" else 0.2)
    if solution_str == "raise":
        raise RuntimeError("no judge")
    return solution_str == ground_truth


def without_score(data_source, solution_str, ground_truth, extra_info):
    return {"reward": 1.0}


def positional(a, b, c, d):
    return 1.0


LIMIT = 3
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("user") / "my_reward.py"
    path.write_text(VERL)
    return str(path)


def of_texts(*texts: str) -> list[Response]:
    return [Response("gsm8k", text, "72", {"index": i}, group=i) for i, text in enumerate(texts)]


def node(file, **more):
    return {"_target_": "mrl.rewards.user_function.Function", "path": file} | more


def test_a_reward_function_of_verl_works_unchanged(file):
    with Scorer(instantiate_callable(node(file), "reward"), workers=1) as scorer:
        assert [s.value for s in scorer(of_texts("so #### 72", "so #### 7,3", "72"))] == [1.0, 0.1, 0.0]


def test_a_dict_gives_parts_and_args_are_passed(file):
    with Scorer(Function(file, "with_parts", {"method": "harsh", "other": 1}), workers=1) as scorer:
        right, wrong = scorer(of_texts("#### 72", "#### 1"))
    assert right == Score(0.5, parts={"acc": 1.0, "n_a": 7.0}) and wrong.value == -0.5


@pytest.mark.extended
def test_coroutine_functions_run_concurrently(file):
    with Scorer(Function(file, "later", timeout_s=3.0), workers=1) as scorer:
        scorer(of_texts("72"))
        start = time.monotonic()
        scores = scorer(of_texts(*["72"] * 40, "raise", "hang"))
        assert time.monotonic() - start < 7.5, "one after another they take 8 s"
    assert [s.value for s in scores] == [1.0] * 40 + [0.0, 0.0]
    assert (
        scores[40].failure == f"RuntimeError: no judge ({file}:27, in later)"
        and scores[41].failure == "no answer within 3.0 s."
    )


def test_a_dict_without_a_score_is_a_failure(file):
    with Scorer(Function(file, "without_score"), workers=1) as scorer:
        assert (
            scorer(of_texts("x"))[0].failure
            == "the reward returned a dict without the key 'score', got the keys reward."
        )


def test_a_function_may_be_named_by_its_module(file, tmp_path, monkeypatch):
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package/rewards.py").write_text(VERL)
    monkeypatch.syspath_prepend(tmp_path)
    with Scorer(Function("my_package.rewards"), workers=1) as scorer:
        assert scorer(of_texts("#### 72"))[0].value == 1.0
    with pytest.raises(ValueError, match=re.escape("name=join: join(a, *p) cannot be called as join(data_source")):
        Function("posixpath", "join")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            dict(path="/nowhere/x.py"),
            "path=/nowhere/x.py: there is no such file; expected a Python file that ends in .py",
        ),
        (dict(path="no.such.module"), "path=no.such.module: cannot be imported (ModuleNotFoundError"),
        (dict(name="compute_scor"), "has no function of this name; did you mean 'compute_score'?"),
        (dict(name="LIMIT"), "LIMIT is an object of type int; expected a function"),
        (dict(name="positional"), "positional(a, b, c, d) cannot be called as positional(data_source, solution_str"),
        (dict(args={"solution_str": 1}), "args.solution_str: compute_score gets this argument for each response"),
        (dict(args={"metod": 1}), "args.metod: compute_score(data_source"),
        (dict(nam="x"), "reward.nam: mrl.rewards.user_function.Function has no argument 'nam'; did you mean 'name'?"),
    ],
)
def test_a_wrong_function_name_is_refused_before_anything_starts(file, more, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        instantiate(node(file) | more, "reward")


def test_a_file_that_cannot_be_imported_is_an_error_with_the_reason(tmp_path):
    (tmp_path / "broken.py").write_text("import sys\nsys.exit(2)")
    with pytest.raises(
        ValueError, match=r"broken.py: cannot be imported \(SystemExit: 2 \(.*broken.py:2, in <module>\)\)"
    ):
        Function(str(tmp_path / "broken.py"))


def test_a_file_that_fails_only_in_a_worker_is_a_recorded_failure(tmp_path):
    path = tmp_path / "once.py"
    path.write_text(
        textwrap.dedent("""
        import multiprocessing
        if multiprocessing.parent_process():
            raise RuntimeError("not here")
        def compute_score(**given):
            return 1.0
        """)
    )
    with Scorer(Function(str(path)), workers=1) as scorer:
        assert "RuntimeError: not here" in scorer(of_texts("x"))[0].failure


def weighted(**changes):
    base = {
        "_target_": "mrl.rewards.reward_types.Weighted",
        "parts": {
            "math": {"_target_": "mrl.rewards.rule_based.GSM8K", "strict": False},
            "exact": {"_target_": "mrl.rewards.rule_based.ExactMatch"},
        },
        "weights": {"math": 2.0, "exact": -0.5},
    }
    return base | changes


def test_a_weighted_sum_is_built_from_config_nodes():
    reward = instantiate_callable(weighted(), "reward")
    assert reward == Weighted({"math": GSM8K(strict=False), "exact": ExactMatch()}, {"math": 2.0, "exact": -0.5})
    both, one, none = reward(of_texts("72", "so 72", "71"))
    assert (both.value, one.value, none.value) == (1.5, 2.0, 0.0)
    assert both.parts == {"math": 1.0, "exact": 1.0} and one.parts == {"math": 1.0, "exact": 0.0}
    assert instantiate_callable(weighted(weights={}), "reward")(of_texts("72"))[0].value == 2.0


def test_nested_sums_and_turn_values_are_added():
    inner = Weighted({"exact": ExactMatch()})
    assert Weighted({"a": inner})(of_texts("72"))[0].parts == {"a": 1.0, "a_exact": 1.0}
    check_reward(Weighted({"a": inner}))
    reward = Weighted({"turns": lambda rs: [], "whole": lambda rs: []}, {"turns": 1.0, "whole": 10.0})
    (response,) = of_texts("72")
    total = reward.combine(response, {"parts.turns": Score.of_turns((1.0, 2.0, 3.0)), "parts.whole": Score(0.5)})
    assert total.turn_values == (1.0, 2.0, 8.0) and total.value == 11.0
    assert total.gdpo_parts == {"turns": 6.0, "whole": 0.5}


def test_the_gdpo_parts_of_a_score_are_the_parts_of_the_sum():
    judge = [Score(0.5, parts={"num_chars": 900.0}), Score.failed("no answer", {"num_chars": 7.0})]
    reward, (response,) = Weighted({"judge": ExactMatch(), "exact": ExactMatch()}), of_texts("72")
    scores = [reward.combine(response, {"parts.judge": each, "parts.exact": Score(1.0)}) for each in judge]
    assert [score.gdpo_parts for score in scores] == [{"judge": 0.5, "exact": 1.0}, {"judge": 0.0, "exact": 1.0}]
    assert scores[0].parts == {"judge": 0.5, "exact": 1.0, "judge_num_chars": 900.0}
    assert scores[1].parts == {"exact": 1.0, "judge_num_chars": 7.0} and scores[1].failure == "judge: no answer"
    assert [as_score(score, response) for score in scores] == scores, "a reward around the sum may pass them on"


def part(**arguments):
    return {"math": {"_target_": "mrl.rewards.rule_based.GSM8K"} | arguments}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            dict(parts=part(strikt=True), weights={}),
            "reward.parts.math.strikt: mrl.rewards.rule_based.GSM8K has no argument 'strikt'; did you mean 'strict'?",
        ),
        (
            dict(parts=part(_target_="mrl.rewards.rule_based.GSM9K"), weights={}),
            "reward.parts.math._target_=mrl.rewards.rule_based.GSM9K: cannot be imported",
        ),
        (dict(wieghts={}), "reward.wieghts: mrl.rewards.reward_types.Weighted has no argument 'wieghts'; did you mean"),
        (dict(weights={"maths": 1.0}), "weights.maths: there is no part with this name; did you mean 'math'?"),
        (dict(weights={"math": 1.0}), "weights.exact is missing"),
        (dict(weights={"math": "much", "exact": 1}), "weights.math='much': expected a number"),
        (dict(parts={}), "parts is empty"),
        (dict(parts={"math": "mrl.rewards.rule_based.GSM8K"}, weights={}), "parts.math: expected a reward"),
        (
            dict(parts={"Math!": {"_target_": "mrl.rewards.rule_based.GSM8K"}}, weights={}),
            "parts.Math!: a name consists of",
        ),
    ],
)
def test_an_error_inside_a_weighted_sum_names_its_key(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        instantiate_callable(weighted(**changes), "reward")


def test_nodes_in_lists_are_built_too():
    built = instantiate(
        {
            "_target_": "mrl.rewards.reward_types.Turn",
            "role": [{"_target_": "mrl.rewards.rule_based.GSM8K"}],
            "text": "",
        },
        "k",
    )
    assert built.role == [GSM8K()]
    bad = {
        "_target_": "mrl.rewards.reward_types.Turn",
        "role": [{"_target_": "mrl.rewards.rule_based.GSM8K", "stric": 1}],
        "text": "",
    }
    with pytest.raises(ValueError, match=re.escape("k.role.0.stric")):
        instantiate(bad, "k")


CHOICES = {
    "exact_match": [],
    "gsm8k": ["reward.strict=false"],
    "math": ["reward.boxed=true"],
    "multiple_choice": ["reward.letters=ABCD"],
    "function": ["reward.path={file}", "reward.args={{}}"],
    "weighted": ["reward.weights.overlong=0.2", "reward.parts.correct.boxed=true"],
    "by_source": ["reward.default._target_=mrl.rewards.rule_based.ExactMatch"],
    "verl_sources": ["reward.rewards.gsm8k.reward.strict=false"],
    "judge": ["reward.url=http://h:1", "reward.model=m"],
    "reward_model": ["reward.url=http://h:1", "reward.tokenizer={tokenizer}"],
    "served_judge": ["roles.judge.path=m"],
    "served_reward_model": ["roles.reward_model.path={tokenizer}"],
}


@pytest.mark.extended_after(1)
@pytest.mark.parametrize("name", CHOICES)
def test_every_file_in_conf_reward_makes_a_reward(name, file, tmp_path):
    """The file replaces the reward that the experiment chooses."""
    byte_tokenizer().save_pretrained(tmp_path)
    hydra_entry.register_schema()
    overrides = [o.format(file=file, tokenizer=tmp_path) for o in CHOICES[name]]
    with initialize_config_dir(str(hydra_entry.CONF), version_base="1.3"):
        argv = ["experiment=gsm8k", "model.path=m", "run.dir=out", f"reward={name}", *overrides]
        config = from_hydra(compose("config", hydra_entry.check_overrides(argv)))
    reward = instantiate_callable(config.reward, "reward")
    check_reward(reward)
    assert pickle.loads(pickle.dumps(reward)) == reward


def test_every_file_in_conf_reward_is_tested():
    others = {"code"}  # tested in test_code_reward.py
    assert {path.stem for path in (hydra_entry.CONF / "reward").glob("*.yaml")} - others == CHOICES.keys()
