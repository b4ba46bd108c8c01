"""Monitors, one a file; a file's factory has the file's name."""

from specdec_jax.monitors.phases import phases as phases
