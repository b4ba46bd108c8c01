"""The `doctor` command: what it looks at, in which order, and where it stops."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from specdec_jax.app.doctor import page
from specdec_jax.app.doctor.conclusion import Conclusion, conclude, refused
from specdec_jax.app.doctor.memory import Caches, Weights, caches_of, weights_of
from specdec_jax.app.doctor.pairing import agreements, facts, refusal_of
from specdec_jax.app.doctor.prompts import PROMPTS
from specdec_jax.app.settings import Settings, build
from specdec_jax.app.views.interrupts import interrupts_end_here
from specdec_jax.app.views.printing import plain, status
from specdec_jax.app.views.writable import check_file
from specdec_jax.compilation_cache import enable
from specdec_jax.costs.choices import MEASURED, costs_asked
from specdec_jax.costs.cost_model import CostModel
from specdec_jax.loading import LoadedModel, outline, refuse_encoders
from specdec_jax.loading.coverage import probability_shared
from specdec_jax.loading.new_folder import replacing
from specdec_jax.metrics.acceptance import by_draft
from specdec_jax.metrics.judging import answers
from specdec_jax.metrics.predicted import Predicted, as_fast, costs_counted, every_rule, predicted
from specdec_jax.replay.trace import Trace
from specdec_jax.replay.tracing import trace_texts
from specdec_jax.text.calibration import calibration_of
from specdec_jax.text.generation import encode
from specdec_jax.text.pair import Pair, split_drafters, without_model
from specdec_jax.text.prompt_file import read_prompts
from specdec_jax.types import StoppingPolicy, Verifier

USUAL_CONTEXT = 2048  # tokens that a row's caches are counted for
WARP = ("temperature", "top_k", "top_p", "min_p")


@dataclass
class _Run:
    """What was asked for, and what is known so far."""

    settings: Settings
    policy: StoppingPolicy  # of the pair that is built: every rule takes its place
    verifier: Verifier
    console: Console
    report: dict[str, Any] = field(default_factory=dict)


def examine(
    settings: Settings,
    policy: StoppingPolicy,
    verifier: Verifier,
    *,
    prompts: Path | None = None,
    context: int | None = None,
    report: Path | None = None,
) -> Conclusion:
    """Prints the page to standard output, a section as soon as it is known; `report` is a file for its numbers.

    Raises:
        ValueError, OSError: bad input; a model or a file that cannot be read or written.
    """
    if report is not None:
        check_file(report)
    _check(settings)
    texts = PROMPTS if prompts is None else [prompt.turns[0] for prompt in read_prompts(prompts)]
    enable()
    run = _Run(settings, policy, verifier, Console(highlight=False))
    with interrupts_end_here():
        found = _examined(run, texts, context)
    page.show_conclusion(run.console, found)
    if report is not None:
        run.report["conclusion"] = found._asdict()
        with replacing(report) as temporary:
            temporary.write_text(json.dumps(plain(run.report), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    return found


def _check(settings: Settings) -> None:
    several = len(split_drafters(settings.drafter)) > 1
    if several or settings.drafter == "none" or without_model(settings.drafter):
        raise ValueError(f"doctor replays one drafter that is a model, got {settings.drafter!r}")


def _examined(run: _Run, texts: Sequence[str], context: int | None) -> Conclusion:
    """The sections, until one says no."""
    settings = run.settings
    refuse_encoders("doctor", settings.target)
    target, drafter = outline(settings.target), outline(settings.drafter)
    prompts, context = _tokens(settings, texts, target), _context(context, target)
    refusal = refusal_of(target, drafter)
    run.report["pair"] = {"target": facts(target), "drafter": facts(drafter), "refusal": refusal}
    page.show_pair(run.console, facts(target), facts(drafter), [] if refusal else agreements(target, drafter))
    if refusal:
        return refused(refusal)
    weights = weights_of(target, drafter, settings.dtype)
    if weights.refusal:
        _tell_memory(run, weights, None)
        return refused(weights.refusal)
    with status(f"Loading {settings.target} and {settings.drafter}"):
        pair = build(settings, run.policy, run.verifier)
    caches = caches_of(pair, context)
    _tell_memory(run, weights, caches)
    return refused(caches.refusal) if caches.refusal else _predicted(run, pair, prompts, context)


def _tell_memory(run: _Run, weights: Weights, caches: Caches | None) -> None:
    page.show_memory(run.console, weights, caches)
    run.report["memory"] = {
        "predicted_weights": {dtype: taken._asdict() for dtype, taken in weights.by_dtype.items()},
        "dtype": weights.dtype,
        "devices": weights.devices,
        "measured_free": weights.free,
    }
    if caches is not None:
        run.report["memory"]["loaded"] = {
            "dtype": caches.dtype,
            "measured_weights": caches.weights._asdict(),
            "measured_free": caches.free,
            "context": caches.context,
            "predicted_row": caches.row,
            "predicted_rows": caches.rows,
        }


def _predicted(run: _Run, pair: Pair, prompts: Sequence[list[int]], context: int) -> Conclusion:
    """Costs, acceptance, the rules, and what they amount to."""
    settings, console = run.settings, run.console
    calibration = None if settings.calibration is None else calibration_of(settings.calibration, pair)
    costs, how = costs_counted(pair), _how(settings)
    page.show_costs(console, costs, how)
    run.report["costs"] = {"how": how, "ratio": costs.ratio, **costs._asdict()}
    with status(f"Decoding {len(prompts)} answers, and drafting along them"):
        trace = _trace(settings, pair, prompts)
    accepted = by_draft(trace)
    page.show_acceptance(console, accepted, trace.num_texts, trace.num_positions, settings.temperature)
    shared = probability_shared(pair.target, pair.params.drafter)
    if shared is not None:
        page.show_shared(console, shared, replayed=pair.decoder.parts.drafter.name != "retokenized")
    run.report["acceptance"] = {
        "texts": trace.num_texts,
        "tokens": trace.num_positions,
        "measured_by_draft": accepted,
        "measured_probability_shared": shared,
    }
    found: list[Predicted] = []
    for rule in every_rule(pair.decoder.parts.drafter.max_draft_length):
        with status(f"Replaying {rule!r}"):
            found.append(predicted(pair, trace, rule, context, calibration))
    fast = as_fast(found)
    page.show_rules(console, found, fast)
    run.report["rules"] = _rules(found, fast)
    return conclude(settings, found, fast, costs, accepted[0], how)


def _trace(settings: Settings, pair: Pair, prompts: Sequence[list[int]]) -> Trace:
    """What rules would have seen along the target's answers, all in one batch."""
    drafter, limit = pair.decoder.parts.drafter, settings.max_new_tokens
    assert drafter.model is not None  # _check refuses the others
    warp = {name: getattr(settings, name) for name in WARP}
    seeds = [(settings.seed + index) % 2**32 for index in range(len(prompts))]
    found = answers(pair.target, prompts, max_new_tokens=limit, warp=warp, seed=seeds, batch=len(prompts))
    return trace_texts(
        (pair.target.model, drafter.model),
        (pair.target.params, pair.params.drafter),
        list(zip(prompts, found, strict=True)),
        limit=limit,
        warp=warp,
        seed=seeds,
        max_draft_length=drafter.max_draft_length,
    )


