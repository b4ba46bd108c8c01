"""How far texts leave the target's distribution under lossy verifiers: figures of a generation, and their table."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.lib.cells import NONE, at_temperature, interval, markdown
from specdec_jax.decoding.sampling import make_warp
from specdec_jax.metrics.deviation import DISTRIBUTIONS, deviations
from specdec_jax.metrics.intervals import mean_interval
from specdec_jax.text.generation import Generation, Pair
from specdec_jax.types import Verifier

BOUNDS = "[{}, {}]"  # some are negative
MEANS = ("log_likelihood", "total_variation", "divergence", "first_choice")
NOTE = (
    "Log-likelihood: mean over prompts of a token's under the target at temperature 1, in nats, and its difference to "
    "the reference's on the same prompts, with a 95 % bootstrap interval. It is no score to "
    "maximise: text that repeats itself has a high one. TV: mean total variation between the distribution of a token "
    "drafted at a position and the target's, along the text; KL likewise, in nats; unknown for by_phase. First choice: "
    "share of tokens that are the target's most probable one. Before diverging: share of tokens before the first one "
    "that differs from plain decoding."
)


def judge_of(pairs: Mapping[str, Pair]) -> Pair:
    """The pair that judges all texts. Raises ValueError where no method drafts with a language model."""
    for pair in pairs.values():
        if pair.decoder.parts.drafter.model is not None:
            return pair
    raise ValueError("quality is measured with the drafter's distributions: a method must draft with a model")


def quality(judge: Pair, verifier: Verifier, generation: Generation, temperature: float, size: int) -> dict[str, Any]:
    """Means over a text's tokens, by passes of both models over it, padded to `size` so that all share one program.

    `total_variation` and `divergence` are None for a verifier whose distribution metrics/deviation.py does not have.
    """
    exact = verifier.name in DISTRIBUTIONS
    hyperparameters = {key: np.float32(value) for key, value in verifier.hyperparameters.items()} if exact else {}
    hyperparameters |= {key: value for key, value in verifier.options.items() if exact and key == "top_n"}
    prompt, tokens = generation.prompt_tokens, generation.tokens
    text = np.zeros((1, size), np.int32)
    text[0, : len(prompt) + len(tokens)] = [*prompt, *tokens]
    figures = deviations(
        judge.decoder,
        judge.params,
        text,
        verifier=verifier.name if exact else "rejection",
        hyperparameters=hyperparameters,
        warp=make_warp(1, temperature),
    )
    answer = slice(len(prompt) - 1, len(prompt) + len(tokens) - 1)
    means = {name: float(np.asarray(values)[0, answer].mean()) for name, values in figures._asdict().items()}
    return means if exact else means | {"total_variation": None, "divergence": None}


def quality_tables(rows: Sequence[Mapping[str, Any]], reference: str) -> list[str]:
    """Blocks of Markdown: one table per temperature, one row per method, and a note; others differ from `reference`."""
    blocks = []
    for temperature in dict.fromkeys(row["temperature"] for row in rows):
        figures = by_method([row for row in rows if row["temperature"] == temperature])
        lines = []
        for method, means in figures.items():
            likelihood, variation, divergence, first_choice = (means[name].mean() for name in MEANS)
            difference = mean_interval(means["log_likelihood"] - figures[reference]["log_likelihood"])
            cells = [f"{likelihood:.3f}", interval(difference, "+.3f", BOUNDS)]
            cells += [NONE if np.isnan(value) else f"{value:.4f}" for value in (variation, divergence)]
            cells += [f"{first_choice:.1%}", NONE if means["before"] is None else f"{means['before']:.1%}"]
            lines.append([method, *cells])
        heads = ["method", "log-likelihood", "difference", "TV", "KL", "first choice", "before diverging"]
        blocks += [f"## Quality, {at_temperature(temperature)}", markdown(heads, lines)]
    return [*blocks, NOTE]


def by_method(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """MEANS of each method, [prompts] float64 averaged over repeats, and `before`, the share of its tokens that stand
    before the first difference to plain decoding, None where no row was compared."""
    figures: dict[str, dict[str, Any]] = {}
    for method in dict.fromkeys(row["method"] for row in rows):
        prompts: dict[str, list[list[float]]] = {}
        same = compared = 0
        for row in rows:
            if row["method"] == method:
                # None becomes NaN
                prompts.setdefault(row["prompt_id"], []).append(np.array([row[name] for name in MEANS], float))
                difference = row["first_difference"]
                if row["equals_plain"] is not None:
                    same += len(row["tokens"]) if difference is None else difference["position"]
                    compared += len(row["tokens"])
        means = np.array([np.mean(repeats, axis=0) for repeats in prompts.values()])
        figures[method] = dict(zip(MEANS, means.T, strict=True)) | {"before": same / compared if compared else None}
    return figures
