"""Entropy against acceptance on pairs of another architecture: a first look at models like GPT-2, trained here.

Question:  Is acceptance tied to the drafter's entropy as `1 - sqrt(gamma H)` says where the family is not llama's?
Command:   python -m experiments.gpt2_pairs [TRACES...] [--steps 600]
Time:      four minutes on 2 idle cores, most of it training; seconds with --smoke
Expected:  acceptance falls with entropy in every pair, above 1 - sqrt(0.2 H) in nearly all bins; the factor that fits
           is 0.05 to 0.11; entropy ranks acceptance less well (-0.14 to -0.41) than in the built-in pair (under -0.5)
Output:    runs/gpt2_pairs-<time>/ with manifest.json, the models, trace-<pair>-<temperature>.npz, results.jsonl (a
           line a pair and temperature), table.md and entropy.png; models and traces that are there stay

A target of 3 layers and drafters of 1 and 2 are trained on Python's standard library with a vocabulary of 1,024 pieces.
The target writes on from beginnings it was not trained on, at each temperature, and along its texts the distributions
of both are recorded (analysis.tracing). Traces given by path, of experiments.record, are read the same way and stand in
the same table. Acceptance of a position is the overlap of the two distributions; greedy, whether the drafter names the
target's token. These models know little: what is compared is how acceptance hangs on entropy, not how much of it there
is.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import flax.serialization
import jax
import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from scipy import stats
from tyro.conf import Positional

from experiments.lib import studies
from experiments.lib.distill_write import bar
from experiments.lib.run_folder import RunFolder
from experiments.lib.tiny_gpt2 import Size, bpe, corpus, language_model, train
from experiments.lib.traced import load_traces
from specdec_jax.compilation_cache import enable
from specdec_jax.decoding import build_decoder
from specdec_jax.decoding.rounds import ModelParams
from specdec_jax.decoding.sampling import make_warp
from specdec_jax.drafters.no_drafter import no_drafter
from specdec_jax.replay.trace import FEATURES, Trace, load_trace, save_trace
from specdec_jax.replay.tracing import trace_texts
from specdec_jax.stopping import static
from specdec_jax.types import Params
from specdec_jax.verification import rejection

KEYS = ("pair", "temperature")
EDGES = (0.0, 0.1, 0.3, 0.6, 1.0, 1.5, 2.0, 3.0, 4.0, np.inf)  # nats
FACTOR = 0.2  # the paper's entropy factor
TARGET_NAME, TARGET = "gpt2-target", Size(3, 128)
DRAFTERS = {"gpt2-1": Size(1, 48), "gpt2-2": Size(2, 96)}
CONTEXT, PROMPT, ANSWER = 128, 32, 64
HELD_OUT = 0.05


@dataclass(frozen=True)
class GPT2Pairs:
    """Train small pairs and measure acceptance by entropy."""

    traces: Positional[tuple[str, ...]] = ()
    """Traces of other pairs, to compare with."""
    steps: int = 600
    """Training steps of each drafter; the target takes twice as many, or it would hardly know more."""
    characters: int = 3_000_000
    """Of the texts to learn from."""
    vocab_size: int = 1024
    """Pieces of the vocabulary, 256 bytes among them."""
    texts: int = 48
    """Texts the target writes at each temperature."""
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    """0 is greedy."""
    seed: int = 0
    """Of training, prompts and sampling."""
    smoke: bool = False
    """A few steps and texts."""
    out: str | None = None
    """Run folder; none: runs/gpt2_pairs-<time>."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the study; 2 on bad input."""
    return studies.run(GPT2Pairs, study, __doc__, arguments)


def study(config: GPT2Pairs, console: Console) -> None:
    """Trains, writes, traces and measures what is missing."""
    steps, texts, size = config.steps, config.texts, config.characters
    if config.smoke:
        steps, texts, size = 8, 6, 60_000
    if min(steps, texts) < 1 or config.vocab_size < 300 or size < 20_000 or min(config.temperatures) < 0:
        raise ValueError(
            f"steps and texts must be positive, vocab_size 300 or more, characters 20,000 or more and temperatures 0 "
            f"or more, got {config.steps}, {config.texts}, {config.vocab_size}, {config.characters}, "
            f"{config.temperatures}"
        )
    others = load_traces(config.traces) if config.traces else {}
    folder = RunFolder.create("gpt2_pairs", config, config.out)
    enable()
    pairs = list(DRAFTERS)[: 1 if config.smoke else None]
    wanted = [(pair, temperature) for pair in pairs for temperature in config.temperatures]
    if studies.missing(folder, KEYS, wanted):
        for (pair, temperature), trace in _pairs(config, folder, pairs, steps, texts, size, console).items():
            if studies.missing(folder, KEYS, [(pair, temperature)]):
                folder.append({"pair": pair, "temperature": temperature} | by_entropy(trace))
    for temperature, trace in others.items():
        name = str(trace.about.get("drafter", "given"))
        if studies.missing(folder, KEYS, [(name, temperature)]):
            folder.append({"pair": name, "temperature": temperature} | by_entropy(trace))
    rows = folder.rows()
    with folder.replacing("entropy.png") as path:
        picture(rows).savefig(path)
    studies.publish(folder, report(rows), console)


