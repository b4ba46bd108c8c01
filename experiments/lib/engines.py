"""Virtual environments for compilers and other engines, created at first use and then kept; and the processes that
decode with these engines for `python -m experiments.peers`: a request in, tokens or text and seconds out.
"""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock

ROOT = Path(__file__).resolve().parents[2]
STAMP = ".requirements"
THIS, Words = sys.executable, Sequence[str]
PIP = ("-m", "pip", "install", "-qq", "--disable-pip-version-check")
SOURCE = "llama-cpp-python"
LLAMA_CPP = ("llama-completion", "llama-speculative-simple", "llama-speculative")
LLAMA_FLAGS = ("-DGGML_NATIVE=ON", "-DLLAMA_CURL=OFF")


class Failed(OSError):
    """An environment that cannot be made, or a side that cannot go on; the message gives the reason in one line."""


def python_of(
    requirements: str, folder: Path, *, seconds: float, packages: Words = (), without: Words = (), base: str = THIS
) -> Path:
    """The interpreter of the environment that a requirements file of the repository describes, made by `base` unless it
    is there: `packages` alone, at the file's versions, and `without` some that they bring along and do not need. Raises
    Failed where it cannot be made, or not within the time."""
    made_by = [_digest(ROOT / requirements), *packages, *([base] if base != THIS else [])]
    place = (folder / "-".join([Path(requirements).stem, *packages[:1]])).absolute()
    python, wanted = place / "bin" / "python", " ".join(made_by)
    requested = ["-c" if packages else "-r", str(ROOT / requirements), *packages]
    place.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{place}.lock"):
        if python.exists() and (place / STAMP).exists() and (place / STAMP).read_text() == wanted:
            return python
        shutil.rmtree(place, ignore_errors=True)
        removal = [[str(python), "-m", "pip", "uninstall", "-qq", "-y", *without]] if without else []
        for command in ([base, "-m", "venv", str(place)], [str(python), *PIP, *requested], *removal):
            run(command, f"{requirements} does not install", seconds)
        (place / STAMP).write_text(wanted)
    return python


def llama_cpp(folder: Path, *, seconds: float, base: str = THIS) -> Path:
    """The folder with llama.cpp's programs, compiled from the source in llama-cpp-python unless they are there. Raises
    Failed where there is no compiler, or they do not compile, or not within the time."""
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
        run([str(python), "-m", "pip", "download", "-q", *constraint, SOURCE, "-d", str(place)], failed, seconds)
        for file in place.glob("*.tar.gz"):
            with tarfile.open(file) as archive:
                archive.extractall(place, filter="data")
        source = next(place.glob("*/vendor/llama.cpp"), None)
        if source is None:
            raise Failed(f"{failed}: its source is not where it was")
        cmake, build = str(bin_folder / "cmake"), ["-B", str(place / "build")]
        ninja = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={bin_folder / 'ninja'}", "-DCMAKE_BUILD_TYPE=Release"]
        run([cmake, "-S", str(source), *build, *ninja, *LLAMA_FLAGS], failed, seconds)
        run([cmake, "--build", str(place / "build"), "--target", *LLAMA_CPP], failed, seconds)
    return programs


def run(
    command: Sequence[str], failed: str, seconds: float, env: Mapping[str, str] | None = None, log: Path | None = None
) -> tuple[str, str]:
    """Runs a command to its end; returns what it printed and its errors, which `log` has too. Raises Failed, whose
    message begins with `failed`, where it does not start, fails, or takes longer: then it ends with what it started."""
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "errors": "replace"}
    try:
        process = subprocess.Popen(command, env=env, start_new_session=True, **options)
        out, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise Failed(f"{failed}: not within {seconds:.0f} s") from None
    except OSError as error:
        raise Failed(f"{failed}: {error}") from None
    if log:
        log.write_text(f"{out}\n{errors}", encoding="utf-8")
    if process.returncode:
        raise Failed(f"{failed}: {last_line(errors) or f'exit code {process.returncode}'}")
    return out, errors


def last_line(printed: str) -> str:
    """The last line that says something, an error if there is one, cut to 300 characters."""
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line or "error" in line]
    return (errors or lines or [""])[-1][:300]


def _digest(path: Path) -> str:
    """Requirements of a file and those that it includes."""
    text = path.read_text(encoding="utf-8")
    included = [line[3:].strip() for line in text.splitlines() if line.startswith("-r ")]
    parts = [text, *(_digest(path.parent / name) for name in included), sys.version]
    return hashlib.sha256("".join(parts).encode()).hexdigest()


