"""Folders and pieces of work that one process holds at a time. The system lets go of what a dead process held."""

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from filelock import FileLock, Timeout

LOCK = ".lock"
HOLDER = ".lock.pid"  # not in the lock itself: some systems and versions of filelock empty or hide a locked file


@contextlib.contextmanager
def locked(folder: str | Path) -> Iterator[None]:
    """Holds the folder, which is made if need be.

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


def held(lock: str | Path) -> bool:
    """Whether some process holds this lock file."""
    file_lock = FileLock(lock)
    try:
        file_lock.acquire(timeout=0)
    except Timeout:
        return True
    file_lock.release()
    return False


def claimed(folder: str | Path, missing: Callable[[], Iterable[str]], look: float = 1.0) -> Iterator[str]:
    """Pieces of work by name, each while no other process has it, until nothing is missing.

    Any number of processes that see the folder share the work so, and one that dies leaves its piece to the others. An
    error lets go of the piece when the iterator is closed: keep no other reference to it.

    Args:
        missing: () -> what is not done yet, by name, as the files say; what is given must be done before the next.
        look: seconds between two looks at pieces that others hold.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    while names := list(missing()):
        for name in names:
            lock = FileLock(folder / f".{name}{LOCK}")
            try:
                lock.acquire(timeout=0)
            except Timeout:
                continue
            try:
                if name in missing():  # else another has done it in between
                    yield name
                Path(lock.lock_file).unlink(missing_ok=True)  # a process that takes it anew finds the piece done
            finally:
                lock.release()
            break
        else:
            time.sleep(look)
