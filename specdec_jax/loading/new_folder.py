"""Atomic creation of folders and files."""

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def new_folder(path: str | Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yields a temporary folder next to `path`, renamed to it if the block succeeds and removed otherwise.

    Raises FileExistsError if `path` exists, unless `overwrite`.
    """
    path = Path(path)
    if path.exists() and not overwrite:
        raise FileExistsError(f"{path} exists already")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{path.name}.{os.getpid()}.new"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        old, replaces = temporary.with_suffix(".old"), path.exists()
        if replaces:  # a non-empty folder cannot be replaced in one step
            path.rename(old)
        temporary.rename(path)
        if replaces:
            shutil.rmtree(old)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yields a temporary name next to the file `path`, renamed to it if the block succeeds and removed otherwise.

    It has the file's suffix, the format of pictures. Raises OSError naming `path`, for instance on a full disk.
    """
    path = Path(path).expanduser()
    suffix = f"{os.getpid()}-{secrets.token_hex(3)}"  # processes on other hosts may have the same number
    temporary = path.with_name(f".{path.stem}.{suffix}.tmp{path.suffix}")
    try:
        yield temporary
        os.replace(temporary, path)
    except OSError as error:
        raise OSError(f"cannot write {path}: {error}") from None
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> None:
    """Replaces a text file atomically. Raises as `replacing`."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def check_file(path: str | Path, suffixes: tuple[str, ...] = ()) -> None:
    """Checks that a file can be written.

    Raises ValueError: a folder of that name, a missing parent folder, no permission, or another suffix.
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


def writable_folder(path: Path, kind: str) -> None:
    """Creates the folder if necessary. Raises ValueError naming it and its kind if it cannot be written."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ValueError(f"cannot write the {kind} {str(path)!r}: {error.strerror or error}") from None
