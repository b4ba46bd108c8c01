"""Virtual environments for compilers and other engines, created at first use and then kept; and the processes that
decode with these engines for `python -m experiments.peers`: a request in, tokens or text and seconds out.
"""

import hashlib
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock

ROOT = Path(__file__).resolve().parents[2]
STAMP = ".requirements"
PIP = ("-m", "pip", "install", "-qq", "--disable-pip-version-check")
SOURCE = "llama-cpp-python"
LLAMA_CPP = ("llama-completion", "llama-speculative-simple", "llama-speculative")
LLAMA_FLAGS = ("-DGGML_NATIVE=ON", "-DLLAMA_CURL=OFF")


class NoEnvironment(RuntimeError):
    """An environment that could not be made; the message gives the reason in one line."""


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
        for file in place.glob("*.tar.gz"):
            with tarfile.open(file) as archive:
                archive.extractall(place, filter="data")
        source = next(place.glob("*/vendor/llama.cpp"), None)
        if source is None:
            raise NoEnvironment(f"{failed}: its source is not where it was")
        cmake, build = str(bin_folder / "cmake"), ["-B", str(place / "build")]
        ninja = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={bin_folder / 'ninja'}", "-DCMAKE_BUILD_TYPE=Release"]
        _run([cmake, "-S", str(source), *build, *ninja, *LLAMA_FLAGS], failed, seconds)
        _run([cmake, "--build", str(place / "build"), "--target", *LLAMA_CPP], failed, seconds)
    return programs


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


SIDES = Path(__file__).parent / "peer_sides"
READY = 900.0  # seconds to load models in
SIMPLE = "llama-speculative-simple"
PROGRAMS = {"plain": "llama-completion", "draft": SIMPLE, "lookup": SIMPLE, "tree": "llama-speculative"}
MEASURED = (  # runs a command and says at its end how much memory it had at most
    sys.executable,
    "-S",
    "-c",
    "import re, subprocess, sys, time\n"
    "run, peak = subprocess.Popen(sys.argv[1:]), 0\n"
    "while run.poll() is None:\n"
    "    try: peak = int(re.search(r'VmHWM:\\s+(\\d+)', open(f'/proc/{run.pid}/status').read())[1])\n"
    "    except (OSError, TypeError): pass\n"
    "    time.sleep(0.05)\n"
    "print('\\npeak_kb', peak, file=sys.stderr)\n"
    "sys.exit(run.returncode)",
)


class Failed(RuntimeError):
    """A side that cannot go on; the message gives the reason in one line."""


class Process:
    """A process that lives as long as the run: one request per line in, one answer per line out.

    `answer` gives tokens or text, seconds with the prompt's, passes and peak memory.

    Raises:
        Failed: it does not start, or from `answer` it ends or does not answer in time.
    """

    def __init__(self, command: Sequence[str], log: Path, seconds: float):
        self._log, self._seconds = log, seconds
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self._next(READY)

    def _read(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _next(self, seconds: float) -> dict[str, Any]:
        until = time.monotonic() + seconds
        while True:
            try:
                line = self._lines.get(timeout=max(until - time.monotonic(), 0.0))
            except queue.Empty:
                self.close()
                raise Failed(f"no answer in {seconds:.0f} s") from None
            if not line:
                raise Failed(f"ended with {self._process.wait()}: {last_line(self._log)}")
            if line.startswith("{"):
                return json.loads(line)

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Decodes a request."""
        assert self._process.stdin
        try:
            self._process.stdin.write(json.dumps(dict(request)) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise Failed(f"ended: {last_line(self._log)}") from None
        return self._next(self._seconds)

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
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
        try:
            ran = run_group([*MEASURED, *command], self._seconds)
        except subprocess.TimeoutExpired:
            raise Failed(f"no answer in {self._seconds:.0f} s") from None
        printed = ran.stdout + "\n" + ran.stderr
        self._log.write_text(printed, encoding="utf-8")
        if ran.returncode:
            raise Failed(f"ended with {ran.returncode}: {last_line(self._log)}")
        peak = re.findall(r"^peak_kb (\d+)$", ran.stderr, re.MULTILINE)
        figures = {"text": ran.stdout, "peak_kb": int(peak[-1]) if peak else 0, "base_kb": 0}
        return figures if request.get("untimed") else figures_of(kind, printed, request["new"]) | figures

    def close(self) -> None:
        """Nothing runs between requests."""


def figures_of(kind: str, printed: str, new: int) -> dict[str, Any]:
    """Seconds, passes and the count of tokens from a program's report. Raises Failed where there is none."""
    if kind == "plain":
        times = {
            name: float(ms) / 1e3 for name, ms in re.findall(r"(prompt eval|eval) time\s*=\s*([\d.]+) ms", printed)
        }
        count, accepted = new, 0
    else:
        read = re.findall(r"(encoded|decoded)\s+(?:\d+) tokens in\s+([\d.]+) seconds", printed)
        counts = dict(re.findall(r"n_(predict|drafted|accept)\s*=\s*(\d+)", printed))
        times = {name: float(seconds) for name, seconds in read if "predict" in counts}
        count, accepted = int(counts.get("predict", 0)), int(counts.get("accept", 0))
    if len(times) != 2:
        raise Failed(f"{PROGRAMS[kind]} reported no times")
    return {"seconds": sum(times.values()), "passes": count - accepted, "count": count}


def last_line(log: Path) -> str:
    """The last line that says something, cut to 200 characters."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line or "error" in line]
    return (errors or lines or ["nothing was said"])[-1][:200]
