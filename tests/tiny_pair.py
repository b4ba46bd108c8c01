"""A tiny target and a drafter that mostly agrees with it, as Hugging Face folders."""

from pathlib import Path

import numpy as np
from tiny_weights import CONFIG, weights, write_folder

ONE_LAYER = {**CONFIG, "num_hidden_layers": 1}  # what compiles fastest


def write_pair(folder: Path) -> tuple[str, str]:
    """(target, drafter): the drafter is the target with noise in its weights, so that some drafts are rejected."""
    named, rng = weights(ONE_LAYER), np.random.default_rng(7)
    noisy = {name: array + rng.normal(0, 0.03, array.shape).astype(np.float32) for name, array in named.items()}
    for name in ("target", "drafter"):
        write_folder(folder / name, named if name == "target" else noisy, ONE_LAYER)
    return str(folder / "target"), str(folder / "drafter")
