"""Columns that trainer ranks compute without gradients: log-probabilities and values of every sampled token."""

from typing import TYPE_CHECKING, Any

import numpy as np

from mrl.core.types import Part, Share, TokenBlock

if TYPE_CHECKING:
    from mrl.workers.actor import Actor
    from mrl.workers.critic import Critic


def compute(model: "Actor | Critic", what: str, block: TokenBlock, share: Share, **how: Any) -> Part | None:
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
    return Part(rows, np.concatenate([np.empty(0, np.float32), *values]))
