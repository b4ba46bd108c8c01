"""Verifiers, one a file; a file's factory has the file's name."""

from specdec_jax.verification.block import block as block
from specdec_jax.verification.greedy import greedy as greedy
from specdec_jax.verification.rejection import rejection as rejection
