"""Several processes of one launch: the index of this one, and whether the others are alive.

They connect through `jax.distributed` (automatic with SLURM, TPU pods, Kubernetes and Open MPI, elsewhere by
JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID). A lost process is detected by its lock on a shared disk,
because JAX's service would abort the others without a clear message.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental import multihost_utils

from specdec_jax.locks import exclusive, held

VARIABLES = {"num_processes": "JAX_NUM_PROCESSES", "process_id": "JAX_PROCESS_ID"}
LOOK = 5.0  # seconds between checks of the others
GRACE = 60.0  # seconds in which all others must start, or leave
ALIKE = 3.0  # seconds for which a process keeps its lock after an error, so that others report the same error first
SAID = 8.0  # seconds in which all others notice that the first one released its lock, or report their own error
LEFT = 30.0  # seconds in which an ended launch releases its locks
AGREED = 1.0  # seconds in which all leave a finished block, and in which a dead process's locks are released


class Share(NamedTuple):
    """Process `index` of `count` processes."""

    index: int
    count: int

    @property
    def others(self) -> list["Share"]:
        """Shares of the other processes."""
        return [Share(index, self.count) for index in range(self.count) if index != self.index]


def join() -> Share:
    """Connects to the other processes of this launch, for `watch_others`. Raises ValueError without others."""
    addresses: dict[str, Any] = {}
    for name, variable in VARIABLES.items():
        if variable in os.environ:
            if not os.environ[variable].isdecimal():
                raise ValueError(f"{variable} must be a whole number, got {os.environ[variable]!r}")
            addresses[name] = int(os.environ[variable])
    # Otherwise leaving waits for all, and JAX ends all if one is lost, without a clear message.
    jax.config.update("jax_enable_recoverability", True)
    try:
        jax.distributed.initialize(**addresses)
    except (ValueError, RuntimeError) as error:
        names = ", ".join(["JAX_COORDINATOR_ADDRESS", *VARIABLES.values()])
        raise ValueError(f"the processes of this run do not find each other ({error}): set {names}") from None
    return Share(jax.process_index(), jax.process_count())


@contextlib.contextmanager
def watch_others(folder: Path, share: Share) -> Iterator[None]:
    """A block that all processes run together, and after which they have left JAX's service.

    If one is lost in the block, the others end with one line and exit code 2. If it is the first, JAX's service ends
    too, and JAX aborts the others with its own message. Every process holds a lock in `folder`, which all see.

    Raises BlockingIOError: processes of another launch hold the locks.
    """
    folder.mkdir(parents=True, exist_ok=True)
    over = threading.Event()
    refusal = f"{folder} is in use by the processes of another launch"
    try:
        with exclusive(_lock(folder, share), refusal, LEFT):
            threading.Thread(target=_watch, args=(folder, share, over), daemon=True).start()
            try:
                yield
                multihost_utils.sync_global_devices("done")
            except Exception:  # perhaps from a collective with the lost process; also ValueError
                time.sleep(AGREED)
                _end_if_lost([each for each in share.others if not held(_lock(folder, each))])
                time.sleep(ALIKE)
                raise
            finally:
                over.set()
            if share.index:
                jax.distributed.shutdown()
            others = [_lock(folder, each) for each in share.others]
            until = time.monotonic() + GRACE  # the first process runs the service and stays until the others have left
            while not share.index and time.monotonic() < until and any(map(held, others)):
                time.sleep(0.05)
    except (ValueError, OSError):  # the first stays a while longer, because JAX aborts processes that lose its service
        if share.index:
            jax.distributed.shutdown()
        else:
            time.sleep(SAID)
        raise


def _lock(folder: Path, share: Share) -> Path:
    return folder / f".process-{share.index + 1}-of-{share.count}.lock"


def _watch(folder: Path, share: Share, over: threading.Event) -> None:
    """Ends this process when another one releases its lock before the end of the block, or never acquires it."""
    seen, until = set(), time.monotonic() + GRACE
    while not over.wait(LOOK):
        here = {other for other in share.others if held(_lock(folder, other))}
        missed = (seen if time.monotonic() < until else set(share.others)) - here
        if missed and not over.wait(AGREED):
            _end_if_lost(sorted(missed))
        seen |= here


def _end_if_lost(lost: Sequence[Share]) -> None:
    for share in lost:
        reason = f"process {share.index + 1} of {share.count} has ended before the work was done"
        print(f"error: {reason}. What was saved is kept: the same command goes on", file=sys.stderr, flush=True)
        os._exit(2)
