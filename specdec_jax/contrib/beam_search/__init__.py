"""Beam search with the models and caches of `generate`, and its options of the command line (`generate --beams`)."""

from specdec_jax.contrib.beam_search.search import Hypothesis as Hypothesis
from specdec_jax.contrib.beam_search.search import beam_search as beam_search
