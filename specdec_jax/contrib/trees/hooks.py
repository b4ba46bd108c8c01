"""Functions that the decoder, proofs and replays call for policies and verifiers of trees (`StoppingPolicy.rounds`)."""

from specdec_jax.contrib.trees.answers import as_chain as as_chain
from specdec_jax.contrib.trees.answers import check_answers as check_answers
from specdec_jax.contrib.trees.answers import check_parts as check_parts
from specdec_jax.contrib.trees.answers import check_verifier as check_verifier
from specdec_jax.contrib.trees.answers import max_tokens as max_tokens
from specdec_jax.contrib.trees.answers import needs_one_model as needs_one_model
from specdec_jax.contrib.trees.answers import shapes_of as shapes_of
from specdec_jax.contrib.trees.enumeration import before_pass as before_pass
from specdec_jax.contrib.trees.enumeration import ends_of_round as ends_of_round
from specdec_jax.contrib.trees.enumeration import without_extras as without_extras
from specdec_jax.contrib.trees.proof import prove_siblings as prove_siblings
from specdec_jax.contrib.trees.replaying import check_replay as check_replay
from specdec_jax.contrib.trees.replaying import end_round as end_round
from specdec_jax.contrib.trees.rounds import decode_round as decode_round
