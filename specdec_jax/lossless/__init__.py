"""Proofs of losslessness: cases drawn from a seed, enumerated on toy models or sampled from the whole decoder."""

from specdec_jax.lossless.drawing import Drawing, Shape, constants_of
from specdec_jax.lossless.law import prove_law
from specdec_jax.lossless.proof import LOSSLESS, NOT_LOSSLESS, NOT_SHOWN, Proof, Row, prove
from specdec_jax.lossless.real_size import prove_real_size
from specdec_jax.lossless.results import Counterexample, Coverage, Result
from specdec_jax.lossless.rounds import prove_rounds
from specdec_jax.lossless.sampled import FALSE_ALARM, SampledReport, check_on_toy, test_by_sampling, toy_decoder
from specdec_jax.lossless.whole import prove_whole

__all__ = [
    "FALSE_ALARM",
    "LOSSLESS",
    "NOT_LOSSLESS",
    "NOT_SHOWN",
    "Counterexample",
    "Coverage",
    "Drawing",
    "Proof",
    "Result",
    "Row",
    "SampledReport",
    "Shape",
    "check_on_toy",
    "constants_of",
    "prove",
    "prove_law",
    "prove_real_size",
    "prove_rounds",
    "prove_whole",
    "test_by_sampling",
    "toy_decoder",
]
