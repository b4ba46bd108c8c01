"""Properties of the current machine: processor, cores, load, device and free memory."""

import contextlib
import math
import os
import platform
import re
import time
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from specdec_jax.kernels.compiled import cpu_info
from specdec_jax.meshes import spans_processes
from specdec_jax.sharding import mesh_here

GROUPS = {  # memory limits of control groups, versions 2 and 1
    Path("/sys/fs/cgroup"): ("memory.max", "memory.current"),
    Path("/sys/fs/cgroup/memory"): ("memory.limit_in_bytes", "memory.usage_in_bytes"),
}
_imported = time.monotonic(), time.process_time()


def processor() -> str:
    """The CPU's model name."""
    return cpu_info("model name") or platform.processor() or platform.machine()


def cores() -> int | None:
    """Number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def load_average() -> float:
    """The load average of the last minute, less this process's mean use; 0 if the system does not report it."""
    passed, used = time.monotonic() - _imported[0], time.process_time() - _imported[1]
    with contextlib.suppress(OSError, AttributeError):
        return max(os.getloadavg()[0] - used / passed * (1 - math.exp(-passed / 60)), 0.0)
    return 0.0


def device() -> str:
    """A description of jax's first device; for a CPU its cores and processor."""
    first = jax.local_devices()[0]
    return f"{cores()} cores of {processor()}" if first.platform == "cpu" else first.device_kind


def free_memory() -> int | None:
    """Free bytes of a device: this process's first one of the mesh, or of jax; None: unknown.

    For a CPU the free memory of the machine or its control group, divided equally among the mesh's devices. On a mesh
    that spans processes the minimum over all processes, each of which must call this.
    """
    mesh = mesh_here()
    counts = (jax.local_devices()[0] if mesh is None else mesh.local_devices[0]).memory_stats() or {}
    sizes = [counts["bytes_limit"] - counts.get("bytes_in_use", 0)] if "bytes_limit" in counts else []
    if "bytes_limit" not in counts:
        with contextlib.suppress(OSError, ValueError, IndexError):
            meminfo = Path("/proc/meminfo").read_text(encoding="utf-8")
            sizes.append(1024 * int(re.findall(r"^MemAvailable:\s*(\d+) kB$", meminfo, re.MULTILINE)[0]))
        for place, names in GROUPS.items():
            with contextlib.suppress(OSError, ValueError):  # "max" is not a number: no limit
                limit, used = (int((place / name).read_text(encoding="utf-8")) for name in names)
                statistics = (place / "memory.stat").read_text("utf-8")
                files = re.findall(r"^(?:in)?active_file (\d+)$", statistics, re.MULTILINE)
                sizes.append(limit - used + sum(map(int, files)))  # cached files are evicted when memory is needed
    free = min(sizes, default=None)
    if free is not None and mesh is not None and jax.default_backend() == "cpu":
        free //= len(mesh.local_devices)
    if not spans_processes():
        return free
    megabytes = np.int32(-1 if free is None else free >> 20)  # jax would truncate 64 bits to 32
    least = int(np.min(multihost_utils.process_allgather(megabytes)))
    return None if least < 0 else least << 20
