"""A file of requests that several processes share: each decodes its lines into a file of its own, one makes one of all.

Nothing waits for another device; files are seen by all.
"""

import contextlib
import os
import time
from pathlib import Path

from specdec_jax.loading.new_folder import replacing
from specdec_jax.locks import held
from specdec_jax.processes import LOOK, Lost, Share
from specdec_jax.text.result_file import OLD, SETTINGS, Whole, known_settings, lock_of, whole_lines, write_settings

GRACE = 20.0  # seconds in which all others begin


class Watch:
    """A look at the others now and then. Calling it raises `Lost` when one has ended before its lines were done.

    For the first `GRACE` seconds nobody is missed: not all begin at once.
    """

    def __init__(self, share: Share, output: Path, total: int):
        self._waiting, self._output, self._total = share.others, output, total
        self._begun, self._last = time.monotonic(), 0.0

    def __call__(self) -> bool:
        """Whether all others are done."""
        if time.monotonic() - self._last >= LOOK:
            self._last = time.monotonic()
            self._waiting = [one for one in self._waiting if not self._done(one)]
        return not self._waiting

    def _done(self, one: Share) -> bool:
        path = one.file(self._output)
        if held(lock_of(path)):
            return False
        done = path.is_file() and whole_lines(path).lines >= one.lines(self._total)
        if not done and time.monotonic() - self._begun >= GRACE:
            raise Lost(
                f"process {one.index + 1} of {one.count} has ended before its lines were done. What was decoded is "
                "kept: the same command goes on"
            )
        return done


def merge(output: Path, share: Share, overwrite: bool) -> Whole:
    """All processes' lines in the input's order as `output`, complete or not at all; then their files are removed.

    Raises ValueError where there is such a file and it is not to be overwritten; it is kept if it is.
    """
    parts = [Share(index, share.count).file(output) for index in range(share.count)]
    known = known_settings(parts[0])
    if output.exists():
        if not overwrite:
            raise ValueError(f"{output} exists already: move it away, and the same command goes on")
        os.replace(output, output.with_name(output.name + OLD))
    write_settings(output, {name: known[name] for name in ("settings", "input")})
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(path.open("rb")) for path in parts]
        with replacing(output) as temporary, temporary.open("wb") as merged:
            while all(lines := [file.readline() for file in files]):
                merged.writelines(lines)
            merged.writelines(lines)  # the last of them, which not all have
    for path in parts:
        for one in (path, path.with_name(path.name + SETTINGS), lock_of(path)):
            one.unlink(missing_ok=True)
    return whole_lines(output)
