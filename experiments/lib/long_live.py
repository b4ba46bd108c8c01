"""Lambda over long texts from several starts, replayed from a trace or decoded in windows (`experiments.adaedl`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from matplotlib.figure import Figure

from experiments.lib.cells import NONE, at_temperature, markdown
from experiments.lib.options import Served
from experiments.lib.plots import INK, panels
from experiments.lib.rules import Rule
from experiments.lib.smoke import tiny_pair
from experiments.lib.summary import ratio
from specdec_jax.compilation_cache import enable
from specdec_jax.costs.cost_model import CostModel
from specdec_jax.decoding.sampling import make_warp
from specdec_jax.decoding.state import slots_for
from specdec_jax.loading import refuse_encoders
from specdec_jax.replay.long import LongRun, at_positions, forgotten, join_rounds, long_replay
from specdec_jax.replay.trace import Trace
from specdec_jax.text.generation import encode
from specdec_jax.text.pair import measured_pair
from specdec_jax.types import DecodeState, StoppingPolicy

KEYS = ("temperature", "rule", "start")
COURSE = 50  # points of a stored course
ROUNDS = ("drafted", "accepted", "passes", "entropy", "threshold")
FIGURES = ("threshold", "deviation", "acceptance", "entropy", "undrafted")
NOTE = (
    "Forgotten: from then on all lambdas stay within that of each other at every position of the text. Late: the "
    "second half of the tokens, all starts; lambda with its standard deviation over rounds; acceptance: accepted over "
    "drafted tokens; entropy: of the distributions that were looked at, nats; no draft: rounds without any."
)


@dataclass(frozen=True)
class Live(Served):
    """A pair of models and what they go on about."""

    temperature: float = 0.7
    """Greedy decoding of a small target ends in a loop, and nothing is learnt from that."""
    prompt: str = "Write a long story about a lighthouse keeper."
    """What the text begins with."""
    window: int = 1024
    """Most tokens of context; when it is full, the last half begins the next window."""


def live_run(
    options: Live,
    policy: StoppingPolicy,
    hyperparameters: Mapping[str, Any],
    tokens: int,
    most: int,
    seed: int,
    smoke: bool,
) -> LongRun:
    """Decodes `tokens` tokens with every start of `hyperparameters["threshold"]` in a batch, ends of sequence ignored.

    Raises:
        ValueError: a window that the context or the prompt does not allow, or a model with an encoder.
    """
    if not smoke:
        refuse_encoders("long", options.target, options.drafter)
    enable()
    models = tiny_pair() if smoke else (options.target, options.drafter)
    pair = measured_pair(*models, policy=policy, max_draft_length=most, dtype=options.dtype)
    window = min(options.window, 256) if smoke else options.window
    rows, prompt = len(hyperparameters["threshold"]), encode(pair.target, options.prompt)
    if window > pair.target.model.spec.context or window < 2 * len(prompt):
        context = pair.target.model.spec.context
        raise ValueError(f"a window must hold twice the prompt's {len(prompt)} tokens and at most {context}: {window}")
    texts, carried, parts, emitted = [prompt] * rows, None, [], 0
    slots = slots_for(window, 0, max(pair.decoder.parts.widths))
    while emitted < tokens:
        new = min(window - len(texts[0]), tokens - emitted)
        state = pair.decoder.prefill(
            pair.params,
            texts,
            max_new_tokens=new,
            seed=(seed + len(parts) * rows + np.arange(rows)) % 2**32,
            warp=make_warp(rows, options.temperature),
            policy=pair.policy,
            policy_hyperparameters=dict(hyperparameters),
            stop_ids=(),
            slots=slots,
            record_rounds=window,
        )
        state = pair.decoder.run(pair.params, state if carried is None else state._replace(policy=carried))
        parts.append(_rounds(state, emitted))
        carried = jax.device_get(state.policy)  # the state itself is given away with the next call
        known = np.asarray(state.tokens)[:, : len(texts[0]) + new]
        texts = [line[-(window // 2) :].tolist() for line in known]
        emitted += new
    return join_rounds(parts, emitted)


def _rounds(state: DecodeState, before: int) -> LongRun:
    """The recorded rounds of a window."""
    record = state.record
    assert record is not None
    drafted, accepted, emitted, passes = (
        np.asarray(leaf, np.int64) for leaf in (record.drafted, record.accepted, record.emitted, record.drafter_passes)
    )
    index = np.arange(drafted.shape[1])[None, :]
    played = index < np.asarray(state.statistics.num_rounds)[:, None]
    at = np.cumsum(np.where(played, emitted, 0), axis=1) - np.where(played, emitted, 0)
    looked = np.arange(record.entropy.shape[2])[None, None, :] < passes[:, :, None]
    total = np.where(looked, np.asarray(record.entropy, np.float64), 0.0).sum(axis=2)
    entropy = np.where(passes > 0, total / np.maximum(passes, 1), np.nan)
    position = np.where(played, before + at, -1)
    return LongRun(position, drafted, accepted, passes, entropy, np.asarray(record.threshold), 0)


def played(config: Any, entry: Rule, costs: CostModel, trace: Trace | None, tokens: int) -> LongRun:
    """All starts of a rule over one trace, or live where there is none."""
    longest = config.max_draft_length
    chosen = entry.hyperparameters([dict(entry.policy.given)], costs, longest)
    hyperparameters = {name: float(value[0]) for name, value in chosen.items()} | {"threshold": np.array(config.starts)}
    if trace is None:
        return live_run(config.decoder, entry.policy, hyperparameters, tokens, longest, config.seed, config.smoke)
    order = text_order(trace, tokens, config.seed)
    return long_replay(trace, entry.policy, hyperparameters, order, max_draft_length=longest)


def text_order(trace: Trace, tokens: int, seed: int) -> list[int]:
    """Texts that hold at least that many tokens: all in random order, again and again."""
    rng, rounds = np.random.default_rng(seed), -(-tokens // int(trace.length.sum()))
    order = np.concatenate([rng.permutation(trace.num_texts) for _ in range(rounds)])
    return order[: np.searchsorted(np.cumsum(trace.length[order]), tokens) + 1].tolist()


def figures(run: LongRun, row: int, within: float) -> dict[str, Any]:
    """A start's rounds, when it was forgotten, means over its second half, and its course."""
    return _late(run, row, forgotten(run, within)) | _course(run, row)


