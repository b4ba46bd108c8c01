"""Does the drafter's entropy predict acceptance, with which factor, and for which pairs of models?

Question:  Does 1 - sqrt(0.2 H) lie below the chance that a token is accepted, where does it not and by how much? Which
           factor fits, pair by pair, and is the cross-entropy 1.4 times the entropy, as gamma = 0.2 assumes? What does
           AdaEDL bring with 0.2, with the fitted factor, and with a lambda chosen for the pair?
Command:   python -m experiments.entropy TRACES... [--costs cost_model.json]
           traces of each pair by: python -m experiments.record --target ... --drafter ... --out runs/PAIR
Time:      half a minute a pair and temperature on 2 cores; --smoke needs no trace
Expected:  the built-in pair: greedy and at temperature 1 the bound lies well below the mean acceptance of every bin
           (fitted factors 0.08 and 0.10), at 0.7 it is the mean (0.19) and 40 % of the positions are below it; the
           cross-entropy is 1.7 to 1.8 times the entropy. docs/method.md has further pairs
Output:    runs/entropy-<time>/; results.jsonl has a line a pair, temperature, task and rule ("bound": the comparison)

The expected acceptance of a position is the overlap of the two distributions as sampled, sum of min(p, q); at
temperature 0 it is whether their first choices agree, a bit, and the entropy is the raw one: there a single position
can only be judged by its bin. Derivation (arXiv 2410.18351, appendix B): Pinsker bounds acceptance by the drafter's
cross-entropy against the target less its entropy (`Pinsker`); that the ratio of the two is a constant, 1 + 2 gamma, is
the stable-entropy assumption. Traces hold the cross-entropy against the target's raw distribution: both are compared
at temperature 1, the ratio at 0 too. All pairs are given the costs of one machine, so that what differs is
acceptance. The factor is fitted to the tokens it is then judged on, which favours it a little: it is one number.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console

from experiments.lib import plots
from experiments.lib import trace_runs as runs
from experiments.lib.commands import command
from experiments.lib.rules import THRESHOLDS, rule
from experiments.lib.smoke import made_up_trace
from experiments.lib.tables import NONE, Row, at_temperature, gain, interval, markdown, percent_more, speedup
from experiments.lib.trace_runs import ALL, Run, Source, TraceOptions, Variant, variant
from specdec_jax.metrics.intervals import Interval, ratio_of_totals
from specdec_jax.metrics.separation import entropy_factor_interval, fitted_entropy_factor
from specdec_jax.ranges import Between
from specdec_jax.replay.replay import Replay
from specdec_jax.replay.trace import FEATURES

BOUND = "bound"
FACTOR = 0.2  # the paper's gamma
PUBLISHED, FITTED, CHOSEN = "adaedl, 0.2", "adaedl, fitted", "adaedl, lambda chosen"
GAINS = ((FITTED, PUBLISHED), ("survival", FITTED), ("survival", CHOSEN))
LEAST = 0.01  # nats; a ratio to less entropy says nothing
PANELS, POINTS = 4, 60  # in the figure: panels side by side, points of a curve


@dataclass(frozen=True)
class Entropy(TraceOptions):
    """Compare AdaEDL's bound with the acceptance it bounds."""

    bins: Annotated[int, Between(2)] = 8  # Bins of entropy, with equally many tokens each.


class Positions(NamedTuple):
    """Positions of some texts, [P] each."""

    text: np.ndarray  # index of the text
    entropy: np.ndarray  # nats
    acceptance: np.ndarray  # expected
    accepted: np.ndarray  # bool, the drafter's token
    cross: np.ndarray  # nats


