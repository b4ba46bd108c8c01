"""Draft-stopping policies, one a file; a file's factory has the file's name."""

from specdec_jax.stopping.adaedl import adaedl as adaedl
from specdec_jax.stopping.at_least import at_least as at_least
from specdec_jax.stopping.static import static as static
