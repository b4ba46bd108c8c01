"""Costs of passes on a machine: measured, cached on disk, and used by policies that weigh costs."""
