"""Does the entropy criterion hold across architectures and tokenizers?

Question:  How does acceptance fall with the drafter's entropy, pair by pair; which factor gamma fits 1 - sqrt(gamma H)
           best; what does AdaEDL bring with the published 0.2, with that one, and with 0.2 and a lambda chosen for the
           pair, beside a fixed length and survival?
Command:   python -m experiments.cross_family TRACES... [--costs cost_model.json]
           traces of each pair by: python -m experiments.record --target ... --drafter ... --out runs/PAIR
Time:      half a minute a pair and temperature on 2 cores; --smoke needs no trace
Expected:  docs/cross_family.md has five pairs
Output:    runs/cross_family-<time>/ with manifest.json, results.jsonl (a line a pair, temperature, task and rule),
           table.md and entropy.png; a stopped run goes on where it was with the same --out

Pairs are told apart by target and drafter; all are given the costs of one machine, so that what differs is acceptance.
Bins have equally many tokens; 95 % intervals over texts. The factor is fitted to the tokens it is then judged on, which
favours it a little: it is one number.
"""

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console

from experiments.lib import trace_runs as runs
from experiments.lib import trace_tables as tables
from experiments.lib.cells import at_temperature, interval, markdown
from experiments.lib.commands import command
from experiments.lib.options import check_least
from experiments.lib.plots import COLOURS
from experiments.lib.rules import THRESHOLDS, rule
from experiments.lib.smoke import made_up_trace
from experiments.lib.terminal import publish
from experiments.lib.trace_runs import ALL, Row, Run, Source, TraceOptions, Variant, variant
from experiments.lib.traced import trace_files
from specdec_jax.metrics.intervals import Interval, ratio_of_totals
from specdec_jax.metrics.separation import entropy_factor_interval, fitted_entropy_factor
from specdec_jax.replay.replay import Replay
from specdec_jax.replay.trace import FEATURES, Trace, load_trace

PUBLISHED, FITTED, CHOSEN = "adaedl, 0.2", "adaedl, fitted", "adaedl, lambda chosen"
ENTROPY = FEATURES.index("entropy")
PANELS, POINTS = 4, 60  # of the picture: panels side by side, points of a curve


@dataclass(frozen=True)
class CrossFamily(TraceOptions):
    """Compare pairs of models."""

    bins: int = 8
    """Of entropy."""


Curve = list[tuple[float, Interval]]  # mean entropy of a bin, share of its tokens that was accepted


def study(options: CrossFamily, console: Console) -> None:
    """Replays what is missing and writes the run folder. Raises ValueError, FileNotFoundError: bad input."""
    check_least(options, 2, "bins")
    run = runs.open_run("cross_family", options, console, sources=sources_of(options))
    rows = runs.compare(run, variants())
    curves = {title: binned(source.trace, options.bins) for source, title in titled(run)}
    publish(run.folder, report(run, rows, curves), console, entropy=picture(run, curves))


def sources_of(options: CrossFamily) -> list[Source]:
    """The traces, each pair of models a group."""
    options.check()
    costs = options.machine()
    if options.smoke:
        made_up = {"one pair": made_up_trace(1.0), "another": made_up_trace(1.0, boost=0.7)}
        return [runs.source_of(name, 1.0, trace, costs) for name, trace in made_up.items()]
    found: dict[tuple[str, str, float], Trace] = {}
    for file in trace_files(options.traces):
        trace = load_trace(file)
        drafter, target = (str(trace.about.get(role, role)) for role in ("drafter", "target"))
        key = drafter, target, round(float(trace.temperature.max()), 6)
        if key in found:
            raise ValueError(f"{file}: there is another trace of {drafter} for {target} at temperature {key[2]:g}")
        found[key] = trace
    called = short_names({name for *names, _ in found for name in names})
    pairs = {key: f"{called[key[0]]} for {called[key[1]]}" for key in sorted(found)}
    return [runs.source_of(pair, key[2], found[key], costs) for key, pair in pairs.items()]


def short_names(names: Iterable[str]) -> dict[str, str]:
    """Of models, as tables call them: the last part of a path but for the `drafter` that distillation writes.

    Names that would be told apart no more stay whole.
    """
    short = {name: [part for part in Path(name).parts if part != "drafter"][-1:] for name in names}
    often = Counter(map(tuple, short.values()))
    return {name: part[0] if part and often[tuple(part)] == 1 else name for name, part in short.items()}


def titled(run: Run) -> list[tuple[Source, str]]:
    """Every source with its title: models are written as they are named."""
    return [(source, f"{source.group}, {at_temperature(source.temperature)}") for source in run.sources]


