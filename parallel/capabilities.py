"""What NVIDIA's libraries this machine has: each is used where it is installed beside a GPU, and none is required."""

import logging
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

from parallel.device import has_cuda

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Capabilities:
    """Kernels that can be chosen; all False on a CPU."""

    cuda: bool
    transformer_engine: bool
    apex: bool  # NVIDIA's, built with its extensions; the package of that name on PyPI is another
    fused_wgrad: bool  # gradients of weights added straight to the fp32 buffers

    def __str__(self) -> str:
        kernels = "Transformer Engine" if self.transformer_engine else "torch"
        fused = "Transformer Engine's" if self.transformer_engine else "Apex's" if self.apex else "torch's"
        return (
            f"{'CUDA' if self.cuda else 'CPU'}: {kernels} layers, {fused} fused Adam, "
            f"gradient accumulation {'fused' if self.fused_wgrad else 'not fused'}"
        )


@cache
def capabilities() -> Capabilities:
    """Look once, and log what was found in one line."""
    cuda = has_cuda()
    apex = cuda and find_spec("amp_C") is not None  # an extension module that only NVIDIA's Apex brings
    found = Capabilities(
        cuda=cuda,
        transformer_engine=cuda and find_spec("transformer_engine") is not None,
        apex=apex,
        fused_wgrad=cuda and find_spec("fused_weight_gradient_mlp_cuda") is not None,
    )
    logger.info("%s", found)
    return found
