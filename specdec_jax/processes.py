"""Several processes of one launch: who this one is, and whether the others still work.

JAX's own runtime makes them find each other (`jax.distributed`: SLURM, TPU pods, Kubernetes and Open MPI by themselves,
elsewhere JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID). That one is lost is known from its lock on a
disk that all see: JAX's service would end the others without a word of ours.
"""

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from filelock import FileLock, Timeout
from jax.experimental import multihost_utils

from specdec_jax.locks import held

VARIABLES = {"num_processes": "JAX_NUM_PROCESSES", "process_id": "JAX_PROCESS_ID"}
LOOK = 5.0  # seconds between two looks at the others
GRACE = 60.0  # seconds in which all others begin, or leave
ALIKE = 3.0  # seconds after its error that a process keeps its lock, so that others with the same error are not misled
SAID = 8.0  # seconds in which all others notice that the first one has let go of its lock, or say their own error
LEFT = 30.0  # seconds in which a launch that was ended lets go of its locks
AGREED = 1.0  # seconds in which all leave a block that all have done, and in which a dead process lets go of its locks


class Share(NamedTuple):
    """Process `index` of `count`."""

    index: int
    count: int

    @property
    def others(self) -> list["Share"]:
        """Shares of the other processes."""
        return [Share(index, self.count) for index in range(self.count) if index != self.index]


def is_first() -> bool:
    """Whether this is the process that writes what all know."""
    return jax.process_index() == 0


def join(watched: bool = True) -> Share:
    """Meets the other processes of this launch, for programs on the devices of all. Raises ValueError without others.

    Args:
        watched: those programs run `together`. Else JAX ends all when one is lost, within two minutes.
    """
    addresses: dict[str, Any] = {}
    for name, variable in VARIABLES.items():
        if variable in os.environ:
            if not os.environ[variable].isdecimal():
                raise ValueError(f"{variable} must be a whole number, got {os.environ[variable]!r}")
            addresses[name] = int(os.environ[variable])
    # Else leaving waits for all, and JAX ends all when one is lost, without a word of ours.
    jax.config.update("jax_enable_recoverability", watched)
    try:
        jax.distributed.initialize(**addresses)
    except (ValueError, RuntimeError) as error:
        names = ", ".join(["JAX_COORDINATOR_ADDRESS", *VARIABLES.values()])
        raise ValueError(f"the processes of this run do not find each other ({error}): set {names}") from None
    return Share(jax.process_index(), jax.process_count())


def from_first(facts: Any) -> Any:
    """What the first process knows, as JSON carries it. All processes must call it."""
    buffer = np.frombuffer(json.dumps(facts).encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(buffer.size)))
    buffer = buffer if is_first() else np.zeros(size, np.uint8)
    return json.loads(bytes(multihost_utils.broadcast_one_to_all(buffer)))


@contextlib.contextmanager
def leaving(share: Share) -> Iterator[None]:
    """A block of processes that met (`join`): one that ends by an error of its own leaves JAX's service.

    The first one stays a while longer, since JAX aborts those who lose the service.
    """
    try:
        yield
    except (ValueError, OSError):
        if share.index:
            jax.distributed.shutdown()
        else:
            time.sleep(SAID)
        raise


@contextlib.contextmanager
def together(folder: Path, share: Share) -> Iterator[None]:
    """A block that all processes do at once, and after which they have left JAX's service.

    One that is lost meanwhile ends the others with one line and exit code 2. If it is the first, JAX's service goes
    with it, and JAX ends the others in words of its own.

    Args:
        folder: seen by all; every process holds a lock in it.

    Raises:
        BlockingIOError: processes of another launch hold the locks.
    """
    folder.mkdir(parents=True, exist_ok=True)
    over = threading.Event()
    with leaving(share), _alone(folder, share):
        threading.Thread(target=_watch, args=(folder, share, over), daemon=True).start()
        try:
            yield
            multihost_utils.sync_global_devices("done")
        except Exception:  # a collective that the lost one was part of, perhaps: ValueError, too
            time.sleep(AGREED)
            _end_if_lost([each for each in share.others if not held(_lock(folder, each))])
            time.sleep(ALIKE)
            raise
        finally:
            over.set()
        if share.index:
            jax.distributed.shutdown()
        until = time.monotonic() + GRACE  # the service is the first process's: it stays until the others have left
        while not share.index and time.monotonic() < until and any(held(_lock(folder, each)) for each in share.others):
            time.sleep(0.05)


@contextlib.contextmanager
def _alone(folder: Path, share: Share) -> Iterator[None]:
    lock = FileLock(_lock(folder, share))
    try:
        lock.acquire(timeout=LEFT)
    except Timeout:
        raise BlockingIOError(f"{folder} is in use by the processes of another launch") from None
    try:
        yield
    finally:
        lock.release()


def _lock(folder: Path, share: Share) -> Path:
    return folder / f".process-{share.index + 1}-of-{share.count}.lock"


def _watch(folder: Path, share: Share, over: threading.Event) -> None:
    """Ends this process when another has let go of its lock before the block was over, or never came to take it."""
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
