"""Rules that want siblings, one a file; a file's factory has the file's name."""

from specdec_jax.contrib.trees.stopping.comb import comb as comb
from specdec_jax.contrib.trees.stopping.survival_tree import survival_tree as survival_tree
