"""Is AdaEDL's bound a bound? Expected acceptance against `1 - sqrt(gamma * H)`, position by position.

Question:  Does 1 - sqrt(0.2 H) lie below the chance that a token is accepted, where does it not and by how much, which
           factor fits, and is the cross-entropy 1.4 times the entropy, as gamma = 0.2 assumes?
Command:   python -m experiments.bound TRACES... [--entropy-factor 0.2]
Time:      seconds; --smoke needs no trace
Expected:  the built-in pair: greedy and at temperature 1 the bound lies well below the mean acceptance of every bin
           (fitted factors 0.07 and 0.10), at 0.7 it is the mean (0.20) and 41 % of the positions are below it; the
           cross-entropy is 1.7 to 1.9 times the entropy
Output:    runs/bound-<time>/ with manifest.json, results.jsonl (a line a trace and task), table.md and bound.png

The expected acceptance of a position is the overlap of the two distributions as sampled, sum of min(p, q); at
temperature 0 it is whether their first choices agree, a bit, and the entropy is the raw one: there a single position
can only be judged by its bin. Derivation (arXiv 2410.18351, appendix B): Pinsker bounds acceptance by the drafter's
cross-entropy against the target less its entropy; that the ratio of the two is a constant, 1 + 2 gamma, is the
stable-entropy assumption. Traces hold the cross-entropy against the target's raw distribution, so that it is compared
at temperatures 0 (raw distributions) and 1.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console

from experiments.lib import trace_runs as runs
from experiments.lib import trace_tables as tables
from experiments.lib.cells import NONE, interval, markdown
from experiments.lib.commands import command
from experiments.lib.plots import COLOURS, INK, legend_below, panels
from experiments.lib.terminal import publish
from experiments.lib.trace_runs import ALL, Row, Run, Source, TraceFiles
from experiments.lib.trace_tables import share
from specdec_jax.metrics.intervals import Interval, ratio_of_totals
from specdec_jax.replay.trace import FEATURES

WHAT = "bound"
EDGES = (0.0, 0.05, 0.25, 0.5, 1.0, 2.0, 4.0, float("inf"))  # nats
FINE = 14  # bins of equal size in the picture
LEAST = 0.01  # nats; a ratio to less entropy says nothing
RATIOS = np.geomspace(0.5, 16.0, 41)
COVERED = 0.9


@dataclass(frozen=True)
class Bound(TraceFiles):
    """Compare AdaEDL's bound with the acceptance it bounds."""

    entropy_factor: float = 0.2
    """The paper's gamma."""

    def check(self) -> None:
        """Raises ValueError where options make no sense."""
        super().check()
        if not 0 < self.entropy_factor < float("inf"):
            raise ValueError(f"entropy_factor must be above 0, got {self.entropy_factor}")


class Positions(NamedTuple):
    """Positions of some texts, [P] each."""

    text: np.ndarray  # whose
    entropy: np.ndarray  # nats
    acceptance: np.ndarray  # expected
    cross: np.ndarray  # nats


def study(options: Bound, console: Console) -> None:
    """Measures what is missing and writes the run folder."""
    run = runs.open_run("bound", options, console)

    def measure(source: Source, what: str) -> Mapping[str, Row]:
        del what
        return {
            task: measured(positions_of(source, texts), options.entropy_factor, cross_is_known(source))
            for task, texts in source.tasks.items()
        }

    rows = runs.fill(run, (WHAT,), measure)
    publish(run.folder, report(run, rows), run.console, bound=picture(run, rows))


def positions_of(source: Source, texts: np.ndarray) -> Positions:
    """Every position that emitted a token."""
    trace = source.trace
    within = np.arange(trace.overlap.shape[1])[None, :] < trace.length[texts, None]
    owner = np.broadcast_to(np.arange(len(texts))[:, None], within.shape)[within]
    columns = trace.path[texts][..., FEATURES.index("entropy")], trace.overlap[texts], trace.cross_entropy[texts]
    entropy, overlap, cross = (column[within].astype(np.float64) for column in columns)
    return Positions(owner, np.maximum(entropy, 0.0), np.clip(overlap, 0.0, 1.0), cross)


def cross_is_known(source: Source) -> bool:
    """Whether entropy and cross-entropy are of distributions at the same temperature, nothing cut off."""
    warp = source.trace.about.get("warp") or {}
    whole = not warp.get("top_k") and warp.get("top_p", 1.0) >= 1.0 and not warp.get("min_p")
    return source.temperature in (0.0, 1.0) and whole


def measured(found: Positions, factor: float, known: bool) -> Row:
    """A row: the bins, all positions as one, the fits, and the ratio of the entropies."""
    bins = [
        part(found, (found.entropy >= low) & (found.entropy < high))
        for low, high in zip(EDGES, EDGES[1:], strict=False)
    ]
    quantiles = np.unique(np.quantile(found.entropy, np.linspace(0, 1, FINE + 1)))
    inside = np.clip(np.searchsorted(quantiles, found.entropy, side="right") - 1, 0, max(len(quantiles) - 2, 0))
    fine = [part(found, inside == index) for index in range(max(len(quantiles) - 1, 1))]
    describe = lambda some: described(some, len(found.text), factor, known)  # noqa: E731
    return {
        "positions": len(found.text),
        "bins": [describe(some) for some in bins],
        "fine": [describe(some) for some in fine],
        "whole": describe(found),
        "fits": fits(found),
        "ratio": ratios(found) if known else None,
    }


