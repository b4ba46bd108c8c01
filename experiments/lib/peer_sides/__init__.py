"""The processes that decode for `python -m experiments.peers`, one a side; each runs in its peer's own environment."""
