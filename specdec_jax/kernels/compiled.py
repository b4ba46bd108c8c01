"""Compiles `products.cc` for this processor, caches the library, checks and loads it.

A library is identified by its source, the headers, the compiler, its flags and the processor. Processes that need the
same library wait for the first one, and files are written atomically.
"""

import ctypes
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax.ffi
import ml_dtypes
import numpy as np
from filelock import FileLock

from specdec_jax.compilation_cache import cache_folder, shown

SOURCE = Path(__file__).with_name("products.cc")
COMPILERS = "c++", "g++", "clang++"
FLAGS = "-O3", "-std=c++17", "-fPIC", "-shared", "-w"
AVX512 = "avx512f", "avx512bw", "avx512vl", "avx512dq"
PATHS = {  # fastest first: required instruction sets, as named by Linux and by compilers (with -m)
    "amx": ("avx2", "fma", *AVX512, "avx512bf16", "amx-tile", "amx-bf16"),
    "avx512bf16": ("avx2", "fma", *AVX512, "avx512bf16"),
    "avx512": ("avx2", "fma", *AVX512),
    "avx2": ("avx2", "fma"),
}
SECONDS = 120  # time limit for the compiler


def cpu_info(field: str) -> str:
    """The first entry `field` in /proc/cpuinfo; empty if there is none."""
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        return next(iter(re.findall(rf"^{field}\s*:\s*(.+)$", text, re.MULTILINE)), "")
    return ""


def paths_here() -> tuple[str, ...]:
    """The paths that this processor supports, fastest first."""
    here = {name.replace("_", "") for name in cpu_info("flags").split()}
    return tuple(name for name, needed in PATHS.items() if {need.replace("-", "") for need in needed} <= here)


def library(path: str) -> ctypes.CDLL:
    """The library of a path, compiled if necessary, with a line on standard error.

    Raises:
        OSError: there is no compiler, it fails, or the system does not permit the instructions.
        ValueError: the library computes wrong products.
    """
    command = [*_compiler(), *FLAGS, *(f"-m{name}" for name in PATHS[path]), f"-I{jax.ffi.include_dir()}"]
    compiler = subprocess.run([command[0], "--version"], capture_output=True, text=True, timeout=SECONDS).stdout
    identity = SOURCE.read_text(encoding="utf-8"), compiler, command, cpu_info("flags"), version("jaxlib")
    name = f"products-{path}-{hashlib.sha256(repr(identity).encode()).hexdigest()[:16]}.so"
    with _place() as (folder, where), FileLock(folder / f"{name}.lock"):
        file = folder / name
        if file.is_file():
            with suppress(OSError, ValueError):  # a damaged one is compiled again
                return _opened(file)
        say(f"compiling products for this processor ({path}), once{where}")
        temporary = folder / f".{os.getpid()}-{name}"
        try:
            _run([*command, str(SOURCE), "-o", str(temporary)])
            loaded = _opened(temporary)
            temporary.replace(file)
        finally:
            temporary.unlink(missing_ok=True)
        return loaded


def say(line: str) -> None:
    """Prints a line to standard error, because the first pass waits for the compiler."""
    print(f"specdec_jax: {line}", file=sys.stderr, flush=True)


def call(loaded: ctypes.CDLL, x: np.ndarray, weights: np.ndarray, scale: np.ndarray | None = None) -> np.ndarray:
    """x [rows, depth] bfloat16 times weights [columns, depth] -> [rows, columns] float32, on this thread.

    Args:
        weights: bfloat16, or int8 with `scale` [columns] float32.
    """
    x, weights = np.ascontiguousarray(x), np.ascontiguousarray(weights)
    out = np.full((len(x), len(weights)), np.nan, np.float32)
    pointers = [ctypes.c_void_p(None if array is None else array.ctypes.data) for array in (x, weights, scale, out)]
    loaded.specdec_product(*pointers, *map(ctypes.c_size_t, (*x.shape, len(weights))))
    return out


def call_attention(loaded: ctypes.CDLL, *arrays: np.ndarray, cap: float) -> np.ndarray:
    """As `kernels.attention`, on this thread: [B, T, H, head_dim] float32."""
    query, keys, _, _, *biases = arrays = tuple(map(np.ascontiguousarray, arrays))
    out = np.full(query.shape, np.nan, np.float32)
    sizes = (ctypes.c_size_t * 6)(*query.shape[:3], *keys.shape[1:3], query.shape[3])
    pointers = [ctypes.c_void_p(array.ctypes.data) for array in arrays] + ([] if biases else [ctypes.c_void_p(None)])
    loaded.specdec_attend(*pointers, ctypes.c_void_p(out.ctypes.data), sizes, ctypes.c_float(cap))
    return out


def _compiler() -> list[str]:
    """The command of the C++ compiler: CXX in the environment, or the first one found. Raises FileNotFoundError."""
    words = shlex.split(os.environ.get("CXX", ""))
    for name in words[:1] or COMPILERS:
        if where := shutil.which(name):
            return [where, *words[1:]]
    raise FileNotFoundError(f"no C++ compiler ({', '.join(words[:1] or COMPILERS)})")


def _run(command: list[str]) -> None:
    """Runs the compiler. Raises OSError with its first error."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        raise OSError(f"{command[0]} took over {SECONDS} seconds") from None
    if result.returncode:
        lines = result.stderr.strip().splitlines() or [f"exit code {result.returncode}"]
        raise OSError(f"{command[0]}: {next((line for line in lines if 'error' in line), lines[-1])}")


@contextmanager
def _place() -> Iterator[tuple[Path, str]]:
    """The cache folder of libraries, or a temporary one if it cannot be written, and the end of a message about it."""
    try:
        folder = cache_folder("kernels")
    except (OSError, RuntimeError):
        with tempfile.TemporaryDirectory() as here:
            yield Path(here), "; kept nowhere: every process compiles again"
        return
    yield folder, f"; kept in {shown(folder)}"


def _opened(file: Path) -> ctypes.CDLL:
    """Loads and checks a library. Raises OSError, ValueError."""
    loaded = ctypes.CDLL(str(file))
    loaded.specdec_enable.restype = ctypes.c_bool
    if not loaded.specdec_enable():
        raise OSError("the system does not let programs use these instructions")
    _check(loaded)
    return loaded


def _check(loaded: ctypes.CDLL) -> None:
    """Raises ValueError for a wrong product of integers, which are exact in any order of summation."""
    rng = np.random.default_rng(0)

    def whole(*shape: int, dtype: Any = ml_dtypes.bfloat16) -> np.ndarray:
        return rng.integers(-9, 10, shape).astype(dtype)

    for rows, depth, columns in ((1, 1, 1), (3, 67, 29), (17, 64, 70), (33, 31, 16)):
        x, scale = whole(rows, depth), (2.0 ** rng.integers(-2, 3, columns)).astype(np.float32)
        for weights, factor in ((whole(columns, depth), None), (whole(columns, depth, dtype=np.int8), scale)):
            exact = x.astype(np.float64) @ weights.astype(np.float64).T * (1.0 if factor is None else factor)
            if not np.array_equal(call(loaded, x, weights, factor), exact):
                raise ValueError(f"wrong products of {rows} rows of {depth} with {columns} columns")
