"""Verifiers, one per file; the factory has the file's name."""

# Helpers for user-defined verifiers.
from specdec_jax.verification._common import bonus_or as bonus_or
from specdec_jax.verification._common import draft_log_probabilities as draft_log_probabilities
from specdec_jax.verification._common import positions as positions
from specdec_jax.verification._common import residual as residual
from specdec_jax.verification._common import token_by_token as token_by_token
from specdec_jax.verification.block import block as block
from specdec_jax.verification.by_phase import by_phase as by_phase
from specdec_jax.verification.easd import easd as easd
from specdec_jax.verification.greedy import greedy as greedy
from specdec_jax.verification.lenience import lenience as lenience
from specdec_jax.verification.rejection import rejection as rejection
from specdec_jax.verification.typical import typical as typical