def _pairs(
    config: GPT2Pairs, folder: RunFolder, pairs: Sequence[str], steps: int, texts: int, size: int, console: Console
) -> dict[tuple[str, float], Trace]:
    """The traces of all pairs and temperatures."""
    with console.status("Reading the texts"):
        text = corpus(size)
        backend = bpe(text, config.vocab_size)
        tokens = np.array(backend.encode(text).ids, np.int32)
    vocab, cut = backend.get_vocab_size(), int(len(tokens) * (1 - HELD_OUT))
    sizes = {TARGET_NAME: TARGET} | {pair: DRAFTERS[pair] for pair in pairs}
    models = {name: language_model(shape, vocab, CONTEXT) for name, shape in sizes.items()}
    params = {
        name: _trained(config, folder, name, shape, vocab, tokens[:cut], steps * (1 + (name == TARGET_NAME)), console)
        for name, shape in sizes.items()
    }
    rng = np.random.default_rng(config.seed)
    starts = rng.integers(cut, len(tokens) - PROMPT, texts)
    prompts = [tokens[start : start + PROMPT].tolist() for start in starts]
    found = {}
    for temperature in config.temperatures:
        paths = {pair: folder.path / f"trace-{pair}-{temperature:g}.npz" for pair in pairs}
        with console.status(f"Writing and tracing, {studies.at_temperature(temperature)}"):
            answers = (
                None
                if all(path.exists() for path in paths.values())
                else _answers(models, params, prompts, temperature)
            )
            for pair, path in paths.items():
                if answers is not None and not path.exists():
                    trace = trace_texts(
                        (models[TARGET_NAME], models[pair]),
                        (params[TARGET_NAME], params[pair]),
                        list(zip(prompts, answers, strict=True)),
                        limit=ANSWER,
                        warp={"temperature": temperature},
                        seed=config.seed,
                        max_draft_length=2,
                        about={"target": TARGET_NAME, "drafter": pair},
                    )
                    save_trace(path, trace)
                found[pair, temperature] = load_trace(path)
    return found


def _trained(
    config: GPT2Pairs,
    folder: RunFolder,
    name: str,
    size: Size,
    vocab: int,
    tokens: np.ndarray,
    steps: int,
    console: Console,
) -> Params:
    """The parameters of a model, read if it was trained before."""
    path = folder.path / f"{name}.msgpack"
    if not path.exists():
        with bar(console, f"Training {name}", steps, 0, unit="steps") as update:
            params, loss = train(size, vocab, CONTEXT, tokens, steps, seed=config.seed, progress=update)
        console.print(f"{name}: {size.layers} layers of width {size.width}, loss {loss:.3f} nats a token")
        with folder.replacing(path.name) as temporary:
            temporary.write_bytes(flax.serialization.to_bytes(jax.device_get(params)))
    return flax.serialization.msgpack_restore(path.read_bytes())


def _answers(models: Any, params: Any, prompts: Sequence[Sequence[int]], temperature: float) -> list[list[int]]:
    """What the target writes, decoded plainly."""
    decoder = build_decoder(models[TARGET_NAME], no_drafter(), static(), rejection(), verification_widths=(1,))
    weights = ModelParams(params[TARGET_NAME])
    warp = make_warp(len(prompts), temperature)
    state = decoder.prefill(weights, prompts, max_new_tokens=ANSWER, seed=1, warp=warp, stop_ids=())
    tokens = np.asarray(decoder.run(weights, state).tokens)
    return tokens[:, PROMPT : PROMPT + ANSWER].tolist()


def by_entropy(trace: Trace) -> dict[str, Any]:
    """Acceptance by bins of the drafter's entropy, the factor that fits, and how often the bound is kept."""
    within = np.arange(trace.overlap.shape[1])[None, :] < trace.length[:, None]
    greedy = np.broadcast_to(trace.temperature[:, None] <= 0, within.shape)
    taken = np.where(greedy, trace.accepted, trace.overlap)[within].astype(float)
    entropy = trace.path[..., FEATURES.index("entropy")][within].astype(float)
    most = trace.path[..., FEATURES.index("max_prob")][within].astype(float)
    bins = np.digitize(entropy, EDGES[1:-1])
    count = np.bincount(bins, minlength=len(EDGES) - 1)
    mean = np.bincount(bins, taken, len(EDGES) - 1) / np.maximum(count, 1)
    middle = np.bincount(bins, entropy, len(EDGES) - 1) / np.maximum(count, 1)
    return {
        "positions": len(taken),
        "mean_acceptance": float(taken.mean()),
        "mean_entropy": float(entropy.mean()),
        "count": count,
        "acceptance": [float(value) if n else None for value, n in zip(mean, count, strict=True)],
        "entropy": [float(value) if n else None for value, n in zip(middle, count, strict=True)],
        "bound_kept": float(np.mean(taken >= 1 - np.sqrt(FACTOR * entropy))),
        "fitted_factor": fitted_factor(entropy, taken),
        "rank_correlation": rank_correlation(entropy, taken),
        "rank_correlation_max_prob": rank_correlation(most, taken),
    }


