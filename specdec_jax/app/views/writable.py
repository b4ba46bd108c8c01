"""Files that could not be written are refused before any work is done."""

import tempfile
from pathlib import Path


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
