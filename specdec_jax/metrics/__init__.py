"""Figures read off texts, traces and counts: intervals, agreement, acceptance, repetition, separation."""
