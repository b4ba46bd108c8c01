"""Families with an encoder: T5 and mT5. `loading.families` finds them by their model_type."""
