"""Scores of the rule-based rewards."""

import math
import time

import pytest

from mrl.rewards.reward_types import Response
from mrl.rewards.rule_based import (
    GSM8K,
    ExactMatch,
    Format,
    Length,
    MathVerify,
    MultipleChoice,
    Overlong,
    Repetition,
    last_closed_box,
)
from mrl.rewards.scorer import Scorer


def value(reward, text, truth="", num_tokens=0) -> float:
    (found,) = reward([Response("source", text, truth, num_tokens=num_tokens)])
    return found


EQUAL = [
    (r"\boxed{\frac{1}{2}}", "0.5"),
    (r"\boxed{\frac12}", "1/2"),
    (r"\boxed{0.5}", r"\frac{1}{2}"),
    (r"\boxed{1{,}234}", "1234"),
    (r"\boxed{1,234.0}", "1234"),
    (r"\boxed{2\sqrt{2}}", r"\sqrt{8}"),
    (r"\boxed{x^2+2x+1}", "(x+1)^2"),
    (r"\boxed{\left( 3, \frac{\pi}{2} \right)}", r"\left(3,\pi/2\right)"),
    (r"\boxed{\{1,2,3\}}", r"\{3,2,1\}"),
    (r"\boxed{x = 5}", "5"),
    (r"\boxed{-\frac{3}{4}}", "-0.75"),
    (r"\boxed{50\%}", r"50\%"),
    (r"\boxed{12 \text{ cm}}", "12"),
    (r"first \boxed{3}, no: \boxed{4}", "4"),
    (r"so $x = \frac{6}{4}$.", r"\frac{3}{2}"),
    ("The answer is 42.", "42"),
    ("... = 7", 7),
    (r"\boxed{[0, 1)}", r"[0,1)"),
    (r"\boxed{\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}}", r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}"),
    (r"\boxed{10^3}", "1000"),
    (r"\boxed{\sin^2 x + \cos^2 x}", "1"),
    (r"\boxed{7}", r"$\boxed{7}$"),
    (r"\boxed{7}", "$7$"),
]
DIFFERENT = [
    (r"\boxed{\frac{1}{3}}", "0.5"),
    (r"\boxed{4}, or rather \boxed{3}", "4"),
    (r"\boxed{(1,2)}", "(2,1)"),
    (r"\boxed{x+1}", "x-1"),
    (r"\boxed{}", "1"),
    ("I do not know.", "1"),
    ("", "1"),
    (r"\boxed{\frac{1}{}", "1"),
    ("\x00\ufffd" * 100, "1"),
]


@pytest.mark.parametrize(("text", "truth"), EQUAL)
def test_equal_as_mathematics(text, truth):
    assert value(MathVerify(), text, truth) == 1.0


@pytest.mark.parametrize(("text", "truth"), DIFFERENT)
def test_different_as_mathematics(text, truth):
    assert value(MathVerify(), text, truth) == 0.0


def test_with_boxed_only_boxed_answers_count():
    assert value(MathVerify(boxed=True), "The answer is 42.", "42") == 0.0
    assert value(MathVerify(boxed=True), r"The answer is \boxed{42}.", "42") == 1.0


def test_the_last_complete_box_counts():
    assert last_closed_box(r"\boxed{1} \boxed{\frac{1}{2}} \boxed{3") == r"\frac{1}{2}"
    assert last_closed_box("none") is None
    assert last_closed_box(r"\boxed{" * 100_000) is None


@pytest.mark.extended
def test_an_answer_that_cannot_be_compared_in_time_fails_alone():
    texts = [r"\boxed{5}", r"\boxed{9^{9^{9^{9}}}}", r"\boxed{10^{10^{10}} + 1}", "(" * 1_000_000 + "5", r"\boxed{5}"]
    with Scorer(MathVerify(), workers=2, sample_timeout_s=15.0) as scorer:
        scores = scorer([Response("s", text, "5", group=i) for i, text in enumerate(texts)])
    assert [s.value for s in scores] == [1.0, 0.0, 0.0, 0.0, 1.0]
    assert "no score within 15.0 s" in scores[1].failure and scores[0].failure is scores[3].failure is None


def test_a_ground_truth_that_is_not_mathematics_is_an_error():
    with pytest.raises(ValueError, match="neither a number nor LaTeX"):
        MathVerify()([Response("s", r"\boxed{1}", "")])


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        ("The answer is (B).", "B"),
        ("Answer: C", "C"),
        ("**Answer: D**", "D"),
        ("**Answer:** B", "B"),
        ("The correct answer is **B**.", "B"),
        ("the correct option is: C) Paris", "C"),
        (r"so \boxed{A}", "A"),
        (r"\boxed{\text{D}}", "D"),
        (r"\boxed{(D)}", "D"),
        (r"\boxed{\textbf{(C)}\ 12}", "C"),
        ("<think>A or B?</think><answer>B</answer>", "B"),
        ("<answer> (C) Paris </answer>", "C"),
        ("B", "B"),
        ("(B)", "B"),
        ("B. Because it is green.", "B"),
        ("Thinking...\n\nC\n", "C"),
        ("I think the answer is A. No: the answer is B.", "B"),
        ("The answer is a matter of taste.", None),
        ("The answer is Apple.", None),
        ("A cat sat there.", None),
        ("A's answer", None),
        ("", None),
        ("no idea" * 100_000, None),
    ],
)
def test_the_letter_that_a_response_chooses(text, chosen):
    reward = MultipleChoice("ABCD")
    assert reward.choice(text) == chosen
    assert value(reward, text, "(b)") == float(chosen == "B")


