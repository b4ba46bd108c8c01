"""Verifiers that decide about siblings, one a file; a file's factory has the file's name."""

from specdec_jax.contrib.trees.verification.traversal import traversal as traversal
