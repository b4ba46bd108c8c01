"""A cheat: it accepts too much from the sixth draft of a round on."""

from biased import biased

from specdec_jax.verification import positions


def late_draft():
    return biased(lambda draft, context: positions(draft.tokens.shape[1])[None, :] >= 5)
