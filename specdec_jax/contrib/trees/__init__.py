"""Drafts with siblings: policies for them and a verifier designed for them."""

from specdec_jax.contrib.trees import hooks
from specdec_jax.contrib.trees.seams import SiblingOutcomes as SiblingOutcomes
from specdec_jax.contrib.trees.seams import TreeDraft as TreeDraft
from specdec_jax.contrib.trees.seams import TreePolicy as TreePolicy
from specdec_jax.contrib.trees.seams import TreeResult as TreeResult
from specdec_jax.contrib.trees.seams import TreeVerifier as TreeVerifier
from specdec_jax.contrib.trees.stopping import comb as comb
from specdec_jax.contrib.trees.stopping import survival_tree as survival_tree
from specdec_jax.contrib.trees.verification import traversal as traversal

TreePolicy.tree_hooks = TreeVerifier.tree_hooks = hooks  # last: the hooks import all other files