SIDES = Path(__file__).parent / "peer_sides"
READY = 900.0  # seconds to load models in
SIMPLE = "llama-speculative-simple"
PROGRAMS = {"plain": "llama-completion", "draft": SIMPLE, "lookup": SIMPLE, "tree": "llama-speculative"}
MEASURED = (sys.executable, "-S", "-c")  # runs a command and says at its end how much memory it had at most
MEASURED += (
    "import resource, subprocess, sys\n"
    "code = subprocess.call(sys.argv[1:])\n"
    "print('\\npeak_kb', resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, file=sys.stderr)\n"
    "sys.exit(code)",
)


class Process:
    """A process that lives as long as the run: a request per line in, an answer per line out, with tokens or text,
    seconds, passes and peak memory. Raises Failed where it does not start, ends, or does not answer in time."""

    def __init__(self, command: Sequence[str], log: Path, seconds: float):
        self._log, self._seconds, pipe = log, seconds, subprocess.PIPE
        with log.open("w") as errors:
            options: dict[str, Any] = {"stderr": errors, "text": True, "start_new_session": True}
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, **options)
        self._next(READY)

    def _next(self, seconds: float) -> dict[str, Any]:
        """The next line that is an object."""
        until, timer = time.monotonic() + seconds, threading.Timer(seconds, self.close)
        timer.start()
        try:
            for line in self._process.stdout:
                if line.startswith("{"):
                    return json.loads(line)
        finally:
            timer.cancel()
        if time.monotonic() >= until:
            raise Failed(f"no answer in {seconds:.0f} s")
        raise Failed(f"ended with {self._process.wait()}: {self._last_line()}")

    def _last_line(self) -> str:
        return last_line(self._log.read_text(encoding="utf-8", errors="replace")) or "nothing was said"

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Decodes a request."""
        try:
            self._process.stdin.write(json.dumps(dict(request)) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise Failed(f"ended: {self._last_line()}") from None
        return self._next(self._seconds)

    def close(self) -> None:
        """Ends the process and what it started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class LlamaCpp:
    """llama.cpp's own programs, started anew for each request; seconds are those that they print."""

    def __init__(self, programs: Path, target: Path, drafter: Path, threads: int, log: Path, seconds: float):
        self._programs, self._models, self._log, self._seconds = programs, (target, drafter), log, seconds
        self._threads = str(threads)

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Decodes a request; `mode` is plain, draft-N, lookup-N or tree-N (llama-speculative); `untimed`: text only."""
        kind, _, drafts = request["mode"].partition("-")
        command = [str(self._programs / PROGRAMS[kind]), "-m", str(self._models[0]), "-p", request["text"]]
        command += ["-n", str(request["new"]), "-c", str(request["slots"]), "-t", self._threads, "--ignore-eos"]
        command += ["--temp", str(request["temperature"]), "--seed", str(request["seed"])]
        command += ["--top-k", "0", "--top-p", "1", "--min-p", "0", "--samplers", "temperature"]
        if kind == "plain":
            command += ["-no-cnv", "--no-display-prompt", "--simple-io"]
        elif kind == "lookup":
            command += ["--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "2"]
            command += ["--spec-ngram-simple-size-m", drafts]
        else:
            command += ["-md", str(self._models[1]), "-td", self._threads, "--spec-draft-n-max", drafts]
            command += [] if kind == "tree" else ["--spec-type", "draft-simple"]
        text, errors = run([*MEASURED, *command], PROGRAMS[kind], self._seconds, log=self._log)
        peak = re.findall(r"^peak_kb (\d+)$", errors, re.MULTILINE)
        figures = {"text": text, "peak_kb": int(peak[-1]) if peak else 0, "base_kb": 0}
        return figures if request.get("untimed") else figures_of(kind, f"{text}\n{errors}", request["new"]) | figures

    def close(self) -> None:
        """Nothing runs between requests."""


def figures_of(kind: str, printed: str, new: int) -> dict[str, Any]:
    """Seconds, passes and the count of tokens from a program's report. Raises Failed where there is none."""
    if kind == "plain":
        read = re.findall(r"(prompt eval|eval) time\s*=\s*([\d.]+) ms", printed)
        times, count, accepted = {name: float(ms) / 1e3 for name, ms in read}, new, 0
    else:
        read = re.findall(r"(encoded|decoded)\s+(?:\d+) tokens in\s+([\d.]+) seconds", printed)
        counts = dict(re.findall(r"n_(predict|drafted|accept)\s*=\s*(\d+)", printed))
        times = {name: float(seconds) for name, seconds in read if "predict" in counts}
        count, accepted = int(counts.get("predict", 0)), int(counts.get("accept", 0))
    if len(times) != 2:
        raise Failed(f"{PROGRAMS[kind]} reported no times")
    return {"seconds": sum(times.values()), "passes": count - accepted, "count": count}
