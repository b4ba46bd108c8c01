"""A file of results that only ever grows by whole lines, and what must be the same for a run to go on with it."""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout

from specdec_jax.loading.new_folder import replacing

SETTINGS, OLD = ".settings.json", ".old"
DECIDED = "decided"  # what this machine chose when the run began, and a run that goes on takes over
ERROR = b'"error": '  # a line's field; inside a text its quotes would be escaped


class Whole(NamedTuple):
    """The lines of a file of results that end."""

    lines: int
    refused: int  # lines of an error
    size: int  # bytes


class ResultFile:
    """Appends whole lines: one that could not be written whole is taken back, one half-written by a killed run too."""

    def __init__(self, path: Path):
        self.path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        self.lines, self.refused, self._size = whole_lines(path)
        self.decided = read_settings(path).get(DECIDED)  # by the machine on which the run began
        os.ftruncate(self._descriptor, self._size)

    def append(self, line: bytes) -> None:
        """One line, its end included. Raises OSError naming the file; the lines before it stand."""
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError as error:
            os.ftruncate(self._descriptor, self._size)
            raise OSError(f"cannot write {self.path}: {error.strerror or error}") from None
        self._size += len(line)
        self.lines += 1

    def decide(self, facts: Mapping[str, Any]) -> None:
        """Writes what this machine chose into the settings, for a run that goes on."""
        write_settings(self.path, {**read_settings(self.path), DECIDED: dict(facts)})

    def close(self) -> None:
        """What was written is on the disk afterwards."""
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise OSError(f"cannot write {self.path}: {error.strerror or error}") from None
        finally:
            os.close(self._descriptor)


class Unwritten:
    """Stands in for a file of results that another process writes, as that process described it."""

    def __init__(self, path: Path, lines: int, refused: int, decided: Any):
        self.path, self.lines, self.refused, self.decided = path, lines, refused, decided

    def append(self, line: bytes) -> None:
        """Counts the line."""
        del line
        self.lines += 1

    def decide(self, facts: Mapping[str, Any]) -> None:
        """Nothing is written."""
        del facts


@contextlib.contextmanager
def opened(path: Path, settings: Mapping[str, Any], source: bytes, overwrite: bool = False) -> Iterator[ResultFile]:
    """The file of results of these settings and this input, alone: with the whole lines it has, or empty.

    What must be the same is in `NAME.settings.json`. An input may have grown since, by whole lines. With
    `overwrite` the file begins anew, and what was there is kept as `NAME.old`.

    Raises:
        ValueError: the file has results of other settings, of another input, or of something else.
        BlockingIOError: another process writes it.
        OSError: it cannot be written.
    """
    lock = FileLock(path.with_name(f".{path.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise BlockingIOError(f"{path} is being written by another process") from None
    try:
        settings_file = path.with_name(path.name + SETTINGS)
        if overwrite:
            if path.exists():
                os.replace(path, path.with_name(path.name + OLD))
            settings_file.unlink(missing_ok=True)
        if path.exists() and path.stat().st_size:
            _check_same(path, settings_file, settings, source)
        else:
            settings_file.unlink(missing_ok=True)
        results = ResultFile(path)
        try:
            write_settings(path, {**read_settings(path), "settings": settings, "input": digest(source)})
            yield results
        finally:
            results.close()
    finally:
        lock.release()


def read_settings(path: Path) -> dict[str, Any]:
    """The settings of a file of results; {} where none can be read."""
    try:
        settings = json.loads(path.with_name(path.name + SETTINGS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return settings if isinstance(settings, dict) else {}


def write_settings(path: Path, settings: Mapping[str, Any]) -> None:
    """Writes the settings of a file of results, complete or not at all."""
    with replacing(path.with_name(path.name + SETTINGS)) as temporary:
        temporary.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _check_same(path: Path, settings_file: Path, settings: Mapping[str, Any], source: bytes) -> None:
    stored = read_settings(path)
    advice = "give another name, or --overwrite"
    if not settings_file.is_file() or not all(isinstance(stored.get(name), dict) for name in ("settings", "input")):
        raise ValueError(
            f"{path} exists and is no unfinished output ({settings_file.name} does not say what it is): {advice}"
        )
    wanted = json.loads(json.dumps(settings))
    for name in wanted.keys() | stored["settings"].keys():
        before, now = stored["settings"].get(name), wanted.get(name)
        if before != now:
            raise ValueError(f"{path} was written with {name} {before!r}, not {now!r}: {advice}")
    before = stored["input"].get("bytes")
    same = isinstance(before, int) and digest(source[:before]) == stored["input"]
    if not same or (source[before - 1 : before] != b"\n" and source[before : before + 1] not in (b"", b"\n", b"\r")):
        raise ValueError(f"{path} was written from another input: {advice}")


def digest(content: bytes) -> dict[str, Any]:
    """Length and SHA-256, by which settings and processes compare contents."""
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def whole_lines(path: Path) -> Whole:
    """Counts the whole lines of a file of results."""
    lines, refused, size = 0, 0, 0
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                lines, refused, size = lines + 1, refused + (ERROR in line), size + len(line)
    return Whole(lines, refused, size)