def _late(run: LongRun, row: int, end: int | None) -> dict[str, Any]:
    """A start's rounds, when it was forgotten, and means over its second half."""
    count = int(run.rounds[row])
    position = run.position[row, :count]
    late = np.flatnonzero(position >= run.tokens / 2)
    drafted, accepted, passes, entropy, threshold = (getattr(run, name)[row, late] for name in ROUNDS)
    return {
        "tokens": run.tokens,
        "rounds": count,
        "forgotten_tokens": end,
        "forgotten_rounds": None if end is None else int((position < end).sum()),
        "late_threshold": float(np.mean(threshold)),
        "late_deviation": float(np.std(threshold)),
        "late_acceptance": float(accepted.sum() / max(drafted.sum(), 1)),
        "late_entropy": float(np.nansum(entropy * passes) / max(passes.sum(), 1)),
        "late_undrafted": float(np.mean(drafted == 0)),
    }


def _course(run: LongRun, row: int) -> dict[str, Any]:
    """How a start goes on, in COURSE spans of the tokens."""
    count, edges = int(run.rounds[row]), np.linspace(0, run.tokens, COURSE + 1).astype(int)
    drafted, accepted, passes, entropy, _ = (getattr(run, name)[row, :count] for name in ROUNDS)
    bins = np.clip(np.searchsorted(edges, run.position[row, :count], side="right") - 1, 0, COURSE - 1)
    drafts, hits, looks, total = (
        np.bincount(bins, values, COURSE) for values in (drafted, accepted, passes, np.nan_to_num(entropy) * passes)
    )
    return {
        "course_tokens": edges[1:],
        "course_threshold": at_positions(run, run.threshold, edges[1:] - 1)[row],
        "course_acceptance": list(map(ratio, hits, drafts)),
        "course_entropy": list(map(ratio, total, looks)),
    }


def report(rows: Sequence[dict[str, Any]]) -> list[str]:
    """When starts are forgotten, and where each ends: two tables."""
    head = ["rule", "temp.", "forgotten after tokens", "rounds", "late lambda", "acceptance", "entropy", "no draft"]
    starts, lines, ends = list(dict.fromkeys(row["start"] for row in rows)), [], []
    for (name, temperature), mine in _by_rule(rows).items():
        end, rounds = mine[0]["forgotten_tokens"], [row["forgotten_rounds"] for row in mine]
        when = ["never", NONE] if end is None else [str(end), f"{min(rounds)} to {max(rounds)}"]
        late = {figure: np.mean([row[f"late_{figure}"] for row in mine]) for figure in FIGURES}
        threshold = f"{late['threshold']:.3f} ±{late['deviation']:.3f}"
        shares = [f"{late['acceptance']:.0%}", f"{late['entropy']:.2f}", f"{late['undrafted']:.0%}"]
        lines.append([name, f"{temperature:g}", *when, threshold, *shares])
        last = {row["start"]: row["course_threshold"][-1] for row in mine}
        ends.append([name, f"{temperature:g}", *(f"{last[start]:.3f}" for start in starts)])
    by_start = markdown(["rule", "temp.", *(f"from {start:g}" for start in starts)], ends)
    return [markdown(head, lines), "Lambda at the end, by start:", by_start]


def _by_rule(rows: Sequence[dict[str, Any]]) -> dict[tuple[str, float], list[dict[str, Any]]]:
    """The rows, one a start, of each rule and temperature."""
    found: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["rule"], row["temperature"]), []).append(row)
    return found


def picture(rows: Sequence[dict[str, Any]]) -> Figure:
    """Lambda, acceptance and entropy over the tokens: a column a temperature and rule, a line a start."""
    columns = _by_rule(rows)
    titles = [f"{name}, {at_temperature(temperature)}" for name, temperature in columns]
    figure, grid = panels(titles, 2.1, rows=3, width=3.2, least=5.3, sharex=True, sharey="row")
    names = {"threshold": "lambda", "acceptance": "accepted / drafted", "entropy": "entropy looked at, nats"}
    for column, mine in enumerate(columns.values()):
        for at, row in enumerate(mine):
            colour = (0.15 + 0.7 * at / max(len(mine) - 1, 1), 0.35, 0.75 - 0.6 * at / max(len(mine) - 1, 1))
            for axes, name in zip(grid[:, column], names, strict=True):
                course = np.array(row[f"course_{name}"], float)
                thin = {"lw": 1.5} if name == "threshold" else {"lw": 0.6, "alpha": 0.7}
                axes.plot(row["course_tokens"], course, color=colour, label=f"{row['start']:g}", **thin)
        if mine[0]["forgotten_tokens"] is not None:
            grid[0, column].axvline(mine[0]["forgotten_tokens"], color=INK, lw=0.8, ls=":")
        grid[-1, column].set_xlabel("tokens")
    tops = (1.02, 1.02, grid[2, 0].get_ylim()[1])  # rows share their axes: known only when all is drawn
    for axes, label, top in zip(grid[:, 0], names.values(), tops, strict=True):
        axes.set(ylabel=label, ylim=(0, top))
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, title="lambda at the start", loc="outside right upper", frameon=False)
    return figure
