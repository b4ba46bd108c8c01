"""What is lost when a process is killed, a disk is full, or a request is nonsense?

Question:  After SIGKILL at random moments, a disk without room and 1,000 malformed requests: is a line lost,
           half-written or different, and does any error lack its line?
Command:   python -m experiments.faults [--kills 20] [--killed generate-file record distill]
           [--full-disk FOLDER_ON_A_SMALL_DISK]
Time:      45 minutes on 2 busy cores, half of it distillation
Expected:  nothing lost, nothing half-written, the same bytes (docs/reliability.md)
Output:    runs/faults-<time>/ with manifest.json, results.jsonl (a line a fault) and table.md

Each fault is done to `generate-file` with the pair named, in float32 with estimated costs, so that every run must end
with the same bytes; kills also to `record` and to a small distillation as they are, whose traces and weights must be
the same bytes. `--full-disk` is a folder on a file system that is too small for the output: such as one that
`mount -t tmpfs -o size=16k tmpfs FOLDER` makes.
"""

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from experiments.lib.cells import markdown
from experiments.lib.commands import command
from experiments.lib.options import Models, Output, check_least
from experiments.lib.run_folder import RunFolder
from experiments.lib.terminal import publish

LINES = 40
NONSENSE = (
    *('{"prompt": ""}', '{"prompt": 3}', '{"prompt": "a", "temprature": 1}', '{"prompt": "a", "max_new_tokens": -1}'),
    *('{"prompt": "a", "temperature": 1e999}', '{"prompt": "\\ud800"}', "[]", "{", '{"prompt": "a", "seed": 1e30}'),
    '{"prompt": "a", "policy": {"threshold": 1}}',
)


class Command(NamedTuple):
    """A command that is killed, and the files that its folder ends with."""

    words: list[str]
    files: tuple[str, ...]


OTHERS = {
    "record": Command(
        ["experiments.record", "--prompts", "configs/prompts/demo.jsonl:2", "--max-new-tokens", "32", "--batch", "1"],
        ("trace-0.npz", "trace-0.7.npz", "trace-1.npz"),
    ),
    "distill": Command(
        ["experiments.distill", "configs/distill_smollm2.py", "--smoke"], ("drafter/model.safetensors",)
    ),
}


@dataclass(frozen=True)
class Faults(Output, Models):
    """Kill, fill and misuse generate-file."""

    drafter: str = "smollm2-drafter@8192"
    """As target."""
    kills: int = 20
    """Moments at which each process is killed."""
    killed: tuple[str, ...] = ("generate-file", "record", "distill")
    """Commands that are killed."""
    full_disk: Path | None = None
    """A folder on a small file system; none: not tried."""
    seed: int = 0
    """Of the moments."""


def faults(config: Faults, console: Console) -> None:
    """Tries all and writes the run folder. Raises ValueError: bad input, or a run that could not be made."""
    check_least(config, 1, "kills")
    unknown = set(config.killed) - {"generate-file", *OTHERS}
    if unknown:
        raise ValueError(f"nothing is known of kills of {min(unknown)!r}")
    folder = RunFolder.create("faults", config, config.out)
    source = folder.path / "in.jsonl"
    lines = [json.dumps({"prompt": f"Count to {i}.", "temperature": 0.7 * (i % 2)}) for i in range(LINES)]
    source.write_text("\n".join(lines), encoding="utf-8")
    whole = folder.path / "whole.jsonl"
    with console.status("A run that nothing happens to"):
        begun = time.monotonic()
        _check(_run(config, source, whole), 0)
        seconds = time.monotonic() - begun
    for name, tried in (("killed", _killed), ("full disk", _full_disk), ("nonsense", _nonsense), ("cut", _cut)):
        with console.status(name):
            row = tried(config, folder.path, source, whole, seconds)
        if row is not None:
            folder.append({"fault": name, **row})
    for name in config.killed:
        if name in OTHERS:
            with console.status(f"{name} killed"):
                folder.append({"fault": f"{name} killed", **_killed_folder(config, folder.path / name, OTHERS[name])})
    publish(folder, _table(folder.rows()), console)


def _words(config: Faults, source: Path, output: Path) -> list[str]:
    options = ["--target", config.target, "--drafter", config.drafter, "--dtype", "float32", "--costs", "estimated"]
    options += ["--max-new-tokens", "24", "--batch", "4", "--tokens"]
    return [sys.executable, "-m", "specdec_jax", "generate-file", str(source), str(output), *options]


def _run(config: Faults, source: Path, output: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(_words(config, source, output), capture_output=True, text=True, check=False)


def _check(done: subprocess.CompletedProcess[str], code: int) -> None:
    if done.returncode != code:
        raise ValueError(f"generate-file ended with {done.returncode} instead of {code}: {done.stderr[-400:]}")


def _killed(config: Faults, folder: Path, source: Path, whole: Path, seconds: float) -> dict[str, Any] | None:
    """SIGKILL at random moments, of a run that begins anew when it was complete before they all have come."""
    if "generate-file" not in config.killed:
        return None
    rng, output = random.Random(config.seed), folder / "killed.jsonl"
    lost, different, completed, kills, kept = 0, 0, 0, 0, b""
    while kills < config.kills:
        kills += _killed_at(_words(config, source, output), rng.uniform(0.1, 1.1) * seconds)
        now = output.read_bytes() if output.exists() else b""
        lost += not now.startswith(kept)
        different += not whole.read_bytes().startswith(now[: now.rfind(b"\n") + 1])
        kept = now[: now.rfind(b"\n") + 1]
        if kept == whole.read_bytes():
            completed, kept = completed + 1, b""
            output.unlink()
    _check(_run(config, source, output), 0)
    same = output.read_bytes() == whole.read_bytes()
    return {"times": config.kills, "lost": lost, "different": different + (not same), "ends": completed + 1}


def _killed_at(words: list[str], seconds: float) -> bool:
    """Whether the command still ran after so long, and was killed."""
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.wait()
        return True
    return False


def _killed_folder(config: Faults, folder: Path, victim: Command) -> dict[str, Any]:
    """SIGKILL at random moments of a command whose folder holds the files it must end with."""
    words = [sys.executable, "-m", *victim.words, "--out"]

    def found(output: Path) -> list[bytes]:
        return [(output / name).read_bytes() for name in victim.files if (output / name).exists()]

    def ends(output: Path) -> list[bytes]:
        done = subprocess.run([*words, str(output)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise ValueError(f"{victim.words[0]} ended with {done.returncode}: {done.stderr[-400:]}")
        return found(output)

    whole, begun = ends(folder / "whole"), time.monotonic()
    different = int(ends(folder / "again") != whole)  # and nothing is compiled this time
    seconds, rng, output = time.monotonic() - begun, random.Random(config.seed), folder / "killed"
    kills, completed = 0, 0
    while kills < config.kills:
        kills += _killed_at([*words, str(output)], rng.uniform(0.1, 1.1) * seconds)
        if len(found(output)) == len(victim.files):
            different, completed = different + (ends(output) != whole), completed + 1
            shutil.rmtree(output)
    different += ends(output) != whole
    return {"times": config.kills, "lost": "–", "different": different, "unclear": "–", "ends": completed + 1}


def _full_disk(config: Faults, folder: Path, source: Path, whole: Path, seconds: float) -> dict[str, Any] | None:
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


def _nonsense(config: Faults, folder: Path, source: Path, whole: Path, seconds: float) -> dict[str, Any]:
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


def _cut(config: Faults, folder: Path, source: Path, whole: Path, seconds: float) -> dict[str, Any]:
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
