"""How programs are compiled. On an NVIDIA GPU a whole generation is one CUDA graph, its loops included.

XLA captures kernels by itself, but a loop whose length is not known, such as the draft loop, only by an option. Without
that every turn of a loop and every conditional copies its predicate to the host and waits for it. Compiled programs say
that all of `run` is captured (experiments.accelerators); whether it is faster has not been timed on a device.
"""

import functools
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax

FLAG = "xla_gpu_enable_command_buffer"
CAPTURED = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"
LEAST_CUDA = 12030  # 12.3: the first with conditional nodes in graphs
OPTIONS: Mapping[str, Any] = {FLAG: CAPTURED}


def compiler_options(platform: str, version: str, flags: str = "") -> dict[str, Any]:
    """Compiler options of `jax.jit` for a platform: the capture of loops on CUDA 12.3 or newer, nothing elsewhere.

    Args:
        version: of the platform as jax's client says it, such as `cuda 12090`.
        flags: XLA_FLAGS. A command buffer flag among them is the user's own choice, and stays.
    """
    match = re.search(r"\bcuda (\d+)", version)
    if platform != "gpu" or match is None or int(match[1]) < LEAST_CUDA or FLAG in flags:
        return {}
    return dict(OPTIONS)


def options_here() -> dict[str, Any]:
    """The same for jax's default backend and this process's XLA_FLAGS."""
    platform = jax.default_backend()
    if platform != "gpu":
        return {}
    return compiler_options(platform, jax.local_devices()[0].client.platform_version, os.environ.get("XLA_FLAGS", ""))


def counted(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, for `jax.jit`; `num_programs` says how often jax traced it, which is once a program."""

    @functools.wraps(function)
    def traced(*arguments: Any) -> Any:
        traced.programs += 1  # type: ignore[attr-defined]
        return function(*arguments)

    traced.programs = 0  # type: ignore[attr-defined]
    return traced


def num_programs(jitted: Any) -> int:
    """How many programs a jitted `counted` function has by now, one for every set of shapes and static values."""
    return jitted.__wrapped__.programs


def explained(error: Exception) -> Exception:
    """An error of a generation with captured loops, with what to try."""
    return RuntimeError(
        f"the generation failed as one CUDA graph; XLA_FLAGS=--{FLAG}= decodes without (slower: each turn of a loop "
        f"waits for the host). The error was: {error}"
    )
