"""A file of results that grows by whole lines, and the settings that must be equal for a run to continue it."""

import contextlib
import hashlib
import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from specdec_jax.loading.new_folder import write_text
from specdec_jax.locks import exclusive
from specdec_jax.text.json_lines import numbered

ADVICE = "give another name, or --overwrite"
SETTINGS, OLD = ".settings.json", ".old"
NAMED_FILE = re.compile(r"""[^(),='"]+\.(?:py|json)\b""")


class ResultFile:
    """Appends whole lines; an incomplete line, also one of a killed run, is removed."""

    def __init__(self, path: Path, source: bytes, about: Mapping[str, Any]):
        self.path, self._about = path, about
        self.decided = about.get("decided")  # choices of the machine on which the run began, if it continues
        self.lines, self.refused, self._size = whole_lines(path, [number for number, _ in numbered(source)])
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        os.ftruncate(self._descriptor, self._size)

    def append(self, line: bytes) -> None:
        """Appends a line with its newline. Raises OSError naming the file; earlier lines are kept."""
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError as error:
            os.ftruncate(self._descriptor, self._size)
            raise OSError(f"cannot write {self.path}: {error.strerror or error}") from None
        self._size += len(line)
        self.lines += 1

    def write_settings(self, **facts: Any) -> None:
        """Adds facts to the file of settings, which is replaced atomically."""
        self._about = {**self._about, **facts}
        write_text(self.path.with_name(self.path.name + SETTINGS), json.dumps(self._about, indent=2) + "\n")

    def close(self) -> None:
        """Flushes the file to disk and closes it."""
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise OSError(f"cannot write {self.path}: {error.strerror or error}") from None
        finally:
            os.close(self._descriptor)


@contextlib.contextmanager
def opened(path: Path, settings: Mapping[str, Any], source: bytes, overwrite: bool = False) -> Iterator[ResultFile]:
    """Opens the file of results for these settings and this input exclusively, with its whole lines, or empty.

    The settings are stored in `NAME.settings.json`. The input may have grown by whole lines. With `overwrite` the file
    is replaced, and the old one is kept as `NAME.old`, `NAME.old1` ...

    Raises:
        ValueError: the file has results of other settings or another input, or a line that is no result.
        BlockingIOError: another process writes it.
        OSError: it cannot be written.
    """
    lock = path.with_name(f".{path.name}.lock")
    with exclusive(lock, f"{path} is being written by another process"):
        try:
            about: dict[str, Any] = {}
            if overwrite and path.exists() and path.stat().st_size:
                names = (path.with_name(f"{path.name}{OLD}{number or ''}") for number in itertools.count())
                path.rename(next(name for name in names if not name.exists()))
            if path.exists() and path.stat().st_size:
                about = _stored_settings(path, settings, source)
            else:
                path.with_name(path.name + SETTINGS).unlink(missing_ok=True)
            with contextlib.closing(ResultFile(path, source, about)) as results:
                results.write_settings(settings=settings, input=digest(source))
                yield results
        finally:
            with contextlib.suppress(OSError):  # another may have opened it: filelock locks no file without a name
                lock.unlink()


def _stored_settings(path: Path, settings: Mapping[str, Any], source: bytes) -> dict[str, Any]:
    """The contents of the file of settings. Raises ValueError unless they are these settings and this input."""
    file, stored = path.with_name(path.name + SETTINGS), None
    with contextlib.suppress(OSError, ValueError):
        stored = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(stored, dict) or not all(isinstance(stored.get(key), dict) for key in ("settings", "input")):
        raise ValueError(f"{path} exists and is no unfinished output ({file.name} does not say what it is): {ADVICE}")
    wanted = json.loads(json.dumps(settings))
    for name in wanted.keys() | stored["settings"].keys():
        before, now = stored["settings"].get(name), wanted.get(name)
        if before != now:
            raise ValueError(f"{path} was written with {name} {before!r}, not {now!r}: {ADVICE}")
    before = stored["input"].get("bytes")
    same = isinstance(before, int) and digest(source[:before]) == stored["input"]
    if not same or (source[before - 1 : before] != b"\n" and source[before : before + 1] not in (b"", b"\n", b"\r")):
        raise ValueError(f"{path} was written from another input: {ADVICE}")
    return stored


def files_in(words: str) -> dict[str, str]:
    """SHA-256 by name of the .py and .json files that `words` name, as in "at_least(policy=my_rule.py)"."""
    named = {name: Path(name.strip()).expanduser() for name in NAMED_FILE.findall(words)}
    return {name: digest(path.read_bytes())["sha256"] for name, path in named.items() if path.is_file()}


def digest(content: bytes) -> dict[str, Any]:
    """Length and SHA-256 of contents, for comparison between settings."""
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def whole_lines(path: Path, numbers: Sequence[int]) -> tuple[int, int, int]:
    """The numbers of whole lines, of refused ones among them, and of their bytes in a file of results, if it exists.

    Raises ValueError for a line that is no result of the input's line in `numbers` at its place.
    """
    lines, refused, size = 0, 0, 0
    with path.open("rb") if path.exists() else contextlib.nullcontext(()) as file:
        for line in file:
            if not line.endswith(b"\n"):
                continue
            try:
                entry = json.loads(line)
                wrong = entry["line"] not in numbers[lines : lines + 1] or not {"text", "error"} & entry.keys()
            except (ValueError, TypeError, KeyError, RecursionError):
                wrong, entry = True, {}
            if wrong:
                wanted = f"of the input's line {numbers[lines]}" if lines < len(numbers) else "of any line"
                raise ValueError(f"{path}:{lines + 1} is no result {wanted}: {ADVICE}")
            lines, refused, size = lines + 1, refused + ("error" in entry), size + len(line)
    return lines, refused, size
