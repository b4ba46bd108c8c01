"""Locks on folders and pieces of work between processes. The system releases the locks of a dead process."""

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from filelock import FileLock, Timeout

LOCK = ".lock"
HOLDER = ".lock.pid"  # a separate file: some systems and versions of filelock empty or hide a locked file


@contextlib.contextmanager
def exclusive(lock: str | Path, message: str, timeout: float = 0) -> Iterator[None]:
    """Holds this lock file. Raises BlockingIOError with the message if another process has it for `timeout` seconds."""
    try:
        holding = FileLock(lock).acquire(timeout=timeout)
    except Timeout:
        raise BlockingIOError(message) from None
    with holding:
        yield


@contextlib.contextmanager
def locked(folder: str | Path) -> Iterator[None]:
    """Locks the folder, which is created if necessary.

    Raises BlockingIOError naming the folder and the process that holds the lock.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    holder = folder / HOLDER
    pid = holder.read_text(encoding="utf-8").strip() if holder.is_file() else ""
    with exclusive(folder / LOCK, f"{folder} is in use by another process (pid {pid or 'unknown'})"):
        holder.write_text(str(os.getpid()), encoding="utf-8")
        yield


def held(lock: str | Path) -> bool:
    """Whether a process holds this lock file."""
    try:
        with exclusive(lock, f"{lock} is held"):
            return False
    except BlockingIOError:
        return True


def claimed(folder: str | Path, missing: Callable[[], Iterable[str]], look: float = 1.0) -> Iterator[str]:
    """Iterates over the names of pieces of work, each locked by this process, until none is missing.

    Any number of processes that see the folder share the work, and the piece of a dead process is taken by others.
    After an error the piece is released when the iterator is closed: keep no other reference to the iterator. `missing`
    gives unfinished pieces, from the files; a yielded piece must be done before the next. `look`: seconds between
    checks of pieces that others hold.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    while names := list(missing()):
        for name in names:
            lock = FileLock(folder / f".{name}{LOCK}")
            try:
                holding = lock.acquire(timeout=0)
            except Timeout:
                continue
            with holding:
                if name in missing():  # else another process finished it in the meantime
                    yield name
                Path(lock.lock_file).unlink(missing_ok=True)  # a process that locks it again finds the piece finished
            break
        else:
            time.sleep(look)