def _tokens(settings: Settings, texts: Sequence[str], target: LoadedModel) -> list[list[int]]:
    """The prompts as the target is asked them. Raises ValueError for one that does not fit."""
    found = [encode(target, text, chat=settings.chat, system=settings.system) for text in texts]
    longest, new, most = max(map(len, found)), settings.max_new_tokens, target.model.spec.context
    if longest + new > most:
        raise ValueError(f"a prompt of {longest} tokens and {new} new ones exceed the target's context, {most}")
    return found


def _context(asked: int | None, target: LoadedModel) -> int:
    most = target.model.spec.context
    if asked is not None and not 1 <= asked <= most:
        raise ValueError(f"context must lie in 1 to the target's, {most}, got {asked}")
    return asked or min(USUAL_CONTEXT, most)


def _how(settings: Settings) -> str:
    """How the costs are known."""
    known = costs_asked(settings.costs)
    return "given" if isinstance(known, CostModel) else "measured" if known == MEASURED else "predicted"


def _rules(found: Sequence[Predicted], fast: Sequence[bool]) -> list[dict[str, Any]]:
    """The fastest first."""
    lines = [
        {
            "policy": repr(one.policy),
            "predicted_speedup": one.speedup,
            "as_fast_as_best": marked,
            "predicted_seconds": one.seconds,
            "break_even": one.break_even,
            "tokens": one.tokens,
            "drafted": one.drafted,
            "acceptance_rate": one.acceptance_rate,
        }
        for one, marked in zip(found, fast, strict=True)
    ]
    return sorted(lines, key=lambda line: -line["predicted_speedup"].estimate)
