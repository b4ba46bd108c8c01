"""The cache in `~/.cache/specdec_jax`, with compiled programs for later processes.

Entry points enable the compilation cache; imports change no settings.
"""

import os
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax


def describe_cache(folder: Path | None) -> str:
    """The result of `enable` in words, for messages during compilation."""
    if folder is None:
        return "kept nowhere: every run compiles again"
    return f"kept in {shown(folder)} for the next run"


def shown(folder: Path) -> str:
    """A path for messages, with ~ for the home folder."""
    home = os.path.expanduser("~")  # Path.home() fails without a home
    return f"~/{folder.relative_to(home)}" if folder.is_relative_to(home) else str(folder)


def cache_path(name: str) -> Path:
    """The folder `name` in `~/.cache/specdec_jax`. Raises RuntimeError if there is no home folder."""
    return Path.home() / ".cache" / "specdec_jax" / name


def cache_folder(name: str, named: str | None = None) -> Path:
    """The folder `named`, or `cache_path`, created if necessary. Raises as it does, OSError: not writable."""
    folder = Path(named) if named else cache_path(name)
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(f"not writable: {folder}")
    return folder


def enable() -> Path | None:
    """Caches compiled programs in `JAX_COMPILATION_CACHE_DIR`, or in `~/.cache/specdec_jax/xla`; returns the folder.

    If it cannot be written, warns once and returns None; jax would warn at every compilation. Only programs that take
    over 0.3 s to compile are cached (jax's default of 1 s would exclude the prefill of small models).
    """
    try:
        folder = cache_folder("xla", os.environ.get("JAX_COMPILATION_CACHE_DIR"))
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        warnings.warn(f"no persistent compilation cache: {error}", stacklevel=2)
        jax.config.update("jax_compilation_cache_dir", None)
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
    return folder


def compile_together(calls: Iterable[Callable[[], Any]]) -> list[Any]:
    """The results of calls that are made in threads, so that their programs are compiled in parallel.

    Sequential if a mesh is set, which is not visible in threads. Raises the first error of a call.
    """
    if not jax.sharding.get_mesh().empty:
        return [call() for call in calls]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        return [done.result() for done in [threads.submit(call) for call in calls]]
