"""Verifiers with rules for siblings, one per file; the factory has the file's name."""

from specdec_jax.contrib.trees.verification.traversal import traversal as traversal
