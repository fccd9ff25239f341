"""The model to be asked: a Hugging Face folder, or one made from a Megatron checkpoint for the time."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from models.conversion.hf_io import HFWeights, check_checkpoint
from models.conversion.partial_folder import Progress, fingerprint
from models.families import family_of
from models.hf_config import HFConfig
from mrl.config.schema import Config

CONVERTED = "model"  # in the folder of a generation, until it is finished


@dataclass(frozen=True)
class Source:
    """Weights, and the Hugging Face folder that says what they are."""

    hf: HFConfig
    checkpoint: Path | None = None  # Megatron's; None: the weights are in the folder too

    @property
    def folder(self) -> Path:
        """Where config and tokenizer are."""
        return self.hf.path.parent

    @property
    def context(self) -> int:
        """Longest sequence, tokens."""
        return family_of(self.hf).read(self.hf).max_position_embeddings

    @property
    def vocab_size(self) -> int:
        """Tokens that the model knows."""
        return family_of(self.hf).read(self.hf).vocab_size

    def fingerprint(self) -> dict[str, list[int]]:
        """Size and time of change of every file that decides the weights."""
        weights = sorted(self.checkpoint.iterdir()) if self.checkpoint else HFWeights(self.folder).files
        return fingerprint([self.hf.path, *weights])

    def served(self, scratch: Path, progress: AbstractContextManager[Progress]) -> Path:
        """A folder that engines load; a Megatron checkpoint becomes one at `scratch`, unless it is there already.

        Raises: ValueError where the checkpoint is none of this model.
        """
        if not self.checkpoint:
            return self.folder
        from models.conversion import convert  # torch

        if not scratch.is_dir():
            with progress as bar:
                convert.to_hf(self.checkpoint, self.hf, scratch, bar)
        return scratch


def find(config: Config) -> Source:
    """What model.path holds, by its files; raises ValueError that says what to name instead."""
    path, base = Path(config.model.path), config.generate.base
    if (path / ".metadata").is_file() and not (path / "config.json").is_file():
        if not base:
            raise ValueError(
                f"model.path={path}: a Megatron checkpoint has neither config nor tokenizer; name the Hugging Face folder "
                "that it was trained from: generate.base=FOLDER."
            )
        return Source(HFConfig.load(base, config.model.family), path)
    if base:
        raise ValueError(
            f"generate.base={base}: goes with a Megatron checkpoint, and model.path={path} is none; leave it out."
        )
    inner = [found for name in ("hf", "checkpoint", "actor") if (found := path / name).is_dir()]
    inner += sorted(path.glob("checkpoints/step_*/actor"))[-1:]
    if inner and not (path / "config.json").is_file():
        raise ValueError(f"model.path={path}: is the folder of a run; name {' or '.join(map(str, inner))}.")
    return Source(check_checkpoint(path, config.model.family))
