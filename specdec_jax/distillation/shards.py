"""Token shards: concatenated conversations in a .safetensors file, listed with checksums in a manifest.

Hidden states are a hundred times as large as the rest, so they are in a separate .npy file, and stay on disk: `load`
memory-maps them.

A shard is written atomically and listed afterwards, so that a killed process loses at most the shard it was working
on.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from filelock import FileLock
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from specdec_jax.loading.new_folder import replacing

MANIFEST = "manifest.json"
HIDDEN = ".hidden.npy"
NO_HIDDEN = np.zeros((0, 0, 0), ml_dtypes.bfloat16)
APART = ("kinds", "hidden")  # fields of a shard that are not tensors in its file
FORMAT = 1


class Shard(NamedTuple):
    """M conversations with N tokens in total. Labels are for the next token; without labels k is 0."""

    tokens: np.ndarray  # [N] uint16 or int32
    writer: np.ndarray  # [N] uint8, as in `writing`: GIVEN, BY_USER, BY_ASSISTANT
    offsets: np.ndarray  # [M + 1] int64, boundaries of conversations
    kind: np.ndarray  # [M] uint8, index into `kinds`
    temperature: np.ndarray  # [M] float32, of the answers
    top: np.ndarray  # [N, k] uint16 or int32, the target's most probable next tokens
    log_prob: np.ndarray  # [N, k] float16 or float32, their log-probabilities at temperature 1, nats
    kinds: tuple[str, ...]
    hidden: np.ndarray = NO_HIDDEN  # [N, F, D] bfloat16, hidden states of the target at the token; F may be 0

    @property
    def num_tokens(self) -> int:
        """Number of tokens, N."""
        return len(self.tokens)


def token_dtype(vocab_size: int) -> Any:
    """The smaller of uint16 and int32 that can represent all tokens."""
    return np.uint16 if vocab_size <= 2**16 else np.int32


class ShardFolder:
    """A folder of shards and its manifest. `about` are the settings that created them; others are refused.

    Raises ValueError naming the folder or the file: other settings, or a damaged manifest.
    """

    def __init__(self, path: str | Path, about: Mapping[str, Any] | None = None):
        self.path = Path(path)
        self.entries: list[dict[str, Any]] = []
        before = self._read()
        if about is not None and before is not None and before != _plain(about):
            changed = sorted(key for key in {*before, *about} if before.get(key) != _plain(about).get(key))
            raise ValueError(
                f"{self.path} holds data written with other settings ({', '.join(changed)}): choose another"
            )
        self.about = _plain(about) if about is not None else before or {}

    def _read(self) -> dict[str, Any] | None:
        file = self.path / MANIFEST
        if not file.is_file():
            return None
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            if content["format"] != FORMAT:
                raise ValueError(f"format {content['format']!r}; format {FORMAT} is served")
            self.entries = content["shards"]
            return content["about"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{file} is damaged: {error}") from None

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all listed shards."""
        return sum(entry["tokens"] for entry in self.entries)

    def refresh(self) -> None:
        """Reads the list again, because other processes also add shards."""
        self._read()

    def add(self, name: str, shard: Shard, **facts: Any) -> None:
        """Writes `name`.safetensors and lists it. Raises OSError naming the file, for instance on a full disk."""
        self.path.mkdir(parents=True, exist_ok=True)
        path = self.path / f"{name}.safetensors"
        arrays = {key: np.ascontiguousarray(value) for key, value in shard._asdict().items() if key not in APART}
        if shard.hidden.shape[1]:
            facts["hidden"] = self._add_hidden(path.with_suffix(HIDDEN), shard.hidden)
        with replacing(path) as temporary:
            try:
                save_file(arrays, temporary, metadata={"kinds": json.dumps(shard.kinds)})
            except SafetensorError as error:
                raise OSError(str(error)) from None
            digest = _sha256(temporary)
        entry = {"file": path.name, "sha256": digest, "tokens": shard.num_tokens, "conversations": len(shard.kind)}
        entry["labels"] = shard.top.shape[1]
        folder = self.path.resolve()  # one lock of its manifest for all names of a folder
        with FileLock(folder.with_name(f".{folder.name}.lock")):
            self.refresh()
            others = [other for other in self.entries if other["file"] != path.name]
            self.entries = sorted([*others, entry | _plain(facts)], key=lambda other: other["file"])
            self._write_manifest()

    def load(self, index: int, *, check: bool = True, hidden: bool = True) -> Shard:
        """One shard, with its hidden states if it has any and `hidden`.

        Raises ValueError naming a file that is missing, or whose checksum or contents are wrong.
        """
        entry = self.entries[index]
        path = self.path / entry["file"]
        if not path.is_file():
            raise ValueError(f"{path} is listed in {MANIFEST} and missing")
        if check and _sha256(path) != entry["sha256"]:
            raise ValueError(
                f"{path} is damaged: its checksum is not the manifest's. Delete it from both to write it anew"
            )
        try:
            with safe_open(path, "numpy") as file:
                arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - safe_open has no iterator
                kinds = tuple(json.loads(file.metadata()["kinds"]))
            return Shard(**arrays, kinds=kinds, hidden=self._hidden(entry, check and hidden, hidden))
        except (SafetensorError, TypeError, KeyError) as error:
            raise ValueError(f"{path} is damaged: {error}") from None

    def labels_of(self, index: int) -> int:
        """Number of labels per position of a shard. Raises ValueError as `load`."""
        if "labels" in self.entries[index]:
            return self.entries[index]["labels"]
        path = self.path / self.entries[index]["file"]  # written before the manifest names it
        try:
            with safe_open(path, "numpy") as file:
                return file.get_slice("top").get_shape()[1]
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is missing or damaged: {error}") from None

    def _add_hidden(self, path: Path, hidden: np.ndarray) -> dict[str, Any]:
        """Writes hidden states as the bits of bfloat16, which numpy's format does not support."""
        with replacing(path) as temporary, open(temporary, "wb") as file:
            np.save(file, hidden.astype(ml_dtypes.bfloat16).view(np.uint16))
        return {"file": path.name, "sha256": _sha256(path), "shape": list(hidden.shape)}

    def _hidden(self, entry: Mapping[str, Any], check: bool, wanted: bool) -> np.ndarray:
        if "hidden" not in entry or not wanted:
            return np.zeros((entry["tokens"], 0, 0), ml_dtypes.bfloat16)
        path = self.path / entry["hidden"]["file"]
        if not path.is_file() or (check and _sha256(path) != entry["hidden"]["sha256"]):
            raise ValueError(f"{path} is missing or damaged: delete it, and run --stage label to make it anew")
        return np.load(path, mmap_mode="r").view(ml_dtypes.bfloat16)

    def __iter__(self) -> Iterator[Shard]:
        return (self.load(index) for index in range(len(self.entries)))

    def _write_manifest(self) -> None:
        file = self.path / MANIFEST
        content = {"format": FORMAT, "about": self.about, "tokens": self.num_tokens, "shards": self.entries}
        with replacing(file) as temporary:
            temporary.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _plain(value: Any) -> Any:
    """The value after a round trip through JSON."""
    return json.loads(json.dumps(value, default=lambda x: x.item() if hasattr(x, "item") else str(x)))
