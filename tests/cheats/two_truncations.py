"""A cheat: it accepts too much where top-k and top-p are both on."""

from biased import biased


def two_truncations():
    return biased(lambda draft, context: ((context.warp.top_k > 0) & (context.warp.top_p < 1))[:, None])
