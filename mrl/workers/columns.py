"""Columns that trainer ranks compute without gradients: log-probabilities and values of every sampled token."""

from typing import TYPE_CHECKING, Any

import numpy as np

from mrl.core.types import ColumnPart, RankBatch, TokenBlock

if TYPE_CHECKING:
    from mrl.workers.actor import MegatronActor
    from mrl.workers.critic import MegatronCritic


def compute(
    model: "MegatronActor | MegatronCritic", what: str, block: TokenBlock, share: RankBatch, **how: Any
) -> ColumnPart | None:
    """This replica's rows of the column `what` (logprobs, reference_logprobs, values), on the rank that speaks for it.

    None on the other ranks; every rank of the layout calls this.
    """
    from parallel import groups  # Megatron: in the process that computes

    columns = getattr(model, f"compute_{what}")(block, share, **how)
    first = groups.tp_group().rank() == 0 and groups.cp_group().rank() == 0
    if not (first and groups.is_last_stage()):
        return None
    rows = np.concatenate([np.empty(0, np.int64), *share.micro_batches])
    values = [column.float().cpu().numpy() for column in columns]
    return ColumnPart(rows, np.concatenate([np.empty(0, np.float32), *values]))