def variants() -> dict[str, Variant]:
    """The rules, of which one is told the factor that fits the pair."""
    adaedl = rule("adaedl")

    def fitted(source: Source, longest: int) -> Replay:
        return variant(adaedl, [{"entropy_factor": factor_of(source.trace)}]).replay(source, longest)

    published = variant(adaedl, [{"entropy_factor": 0.2}])
    chosen = variant(adaedl, [{"threshold": value} for value in (0.0, *THRESHOLDS)])
    return {PUBLISHED: published, FITTED: Variant(fitted), CHOSEN: chosen} | {
        name: variant(rule(name)) for name in ("static", "survival")
    }


def tokens_of(trace: Trace) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of every token of the texts: the drafter's entropy, whether it was accepted, and of which text it is."""
    here = np.arange(trace.accepted.shape[1])[None, :] < trace.length[:, None]
    texts = np.broadcast_to(np.arange(trace.num_texts)[:, None], here.shape)
    return trace.path[..., ENTROPY][here], trace.accepted[here], texts[here]


def factor_of(trace: Trace) -> float:
    """The factor that fits."""
    entropy, accepted, _ = tokens_of(trace)
    return fitted_entropy_factor(entropy, accepted)


def shared_of(trace: Trace) -> str:
    """What the tokens that both have hold of the target's probability, where `experiments.record` told it."""
    shared = trace.about.get("probability_shared")
    return "–" if shared is None else f"{shared:.1%}"


def binned(trace: Trace, bins: int) -> Curve:
    """(mean entropy, share accepted) of bins of equally many tokens, ascending."""
    entropy, accepted, texts = tokens_of(trace)
    parts = np.array_split(np.argsort(entropy, kind="stable"), min(bins, len(entropy)))
    counts = [(np.bincount(texts[part], accepted[part]), np.bincount(texts[part])) for part in parts]
    shares = [ratio_of_totals(*(column[total > 0] for column in (hits, total))) for hits, total in counts]
    return [(float(entropy[part].mean()), share) for part, share in zip(parts, shares, strict=True)]


def report(run: Run, rows: Sequence[Row], curves: dict[str, Curve]) -> str:
    """What fits, what it is worth, and acceptance by entropy."""
    gains = ((FITTED, PUBLISHED), ("survival", FITTED), ("survival", CHOSEN))
    words = (f"{one} over {other}".replace("adaedl, ", "") for one, other in gains)
    heads = ["pair", "shared", "accepted", "factor", *variants(), *words]
    lines, shares = [], []
    for source, title in titled(run):
        found = {name: runs.find(runs.of_source(rows, source, ALL), what=name) for name in variants()}
        accepted = tokens_of(source.trace)[1].mean()
        speed = [interval(runs.speedup(row)) for row in found.values()]
        more = [tables.percent_more(runs.gain(found[one], found[other])) for one, other in gains]
        factor = interval(entropy_factor_interval(*tokens_of(source.trace)), ".3f")
        lines.append([title, shared_of(source.trace), f"{accepted:.3f}", factor, *speed, *more])
        shares.append([title, *(f"{value:.2f}: {interval(share)}" for value, share in curves[title])])
    bins = max(len(line) for line in shares) - 1
    by_entropy = markdown(["pair", *(f"bin {i + 1}" for i in range(bins))], shares)
    notes = (
        "Shared: where vocabularies differ, the target's probability, along a sample text, of the tokens that both "
        "have. Accepted: of the drafter's tokens along the target's text. Speed-ups over plain decoding, total over "
        "total; the static length and the chosen lambda are those that were fastest on the other half of the prompts. "
        "Bold where an interval excludes 0."
    )
    parts = ["# The entropy criterion, pair by pair", tables.about(run), notes, markdown(heads, lines)]
    return "\n\n".join([*parts, "Mean entropy in nats, and the share accepted:", by_entropy, ""])


def picture(run: Run, curves: dict[str, Curve]) -> Figure:
    """Acceptance by entropy, and AdaEDL's bound with both factors."""
    styles = {
        "accepted": {"color": COLOURS[1], "marker": "o"},
        "1 - sqrt(0.2 H)": {"color": COLOURS[2], "ls": "--"},
        "1 - sqrt(factor H), fitted": {"color": COLOURS[3], "ls": ":"},
    }
    lines = {}
    for source, title in titled(run):
        entropy, shares = zip(*curves[title], strict=True)
        smooth = entropy[-1] * np.linspace(0.0, 1.0, POINTS) ** 2  # closest together where the bounds bend
        bounds = [np.maximum(0.0, 1 - np.sqrt(gamma * smooth)) for gamma in (0.2, factor_of(source.trace))]
        columns = (entropy, shares), *((smooth.tolist(), bound.tolist()) for bound in bounds)
        lines[title.replace(", ", "\n")] = dict(zip(styles, columns, strict=True))
    return tables.lines_figure(
        lines, ("the drafter's entropy, nats", "accepted"), styles, columns=min(PANELS, len(lines))
    )


main = command(CrossFamily, study, __doc__)

if __name__ == "__main__":
    sys.exit(main())
