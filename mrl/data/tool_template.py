"""The tokens that a chat template puts around tool results. The policy samples the turns between the tool results."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Texts of a fixed conversation; the template is rendered with them to find the tokens around results
_USER, _ASSISTANT, _RESULTS = "8*8=", "12+13", ("9081726354", "7203948165")
_CUT = "..."  # marks the end of a truncated tool result


@dataclass(frozen=True)
class ToolTemplate:
    """The tokens between two turns of the assistant.

    With one tool result, they are `end + before + result + after`. With two results, they are
    `end + before + result + between + result + after`.
    """

    tokenizer: Any
    end: tuple[int, ...]  # the token that ends the assistant's turn; empty if the template has none
    before: tuple[int, ...]  # tokens before the first result
    between: tuple[int, ...]  # tokens between two results
    after: tuple[int, ...]  # tokens after the last result, up to the start of the assistant's next turn

    @classmethod
    def of(cls, tokenizer: Any, role: str = "tool", args: Mapping[str, Any] | None = None) -> "ToolTemplate":
        """Derive the tokens: render a fixed conversation with and without tool results, and compare the texts.

        Args:
            role: role of the messages with tool results.
            args: values of the template's variables, the same values as for the prompts.

        Raises:
            ValueError: the template rejects the role, changes the user's message if a result follows, drops results, or
                puts nothing around them.
            ValueError: the tokens do not decode to the rendered text.
        """
        prompt, one, two = (_render(tokenizer, role, count, args) for count in (0, 1, 2))
        around = _after_assistant(role, prompt, one).split(_RESULTS[0])
        head, found, rest = _after_assistant(role, prompt, two).partition(_RESULTS[0])
        middle, second, tail = rest.partition(_RESULTS[1])
        if len(around) != 2 or not found or not second:
            raise _template_error(role, "it must render each result exactly once", two)
        if around != [head, tail]:
            raise _template_error(role, "the text around results depends on their number", two)
        if not head + tail:
            raise _template_error(
                role, "it puts nothing around a result, so the result would look like the assistant's own text", one
            )
        before, between, after = (encode_text(tokenizer, text) for text in (head, middle, tail))
        _check_round_trip(tokenizer, role, [*before, *encode_text(tokenizer, _RESULTS[0]), *after], head, tail)
        closing = _tokens_after_last_turn(tokenizer, args)
        end = before[:1] if before[:1] == closing[:1] and before[0] in _end_tokens(tokenizer) else []
        return cls(tokenizer, tuple(end), tuple(before[len(end) :]), tuple(between), tuple(after))

    def encode(self, result: str, limit: int) -> list[int]:
        """Return the tokens of a result, at most `limit`. Names of special tokens in the result are encoded as plain text."""
        ids = encode_text(self.tokenizer, result, split_special_tokens=True)
        if len(ids) <= limit:
            return ids
        mark = encode_text(self.tokenizer, _CUT)[:limit]
        return ids[: limit - len(mark)] + mark

    def wrap(self, results: Sequence[Sequence[int]], *, turn_ended: bool) -> list[int]:
        """Return the tokens between an assistant's turn and its next turn, with the tokens of `results`.

        `turn_ended`: whether the policy has already sampled a token that ends the turn. If so, the result has no `end`.
        """
        inner: list[int] = []
        for result in results:
            inner += [*(self.between if inner else ()), *result]
        return [*(() if turn_ended else self.end), *self.before, *inner, *self.after]


def encode_text(tokenizer: Any, text: str, **options: Any) -> list[int]:
    """Return the token ids of a text, without special tokens."""
    return tokenizer(text, add_special_tokens=False, **options)["input_ids"]


def _render(tokenizer: Any, role: str, num_results: int, args: Mapping[str, Any] | None) -> str:
    """Render a user message, and if `num_results` > 0 also an assistant's turn and tool results."""
    from jinja2 import TemplateError  # comes with the tokenizer library

    messages = [dict(role="user", content=_USER)]
    if num_results:
        messages += [dict(role="assistant", content=_ASSISTANT)]
        messages += [dict(role=role, content=result) for result in _RESULTS[:num_results]]
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **(args or {}))
    except TemplateError as error:
        raise _template_error(role, f"it rejects messages of role {role!r} ({error})", "") from None


def _after_assistant(role: str, prompt: str, text: str) -> str:
    """Return the part of `text` after the assistant's turn. `prompt` is the text before this turn.

    A template may render an earlier turn of the assistant in another way than the last turn, for example without thoughts.
    This difference changes no token, because mrl never renders a response again.
    """
    user = prompt.rfind(_USER) + len(_USER)
    if not prompt[:user].endswith(_USER) or not text.startswith(prompt[:user]):
        raise _template_error(
            role, "it is not append-only: the text of the user's message changes if a result follows", text
        )
    _, found, rest = text[user:].partition(_ASSISTANT)
    if not found:
        raise _template_error(role, "it does not render the assistant's turn before a result", text)
    return rest


def _tokens_after_last_turn(tokenizer: Any, args: Mapping[str, Any] | None) -> list[int]:
    """Return the tokens that the template puts after the assistant's last turn."""
    messages = [dict(role="user", content=_USER), dict(role="assistant", content=_ASSISTANT)]
    text = tokenizer.apply_chat_template(messages, tokenize=False, **(args or {}))
    return encode_text(tokenizer, text.rpartition(_ASSISTANT)[2])


def _end_tokens(tokenizer: Any) -> set[int]:
    return {tokenizer.eos_token_id, *tokenizer.all_special_ids}


def _check_round_trip(tokenizer: Any, role: str, ids: list[int], head: str, tail: str) -> None:
    """Raise ValueError if the parts, which were encoded separately, do not decode to the rendered text."""
    text, expected = tokenizer.decode(ids, clean_up_tokenization_spaces=False), head + _RESULTS[0] + tail
    if text != expected:
        raise _template_error(role, f"the tokens of its parts decode to another text, {text!r}", expected)


def _template_error(role: str, why: str, text: str) -> ValueError:
    shown = f" Rendered: {text!r}." if text else ""
    return ValueError(
        f"rollout.agent: the model's chat template cannot be used for tool results: {why}.{shown} Use a template with messages "
        f"of role {role!r}, or set rollout.agent.result_role to a role that it has."
    )
