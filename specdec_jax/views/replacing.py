"""Files that are there whole or not at all."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replaced(path: str | Path) -> Iterator[Path]:
    """A temporary file beside `path`, with its suffix, that takes its place when the block ends well.

    Raises:
        ValueError: it cannot be written there.
    """
    path = Path(path).expanduser()
    check_file(path)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=path.suffix)
    os.close(handle)
    try:
        yield Path(name)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)  # mkstemp's own is for its owner alone
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def check_file(path: str | Path, suffixes: tuple[str, ...] = ()) -> None:
    """Refuses, before any work is done, a file that could not be written afterwards.

    Raises:
        ValueError: a folder of that name, no folder to hold it, no right to write there, or another suffix.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        raise ValueError(f"cannot write {str(path)!r}: it is a folder")
    if suffixes and path.suffix.lower() not in suffixes:
        raise ValueError(f"cannot write {str(path)!r}: its name must end in {' or '.join(suffixes)}")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ValueError(f"cannot write {str(path)!r}: {error.strerror or error}") from None
