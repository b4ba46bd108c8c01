"""One process a run folder."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: no lock, and no promise
    fcntl = None

LOCK = ".lock"


@contextlib.contextmanager
def locked(folder: str | Path) -> Iterator[None]:
    """Holds the folder, which is made if need be. The system lets go when the process ends, however it ends.

    Raises BlockingIOError naming the folder and the process that holds it.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / LOCK, "a+", encoding="utf-8") as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                file.seek(0)
                holder = file.read().strip() or "unknown"
                raise BlockingIOError(f"{folder} is in use by another process (pid {holder})") from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
