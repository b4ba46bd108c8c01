"""The machine at hand, as figures measured on it name it."""

import contextlib
import os
import platform
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from specdec_jax.kernels.compiled import cpu_info
from specdec_jax.sharding import mesh_here, spans_processes

GROUPS = {  # of a container's processes, versions 2 and 1
    Path("/sys/fs/cgroup"): ("memory.max", "memory.current"),
    Path("/sys/fs/cgroup/memory"): ("memory.limit_in_bytes", "memory.usage_in_bytes"),
}


def processor() -> str:
    """The CPU's model name."""
    return cpu_info("model name") or platform.processor() or platform.machine()


def features() -> str:
    """The CPU's instructions, which one name of a virtual machine's processor may stand for several sets of."""
    return cpu_info("flags") or platform.machine()


def cores() -> int | None:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def load_average() -> float:
    """Processes of this machine that wanted a core over the last minute; 0 where the system does not say."""
    with contextlib.suppress(OSError, AttributeError):
        return os.getloadavg()[0]
    return 0.0


def device() -> str:
    """jax's first device; of a CPU its cores and processor."""
    first = jax.local_devices()[0]
    return f"{cores()} cores of {processor()}" if first.platform == "cpu" else first.device_kind


def free_memory() -> int | None:
    """Bytes that a device has left: this process's first of the mesh that was set, or of jax; None: it does not say.

    For a CPU it is what this machine or its control group has, in equal parts for the mesh's devices. On a mesh that
    spans processes it is the least of all processes, each of which must call this.
    """
    mesh = mesh_here()
    free = _free_here(jax.local_devices()[0] if mesh is None else mesh.local_devices[0])
    if free is not None and mesh is not None and jax.default_backend() == "cpu":
        free //= len(mesh.local_devices)
    if not spans_processes():
        return free
    megabytes = np.int32(-1 if free is None else free >> 20)  # jax would cut 64 bits to 32
    least = int(np.min(multihost_utils.process_allgather(megabytes)))
    return None if least < 0 else least << 20


def _free_here(device: Any) -> int | None:
    counts = device.memory_stats() or {}
    if "bytes_limit" in counts:
        return counts["bytes_limit"] - counts.get("bytes_in_use", 0)
    free = []
    with contextlib.suppress(OSError, ValueError, IndexError):
        meminfo = Path("/proc/meminfo").read_text(encoding="utf-8")
        free.append(1024 * int(re.findall(r"^MemAvailable:\s*(\d+) kB$", meminfo, re.MULTILINE)[0]))
    for place, names in GROUPS.items():
        with contextlib.suppress(OSError, ValueError):  # "max" is no number: there is no limit
            limit, used = (int((place / name).read_text(encoding="utf-8")) for name in names)
            files = re.findall(r"^(?:in)?active_file (\d+)$", (place / "memory.stat").read_text("utf-8"), re.MULTILINE)
            free.append(limit - used + sum(map(int, files)))  # files that were read are given up when memory is needed
    return min(free, default=None)
