"""A cheat: it accepts too much at temperatures between 0.61 and 0.99."""

from biased import biased


def at_08():
    return biased(
        lambda draft, context: (context.warp.temperature > 0.61)[:, None] & (context.warp.temperature < 0.99)[:, None]
    )