def part(found: Positions, chosen: np.ndarray) -> Positions:
    """Some of the positions."""
    return Positions(*(column[chosen] for column in found))


def described(found: Positions, of: int, factor: float, known: bool) -> dict[str, Any]:
    """What a bin holds: its share, the bound, the acceptance and how often and how far that is below it."""
    if not len(found.text):
        return {"share": 0.0}
    bound = np.maximum(1.0 - np.sqrt(factor * found.entropy), 0.0)
    below = found.acceptance < bound - 1e-6
    return {
        "share": len(found.text) / of,
        "entropy": found.entropy.mean(),
        "bound": bound.mean(),
        "acceptance": list(mean_over_texts(found, found.acceptance)),
        "below": below.mean(),
        "by": float((bound - found.acceptance)[below].mean()) if below.any() else 0.0,
        "cross_ratio": float(found.cross.sum() / found.entropy.sum()) if known and found.entropy.sum() > 0 else None,
    }


def mean_over_texts(found: Positions, values: np.ndarray) -> Interval:
    """The mean over positions, its interval over texts."""
    texts, index = np.unique(found.text, return_inverse=True)
    return ratio_of_totals(np.bincount(index, values, len(texts)), np.bincount(index, minlength=len(texts)))


def fits(found: Positions) -> dict[str, Any]:
    """Factors that fit: by moments, by least squares, and the one that covers most positions; intervals over texts."""
    root = np.sqrt(found.entropy)
    sums = {
        "moments": (1.0 - found.acceptance, root),
        "least_squares": ((1.0 - found.acceptance) * root, found.entropy),
    }
    fitted: dict[str, Any] = {}
    for name, (above, below) in sums.items():
        top, bottom = (np.bincount(found.text, values) for values in (above, below))
        slope = ratio_of_totals(top[bottom > 0], bottom[bottom > 0])
        fitted[name] = [value**2 for value in slope]
    some = found.entropy > 0
    needed = (1.0 - found.acceptance[some]) ** 2 / found.entropy[some]
    return fitted | {"covers": float(np.quantile(needed, COVERED))}


def ratios(found: Positions) -> dict[str, Any]:
    """Cross-entropy over entropy: of the totals, and its spread over positions with some entropy."""
    top, bottom = (np.bincount(found.text, values) for values in (found.cross, found.entropy))
    some = found.entropy >= LEAST
    each = found.cross[some] / found.entropy[some]
    counts = np.histogram(np.clip(each, RATIOS[0], RATIOS[-1]), RATIOS)[0]
    return {
        "total": list(ratio_of_totals(top[bottom > 0], bottom[bottom > 0])),
        "quantiles": np.quantile(each, (0.1, 0.25, 0.5, 0.75, 0.9)).tolist(),
        "histogram": (counts / max(counts.sum(), 1)).tolist(),
    }


def report(run: Run, rows: Sequence[Row]) -> str:
    """The bins of all texts, then a line a task, by temperature."""
    factor = run.options.entropy_factor
    about = f"{tables.about_traces(run)} The bound: 1 - sqrt({factor:g} H), 0 at the least."
    blocks = ["# Is the bound a bound?", about, NOTES]
    for source, title in tables.sections(run):
        here = {row["task"]: row for row in runs.of_source(rows, source)}
        blocks += [f"## {title}", bins_table(here[ALL]), coverage_table(here), fits_table(here, factor)]
    return "\n\n".join([*blocks, ""])


NOTES = (
    "Acceptance: expected, mean over positions with a 95 % bootstrap interval over texts. Below: share of positions "
    "whose expected acceptance is under the bound, and by how much it is there; greedy, where a position's acceptance "
    "is 0 or 1, every rejection where the bound is above 0 counts. Factors: at which mean bound and mean acceptance "
    "agree (moments), least squares of 1 - acceptance on sqrt(H), and the one whose bound "
    f"{COVERED:.0%} of the positions keep to. CE/H: cross-entropy over entropy, total over total; each position's has "
    "at least 0.01 nats of entropy; – where the trace does not know it."
)


def bins_table(row: Row) -> str:
    """Acceptance and bound by entropy."""
    names = [
        f"{low:g}–{high:g}" if high < np.inf else f"{low:g} and more"
        for low, high in zip(EDGES, EDGES[1:], strict=False)
    ]
    head = ["entropy, nats", "positions", "bound", "acceptance", "below", "by", "CE/H"]
    lines = []
    for name, bin_ in [*zip(names, row["bins"], strict=True), ("all", row["whole"])]:
        if bin_["share"] == 0:
            continue
        ratio = bin_["cross_ratio"]
        values = [
            f"{bin_['bound']:.2f}",
            interval(bin_["acceptance"]),
            share(bin_["below"]),
            f"{bin_['by']:.2f}",
        ]
        lines.append([name, f"{bin_['share']:.1%}", *values, NONE if ratio is None else f"{ratio:.2f}"])
    return markdown(head, lines)


