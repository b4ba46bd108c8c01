"""Monitors, one per file; the factory has the file's name."""

from specdec_jax.monitors.log_probs import log_probs as log_probs
from specdec_jax.monitors.phases import phases as phases
