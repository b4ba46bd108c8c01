"""Drafters, one per file; the factory has the file's name."""

# Helpers for user-defined drafters.
from specdec_jax.drafters._parts import lookup as lookup
from specdec_jax.drafters._parts import no_commit as no_commit
from specdec_jax.drafters._parts import no_state as no_state
from specdec_jax.drafters.model import model as model
from specdec_jax.drafters.multi_drafter import multi_drafter as multi_drafter
from specdec_jax.drafters.ngram import ngram as ngram
from specdec_jax.drafters.ngram import table_of as table_of
from specdec_jax.drafters.no_drafter import no_drafter as no_drafter
from specdec_jax.drafters.prompt_lookup import prompt_lookup as prompt_lookup
