"""Proofs of losslessness: cases drawn from a seed, enumerated on toy models or sampled from the whole decoder."""

from specdec_jax.lossless.drawing import Drawing as Drawing
from specdec_jax.lossless.drawing import Shape as Shape
from specdec_jax.lossless.drawing import constants_of as constants_of
from specdec_jax.lossless.law import prove_law as prove_law
from specdec_jax.lossless.proof import LOSSLESS as LOSSLESS
from specdec_jax.lossless.proof import NOT_LOSSLESS as NOT_LOSSLESS
from specdec_jax.lossless.proof import NOT_SHOWN as NOT_SHOWN
from specdec_jax.lossless.proof import Proof as Proof
from specdec_jax.lossless.proof import Row as Row
from specdec_jax.lossless.proof import prove as prove
from specdec_jax.lossless.real_size import prove_real_size as prove_real_size
from specdec_jax.lossless.results import Counterexample as Counterexample
from specdec_jax.lossless.results import Coverage as Coverage
from specdec_jax.lossless.results import Result as Result
from specdec_jax.lossless.rounds import prove_rounds as prove_rounds
from specdec_jax.lossless.sampled import FALSE_ALARM as FALSE_ALARM
from specdec_jax.lossless.sampled import SampledReport as SampledReport
from specdec_jax.lossless.sampled import check_on_toy as check_on_toy
from specdec_jax.lossless.sampled import test_by_sampling as test_by_sampling
from specdec_jax.lossless.sampled import toy_decoder as toy_decoder
from specdec_jax.lossless.whole import prove_whole as prove_whole
