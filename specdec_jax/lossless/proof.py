"""One engine for policies, verifiers and drafters: it draws cases from a seed, tests properties, and says how much.

Each pass draws everything anew: rounds by enumeration (rounds.py), rows among other rows (batched.py), float32 at the
sizes of real vocabularies (real_size.py), a drafter's declared distribution (law.py) and the whole decoder (whole.py).
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np

from specdec_jax.lossless import enumeration, law, real_size, rounds, whole
from specdec_jax.lossless.drawing import Drawing, Shape, constants_of
from specdec_jax.lossless.law import prove_law
from specdec_jax.lossless.real_size import VOCABULARIES, prove_real_size
from specdec_jax.lossless.results import Counterexample, Coverage, Result, shortest
from specdec_jax.lossless.rounds import prove_rounds
from specdec_jax.lossless.sampled import FALSE_ALARM
from specdec_jax.lossless.whole import prove_whole
from specdec_jax.types import Drafter, Monitor, StoppingPolicy, Verifier

LOSSLESS, NOT_LOSSLESS, NOT_SHOWN = "lossless", "not lossless", "not shown"
LONGEST = 8  # longest draft of an enumeration
SHAPES = 5  # compiled sizes per pass, one of each length
DRAFTER_VOCABULARY = 8  # of the whole decoder's toy with a user's drafter


class Row(NamedTuple):
    """One property, over all passes."""

    name: str
    drawn: str  # what was drawn, such as "1,204 rounds, 30,112 drafts"
    rounds: int  # number of rounds
    measure: float  # the worst; NaN: a property that holds or does not
    bound: float  # lossless code has a smaller measure, or a larger one if it is a p-value
    passed: bool
    wrong: str = ""  # a sentence


class Proof(NamedTuple):
    """All properties, what was drawn, and what was not."""

    rows: tuple[Row, ...]
    coverage: Coverage  # of the policy's decisions, and of the numbers of accepted drafts
    counterexample: Counterexample | None
    gaps: tuple[str, ...]  # clauses about what never occurred
    seed: int
    passes: int
    seconds: float
    constants: tuple[float, ...]  # of the tested functions, which were drawn too

    @property
    def conclusion(self) -> str:
        """LOSSLESS, NOT_LOSSLESS, or NOT_SHOWN if no property failed but something never occurred."""
        if not all(row.passed for row in self.rows):
            return NOT_LOSSLESS
        return NOT_SHOWN if self.gaps else LOSSLESS


class _Sums:
    """What is added up over passes, by property."""

    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}
        self.counts: dict[str, dict[str, int]] = {}
        self.examples: list[Counterexample | None] = []
        self.decisions = Coverage.of(LONGEST)

    def add(self, name: str, result: Result, bound: float) -> bool:
        """Adds a result, whose bound FALSE_ALARM is that of a p-value; another one of a measure. Whether it passes."""
        total = self.counts.setdefault(name, {})
        for unit, count in result.counts.items():
            total[unit] = total.get(unit, 0) + count
        self.examples.append(result.counterexample)
        worst = min if bound == FALSE_ALARM else np.maximum
        before = self.rows.get(name, Row(name, "", 0, result.measure, bound, True))
        passed = result.measure >= bound if bound == FALSE_ALARM else not result.measure >= bound
        drawn = ", ".join(f"{count:,} {unit}" for unit, count in total.items())
        passed, wrong = bool(passed and not result.wrong and before.passed), before.wrong or result.wrong
        measure = float(worst(before.measure, result.measure))
        self.rows[name] = Row(name, drawn, total.get("rounds", 0), measure, bound, passed, wrong)
        return passed

    def add_rounds(
        self, policy: StoppingPolicy | None, verifier: Verifier, monitor: Monitor | None, drawing: Drawing, shape: Shape
    ) -> bool:
        """Enumerated rounds of one shape, with the policy or with drafts that end at random. Whether they pass."""
        if policy is None and shape.longest == 0:
            return True  # without drafts they are the same rounds
        num_rounds = rounds.MANY if policy is not None and shape.longest == 1 else rounds.ROUNDS
        result, compared, coverage = prove_rounds(policy, verifier, drawing, shape, monitor=monitor, rounds=num_rounds)
        for total, counted in zip(self.decisions, coverage, strict=True):
            if policy is not None or counted is coverage.accepted:
                total[: len(counted)] += counted
        name = "rounds of the policy" if policy is not None else "rounds of drafts of random length"
        return self.add(name, result, rounds.TOLERANCE) and self.add("rows among other rows", compared, np.nan)


def prove(
    policy: StoppingPolicy,
    verifier: Verifier,
    *,
    seed: int,
    monitor: Monitor | None = None,
    drafter: Callable[[int, int], Drafter] | None = None,
    max_draft_length: int = LONGEST,
    minutes: float = 0.0,
    shapes: int = SHAPES,
    progress: Callable[[str], Any] = lambda text: None,
) -> Proof:
    """Draws and tests; ends at the first property that fails, or after a pass when `minutes` are over.

    Args:
        drafter: (max_draft_length, vocab_size) -> a drafter without parameters, which is tested too.
        max_draft_length: longest draft of the enumerated rounds.
        shapes: sizes that are compiled per pass.

    Raises:
        ValueError: a length outside 1 to LONGEST.
    """
    if not 1 <= max_draft_length <= LONGEST:
        raise ValueError(f"drafts of 1 to {LONGEST} tokens can be enumerated, got max_draft_length {max_draft_length}")
    watched = monitor or enumeration.monitor_for(policy, verifier)
    small = None if drafter is None else drafter(3, 7)
    constants = constants_of(policy, verifier, watched), constants_of(None, None, enumeration.PHASES, small)
    sums, began, passes, failed = _Sums(), time.perf_counter(), 0, False
    siblings = 0.0  # by depth, the sum of the probabilities that a sibling is accepted
    while not failed and (passes == 0 or time.perf_counter() - began < 60 * minutes):
        drawn = int(np.random.SeedSequence([seed, passes]).generate_state(1)[0])
        drawing, apart = (Drawing(drawn, numbers) for numbers in constants)
        with ThreadPoolExecutor(1) as thread:  # half of the time is compilation, on one core
            swept = None if drafter is None else thread.submit(_drafter, drafter, apart)
            for shape, _ in zip(drawing.shapes(max_draft_length), range(shapes), strict=False):
                progress(f"Enumerating rounds of up to {shape.longest} drafts")
                for rule in (policy, None):
                    failed = failed or not sums.add_rounds(rule, verifier, monitor, drawing, shape)
                if failed or (swept is not None and swept.done() and swept.result()[-1][1].wrong):
                    break
            if swept is not None:
                progress("Sweeping the drafter's uniforms")
                failed = not all([sums.add(*result) for result in swept.result()]) or failed
        if not failed:
            for vocab in VOCABULARIES:
                progress(f"Summing outcomes in float32 of {vocab:,} tokens")
                result = prove_real_size(verifier, drawing, vocab, monitor=monitor)
                failed = failed or not sums.add(f"float32, {vocab:,} tokens", result, real_size.ROUNDING)
        trees = policy.tree_hooks or verifier.tree_hooks
        if trees is not None and not failed:
            progress("Enumerating rounds with siblings")
            result, accepted = trees.prove_siblings(policy, verifier, drawing, monitor)
            siblings = siblings + accepted
            failed = not sums.add("rounds with siblings", result, rounds.TOLERANCE)
        user, seldom = None if drafter is None else drafter(5, DRAFTER_VOCABULARY), True
        for rule, drafts in ((policy, ""), (law.at_random(), ", drafts of random length")):
            if not failed and (rule is policy or (seldom and verifier.tree_hooks is None)):
                progress(f"Decoding long texts on a toy{drafts}")
                more: dict[str, Any] = {"monitor": monitor, "drafter": user, "several": passes > 0}
                result = prove_whole(rule, verifier, drawing, batches=2 if drafts else whole.BATCHES, **more)
                failed = not sums.add(f"the whole decoder{drafts}", result, FALSE_ALARM)
                seldom = result.counts["drafts"] < result.counts["rounds"] / 2
        passes += 1
    gaps: list[str] = [] if failed else _gaps(sums.decisions)
    if not failed and trees is not None and not np.all(siblings):
        gaps.append(f"no sibling of draft {1 + int(np.argmin(siblings))} was accepted")
    if small is not None and not failed and not sums.counts["the drafter's distribution"]["drafted"]:
        gaps.append("this drafter drafted nothing")
    rows, seconds = tuple(sums.rows.values()), time.perf_counter() - began
    numbers = tuple(sorted({*constants[0], *constants[1]}))
    return Proof(rows, sums.decisions, shortest(sums.examples), tuple(gaps), seed, passes, seconds, numbers)


def _drafter(drafter: Callable[[int, int], Drafter], drawing: Drawing) -> list[tuple[str, Result, float]]:
    """The drafter's declared distribution on small vocabularies and a real one, to the first failure: for `_Sums`."""
    rng, results = drawing.rng, []
    cases = [(rng.choice([4, 6, 9, 13]), 16, rng.integers(3, 9), 4), (rng.choice(VOCABULARIES), 4, 3, 6)]
    cases += [(rng.choice([3, 5, 8]), rng.integers(2, 9), rng.integers(1, 9), 4)]
    for vocab, batch, longest, num_rounds in (map(int, case) for case in cases):
        options, exactly = {"vocab_size": vocab, "batch": batch, "rounds": num_rounds}, vocab not in VOCABULARIES
        with jax.default_matmul_precision("highest"):  # a thread has its own
            result = prove_law(drafter(longest, vocab), None, drawing, exactly=exactly, **options)
        name = "the drafter's distribution" if exactly else f"the drafter with {vocab:,} tokens"
        results.append((name, result, law.TOLERANCE))
        if result.wrong:
            break
    return results


def _gaps(decisions: Coverage) -> list[str]:
    """Clauses about decisions of the policy and outcomes of the verifier that never occurred."""
    drafts = lambda numbers: ("drafts " if len(numbers) > 1 else "draft ") + ", ".join(map(str, numbers))  # noqa: E731
    if not np.any(decisions.lengths[1:]):
        return ["the rule never drafted"]
    never = np.flatnonzero((decisions.asked > 0) & (decisions.declined == 0)).tolist()  # that the policy stopped
    late = [index + 1 for index in never if index >= decisions.shown]
    gaps = [f"the rule never said no to {drafts(late)}"] if late else []
    drafted, accepted = (int(np.flatnonzero(counts)[-1]) for counts in (decisions.lengths, decisions.accepted))
    return gaps + ([f"more than {accepted} of {drafted} drafts were never accepted"] if accepted < drafted else [])
