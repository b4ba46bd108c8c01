"""The sides of `python -m experiments.peers`: processes that decode a request and answer with tokens and seconds."""

import json
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.lib.environments import run_group

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
        try:
            ran = run_group([*MEASURED, *self._command(request)], self._seconds)
        except subprocess.TimeoutExpired:
            raise Failed(f"no answer in {self._seconds:.0f} s") from None
        printed = ran.stdout + "\n" + ran.stderr
        self._log.write_text(printed, encoding="utf-8")
        if ran.returncode:
            raise Failed(f"ended with {ran.returncode}: {last_line(self._log)}")
        read = plain_figures if request["mode"] == "plain" else speculative_figures
        peak = re.findall(r"^peak_kb (\d+)$", ran.stderr, re.MULTILINE)
        figures = {"text": ran.stdout, "peak_kb": int(peak[-1]) if peak else 0, "base_kb": 0}
        return figures if request.get("untimed") else read(printed, request["new"]) | figures

    def _command(self, request: Mapping[str, Any]) -> list[str]:
        kind, _, drafts = request["mode"].partition("-")
        program = str(self._programs / PROGRAMS[kind])
        command = [program, "-m", str(self._models[0]), "-p", request["text"]]
        command += ["-n", str(request["new"]), "-c", str(request["slots"]), "-t", self._threads, "--ignore-eos"]
        command += ["--temp", str(request["temperature"]), "--seed", str(request["seed"])]
        command += ["--top-k", "0", "--top-p", "1", "--min-p", "0", "--samplers", "temperature"]
        if kind == "plain":
            return [*command, "-no-cnv", "--no-display-prompt", "--simple-io"]
        if kind == "lookup":
            sizes = ["--spec-ngram-simple-size-n", "2", "--spec-ngram-simple-size-m", drafts]
            return [*command, "--spec-type", "ngram-simple", *sizes]
        command += ["-md", str(self._models[1]), "-td", self._threads, "--spec-draft-n-max", drafts]
        return command if kind == "tree" else [*command, "--spec-type", "draft-simple"]

    def close(self) -> None:
        """Nothing runs between requests."""


def plain_figures(printed: str, new: int) -> dict[str, Any]:
    """Seconds and passes from llama-completion's report. Raises Failed where there is none."""
    milliseconds = dict(re.findall(r"(prompt eval|eval) time\s*=\s*([\d.]+) ms", printed))
    if set(milliseconds) != {"prompt eval", "eval"}:
        raise Failed("llama-completion reported no times")
    return {"seconds": sum(map(float, milliseconds.values())) / 1e3, "passes": new, "count": new}


def speculative_figures(printed: str, new: int) -> dict[str, Any]:
    """The same from llama-speculative-simple's."""
    times = dict(re.findall(r"(encoded|decoded)\s+(?:\d+) tokens in\s+([\d.]+) seconds", printed))
    counts = dict(re.findall(r"n_(predict|drafted|accept)\s*=\s*(\d+)", printed))
    if set(times) != {"encoded", "decoded"} or "predict" not in counts:
        raise Failed("llama-speculative-simple reported no times")
    count = int(counts["predict"])
    passes = count - int(counts.get("accept", 0))
    return {"seconds": sum(map(float, times.values())), "passes": passes, "count": count}


def last_line(log: Path) -> str:
    """The last line that says something, cut to 200 characters."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line or "error" in line]
    return (errors or lines or ["nothing was said"])[-1][:200]