def study(options: Entropy, console: Console) -> None:
    """Measures what is missing and writes the run folder. Raises ValueError, FileNotFoundError for invalid input."""
    made_up = {"one pair": {1.0: made_up_trace(1.0)}, "another": {1.0: made_up_trace(1.0, boost=0.7)}}
    pair_of = lambda trace: f"{runs.drafter_of(trace)} for {trace.about.get('target', 'target')}"  # noqa: E731
    sources = runs.read_sources(options, made_up, group=pair_of)
    run = runs.open_traces("entropy", options, console, sources=sources)

    comparisons = runs.sweep(run, {BOUND: Variant(lambda *_: None)}, lambda *parts: measured(*parts[:2], options))
    rows = runs.sweep(run, variants())
    lines, bins = [], []
    for source, title in titled(run):  # the fits and their worth; and the share accepted in equally large bins
        here, comparison = runs.by_name(rows, source), runs.by_name(comparisons, source)[BOUND]
        shared = source.trace.about.get("probability_shared")
        about = [NONE if shared is None else f"{shared:.1%}", f"{comparison['whole']['accepted'][0]:.3f}"]
        speed = [interval(speedup(row)) for row in here.values()]
        more = [percent_more(gain(here[first], here[other])) for first, other in GAINS]
        lines.append([title, *about, interval(comparison["factor"], ".3f"), *speed, *more])
        bins.append([title, *(f"{bin_['entropy']:.2f}: {interval(bin_['accepted'])}" for bin_ in comparison["fine"])])
    words = [f"{first} over {other}".replace("adaedl, ", "") for first, other in GAINS]
    fine = ["pair", *(f"bin {at}" for at in range(1, max(map(len, bins))))]
    blocks = [runs.about(run), markdown(["pair", "shared", "accepted", "factor", *variants(), *words], lines)]
    blocks += ["Mean entropy in nats: the share accepted:", markdown(fine, bins)]
    head = ["task", "positions", "bound", "acceptance", "below", "by", "factor"]
    head += [f"CE/H ({1 + 2 * FACTOR:g} assumed)", "of positions: median", "quartiles", "10–90 %", "Pinsker"]
    for source, title in titled(run):
        lines = []  # by task: bound against acceptance, the factor that fits, and the stable-entropy assumption
        for task in source.tasks:
            row = runs.by_name(comparisons, source, task)[BOUND]
            whole, ratio, spread = row["whole"], row["ratio"], [NONE] * 5
            if ratio is not None:
                q = [f"{value:.2f}" for value in ratio["quantiles"]]
                spread = [interval(ratio["total"]), q[2], f"{q[1]}–{q[3]}", f"{q[0]}–{q[4]}", NONE]
                if source.temperature:
                    spread[-1] = "{:.2f} ({:.1%})".format(*ratio["pinsker"])
            cells = [str(row["positions"]), f"{whole['bound']:.2f}", interval(whole["acceptance"])]
            cells += [f"{whole['below']:.0%}", f"{whole['by']:.2f}", interval(row["factor"])]
            lines.append([task, *cells, *spread])
        blocks += [f"## {title}", markdown(head, lines)]
    runs.write(run, "Entropy and acceptance", blocks, NOTES, entropy=picture(run, comparisons))


NOTES = (
    "Shared: where vocabularies differ, the target's probability, along a sample text, of the tokens that both have. "
    "Accepted: of the drafter's tokens along the target's text. Speed-ups over plain decoding, total over total; the "
    "static length and the chosen lambda are those that were fastest on the other half of the prompts. Acceptance: "
    "expected, mean over positions with a 95 % bootstrap interval over texts. Below: share of positions whose expected "
    "acceptance is under the bound, and by how much it is there; greedy, where a position's acceptance is 0 or 1, "
    "every rejection where the bound is above 0 counts. Factor: nearest to what was accepted (by squares, the bound "
    "cut at 0). CE/H: cross-entropy over entropy, total over total; each position's has at least "
    f"{LEAST} nats of entropy; {NONE} where the trace does not know it. Pinsker: 1 - sqrt(KL / 2), KL the "
    "cross-entropy less the entropy; in brackets the positions whose acceptance is below it. Bold where an interval "
    "excludes 0."
)


def titled(run: Run) -> list[tuple[Source, str]]:
    """Every source with its title: models are written as they are named."""
    return [(source, f"{source.group}, {at_temperature(source.temperature)}") for source in run.sources]


def variants() -> dict[str, Variant]:
    """The rules, one of them with the factor that fits the pair."""
    adaedl = rule("adaedl")

    def fitted(source: Source, longest: int) -> Replay:
        seen = positions_of(source, source.tasks[ALL])
        factor = fitted_entropy_factor(seen.entropy, seen.accepted)
        return variant(adaedl, [{"entropy_factor": factor}]).replay(source, longest)

    published = variant(adaedl, [{"entropy_factor": FACTOR}])
    chosen = variant(adaedl, [{"threshold": value} for value in THRESHOLDS])
    others = {name: variant(rule(name)) for name in ("static", "survival")}
    return {PUBLISHED: published, FITTED: Variant(fitted), CHOSEN: chosen} | others


