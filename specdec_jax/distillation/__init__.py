"""Drafters from a target: its own text, its distributions as labels, losses, training, judgement."""
