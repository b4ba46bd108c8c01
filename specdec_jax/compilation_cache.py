"""A persistent compilation cache, so that a second process starts warm. Entry points call it; imports set nothing."""

import os
import warnings
from pathlib import Path

import jax


def kept(folder: Path | None) -> str:
    """What `enable` arranged, for whoever waits for a compilation."""
    if folder is None:
        return "kept nowhere: every run compiles again"
    home = os.path.expanduser("~")  # Path.home() fails where there is none
    shown = f"~/{folder.relative_to(home)}" if folder.is_relative_to(home) else folder
    return f"kept in {shown} for the next run"


def enable() -> Path | None:
    """Keeps compiled programs in `JAX_COMPILATION_CACHE_DIR`, or in `~/.cache/specdec_jax/xla`; returns the folder.

    Where that cannot be written it warns once and returns None: jax by itself would warn at every compilation.
    Only programs that take over 0.3 s to compile are kept (jax's bound of 1 s leaves out a small model's prefill).
    """
    named = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    try:
        folder = Path(named) if named else Path.home() / ".cache" / "specdec_jax" / "xla"
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(f"not writable: {folder}")
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        warnings.warn(f"no persistent compilation cache: {error}", stacklevel=2)
        jax.config.update("jax_compilation_cache_dir", None)
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
    return folder
