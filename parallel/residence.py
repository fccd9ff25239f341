"""How much of a model is on its device; light enough for the driver."""

from enum import IntEnum


class Residence(IntEnum):
    """Each level includes those below."""

    NOTHING = 0  # all of its memory is given back
    WEIGHTS = 1  # parameters and buffers: it can compute without gradients, and hand its weights on
    EVERYTHING = 2  # gradients and optimizer state too: it can be trained
