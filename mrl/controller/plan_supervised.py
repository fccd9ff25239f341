"""Plan of supervised training: its objective, the check of its rows, and the settings that decide the weights of a warm start.

A warm start is supervised training with which an RL run begins. Every function raises ValueError for a mistake of the user. No
function starts a process.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mrl.algorithms.inputs import required_inputs_of
from mrl.algorithms.objective import TokenWeighting, sequence_mean, token_mean
from mrl.config.instantiate import instantiate_callable
from mrl.config.schema import Config, SftConfig
from mrl.controller.plan_models import ModelPlan, chat_template
from mrl.data.supervised_dataset import RowForm

ROW_FORMS = ("responses", "pairs", "labels")


@dataclass(frozen=True)
class SupervisedObjective:
    """Objective of a supervised stage: the loss that sft.objective names, with the form of its rows and the output head."""

    loss: Any  # mrl.algorithms.losses.Loss, or ScoreLoss for a reward model
    form: RowForm  # kind of the rows (responses, pairs or labels), and what the loss needs beside them
    head: str  # output head of the model: "vocabulary", or "score" for a reward model

    @classmethod
    def of(cls, config: Config) -> "SupervisedObjective":
        """Build the objective that `sft.objective` names.

        Raises ValueError if the object is not a loss, or if it reads columns that supervised training does not compute.
        """
        key = "sft.objective"
        loss = instantiate_callable(config.sft.objective, key)
        rows, head = getattr(loss, "rows", "responses"), getattr(loss, "head", "vocabulary")
        if rows not in ROW_FORMS:
            raise ValueError(f"{key}: {type(loss).__name__}.rows={rows!r}; expected one of {', '.join(ROW_FORMS)}.")
        if head == "vocabulary" and not all(hasattr(loss, name) for name in ("uses_entropy", "zero_at_zero_advantage")):
            raise ValueError(
                f"{key}: {type(loss).__name__} is not a loss; derive it from mrl.algorithms.losses.PolicyLoss or from a class in "
                "mrl.algorithms.preference."
            )
        if missing := required_inputs_of(loss) - {"ref_logprobs"}:
            raise ValueError(
                f"{key}: {type(loss).__name__} needs {', '.join(sorted(missing))}, but supervised training computes only "
                "ref_logprobs; choose another loss."
            )
        if head == "vocabulary" and loss.zero_at_zero_advantage:
            raise ValueError(
                f"{key}: {type(loss).__name__} is 0 without advantages, which supervised training does not have; choose another "
                "loss, or set zero_at_zero_advantage to False in the class if this is wrong."
            )
        mismatched = hasattr(loss, "with_reference_point")  # KTO needs prompts with responses to other prompts
        return cls(loss, RowForm(rows, for_reward_model=head == "score", mismatched=mismatched), head)

    @property
    def needs_reference(self) -> bool:
        """Whether the loss reads the log-probabilities under the initial weights."""
        return "ref_logprobs" in required_inputs_of(self.loss)

    @property
    def weighting(self) -> TokenWeighting:
        """Rule that computes the token weights.

        All tokens of plain responses have equal weights. All pairs, or all labeled responses, have equal weights.
        """
        return TokenWeighting(token_mean if self.form.rows == "responses" else sequence_mean)


def check_supervised_data(config: Config, model: ModelPlan) -> None:
    """Raise ValueError if a row of `sft.train` or `sft.test` is invalid, longer than the context, or has an unknown token."""
    assert config.sft.train, "only called for a config with a supervised stage"
    form = SupervisedObjective.of(config).form
    for path in filter(None, (config.sft.train, config.sft.test)):
        data = form.load(path, model.model_path, model.context, chat_template(config))
        data.check_vocabulary(model.arch.vocab_size)


def check_warm_start(config: Config) -> None:
    """Raise ValueError if the objective of a warm start trains a reward model, or if a run with LoRA sets sft.output."""
    if SupervisedObjective.of(config).head != "vocabulary":
        raise ValueError(
            f"sft.objective._target_={config.sft.objective.get('_target_')}: it trains a reward model, which cannot be the warm "
            "start of the actor; train it with mrl sft, or set sft.train=null."
        )
    if config.lora.rank and config.sft.output:
        raise ValueError(
            f"sft.output={config.sft.output} with lora.rank={config.lora.rank}: a resumed run would add its adapters to the "
            "merged weights in this folder; set sft.output=null, or make the folder with mrl sft and set model.path to it."
        )


WARM_START_SETTINGS = "mrl_sft.json"  # file in a warm start's folder with the settings that decided the weights


def warm_start_settings(config: Config) -> dict[str, Any]:
    """Return the settings that decide the weights of a warm start.

    sft.test is left out, and so is an objective that has its default value. If data.inputs is set, run.seed is left out, so
    runs with different seeds share one warm start.
    """
    sft: dict[str, Any] = asdict(config.sft)
    del sft["test"]
    if not sft["optim"]["megatron"]:
        del sft["optim"]["megatron"]  # earlier versions of mrl had no such key
    if sft["objective"] == SftConfig().objective:
        del sft["objective"]
    settings = dict(model=config.model.path, seed=None if config.data.inputs else config.run.seed, sft=sft)
    if config.lora.rank:
        settings["lora"] = asdict(config.lora)
    chat = {name: value for name, value in asdict(chat_template(config)).items() if value}
    return settings | (dict(chat=chat) if chat else {})


def find_finished_warm_start(config: Config) -> str:
    """Return the folder of a warm start that exists already, or "".

    Raises ValueError if that warm start was made with other settings.
    """
    folder = config.sft.output if config.sft.train else None
    if not folder or not Path(folder).is_dir():
        return ""
    path = Path(folder) / WARM_START_SETTINGS
    made_with = json.loads(path.read_text()) if path.is_file() else None
    needed = json.loads(json.dumps(warm_start_settings(config)))
    if made_with != needed:
        raise ValueError(
            f"sft.output={folder}: was made from other settings ({made_with}) than this run needs ({needed}); remove the folder "
            "to make it again, name another sft.output, or set sft.train=null to train model.path as it is."
        )
    return folder
