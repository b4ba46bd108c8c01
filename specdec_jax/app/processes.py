"""Several processes that share one file of requests: who this one is, and whether the others still work.

JAX's own runtime makes them find each other (`jax.distributed`: SLURM, TPU pods, Kubernetes and Open MPI by themselves,
elsewhere JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID). Each decodes its share of the lines on its own
devices and writes a file of its own, so nothing waits for another device; files are seen by all.
"""

import contextlib
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
from filelock import FileLock, Timeout
from jax.experimental import multihost_utils

from specdec_jax.loading.new_folder import replacing
from specdec_jax.text.result_file import OLD, SETTINGS, Whole, known_settings, lock_of, whole_lines, write_settings

VARIABLES = {"num_processes": "JAX_NUM_PROCESSES", "process_id": "JAX_PROCESS_ID"}
LOOK = 5.0  # seconds between two looks at the others
SERVED = 1.0  # seconds in which all others leave
GRACE = 20.0  # seconds in which all others begin


class Lost(ConnectionError):
    """Another process has ended before its lines were done."""


class Share(NamedTuple):
    """This process's lines are those at `index`, `index` + `count`, ..."""

    index: int
    count: int

    def file(self, output: Path) -> Path:
        """Where this process writes."""
        return output.with_name(f"{output.name}.part-{self.index + 1}-of-{self.count}")

    def lines(self, total: int) -> int:
        """How many of `total` lines are this process's."""
        return len(range(self.index, total, self.count))

    @property
    def others(self) -> list["Share"]:
        """Of the other processes."""
        return [Share(index, self.count) for index in range(self.count) if index != self.index]


def join() -> Share:
    """Meets the other processes of this launch. Raises ValueError where there are none to be found.

    JAX is only asked who is here. Then all leave its service, which would abort every process when one is lost, without
    a word of ours: `Watch` looks after the others.
    """
    given: dict[str, Any] = {}
    for name, variable in VARIABLES.items():
        if variable in os.environ:
            if not os.environ[variable].isdecimal():
                raise ValueError(f"{variable} must be a whole number, got {os.environ[variable]!r}")
            given[name] = int(os.environ[variable])
    jax.config.update("jax_enable_recoverability", True)  # else leaving waits for all to leave
    try:
        jax.distributed.initialize(**given)
    except (ValueError, RuntimeError) as error:
        names = ", ".join(["JAX_COORDINATOR_ADDRESS", *VARIABLES.values()])
        raise ValueError(f"the processes of this run do not find each other ({error}): set {names}") from None
    share = Share(jax.process_index(), jax.process_count())
    multihost_utils.sync_global_devices("generate-file")
    if share.index:
        jax.distributed.shutdown()
    else:
        time.sleep(SERVED)  # the service is this process's, and ends with it
    return share


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
        if held(path):
            return False
        done = path.is_file() and whole_lines(path).lines >= one.lines(self._total)
        if not done and time.monotonic() - self._begun >= GRACE:
            raise Lost(
                f"process {one.index + 1} of {one.count} has ended before its lines were done. What was decoded is "
                "kept: the same command goes on"
            )
        return done


def held(path: Path) -> bool:
    """Whether a process writes this file of results."""
    lock = FileLock(lock_of(path))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return True
    lock.release()
    return False


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