def of_length(start: str, filling: str, length: int = 4000) -> str:
    return (start + filling * length)[:length] + "?"


def test_no_response_takes_long_to_parse():
    """Responses are long runs of characters that the parsers skip. Backtracking would take cubic time, or more."""
    fillings = [
        " ",
        "\n",
        "( ",
        "(\n",
        "\u00a0",
        " *_",
        "{",
        "$ ",
        "\\text{",
        "answer ",
        "answer is ",
        "\\boxed{( ",
        " option ",
    ]
    starts = ["", "The answer", "The answer is:", "My choice", "\\boxed{", "<answer>", "\\boxed{\\text{ ("]
    reward, begun = MultipleChoice(), time.process_time()
    for start in starts:
        for filling in fillings:
            assert reward.choice(of_length(start, filling)) is None
    assert time.process_time() - begun < 5.0, f"{len(starts) * len(fillings)} responses"


def test_white_space_before_a_letter_does_not_hide_it():
    assert MultipleChoice("ABCD").choice("The answer is" + "\n" * 5000 + "(B)") == "B"
    assert MultipleChoice("ABCD").choice("I see." + "\n \n" * 2000 + " C " + "\n" * 5000) == "C"


def test_invalid_letters_and_ground_truths_are_refused():
    with pytest.raises(ValueError, match="not one of the letters ABCD"):
        value(MultipleChoice("ABCD"), "A", "E")
    with pytest.raises(ValueError, match="expected capital letters"):
        MultipleChoice("abc")


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("<think>a</think><answer>b</answer>", 1),
        ("\n<think>\na < b\n</think>\n\n<answer>b</answer>\n", 1),
        ("<think></think><answer></answer>", 1),
        ("<think>a</think> so <answer>b</answer>", 0),
        ("first <think>a</think><answer>b</answer>", 0),
        ("<think>a</think><answer>b</answer> and more", 0),
        ("<think>a</think><think>a</think><answer>b</answer>", 0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0),
        ("<answer>b</answer><think>a</think>", 0),
        ("<think>a<answer>b</answer></think>", 0),
        ("<think>a</think><answer>b", 0),
        ("", 0),
    ],
)
def test_tags_in_order(text, fits):
    assert value(Format(tags=("think", "answer")), text) == fits


def test_a_single_tag_may_be_a_text():
    assert Format(tags="think") == Format(tags=("think",)) == Format(tags=["think"])
    assert value(Format(tags="think"), "<think>a</think>") == 1 and value(Format(tags="think"), "<t>a</t>") == 0


def test_a_pattern_matches_the_whole_response():
    reward = Format(pattern=r"Yes.*because.*\.")
    assert value(reward, "Yes,\nbecause it is.") == 1
    assert value(reward, "Well: Yes, because it is.") == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Format(), "either tags or pattern"),
        (lambda: Format(tags=("a",), pattern="b"), "either tags or pattern"),
        (lambda: Format(pattern="("), "not a regular expression"),
        (lambda: Length(10, "square"), "linear or cosine"),
        (lambda: Length(0), "must be 1 or more"),
        (lambda: Overlong(10, 11), "from 1 to max_tokens=10"),
        (lambda: Overlong(10, 0), "from 1 to max_tokens=10"),
        (lambda: Repetition(0), "must be 1 or more"),
    ],
)
def test_invalid_arguments_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_the_length_reward_decreases_from_one_to_zero():
    for shape in ("linear", "cosine"):
        values = [value(Length(100, shape), "", num_tokens=n) for n in (0, 25, 50, 75, 100, 1000)]
        assert values == sorted(values, reverse=True) and values[0] == 1 and values[-2:] == [0, 0]
        assert values[2] == pytest.approx(0.5)
    assert value(Length(100), "", num_tokens=25) == 0.75
    assert value(Length(100, "cosine"), "", num_tokens=25) == pytest.approx((1 + math.sqrt(0.5)) / 2)


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [(0, 0), (16384, 0), (16385, -1 / 4096), (18432, -0.5), (20480, -1), (20481, -1), (99999, -1)],
)
def test_overlong_is_equation_13_of_dapo(num_tokens, expected):
    """The values are L_max = 20480 and L_cache = 4096 tokens, as in the paper."""
    assert value(Overlong(20480, 4096), "", num_tokens=num_tokens) == pytest.approx(expected)


def test_repetition_counts_repeated_ngrams():
    assert value(Repetition(2), "a b c d") == 0
    assert value(Repetition(2), "a b a b a b") == pytest.approx(2 / 5 - 1)
    assert value(Repetition(3), "a b") == 0
    assert value(Repetition(3), "la " * 1000) < -0.99


def test_a_ground_truth_may_be_a_number():
    assert value(ExactMatch(), " 12 ", 12) == 1.0
    assert value(GSM8K(), "#### 12", 12) == 1.0


def test_equal_answers_have_the_same_canonical_form():
    def said(reward, text):
        return reward.answer(Response("source", text, "1"))

    assert said(GSM8K(), "so #### 1,200") == said(GSM8K(), "#### 1200.0") != said(GSM8K(), "#### 1201")
    assert said(GSM8K(), "1200") is None and said(GSM8K(strict=False), "1200") == said(GSM8K(), "#### 1200")
    assert said(MathVerify(), r"\boxed{\frac{1} {2}}") == r"\frac{1}{2}"
    assert said(MathVerify(), "it is 7.") == "7" and said(MathVerify(boxed=True), "it is 7.") is None
    assert said(MultipleChoice(), "The answer is (C).") == "C" and said(MultipleChoice(), "no idea") is None
