"""Two checkouts of the project side by side: is one of them faster at the same decoding?

    git worktree add ../before COMMIT
    python tools/versus.py ../before . [--seconds 240]

Each checkout has a process that is idle while the other one decodes. A turn is a few rounds from the same state, and
the two times of a turn are compared, so that what else the machine does falls on both. SmolLM2-135M with the built-in
reading drafter: plain decoding, seven drafts in a pass of eight tokens, and `survival` with fixed costs, greedy and at
0.8. Prints the median ratio of the times, new over old, with a 95 % bootstrap interval.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

PROMPT = "Why is the sky blue? Explain it to a child in a few sentences, and then to a student of physics."
NAMES = ("plain", "V(8)", "survival", "survival 0.8")


def work() -> None:
    """Answers each line of the standard input, one of NAMES, with the seconds that it took."""
    import jax

    from specdec_jax.compilation_cache import enable
    from specdec_jax.stopping import static, survival
    from specdec_jax.text.generation import SamplingParams, build_pair, prepare, start

    enable()
    target = build_pair("smollm2", None).target
    drafter, costs = "smollm2-drafter-reading@8192", str(Path(__file__).parent.parent / "configs/costs/cpu.json")
    eight = build_pair(target, drafter, policy=static(draft_length=7), verification_widths=(8,), max_draft_length=7)
    adaptive = build_pair(
        target, drafter, policy=survival(), verification_widths=(2, 4, 8), max_draft_length=7, costs=costs
    )
    cases = {"plain": (build_pair(target, None), 0.0, 6), "V(8)": (eight, 0.0, 4)}
    cases |= {"survival": (adaptive, 0.0, 6), "survival 0.8": (adaptive, 0.8, 6)}
    states = {}
    for name, (pair, temperature, _) in cases.items():
        sampling = SamplingParams(max_new_tokens=200, temperature=temperature, stop_ids=(), seed=1)
        states[name] = jax.block_until_ready(start(pair, prepare(pair, [PROMPT], sampling)).state)

    def seconds(name: str) -> float:
        pair, _, rounds = cases[name]
        state = jax.block_until_ready(jax.tree.map(lambda leaf: leaf.copy(), states[name]))
        watch = time.perf_counter()
        jax.block_until_ready(pair.decoder.run(pair.params, state, rounds=rounds))
        return time.perf_counter() - watch

    for name in NAMES:
        seconds(name)
    print("ready", flush=True)
    for line in sys.stdin:
        print(seconds(line.strip()), flush=True)


def main() -> None:
    """Starts both processes and lets them take turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs=2, type=Path, metavar="CHECKOUT", help="the old one, then the new one")
    parser.add_argument("--seconds", type=float, default=240.0, help="of measuring")
    options = parser.parse_args()
    both = []
    for checkout in options.checkouts:
        if not (checkout / "specdec_jax").is_dir():
            parser.error(f"{checkout} is no checkout of the project")
        folders = os.pathsep.join(filter(None, [str(checkout.resolve()), os.environ.get("PYTHONPATH")]))
        variables = {**os.environ, "PYTHONPATH": folders, "SPECDEC_JAX_COSTS": "estimated"}
        words = [sys.executable, str(Path(__file__).resolve()), "work"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        both.append(subprocess.Popen(words, cwd=checkout, env=variables, **pipes))
    for process in both:
        assert process.stdout.readline() == "ready\n", "it ended with the error above"

    def ask(process: subprocess.Popen, name: str) -> float:
        process.stdin.write(f"{name}\n")
        process.stdin.flush()
        return float(process.stdout.readline())

    times, began, turn = {name: [] for name in NAMES}, time.perf_counter(), 0
    print("both are compiled", flush=True)
    while time.perf_counter() - began < options.seconds:
        for name in NAMES:
            order = (0, 1) if turn % 2 else (1, 0)
            spent = {at: ask(both[at], name) for at in order}
            times[name].append((spent[0], spent[1]))
        turn += 1
    for process in both:
        process.stdin.close()
    draws = np.random.default_rng(0)
    for name, pairs in times.items():
        old, new = np.transpose(pairs)
        ratios = new / old
        medians = [np.median(draws.choice(ratios, len(ratios))) for _ in range(2000)]
        low, high = np.quantile(medians, (0.025, 0.975))
        figures = f"{1e3 * np.median(old):.1f} ms before; new over old {np.median(ratios):.3f} [{low:.3f}, {high:.3f}]"
        print(f"{name:13s} {len(ratios)} turns, {figures}")


if __name__ == "__main__":
    work() if sys.argv[1:] == ["work"] else main()
