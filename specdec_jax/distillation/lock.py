"""One process a run folder."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

LOCK = ".lock"
HOLDER = ".lock.pid"  # not in the lock itself: some systems and versions of filelock empty or hide a locked file


@contextlib.contextmanager
def locked(folder: str | Path) -> Iterator[None]:
    """Holds the folder, which is made if need be. The system lets go when the process ends, however it ends.

    Raises BlockingIOError naming the folder and the process that holds it.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    lock, holder = FileLock(folder / LOCK), folder / HOLDER
    try:
        lock.acquire(timeout=0)
    except Timeout:
        pid = holder.read_text(encoding="utf-8").strip() if holder.is_file() else ""
        raise BlockingIOError(f"{folder} is in use by another process (pid {pid or 'unknown'})") from None
    try:
        holder.write_text(str(os.getpid()), encoding="utf-8")
        yield
    finally:
        lock.release()
