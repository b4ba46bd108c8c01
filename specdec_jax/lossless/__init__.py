"""Proofs of losslessness: exact ones on toy models, and chi-square tests of samples of the whole decoder."""

from specdec_jax.lossless.counterexample import Counterexample
from specdec_jax.lossless.coverage import Coverage
from specdec_jax.lossless.exact import TOLERANCE, TOYS, WARPS, Case, LosslessReport, prove_exactly
from specdec_jax.lossless.long_drafts import RoundsCase, RoundsReport, prove_long_drafts
from specdec_jax.lossless.long_texts import LongTextsReport, prove_long_texts
from specdec_jax.lossless.real_size import RealSizeReport, prove_real_size
from specdec_jax.lossless.sampled import FALSE_ALARM, SampledReport, check_on_toy, test_by_sampling, toy_decoder
from specdec_jax.lossless.together import drawn_warps, prove_together, prove_verifier

__all__ = [
    "FALSE_ALARM",
    "TOLERANCE",
    "TOYS",
    "WARPS",
    "Case",
    "Counterexample",
    "Coverage",
    "LongTextsReport",
    "LosslessReport",
    "RealSizeReport",
    "RoundsCase",
    "RoundsReport",
    "SampledReport",
    "check_on_toy",
    "drawn_warps",
    "prove_exactly",
    "prove_long_drafts",
    "prove_long_texts",
    "prove_real_size",
    "prove_together",
    "prove_verifier",
    "test_by_sampling",
    "toy_decoder",
]
