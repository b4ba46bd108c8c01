"""The GGUF container: metadata and the location of each tensor.

The header is parsed here because `gguf.GGUFReader` wraps each of 98,000 vocabulary strings in numpy arrays (2.8 s for
SmolLM2 against 0.2 s) and reads past the end of a truncated file. Dequantisation is the `gguf` package's.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np

MAGIC = b"GGUF"
VERSIONS = (2, 3)
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
BLOCKS_TOGETHER = 4096
RANGES = {"expert_count": (0, 10_000)}  # lowest and highest
RANGES |= dict.fromkeys(("block_count", "attention.head_count", "attention.head_count_kv"), (1, 10_000))


class TensorInfo(NamedTuple):
    """A stored tensor: shape with the slowest axis first, as in numpy; offset and size in bytes."""

    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    offset: int
    size: int


class GGUF(NamedTuple):
    """An open GGUF file. Tensors stay in the memory map until `dequantise` reads them."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    buffer: mmap.mmap


def read_gguf(path: str | Path) -> GGUF:
    """Parses the header of a GGUF file, little-endian, version 2 or 3.

    Raises FileNotFoundError if there is no such file, and ValueError naming it if it is not a GGUF file, has another
    version, is damaged, or shorter than its tensors require.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no such weight file: {path}")
    size = path.stat().st_size
    with path.open("rb") as file:
        if file.read(4) != MAGIC:
            raise ValueError(f"{path} is no GGUF file (it does not begin with {MAGIC.decode()!r})")
        if size < 24:
            raise ValueError(f"{path} is truncated: its header is incomplete ({size} bytes)")
        buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    (version,) = struct.unpack_from("<I", buffer, 4)
    if version not in VERSIONS:
        raise ValueError(f"{path} is GGUF version {version}; versions 2 and 3, little-endian, are served")
    try:
        metadata, tensors = _header(buffer)
    except struct.error:
        raise ValueError(f"{path} is truncated: its header is incomplete ({size} bytes)") from None
    except KeyError as error:
        raise ValueError(f"{path} is damaged: unknown metadata type {error}, or a nested array") from None
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    for name, tensor in tensors.items():
        if tensor.offset + tensor.size > size:
            raise ValueError(
                f"{path} is truncated: tensor {name} ends at byte {tensor.offset + tensor.size}, the file at {size}"
            )
    return GGUF(path, metadata, tensors, buffer)


def dequantise(file: GGUF, name: str) -> np.ndarray:
    """Tensor `name` as float32. Raises ValueError for a type the gguf package cannot dequantise."""
    info = file.tensors[name]
    stored = np.frombuffer(file.buffer, np.uint8, info.size, info.offset)
    block = gguf.GGML_QUANT_SIZES[info.kind][1]  # bytes
    # The package converts sixteen rows at a time. Blocks are independent of rows, and long rows take 2/3 of the time.
    row = block * math.gcd(info.size // block, BLOCKS_TOGETHER)
    try:
        array = gguf.quants.dequantize(stored.reshape(-1, row), info.kind)
    except NotImplementedError:
        raise ValueError(f"{file.path}: tensor {name} has type {info.kind.name}, which cannot be dequantised") from None
    return array.reshape(info.shape)


def architecture_name(file: GGUF) -> str:
    """`general.architecture`, the prefix of the names of the file's hyper-parameters."""
    return str(file.metadata.get("general.architecture"))


def number(file: GGUF, name: str, default: Any = None) -> Any:
    """A hyper-parameter by its name without the architecture prefix.

    Raises ValueError naming the file if it is missing and has no default, is out of range, or differs between layers.
    """
    key = f"{architecture_name(file)}.{name}"
    value = file.metadata.get(key, default)
    if value is None:
        raise ValueError(f"{file.path} lacks the hyper-parameter {key}")
    if isinstance(value, np.ndarray):  # one number per layer
        if len(set(value.tolist())) != 1:
            raise ValueError(f"{file.path}: {key} differs between layers, which is not served")
        value = value.tolist()[0]
    low, high = RANGES.get(name, (-math.inf, math.inf))
    if not low <= value <= high:
        raise ValueError(f"{file.path}: {key} must be {low} to {high}, got {value}")
    return value


class _Cursor:
    """Reads values one after another."""

    def __init__(self, buffer: mmap.mmap, offset: int):
        self.buffer, self.offset, self.end = buffer, offset, len(buffer)

    def number(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.buffer, self.offset)
        self.offset += struct.calcsize("<" + code)
        return value

    def raw(self, size: int) -> bytes:
        if self.offset + size > self.end:
            raise struct.error
        self.offset += size
        return self.buffer[self.offset - size : self.offset]

    def string(self) -> str:
        return self.raw(self.number("Q")).decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            return self.number(SCALARS[kind])
        inner, count = self.number("I"), self.number("Q")
        if count > self.end:
            raise struct.error
        if inner == STRING:
            return [self.string() for _ in range(count)]
        dtype = np.dtype("<" + SCALARS[inner])
        return np.frombuffer(self.raw(count * dtype.itemsize), dtype)


def _header(buffer: mmap.mmap) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    cursor = _Cursor(buffer, 8)
    tensor_count, entry_count = cursor.number("Q"), cursor.number("Q")
    metadata: dict[str, Any] = {}
    for _ in range(entry_count):
        name = cursor.string()
        metadata[name] = cursor.value(cursor.number("I"))
    stored = []
    for _ in range(tensor_count):
        name, axes = cursor.string(), cursor.number("I")
        if axes > 8:
            raise ValueError(f"tensor {name} has {axes} axes")
        shape = tuple(cursor.number("Q") for _ in range(axes))[::-1]
        number, offset = cursor.number("I"), cursor.number("Q")
        try:
            kind = gguf.GGMLQuantizationType(number)
        except ValueError:
            raise ValueError(f"tensor {name} has unknown type {number}") from None
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        if not shape or shape[-1] % block:
            raise ValueError(f"tensor {name} of shape {shape} does not divide into {kind.name} blocks of {block}")
        stored.append((name, TensorInfo(shape, kind, offset, math.prod(shape) // block * block_bytes)))
    alignment = metadata.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"general.alignment is {alignment!r}")
    start = cursor.offset + -cursor.offset % alignment
    tensors = {name: info._replace(offset=start + info.offset) for name, info in stored}
    if len(tensors) != len(stored):
        raise ValueError("a tensor name comes twice")
    return metadata, tensors
