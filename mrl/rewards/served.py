"""A scalar reward model that SGLang serves."""

from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar

from mrl.rewards.base import Response, Score, as_number
from mrl.rewards.remote import Post, Service


@dataclass(frozen=True, kw_only=True)
class RewardModel(Service):
    """The score that a sequence-classification model with one output gives the conversation: prompt, then response.

    The server is SGLang with `--is-embedding` and the reward model; it is asked by /classify, with token ids made here by
    the reward model's own tokenizer and chat template.

    Raises: ValueError when `tokenizer` is no folder with tokenizer.json and a chat template.
    """

    in_process: ClassVar[bool] = True  # it only waits

    tokenizer: str  # Hugging Face folder of the reward model, for its tokenizer and chat template
    scale: float = 1.0  # the score is multiplied by this
    max_tokens: int | None = None  # of the conversation; the score of a longer one fails, without asking

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(
            self, "tokenizer", str(Path(self.tokenizer).expanduser().resolve())
        )  # workers may run elsewhere
        _tokenizer(self.tokenizer)

    async def __call__(self, responses: list[Response]) -> list[Score]:
        """Scores of the served model; failures of the service are recorded."""
        return await self.ask_all("/classify", [partial(self._score, response) for response in responses])

    async def _score(self, response: Response, post: Post) -> Score:
        ids = self.encode(response)
        if self.max_tokens is not None and len(ids) > self.max_tokens:
            return Score.failed(f"{len(ids)} tokens are more than the {self.max_tokens} that the reward model may get.")
        answer = await post(dict(input_ids=ids))
        found = answer["embedding"]
        if len(found) != 1:
            raise ValueError(f"{self.url} gives {len(found)} numbers; a reward model gives one.")
        return Score(self.scale * as_number(found[0]))

    def encode(self, response: Response) -> list[int]:
        """Token ids of the conversation as the reward model sees it."""
        turns = [dict(role=turn.role, content=turn.text) for turn in response.turns]
        messages = response.prompt + (turns or [dict(role="assistant", content=response.text)])
        tokenizer = _tokenizer(self.tokenizer)
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        return tokenizer(text, add_special_tokens=False)["input_ids"]


@cache
def _tokenizer(folder: str) -> Any:
    if not (Path(folder) / "tokenizer.json").is_file():
        raise ValueError(f"tokenizer={folder}: tokenizer.json is missing; name the reward model's folder.")
    from transformers import PreTrainedTokenizerFast  # 2 s

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    if not tokenizer.chat_template:
        raise ValueError(f"tokenizer={folder}: it has no chat template, which says how prompt and response are joined.")
    return tokenizer