def rank_correlation(one: np.ndarray, other: np.ndarray) -> float:
    """Spearman's."""
    return float(np.corrcoef(stats.rankdata(one), stats.rankdata(other))[0, 1])


def fitted_factor(entropy: np.ndarray, taken: np.ndarray) -> float:
    """The gamma with which `1 - sqrt(gamma H)` is nearest to the acceptances, in least squares.

    Linear in sqrt(gamma): 1 - a = sqrt(gamma) sqrt(H). Not cut at 0, where the rule's bound is not either.
    """
    root = np.sqrt(entropy)
    return float((np.sum(root * (1 - taken)) / max(np.sum(root * root), 1e-12)) ** 2)


def report(rows: Sequence[dict[str, Any]]) -> str:
    """Figures of each pair and temperature, then acceptance by entropy."""
    lines = []
    for row in rows:
        figures = [str(row["positions"]), f"{row['mean_acceptance']:.3f}", f"{row['mean_entropy']:.2f}"]
        figures += [f"{row['bound_kept']:.0%}", f"{row['fitted_factor']:.3f}", f"{row['rank_correlation']:.2f}"]
        lines.append([row["pair"], f"{row['temperature']:g}", *figures, f"{row['rank_correlation_max_prob']:.2f}"])
    head = ["pair", "temp.", "n", "accept.", "entropy", "kept", "gamma", "rank H", "rank max"]
    parts = [
        "# Entropy and acceptance",
        "n: positions. Accept.: mean overlap of the distributions, greedy: agreement. Entropy: the drafter's, nats. "
        "Kept: positions with at least 1 - sqrt(0.2 H). Gamma: the factor that fits in least squares. Rank: rank "
        "correlation of acceptance with the entropy, and with the largest probability.",
        studies.table(head, lines),
    ]
    for temperature in dict.fromkeys(row["temperature"] for row in rows):
        parts += [
            f"## Acceptance by entropy (positions), {studies.at_temperature(temperature)}",
            _bins(rows, temperature),
        ]
    return "\n\n".join(parts) + "\n"


def _bins(rows: Sequence[dict[str, Any]], temperature: float) -> str:
    """Bins down, pairs across, the published bound beside them."""
    mine = [row for row in rows if row["temperature"] == temperature]
    lines = []
    for index, (low, high) in enumerate(zip(EDGES[:-1], EDGES[1:], strict=True)):
        span = f"{low:g} to {high:g}" if np.isfinite(high) else f"over {low:g}"
        ends = [f"{max(0.0, 1 - float(np.sqrt(FACTOR * end))):.2f}" for end in (low, high)]
        found = [(row["acceptance"][index], row["count"][index]) for row in mine]
        texts = ["–" if value is None else f"{value:.2f} ({count})" for value, count in found]
        lines.append([span, " to ".join(ends), *texts])
    return studies.table(["entropy", "1 - sqrt(0.2 H)", *(row["pair"] for row in mine)], lines)


def picture(rows: Sequence[dict[str, Any]]) -> Figure:
    """Acceptance against entropy, a panel a temperature, a line a pair, over the published bound."""
    temperatures = list(dict.fromkeys(row["temperature"] for row in rows))
    pairs = list(dict.fromkeys(row["pair"] for row in rows))
    figure = Figure(figsize=(max(3.6 * len(temperatures), 5.0), 3.9), dpi=150, layout="constrained")
    panels = figure.subplots(1, len(temperatures), sharex=True, sharey=True, squeeze=False)[0]
    grid = np.linspace(0, 6, 200)
    colours = studies.colours(pairs)
    for axes, temperature in zip(panels, temperatures, strict=True):
        axes.plot(grid, 1 - np.sqrt(FACTOR * grid), color="#222222", ls="--", lw=1, label="1 - sqrt(0.2 H)")
        for row in (row for row in rows if row["temperature"] == temperature):
            points = [(x, y, n) for x, y, n in zip(row["entropy"], row["acceptance"], row["count"], strict=True) if n]
            x, y, n = (np.array(column) for column in zip(*points, strict=True))
            colour = colours[row["pair"]]
            axes.plot(x, y, color=colour, lw=1.5, label=row["pair"])
            axes.scatter(x, y, s=4 + 120 * n / n.sum(), color=colour, zorder=3)
        studies.plain_axes(axes, studies.at_temperature(temperature))
        axes.set(xlabel="drafter's entropy, nats", ylim=(0, 1.02), xlim=(0, 6))
    panels[0].set_ylabel("acceptance")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return figure


if __name__ == "__main__":
    sys.exit(main())
