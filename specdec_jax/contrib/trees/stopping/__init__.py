"""Stopping policies with siblings, one per file; the factory has the file's name."""

from specdec_jax.contrib.trees.stopping.comb import comb as comb
from specdec_jax.contrib.trees.stopping.survival_tree import survival_tree as survival_tree