def positions_of(source: Source, texts: np.ndarray) -> Positions:
    """Every position that emitted a token."""
    trace = source.trace
    within = np.arange(trace.overlap.shape[1])[None, :] < trace.length[texts, None]
    owner = np.broadcast_to(np.arange(len(texts))[:, None], within.shape)[within]
    columns = trace.path[texts][..., FEATURES.index("entropy")], trace.overlap[texts], trace.cross_entropy[texts]
    entropy, overlap, cross = (column[within].astype(np.float64) for column in columns)
    accepted = trace.accepted[texts][within]
    return Positions(owner, np.maximum(entropy, 0.0), np.clip(overlap, 0.0, 1.0), accepted, cross)


def measured(source: Source, texts: np.ndarray, options: Entropy) -> Row:
    """A row: bins by entropy of equally many tokens, all positions, the fitted factor, ratio of entropies."""
    seen, warp = positions_of(source, texts), source.trace.about.get("warp") or {}
    whole = not warp.get("top_k") and warp.get("top_p", 1.0) >= 1.0 and not warp.get("min_p")
    ratio = None
    if source.temperature in (0.0, 1.0) and whole:  # at one temperature, nothing cut off
        top, bottom = (np.bincount(seen.text, values) for values in (seen.cross, seen.entropy))
        some = seen.entropy >= LEAST
        quantiles = np.quantile(seen.cross[some] / seen.entropy[some], (0.1, 0.25, 0.5, 0.75, 0.9)).tolist()
        ratio = {"total": list(ratio_of_totals(top[bottom > 0], bottom[bottom > 0])), "quantiles": quantiles}
        pinsker = np.maximum(1.0 - np.sqrt(np.maximum(seen.cross - seen.entropy, 0.0) / 2.0), 0.0)
        ratio["pinsker"] = [pinsker.mean(), (seen.acceptance < pinsker - 1e-3).mean()]  # rounding apart
    order = np.array_split(np.argsort(seen.entropy, kind="stable"), min(options.bins, len(seen.text)))
    return {
        "positions": len(seen.text),
        "fine": [described(Positions(*(column[indices] for column in seen))) for indices in order],
        "whole": described(seen),
        "factor": list(entropy_factor_interval(seen.entropy, seen.accepted, seen.text)),
        "ratio": ratio,  # cross-entropy over entropy: of the totals, its spread over positions; Pinsker's bound
    }


def described(seen: Positions) -> dict[str, Any]:
    """Statistics of a bin: bound, acceptance, and how often and how far acceptance is below the bound."""
    texts, index = np.unique(seen.text, return_inverse=True)
    count = np.bincount(index, minlength=len(texts))
    means = {  # over positions, with an interval over texts
        name: list(ratio_of_totals(np.bincount(index, getattr(seen, name), len(texts)), count))
        for name in ("acceptance", "accepted")
    }
    bound = np.maximum(1.0 - np.sqrt(FACTOR * seen.entropy), 0.0)
    below = seen.acceptance < bound - 1e-6
    by = float((bound - seen.acceptance)[below].mean()) if below.any() else 0.0
    return {"entropy": seen.entropy.mean(), "bound": bound.mean(), **means, "below": below.mean(), "by": by}


def picture(run: Run, comparisons: Sequence[Row]) -> Figure:
    """Acceptance by entropy, and AdaEDL's bound with both factors."""
    names = ("accepted", f"1 - sqrt({FACTOR:g} H)", "1 - sqrt(factor H), fitted")
    looks = zip(names, plots.COLOURS[1:4], ({"marker": "o"}, {"ls": "--"}, {"ls": ":"}), strict=True)
    styles = {name: {"color": colour} | look for name, colour, look in looks}
    lines = {}
    for source, title in titled(run):
        comparison = runs.by_name(comparisons, source)[BOUND]
        entropy = [bin_["entropy"] for bin_ in comparison["fine"]]
        smooth = entropy[-1] * np.linspace(0.0, 1.0, POINTS) ** 2  # closest together where the bounds bend
        bounds = [np.maximum(0.0, 1 - np.sqrt(gamma * smooth)) for gamma in (FACTOR, comparison["factor"][0])]
        taken = entropy, [Interval(*bin_["accepted"]) for bin_ in comparison["fine"]]
        columns = taken, *((smooth.tolist(), bound.tolist()) for bound in bounds)
        lines[title.replace(", ", "\n")] = dict(zip(names, columns, strict=True))
    axes = "the drafter's entropy, nats", "accepted"
    return plots.lines_figure(lines, axes, styles, columns=min(PANELS, len(lines)))


main = command(Entropy, study, __doc__)

if __name__ == "__main__":
    raise SystemExit(main())
