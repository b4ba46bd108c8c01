"""Drafters, one a file; a file's factory has the file's name."""

from specdec_jax.drafters.model import model as model
from specdec_jax.drafters.nothing import nothing as nothing
