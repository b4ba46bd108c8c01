"""Virtual environments for compilers and peers, created at first use and then kept."""

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock
from rich.console import Console

from experiments.lib.options import Output

ROOT = Path(__file__).resolve().parents[2]
STAMP = ".requirements"
PIP = ("-m", "pip", "install", "-qq", "--disable-pip-version-check")
SOURCE = "llama-cpp-python"
LLAMA_CPP = ("llama-completion", "llama-speculative-simple", "llama-speculative")
LLAMA_FLAGS = ("-DGGML_NATIVE=ON", "-DLLAMA_CURL=OFF")


class NoEnvironment(RuntimeError):
    """An environment that could not be made; the message gives the reason in one line."""


@dataclass(frozen=True)
class BesideTorch(Output):
    """Options of a comparison with transformers on torch."""

    environments: str = "runs/environments"
    """Folder of the environment with torch."""
    install_seconds: float = 3600.0
    """Most time for making it."""

    def python(self, console: Console, aim: str) -> Path | None:
        """The interpreter with torch and transformers; None, and a line that nothing is `aim`, where there is none."""
        where, names = Path(self.environments), ("torch", "transformers")
        try:
            with console.status("The environment with torch"):
                return python_of("requirements-peers.txt", where, seconds=self.install_seconds, packages=names)
        except NoEnvironment as error:
            console.print(f"Nothing is {aim}: {error}", style="yellow")
            return None


def python_of(
    requirements: str,
    folder: Path,
    *,
    seconds: float,
    packages: Sequence[str] = (),
    without: Sequence[str] = (),
    base: str = sys.executable,
) -> Path:
    """The interpreter of the environment that a requirements file of the repository describes, made unless it is there.

    Args:
        packages: only these, at the file's versions.
        without: what they bring along and do not need.
        base: the interpreter that makes it.

    Raises:
        NoEnvironment: it could not be made, or not within the time.
    """
    made_by = [_digest(ROOT / requirements), *packages, *([base] if base != sys.executable else [])]
    place = (folder / "-".join([Path(requirements).stem, *packages[:1]])).absolute()
    python, wanted = place / "bin" / "python", " ".join(made_by)
    requested = ["-r", str(ROOT / requirements)]
    if packages:
        requested = ["-c", str(ROOT / requirements), *packages]
    place.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{place}.lock"):
        if python.exists() and (place / STAMP).exists() and (place / STAMP).read_text() == wanted:
            return python
        shutil.rmtree(place, ignore_errors=True)
        removal = [[str(python), "-m", "pip", "uninstall", "-qq", "-y", *without]] if without else []
        for command in ([base, "-m", "venv", str(place)], [str(python), *PIP, *requested], *removal):
            _run(command, f"{requirements} does not install", seconds)
        (place / STAMP).write_text(wanted)
    return python


def llama_cpp(folder: Path, *, seconds: float, base: str = sys.executable) -> Path:
    """The folder with llama.cpp's programs, compiled from the source in llama-cpp-python unless they are there.

    Raises:
        NoEnvironment: no compiler, or it does not compile, or not within the time.
    """
    python = python_of("requirements-peers.txt", folder, seconds=seconds, packages=("cmake", "ninja"), base=base)
    place, bin_folder = folder.absolute() / "llama.cpp", python.parent
    programs = place / "build" / "bin"
    with FileLock(f"{place}.lock"):
        if all((programs / name).exists() for name in LLAMA_CPP):
            return programs
        failed = "llama.cpp does not compile"
        constraint = ["-c", str(ROOT / "requirements-peers.txt"), "--no-deps", "--no-binary", ":all:"]
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        _run([str(python), "-m", "pip", "download", "-q", *constraint, SOURCE, "-d", str(place)], failed, seconds)
        with tarfile.open(_only(place.glob("*.tar.gz"), failed)) as archive:
            archive.extractall(place, filter="data")
        source = _only(place.glob("*/vendor/llama.cpp"), failed)
        cmake, build = str(bin_folder / "cmake"), ["-B", str(place / "build")]
        ninja = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={bin_folder / 'ninja'}", "-DCMAKE_BUILD_TYPE=Release"]
        _run([cmake, "-S", str(source), *build, *ninja, *LLAMA_FLAGS], failed, seconds)
        _run([cmake, "--build", str(place / "build"), "--target", *LLAMA_CPP], failed, seconds)
    return programs


def _only(paths: Iterable[Path], failed: str) -> Path:
    for path in paths:
        return path
    raise NoEnvironment(f"{failed}: its source is not where it was")


def _run(command: Sequence[str], failed: str, seconds: float) -> None:
    try:
        run = run_group(command, seconds)
    except subprocess.TimeoutExpired:
        raise NoEnvironment(f"{failed}: not within {seconds:.0f} s") from None
    except OSError as error:
        raise NoEnvironment(f"{failed}: {error}") from None
    if run.returncode:
        last = [line for line in run.stderr.splitlines() if line.strip()]
        raise NoEnvironment(f"{failed}: {last[-1][:300] if last else f'exit code {run.returncode}'}")


def run_script(python: Path, script: Path, *words: str) -> None:
    """Runs a script in another environment. Raises OSError with the last line that it printed where it fails."""
    done = subprocess.run([str(python), str(script), *words], capture_output=True, text=True, check=False)
    if done.returncode:
        last = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise OSError(f"{script.name}: {last[-1]}")


def _digest(path: Path) -> str:
    """Requirements of a file and those that it includes."""
    text = path.read_text(encoding="utf-8")
    included = [line[3:].strip() for line in text.splitlines() if line.startswith("-r ")]
    parts = [text, *(_digest(path.parent / name) for name in included), sys.version]
    return hashlib.sha256("".join(parts).encode()).hexdigest()


def run_group(command: Sequence[str], seconds: float) -> "subprocess.CompletedProcess[str]":
    """Runs a command to its end and keeps what it prints.

    Raises:
        subprocess.TimeoutExpired: it took longer, and is ended with what it started.
    """
    pipe = subprocess.PIPE
    run = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, errors="replace", start_new_session=True)
    try:
        out, errors = run.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(run.pid, signal.SIGKILL)
        run.communicate()
        raise
    return subprocess.CompletedProcess(command, run.returncode, out, errors)
