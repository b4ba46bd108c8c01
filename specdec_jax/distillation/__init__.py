"""Distillation of drafters: texts of the target, its distributions as labels, losses, training, evaluation."""
