"""What a chat template puts around tool results, as tokens: the only tokens of a conversation that no policy sampled."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_USER, _ASSISTANT, _RESULTS = "8*8=", "12+13", ("9081726354", "7203948165")
_CUT = "..."  # at the end of a result that was cut


@dataclass(frozen=True)
class ToolTemplate:
    """Between two turns of an assistant stand the tokens `end + before + result [+ between + result ...] + after`."""

    tokenizer: Any
    end: tuple[int, ...]  # the token that closes an assistant's turn, none in some templates
    before: tuple[int, ...]
    between: tuple[int, ...]  # two results
    after: tuple[int, ...]  # the last result, up to where the assistant goes on

    @classmethod
    def of(cls, tokenizer: Any, role: str = "tool", args: Mapping[str, Any] | None = None) -> "ToolTemplate":
        """Derive the tokens from a fixed conversation, rendered with results (messages of this role) and without.

        `args`: variables of the template, the same as for the prompts. Raises: ValueError where the template refuses the
        role, changes the user's part when a result is added, leaves results out, puts nothing around them, or where its text
        does not survive the tokenizer.
        """
        prompt, one, two = (_render(tokenizer, role, count, args) for count in (0, 1, 2))
        around = _behind_assistant(role, prompt, one).split(_RESULTS[0])
        head, found, rest = _behind_assistant(role, prompt, two).partition(_RESULTS[0])
        middle, second, tail = rest.partition(_RESULTS[1])
        if len(around) != 2 or not found or not second:
            raise _unfit(role, "each result should stand in it once", two)
        if around != [head, tail]:
            raise _unfit(role, "what stands around results depends on how many there are", two)
        if not head + tail:
            raise _unfit(role, "it puts nothing around a result, which would read as the assistant's own words", one)
        before, between, after = (encode_text(tokenizer, text) for text in (head, middle, tail))
        _check_pieces(tokenizer, role, [*before, *encode_text(tokenizer, _RESULTS[0]), *after], head, tail)
        closing = _closing(tokenizer, args)
        end = before[:1] if before[:1] == closing[:1] and before[0] in _ends(tokenizer) else []
        return cls(tokenizer, tuple(end), tuple(before[len(end) :]), tuple(between), tuple(after))

    def encode(self, result: str, limit: int) -> list[int]:
        """A result's tokens, at most `limit` of them; what stands in it is text, also where it spells a special token."""
        ids = encode_text(self.tokenizer, result, split_special_tokens=True)
        if len(ids) <= limit:
            return ids
        mark = encode_text(self.tokenizer, _CUT)[:limit]
        return ids[: limit - len(mark)] + mark

    def wrap(self, results: Sequence[Sequence[int]], *, closed: bool) -> list[int]:
        """What follows an assistant's turn; `closed`: the policy has sampled the turn's end itself."""
        inner: list[int] = []
        for result in results:
            inner += [*(self.between if inner else ()), *result]
        return [*(() if closed else self.end), *self.before, *inner, *self.after]


def encode_text(tokenizer: Any, text: str, **how: Any) -> list[int]:
    """Tokens of a text by itself, nothing added."""
    return tokenizer(text, add_special_tokens=False, **how)["input_ids"]


def _render(tokenizer: Any, role: str, num_results: int, args: Mapping[str, Any] | None) -> str:
    """A user's message, ready for the assistant; with results, the assistant's turn and these, ready for its next."""
    from jinja2 import TemplateError  # comes with the tokenizer library

    messages = [dict(role="user", content=_USER)]
    if num_results:
        messages += [dict(role="assistant", content=_ASSISTANT)]
        messages += [dict(role=role, content=result) for result in _RESULTS[:num_results]]
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **(args or {}))
    except TemplateError as error:
        raise _unfit(role, f"it refuses messages of role {role!r} ({error})", "") from None


def _behind_assistant(role: str, prompt: str, text: str) -> str:
    """What a conversation has behind the assistant's turn. What templates put before that turn may differ from what they
    put where it begins (some leave out thoughts of earlier turns): nothing is rendered again, so that changes no token."""
    user = prompt.rfind(_USER) + len(_USER)
    if not prompt[:user].endswith(_USER) or not text.startswith(prompt[:user]):
        raise _unfit(role, "it is not append-only: once a result follows, the user's part is another", text)
    _, found, rest = text[user:].partition(_ASSISTANT)
    if not found:
        raise _unfit(role, "the assistant's turn before a result does not stand in it", text)
    return rest


def _closing(tokenizer: Any, args: Mapping[str, Any] | None) -> list[int]:
    """Tokens of what the template puts behind an assistant's last turn."""
    messages = [dict(role="user", content=_USER), dict(role="assistant", content=_ASSISTANT)]
    text = tokenizer.apply_chat_template(messages, tokenize=False, **(args or {}))
    return encode_text(tokenizer, text.rpartition(_ASSISTANT)[2])


def _ends(tokenizer: Any) -> set[int]:
    return {tokenizer.eos_token_id, *tokenizer.all_special_ids}


def _check_pieces(tokenizer: Any, role: str, ids: list[int], head: str, tail: str) -> None:
    """Raise ValueError unless the tokens of the parts spell the text of the whole."""
    text, wanted = tokenizer.decode(ids, clean_up_tokenization_spaces=False), head + _RESULTS[0] + tail
    if text != wanted:
        raise _unfit(role, f"its parts do not survive the tokenizer, which makes {text!r} of them", wanted)


def _unfit(role: str, why: str, text: str) -> ValueError:
    shown = f" Rendered: {text!r}." if text else ""
    return ValueError(
        f"rollout.agent: the model's chat template cannot carry tool results: {why}.{shown} Use a template with messages of "
        f"role {role!r}, or set rollout.agent.result_role to one that it has."
    )
