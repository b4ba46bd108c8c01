"""Metrics of texts, traces and counts: intervals, agreement, acceptance, repetition, separation."""
