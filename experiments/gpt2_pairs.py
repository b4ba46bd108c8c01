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
from dataclasses import dataclass, replace
from typing import Any

import flax.serialization
import jax
import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from scipy import stats
from tyro.conf import Positional

from experiments.lib.cells import NONE, at_temperature, markdown
from experiments.lib.commands import command
from experiments.lib.distill_write import bar
from experiments.lib.options import Output, Smoke, check_least
from experiments.lib.plots import INK, legend_below, panels, rule_colours
from experiments.lib.run_folder import RunFolder
from experiments.lib.summary import ratio
from experiments.lib.terminal import publish
from experiments.lib.tiny_gpt2 import Size, bpe, corpus, language_model, train
from experiments.lib.traced import load_traces
from specdec_jax.compilation_cache import enable
from specdec_jax.loading import LoadedModel
from specdec_jax.loading.tokenizer import Tokenizer
from specdec_jax.metrics.judging import answers
from specdec_jax.replay.trace import FEATURES, Trace, load_trace, save_trace
from specdec_jax.replay.tracing import trace_texts
from specdec_jax.text.sampling_params import check_sampling

KEYS = ("pair", "temperature")
EDGES = (0.0, 0.1, 0.3, 0.6, 1.0, 1.5, 2.0, 3.0, 4.0, np.inf)  # nats
FACTOR = 0.2  # the paper's entropy factor
TARGET_NAME, DRAFTERS = "gpt2-target", ("gpt2-1", "gpt2-2")
SIZES = {TARGET_NAME: Size(3, 128), "gpt2-1": Size(1, 48), "gpt2-2": Size(2, 96)}
CONTEXT, PROMPT, ANSWER = 128, 32, 64
HELD_OUT = 0.05
FEW: dict[str, Any] = {"steps": 8, "texts": 6, "characters": 60_000}  # with --smoke


@dataclass(frozen=True)
class GPT2Pairs(Output, Smoke):
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


def study(config: GPT2Pairs, console: Console) -> None:
    """Trains, writes, traces and measures what is missing."""
    config = replace(config, **FEW) if config.smoke else config
    for least, *names in ((1, "steps", "texts"), (300, "vocab_size"), (20_000, "characters")):
        check_least(config, least, *names)
    check_sampling(config)
    others = load_traces(config.traces) if config.traces else {}
    traces = {(str(trace.about.get("drafter", "given")), temperature): trace for temperature, trace in others.items()}
    folder = RunFolder.create("gpt2_pairs", config, config.out)
    enable()
    pairs = DRAFTERS[: 1 if config.smoke else None]
    wanted = [(pair, temperature) for pair in pairs for temperature in config.temperatures]
    if folder.missing(KEYS, wanted):
        traces = _own_traces(config, folder, pairs, console) | traces
    for pair, temperature in folder.missing(KEYS, traces):
        figures = by_entropy(traces[pair, temperature])
        folder.append({"pair": pair, "temperature": temperature} | figures)
    rows = folder.rows()
    publish(folder, report(rows), console, entropy=picture(rows))


def _own_traces(
    config: GPT2Pairs, folder: RunFolder, pairs: Sequence[str], console: Console
) -> dict[tuple[str, float], Trace]:
    """The traces of all pairs and temperatures."""
    with console.status("Reading the texts"):
        text = corpus(config.characters)
        backend = bpe(text, config.vocab_size)
        tokens = np.array(backend.encode(text).ids, np.int32)
    cut, tokenizer = int(len(tokens) * (1 - HELD_OUT)), Tokenizer(backend, {})
    models = {name: _trained(config, folder, name, tokenizer, tokens[:cut], console) for name in (TARGET_NAME, *pairs)}
    starts = np.random.default_rng(config.seed).integers(cut, len(tokens) - PROMPT, config.texts)
    prompts = [tokens[start : start + PROMPT].tolist() for start in starts]
    found = {}
    for temperature in config.temperatures:
        paths = {pair: folder.path / f"trace-{pair}-{temperature:g}.npz" for pair in pairs}
        with console.status(f"Writing and tracing, {at_temperature(temperature)}"):
            if not all(path.exists() for path in paths.values()):
                texts = _texts(models[TARGET_NAME], prompts, temperature)
                for pair, path in paths.items():
                    save_trace(path, _trace(config, models[TARGET_NAME], models[pair], texts, temperature))
        found |= {(pair, temperature): load_trace(path) for pair, path in paths.items()}
    return found


