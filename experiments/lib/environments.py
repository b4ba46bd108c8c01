"""Virtual environments for compilers and peers, made when they are first asked for and then kept."""

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

from filelock import FileLock

ROOT = Path(__file__).resolve().parents[2]
STAMP = ".requirements"


class NoEnvironment(RuntimeError):
    """An environment that could not be made; the message says why in a line."""


def python_of(requirements: str, folder: Path, *, seconds: float) -> Path:
    """The interpreter of the environment that a requirements file of the repository describes, made unless it is there.

    Raises:
        NoEnvironment: it could not be made, or not within the time.
    """
    place = (folder / Path(requirements).stem).absolute()
    python, wanted = place / "bin" / "python", _digest(ROOT / requirements)
    place.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{place}.lock"):
        if python.exists() and (place / STAMP).exists() and (place / STAMP).read_text() == wanted:
            return python
        shutil.rmtree(place, ignore_errors=True)
        install = [str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check", "-r"]
        for command in ([sys.executable, "-m", "venv", str(place)], [*install, str(ROOT / requirements)]):
            _run(command, requirements, seconds)
        (place / STAMP).write_text(wanted)
    return python


def _run(command: list[str], requirements: str, seconds: float) -> None:
    try:
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise NoEnvironment(f"{requirements} did not install within {seconds:.0f} s") from None
    except (OSError, subprocess.CalledProcessError) as error:
        last = [line for line in (getattr(error, "stderr", "") or str(error)).splitlines() if line.strip()]
        raise NoEnvironment(f"{requirements} does not install: {last[-1][:300] if last else error}") from None


def _digest(path: Path) -> str:
    """Of a requirements file and those that it includes."""
    text = path.read_text(encoding="utf-8")
    included = [line[3:].strip() for line in text.splitlines() if line.startswith("-r ")]
    parts = [text, *(_digest(path.parent / name) for name in included), sys.version]
    return hashlib.sha256("".join(parts).encode()).hexdigest()
