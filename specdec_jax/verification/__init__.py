"""Verifiers, one a file; a file's factory has the file's name."""

from specdec_jax.verification.block import block as block
from specdec_jax.verification.by_phase import by_phase as by_phase
from specdec_jax.verification.easd import easd as easd
from specdec_jax.verification.greedy import greedy as greedy
from specdec_jax.verification.lenience import lenience as lenience
from specdec_jax.verification.rejection import rejection as rejection
from specdec_jax.verification.typical import typical as typical
