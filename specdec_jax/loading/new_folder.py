"""Folders and files that appear complete or not at all."""

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def new_folder(path: str | Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Gives a temporary folder beside `path`, renamed to it when the block ends well and removed when it does not.

    Raises FileExistsError if `path` exists and is not to be overwritten.
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
        _move(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Gives a temporary name beside the file `path`, renamed to it when the block ends well and else removed.

    The name ends as the file's does: what writes pictures chooses their format by it.

    Raises OSError naming `path`, for instance on a full disk.
    """
    path = Path(path)
    suffix = f"{os.getpid()}-{secrets.token_hex(3)}"  # other hosts have processes of the same number
    temporary = path.with_name(f".{path.stem}.{suffix}.tmp{path.suffix}")
    try:
        yield temporary
        os.replace(temporary, path)
    except OSError as error:
        raise OSError(f"cannot write {path}: {error}") from None
    finally:
        temporary.unlink(missing_ok=True)


def check_file(path: str | Path, suffixes: tuple[str, ...] = ()) -> None:
    """Refuses a file that could not be written.

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


def writable_folder(path: Path, kind: str) -> None:
    """Makes the folder unless it is there. Raises ValueError naming it and its kind where nothing can be written."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ValueError(f"cannot write the {kind} {str(path)!r}: {error.strerror or error}") from None


def _move(temporary: Path, path: Path) -> None:
    """Renames over an old folder by way of a second name: a folder that is not empty cannot be replaced in one step."""
    if not path.exists():
        temporary.rename(path)
        return
    old = temporary.with_suffix(".old")
    path.rename(old)
    temporary.rename(path)
    shutil.rmtree(old)
