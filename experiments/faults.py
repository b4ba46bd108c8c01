"""What is lost when a process is killed, a disk is full, or a request is nonsense?

Question:  After SIGKILL at random moments, a disk without room and 1,000 malformed requests: is a line lost,
           half-written or different, and does any error lack its line?
Command:   python -m experiments.faults [--kills 20] [--killed generate-file record distill]
           [--full-disk FOLDER_ON_A_SMALL_DISK]
Time:      45 minutes on 2 busy cores, half of it distillation
Expected:  nothing lost, nothing half-written, the same bytes (docs/reliability.md)
Output:    runs/faults-<time>/ with manifest.json, results.jsonl (a line a fault) and table.md

Each fault is done to `generate-file` with the pair named, in float32 with estimated costs, so that every run must end
with the same bytes. Kills are also done to `record`, and to a small distillation on two processes: one of the two is
killed, and the other must end within a minute and say why. Traces and weights must be the same bytes. `--full-disk` is
a folder on a file system that is too small for the output: such as one that `mount -t tmpfs -o size=16k tmpfs FOLDER`
makes.
"""

import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from experiments.lib.cells import markdown
from experiments.lib.commands import command
from experiments.lib.options import Models, Output, check_least
from experiments.lib.process_groups import of_one_launch
from experiments.lib.run_folder import RunFolder
from experiments.lib.terminal import publish

LINES = 40
NONSENSE = (
    *('{"prompt": ""}', '{"prompt": 3}', '{"prompt": "a", "temprature": 1}', '{"prompt": "a", "max_new_tokens": -1}'),
    *('{"prompt": "a", "temperature": 1e999}', '{"prompt": "\\ud800"}', "[]", "{", '{"prompt": "a", "seed": 1e30}'),
    '{"prompt": "a", "policy": {"threshold": 1}}',
)


GENERATE, MINUTE = "generate-file", 60.0
KILLED = (GENERATE, "record", "distill")
LOST = (b"has ended before the work was done", b"another task died")  # ours, and JAX's of the first process


class Command(NamedTuple):
    """A command that is killed and started again."""

    words: list[str]
    output: Path  # a file of lines, or a folder
    files: tuple[str, ...] = ()  # that the folder ends with, in the order they appear
    processes: int = 1


@dataclass(frozen=True)
class Faults(Output, Models):
    """Kill, fill and misuse generate-file."""

    drafter: str = "smollm2-drafter@8192"
    """As target."""
    kills: int = 20
    """Moments at which each process is killed."""
    killed: tuple[str, ...] = KILLED
    """Commands that are killed."""
    full_disk: Path | None = None
    """A folder on a small file system; none: not tried."""
    seed: int = 0
    """Of the moments."""


def faults(config: Faults, console: Console) -> None:
    """Tries all and writes the run folder. Raises ValueError: bad input, or a run that could not be made."""
    check_least(config, 1, "kills")
    check_least(config, 0, "seed")
    unknown = set(config.killed) - set(KILLED)
    if unknown:
        raise ValueError(f"nothing is known of kills of {min(unknown)!r}")
    folder = RunFolder.create("faults", config, config.out)
    source = folder.path / "in.jsonl"
    lines = [json.dumps({"prompt": f"Count to {i}.", "temperature": 0.7 * (i % 2)}) for i in range(LINES)]
    source.write_text("\n".join(lines), encoding="utf-8")
    whole = folder.path / "whole.jsonl"
    with console.status("A run that nothing happens to"):
        _check(_run(config, source, whole), 0)
    for name in config.killed:
        with console.status(f"{name} killed"):
            command = _command(name, config, folder.path, source)
            folder.append({"fault": f"{name} killed", **_killed(config, command)})
    for name, tried in (("full disk", _full_disk), ("nonsense", _nonsense), ("cut", _cut)):
        with console.status(name):
            row = tried(config, folder.path, source, whole)
        if row is not None:
            folder.append({"fault": name, **row})
    publish(folder, _table(folder.rows()), console)


