"""Drafters from a target: its own text, its laws as labels, losses, training, judgement."""
