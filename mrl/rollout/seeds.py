"""Seeds that follow from what is sampled, so that a response that is sampled again is the same one."""

import numpy as np

TRAINING, HELD_OUT = 0, 1
"""First numbers of places: (TRAINING, number of the response in the run) and (HELD_OUT, row)."""


def seed_of(seed: int, *place: int) -> int:
    """63 bits for the response at this place of a run with this seed.

    One seed serves all turns of a response: SGLang draws a token by the seed and the token's position, which only grows.
    """
    return int(np.random.SeedSequence([seed, *place]).generate_state(1, np.uint64)[0] >> 1)