def _words(config: Faults, source: Path, output: Path) -> list[str]:
    options = ["--target", config.target, "--drafter", config.drafter, "--dtype", "float32", "--costs", "estimated"]
    options += ["--max-new-tokens", "24", "--batch", "4", "--tokens"]
    return ["specdec_jax", GENERATE, str(source), str(output), *options]


def _run(config: Faults, source: Path, output: Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", *_words(config, source, output)]
    return subprocess.run(words, capture_output=True, text=True, check=False)


def _check(done: subprocess.CompletedProcess[str], code: int) -> None:
    if done.returncode != code:
        raise ValueError(f"generate-file ended with {done.returncode} instead of {code}: {done.stderr[-400:]}")


def _command(name: str, config: Faults, folder: Path, source: Path) -> Command:
    """What can be killed; it writes below the folder."""
    if name == GENERATE:
        return Command(_words(config, source, folder / "killed.jsonl"), folder / "killed.jsonl")
    out = folder / name
    if name == "record":
        words = ["experiments.record", "--prompts", "configs/prompts/demo.jsonl:2", "--max-new-tokens", "32"]
        return Command(
            [*words, "--batch", "1", "--out", str(out)], out, ("trace-0.npz", "trace-0.7.npz", "trace-1.npz")
        )
    words = ["experiments.distill", "configs/distill_smollm2.py", "--smoke", "--distributed", "--out", str(out)]
    return Command(words, out, ("drafter/model.safetensors",), processes=2)


def _killed(config: Faults, command: Command) -> dict[str, Any]:
    """SIGKILL at random moments, of one process of several; it begins anew when it ended before they all have come."""
    _to_its_end(command)
    whole = _found(command)
    _remove(command)
    begun = time.monotonic()
    _to_its_end(command)  # nothing is compiled this time
    seconds, rng, different = time.monotonic() - begun, random.Random(config.seed), int(_found(command) != whole)
    _remove(command)
    lost, ends, kills, unclear, kept = 0, 0, 0, 0, b""
    while kills < config.kills:
        killed, clear = _killed_at(command, rng, rng.uniform(0.1, 1.1) * seconds)
        now = _found(command)
        kills, unclear = kills + killed, unclear + (not clear)
        lost, different = lost + (not now.startswith(kept)), different + (not whole.startswith(now))
        kept = now
        if now == whole or not killed:
            different, ends, kept = different + (now != whole and whole.startswith(now)), ends + 1, b""
            _remove(command)
    _to_its_end(command)
    same = _found(command) == whole
    return {"times": kills, "lost": lost, "different": different + (not same), "unclear": unclear, "ends": ends + 1}


def _found(command: Command) -> bytes:
    """What it has written by now: whole lines, whole files."""
    if command.files:
        paths = [command.output / name for name in command.files]
        return b"".join(path.read_bytes() for path in paths if path.exists())
    written = command.output.read_bytes() if command.output.exists() else b""
    return written[: written.rfind(b"\n") + 1]


def _remove(command: Command) -> None:
    if command.files:
        shutil.rmtree(command.output, ignore_errors=True)
    else:
        command.output.unlink(missing_ok=True)


def _start(command: Command, said: Any) -> list[subprocess.Popen[bytes]]:
    """Its processes, which find each other where there are several."""
    words, environments = [sys.executable, "-m", *command.words], of_one_launch(command.processes)
    return [subprocess.Popen(words, env=own, stdout=subprocess.DEVNULL, stderr=said) for own in environments]


def _to_its_end(command: Command) -> None:
    with tempfile.TemporaryFile() as said:
        codes = [process.wait() for process in _start(command, said)]
        said.seek(0)
        if any(codes):
            told = said.read().decode(errors="replace")[-400:]
            raise ValueError(f"{command.words[0]} ended with {max(codes, key=abs)}: {told}")


def _killed_at(command: Command, rng: random.Random, seconds: float) -> tuple[bool, bool]:
    """(whether a process still ran after so long and was killed, whether all others ended in a minute and said why).

    Of processes that all had ended: whether they ended well.
    """
    with tempfile.TemporaryFile() as said:
        processes, until = _start(command, said), time.monotonic() + seconds
        while time.monotonic() < until and any(process.poll() is None for process in processes):
            time.sleep(0.01)
        running = [process for process in processes if process.poll() is None]
        if not running:
            return False, not any(process.returncode for process in processes)
        rng.choice(running).kill()
        ended = [_ended(process) for process in running]
        said.seek(0)
        told = said.read()
        lost = any(process.returncode not in (0, -signal.SIGKILL) for process in running)
        return True, all(ended) and (not lost or any(words in told for words in LOST))


def _ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether it ends by itself within a minute; then it is made to."""
    try:
        process.wait(MINUTE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return False
    return True


def _full_disk(config: Faults, folder: Path, source: Path, whole: Path) -> dict[str, Any] | None:
    """A disk that fills up; then the run goes on where there is room."""
    if config.full_disk is None:
        return None
    output = config.full_disk / "out.jsonl"
    done = _run(config, source, output)
    kept = output.read_bytes()
    clear = done.returncode == 2 and done.stderr.count("error: ") == 1 and "No space left" in done.stderr
    moved = folder / "moved.jsonl"
    for name in ("", ".settings.json"):
        shutil.copyfile(f"{output}{name}", f"{moved}{name}")
    _check(_run(config, source, moved), 0)
    halves = not kept.endswith(b"\n") if kept else False
    same = moved.read_bytes() == whole.read_bytes()
    row = {"times": 1, "lost": int(not whole.read_bytes().startswith(kept)), "different": int(not same) + halves}
    return row | {"ends": 1, "unclear": int(not clear)}


def _nonsense(config: Faults, folder: Path, source: Path, whole: Path) -> dict[str, Any]:
    """1,000 lines that are no requests around those that are."""
    bad, good = [NONSENSE[i % len(NONSENSE)] for i in range(1000)], source.read_text(encoding="utf-8").splitlines()
    mixed, output = folder / "mixed.jsonl", folder / "mixed-out.jsonl"
    mixed.write_text("\n".join([*bad[:500], *good, *bad[500:]]), encoding="utf-8")
    done = _run(config, mixed, output)
    rows = [json.loads(line) for line in output.read_bytes().splitlines()]
    refused = [row for row in rows if "error" in row]
    numbers = [row["line"] for row in refused]
    named = numbers == [*range(1, 501), *range(501 + LINES, 1001 + LINES)] and all(row["error"] for row in refused)
    unclear = int(not named) + int(done.returncode != 1 or "Traceback" in done.stderr)
    return {"times": 1000, "lost": LINES + 1000 - len(rows), "different": 0, "ends": 1, "unclear": unclear}


def _cut(config: Faults, folder: Path, source: Path, whole: Path) -> dict[str, Any]:
    """An input that ends within a line: that line is refused by its number, the others are decoded."""
    cut, output = folder / "cut.jsonl", folder / "cut-out.jsonl"
    cut.write_bytes(source.read_bytes()[:-9])
    done = _run(config, cut, output)
    rows = output.read_bytes().splitlines()
    same = rows[:-1] == whole.read_bytes().splitlines()[:-1]
    last = json.loads(rows[-1])
    clear = done.returncode == 1 and last["line"] == LINES and "not JSON" in last["error"]
    return {"times": 1, "lost": LINES - len(rows), "different": int(not same), "ends": 1, "unclear": int(not clear)}


def _table(rows: list[dict[str, Any]]) -> str:
    heads = ["fault", "times", "lines lost", "outputs that differ", "errors without a clear line", "runs that ended"]
    names = ("fault", "times", "lost", "different", "unclear", "ends")
    return markdown(heads, [[str(row.get(name, 0)) for name in names] for row in rows]) + "\n"


main = command(Faults, faults, __doc__)

if __name__ == "__main__":
    sys.exit(main())