def coverage_table(rows: Mapping[str, Row]) -> str:
    """By task: bound against acceptance over all positions."""
    head = ["task", "positions", "bound", "acceptance", "below", "by"]
    lines = []
    for task, row in rows.items():
        whole = row["whole"]
        values = [f"{whole['bound']:.2f}", interval(whole["acceptance"]), share(whole["below"])]
        lines.append([task, str(row["positions"]), *values, f"{whole['by']:.2f}"])
    return markdown(head, lines)


def fits_table(rows: Mapping[str, Row], factor: float) -> str:
    """By task: factors that fit, and the stable-entropy assumption."""
    head = [
        "task",
        "moments",
        "least squares",
        f"covers {COVERED:.0%}",
        f"CE/H ({tables.number(1 + 2 * factor)} assumed)",
    ]
    head += ["of positions: median", "quartiles", "10–90 %"]
    lines = []
    for task, row in rows.items():
        fitted, ratio = row["fits"], row["ratio"]
        factors = [interval(fitted[name]) for name in ("moments", "least_squares")]
        spread = [NONE] * 4
        if ratio is not None:
            q = [f"{value:.2f}" for value in ratio["quantiles"]]
            spread = [interval(ratio["total"]), q[2], f"{q[1]}–{q[3]}", f"{q[0]}–{q[4]}"]
        lines.append([task, *factors, f"{fitted['covers']:.2f}", *spread])
    return markdown(head, lines)


def picture(run: Run, rows: Sequence[Row]) -> Figure:
    """Acceptance against entropy with the bound, and below it how stable the ratio of the entropies is."""
    figure, grid = panels([title for _, title in tables.sections(run)], 3.4, rows=2)
    for column, source in enumerate(run.sources):
        here = {row["task"]: row for row in runs.of_source(rows, source)}
        acceptance_panel(grid[0][column], here, run.options.entropy_factor)
        ratio_panel(grid[1][column], here[ALL]["ratio"], 1 + 2 * run.options.entropy_factor)
    grid[0][0].set_ylabel("expected acceptance")
    grid[1][0].set_ylabel("share of positions")
    legend_below(figure, grid[0][0], 5)
    return figure


def acceptance_panel(axes: Axes, rows: Mapping[str, Row], factor: float) -> None:
    """Bins of equal size of all texts, tasks as thin lines, the bound at the paper's factor and at the fitted one."""
    for index, (task, row) in enumerate((task, row) for task, row in rows.items() if task != ALL):
        some = [bin_ for bin_ in row["bins"] if bin_["share"] > 0.005]
        points = [bin_["entropy"] for bin_ in some], [bin_["acceptance"][0] for bin_ in some]
        axes.plot(*points, color=COLOURS[1 + index % 6], lw=1, alpha=0.8, label=task)
    fine = rows[ALL]["fine"]
    x, y = (np.array([bin_[name] for bin_ in fine]) for name in ("entropy", "acceptance"))
    bars = np.stack([y[:, 0] - y[:, 1], y[:, 2] - y[:, 0]])
    axes.errorbar(x, y[:, 0], yerr=np.nan_to_num(bars), fmt="o", ms=4, color=INK, lw=1, label="all texts", zorder=4)
    top = min(max(x.max() * 1.05, 1.0), 8.0)
    curve = np.linspace(0.0, top, 300)
    fitted = rows[ALL]["fits"]["moments"][0]
    for value, style, name in ((factor, "-", f"bound, factor {factor:g}"), (fitted, "--", "bound, factor fitted")):
        axes.plot(curve, np.maximum(1 - np.sqrt(value * curve), 0), color="#D55E00", ls=style, lw=2, label=name)
    axes.set(xlim=(-0.02 * top, top), ylim=(0, 1.03), xlabel="drafter's entropy, nats")


def ratio_panel(axes: Axes, ratio: Mapping[str, Any] | None, assumed: float) -> None:
    """How cross-entropy over entropy is spread over positions."""
    if ratio is None:
        axes.set_axis_off()
        axes.text(0.5, 0.5, "the trace does not hold\nthis cross-entropy", ha="center", transform=axes.transAxes)
        return
    axes.stairs(ratio["histogram"], RATIOS, fill=True, color="#bbbbbb")
    axes.axvline(assumed, color="#D55E00", lw=2)
    top = max(ratio["histogram"])
    axes.text(assumed * 1.05, 1.12 * top, f"{assumed:g} assumed", color="#D55E00", va="center", fontsize=9)
    axes.set_ylim(0, 1.2 * top)
    axes.set_xscale("log", base=2)
    axes.set_xticks([0.5, 1, 2, 4, 8, 16], ["0.5", "1", "2", "4", "8", "16+"])
    axes.set_xlabel("cross-entropy over entropy")


main = command(Bound, study, __doc__)

if __name__ == "__main__":
    sys.exit(main())