def _trained(
    config: GPT2Pairs, folder: RunFolder, name: str, tokenizer: Tokenizer, tokens: np.ndarray, console: Console
) -> LoadedModel:
    """A model, its parameters read if it was trained before."""
    path, size, vocab = folder.path / f"{name}.msgpack", SIZES[name], tokenizer.vocab_size
    if not path.exists():
        steps = config.steps * (2 if name == TARGET_NAME else 1)
        with bar(console, f"Training {name}", steps, 0, unit="steps") as update:
            params, loss = train(size, vocab, CONTEXT, tokens, steps, seed=config.seed, progress=update)
        console.print(f"{name}: {size.layers} layers of width {size.width}, loss {loss:.3f} nats a token")
        with folder.replacing(path.name) as temporary:
            temporary.write_bytes(flax.serialization.to_bytes(jax.device_get(params)))
    params = flax.serialization.msgpack_restore(path.read_bytes())
    return LoadedModel(language_model(size, vocab, CONTEXT), params, tokenizer, name, config=size)


def _texts(target: LoadedModel, prompts: list[list[int]], temperature: float) -> list[tuple[list[int], list[int]]]:
    """The prompts with what the target writes, decoded plainly."""
    warp = {"temperature": temperature}
    found = answers(target, prompts, max_new_tokens=ANSWER, warp=warp, seed=1, batch=len(prompts))
    return list(zip(prompts, found, strict=True))


def _trace(config: GPT2Pairs, target: LoadedModel, drafter: LoadedModel, texts: Any, temperature: float) -> Trace:
    return trace_texts(
        (target.model, drafter.model),
        (target.params, drafter.params),
        texts,
        limit=ANSWER,
        warp={"temperature": temperature},
        seed=config.seed,
        max_draft_length=2,
        about={"target": target.name, "drafter": drafter.name},
    )


def by_entropy(trace: Trace) -> dict[str, Any]:
    """Acceptance by bins of the drafter's entropy, the factor that fits, and how often the bound is kept."""
    at = np.arange(trace.overlap.shape[1])[None, :] < trace.length[:, None]
    greedy = trace.temperature[:, None] <= 0
    taken = np.where(greedy, trace.accepted, trace.overlap)[at].astype(float)
    entropy, most = (trace.path[at][:, FEATURES.index(name)].astype(float) for name in ("entropy", "max_prob"))
    bins = np.digitize(entropy, EDGES[1:-1])
    count = np.bincount(bins, minlength=len(EDGES) - 1).tolist()
    hits, nats = (np.bincount(bins, values, len(EDGES) - 1) for values in (taken, entropy))
    return {
        "positions": len(taken),
        "mean_acceptance": float(taken.mean()),
        "mean_entropy": float(entropy.mean()),
        "count": count,
        "acceptance": list(map(ratio, hits, count)),
        "entropy": list(map(ratio, nats, count)),
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
        markdown(head, lines),
    ]
    for temperature in dict.fromkeys(row["temperature"] for row in rows):
        parts += [
            f"## Acceptance by entropy (positions), {at_temperature(temperature)}",
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
        texts = [NONE if value is None else f"{value:.2f} ({count})" for value, count in found]
        lines.append([span, " to ".join(ends), *texts])
    return markdown(["entropy", "1 - sqrt(0.2 H)", *(row["pair"] for row in mine)], lines)


def picture(rows: Sequence[dict[str, Any]]) -> Figure:
    """Acceptance against entropy, a panel a temperature, a line a pair, over the published bound."""
    temperatures = list(dict.fromkeys(row["temperature"] for row in rows))
    titles = list(map(at_temperature, temperatures))
    figure, grid = panels(titles, 3.9, width=3.6, least=5.0, sharex=True, sharey=True)
    entropies = np.linspace(0, 6, 200)
    colours = rule_colours(list(dict.fromkeys(row["pair"] for row in rows)))
    for axes, temperature in zip(grid[0], temperatures, strict=True):
        axes.plot(entropies, 1 - np.sqrt(FACTOR * entropies), color=INK, ls="--", lw=1, label="1 - sqrt(0.2 H)")
        for row in (row for row in rows if row["temperature"] == temperature):
            points = [(x, y, n) for x, y, n in zip(row["entropy"], row["acceptance"], row["count"], strict=True) if n]
            x, y, n = (np.array(column) for column in zip(*points, strict=True))
            axes.plot(x, y, color=colours[row["pair"]], lw=1.5, label=row["pair"])
            axes.scatter(x, y, s=4 + 120 * n / n.sum(), color=colours[row["pair"]], zorder=3)
        axes.set(xlabel="drafter's entropy, nats", ylim=(0, 1.02), xlim=(0, 6))
    grid[0, 0].set_ylabel("acceptance")
    legend_below(figure, grid[0, 0], 4)
    return figure


main = command(GPT2Pairs, study, __doc__)

if __name__ == "__main__":
    sys.exit(main())
