"""What outlives a process in `~/.cache/specdec_jax`: compiled programs first, so that a second process starts warm.

Entry points switch that cache on; imports set nothing.
"""

import os
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax


def describe_cache(folder: Path | None) -> str:
    """What `enable` arranged, in words, for a message while something compiles."""
    if folder is None:
        return "kept nowhere: every run compiles again"
    return f"kept in {shown(folder)} for the next run"


def shown(folder: Path) -> str:
    """A folder as people write it."""
    home = os.path.expanduser("~")  # Path.home() fails where there is none
    return f"~/{folder.relative_to(home)}" if folder.is_relative_to(home) else str(folder)


def cache_folder(name: str) -> Path:
    """The folder of that name in `~/.cache/specdec_jax`, made if need be.

    Raises:
        OSError: it cannot be written.
        RuntimeError: there is no home.
    """
    return _writable(Path.home() / ".cache" / "specdec_jax" / name)


def _writable(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(f"not writable: {folder}")
    return folder


def enable() -> Path | None:
    """Keeps compiled programs in `JAX_COMPILATION_CACHE_DIR`, or in `~/.cache/specdec_jax/xla`; returns the folder.

    Where that cannot be written it warns once and returns None: jax by itself would warn at every compilation.
    Only programs that take over 0.3 s to compile are kept (jax's bound of 1 s leaves out a small model's prefill).
    """
    named = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    try:
        folder = _writable(Path(named)) if named else cache_folder("xla")
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        warnings.warn(f"no persistent compilation cache: {error}", stacklevel=2)
        jax.config.update("jax_compilation_cache_dir", None)
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
    return folder


def compile_together(calls: Iterable[Callable[[], Any]]) -> None:
    """Makes the calls in threads, so that what each has to compile is compiled at the same time.

    One after the other where a mesh is set, which threads do not see. The first error of a call is raised.
    """
    if not jax.sharding.get_mesh().empty:
        for call in calls:
            call()
        return
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        for done in [threads.submit(call) for call in calls]:
            done.result()
