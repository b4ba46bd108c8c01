"""Replays of stopping policies over recorded texts, with times by a machine's costs."""
