"""Compiles `products.cc` for this processor, caches the library, checks and loads it.

A library is identified by its source, the headers, the compiler, its flags and the processor. Processes that need the
same library wait for the first one. A library gets its name, which ends in a checksum, after another process has loaded
and checked it; a file that does not fit its checksum is not loaded.
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

from specdec_jax.compilation_cache import cache_folder, cache_path, shown

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
SECONDS = 120  # time limit for the compiler, and for the first check
ERROR = re.compile(r"\berror:|^\w+Error:")  # in a line of a compiler or of Python, not of a library's log
FIRST_CHECK = "import sys; sys.path[:] = {!r}; from specdec_jax.kernels import compiled; compiled._opened(sys.argv[1])"


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
    words = shlex.split(os.environ.get("CXX", ""))
    compiler = next(filter(None, map(shutil.which, words[:1] or COMPILERS)), None)
    if compiler is None:
        raise FileNotFoundError(f"no C++ compiler ({', '.join(words[:1] or COMPILERS)})")
    flags = *words[1:], *FLAGS, *(f"-m{name}" for name in PATHS[path]), f"-I{jax.ffi.include_dir()}"
    about = _run([compiler, "--version"], compiler)
    identity = SOURCE.read_text(encoding="utf-8"), about, compiler, flags, cpu_info("flags"), version("jaxlib")
    name = f"products-{path}-{hashlib.sha256(repr(identity).encode()).hexdigest()[:16]}"
    with suppress(OSError, RuntimeError):  # there is no home, or it cannot be read
        if loaded := _stored(cache_path("kernels"), name):
            return loaded
    with _place() as (folder, where), FileLock(folder / f"{name}.so.lock", timeout=3 * SECONDS):
        if loaded := _stored(folder, name):  # by another process in the meantime
            return loaded
        say(f"compiling products for this processor ({path}), once{where}")
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            file = Path(temporary) / name
            _run([compiler, *flags, str(SOURCE), "-o", str(file)], compiler)
            python = sys.executable or "python3", "-c", FIRST_CHECK.format(sys.path)
            _run([*python, str(file)], "the library's first check")
            with file.open("rb") as content:
                os.fsync(content.fileno())
                digest = hashlib.sha256(content.read()).hexdigest()[:16]
            for old in folder.glob(f"{name}-*.so"):  # a damaged one
                old.unlink()
            loaded = _opened(file)
            file.replace(folder / f"{name}-{digest}.so")
        return loaded


def _stored(folder: Path, name: str) -> ctypes.CDLL | None:
    """The library of this name in the folder; None: there is none, or a damaged one."""
    for file in folder.glob(f"{name}-*.so"):
        with suppress(OSError, ValueError):
            if file.stem == f"{name}-{hashlib.sha256(file.read_bytes()).hexdigest()[:16]}":
                return _opened(file)
    return None


def say(line: str) -> None:
    """Prints a line to standard error, because the first pass waits for the compiler, or a call for measurements."""
    print(f"specdec_jax: {line}", file=sys.stderr, flush=True)


def call(loaded: ctypes.CDLL, x: np.ndarray, weights: np.ndarray, scale: np.ndarray | None = None) -> np.ndarray:
    """x [rows, depth] bfloat16 times weights [columns, depth] -> [rows, columns] float32, on this thread.

    The weights are bfloat16, or int8 with `scale` [columns] float32.
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


def _run(command: list[str], name: str) -> str:
    """The command's output. Raises OSError with `name` and the first error."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        raise OSError(f"{name} took over {SECONDS} seconds") from None
    if result.returncode:
        lines = result.stderr.strip().splitlines() or [f"exit code {result.returncode}"]
        raise OSError(f"{name}: {next(filter(ERROR.search, lines), lines[-1])}")
    return result.stdout


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


def _opened(file: str | Path) -> ctypes.CDLL:
    """Loads and checks a library. Raises OSError, ValueError, or AttributeError for a missing function."""
    loaded = ctypes.CDLL(str(file))
    loaded.specdec_enable.restype = ctypes.c_bool
    if not loaded.specdec_enable():
        raise OSError("the system does not let programs use these instructions")
    _check(loaded)
    return loaded


def _check(loaded: ctypes.CDLL) -> None:
    """Raises ValueError for wrong products or sums of integers, exact in any order of summation, or wrong attention."""
    rng = np.random.default_rng(0)

    def whole(*shape: int, dtype: Any = ml_dtypes.bfloat16) -> np.ndarray:
        return rng.integers(-9, 10, shape).astype(dtype)

    for rows, depth, columns in ((1, 1, 1), (3, 67, 29), (17, 64, 70), (33, 31, 16)):
        x, scale = whole(rows, depth), (2.0 ** rng.integers(-2, 3, columns)).astype(np.float32)
        for weights, factor in ((whole(columns, depth), None), (whole(columns, depth, dtype=np.int8), scale)):
            exact = x.astype(np.float64) @ weights.astype(np.float64).T * (1.0 if factor is None else factor)
            if not np.array_equal(call(loaded, x, weights, factor), exact):
                raise ValueError(f"wrong products of {rows} rows of {depth} with {columns} columns")
        numbers, out = x.astype(np.float32), np.empty(rows, np.float32)
        pointers = [ctypes.c_void_p(array.ctypes.data) for array in (numbers, out)]
        for power in (1, 2):
            loaded.specdec_sum_rows(*pointers, *map(ctypes.c_size_t, x.shape), ctypes.c_bool(power == 2))
            if not np.array_equal(out, (numbers**power).sum(axis=1)):
                raise ValueError(f"wrong sums of {rows} rows of {depth}")
    shapes = (2, 3, 4, 91), (2, 2, 40, 91), (2, 2, 40, 91)
    arrays = [rng.normal(size=shape, scale=0.5).astype(ml_dtypes.bfloat16) for shape in shapes]
    query, keys, values = (array.astype(np.float32) for array in arrays)
    mask, biases = rng.random((2, 3, 40)) < 0.7, rng.normal(size=(2, 4, 3, 40)).astype(np.float32)
    for cap in (0.0, 5.0):
        scores = np.einsum("bthd,bhsd->bhts", query, keys.repeat(2, axis=1))
        weights = np.exp((cap * np.tanh(scores / cap) if cap else scores) + biases) * mask[:, None]
        weights /= weights.sum(axis=-1, keepdims=True)
        exact = np.einsum("bhts,bhsd->bthd", weights, values.repeat(2, axis=1))
        if not np.allclose(call_attention(loaded, *arrays, mask, biases, cap=cap), exact, atol=0.01):
            raise ValueError(f"wrong attention with cap {cap}")
