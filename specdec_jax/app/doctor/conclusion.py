"""Whether drafting will pay, by how much, with which command; or why not, and what would have to be otherwise."""

import dataclasses
import math
import shlex
from collections.abc import Sequence
from typing import NamedTuple

from specdec_jax.app.settings import Settings
from specdec_jax.costs.cost_model import CostModel
from specdec_jax.metrics.acceptance import break_even_acceptance
from specdec_jax.metrics.intervals import Interval
from specdec_jax.metrics.predicted import Predicted
from specdec_jax.types import StoppingPolicy

PROMPT = "Why is the sky blue?"
ALWAYS = ("target", "drafter", "policy")  # in the recommended command, the others where they are not the usual ones
WHERE_CHANGED = ("dtype", "costs", "mesh", "calibration", "max_draft_length", "system")
BUSY = " The costs are doubtful: measure them again on a quiet machine."
SAMPLING = ("temperature", "top_k", "top_p", "min_p")


class Conclusion(NamedTuple):
    works: bool  # the pair can be decoded, and fits
    pays: bool
    why: str
    command: str | None = None


def refused(why: str) -> Conclusion:
    """Of a pair that cannot be decoded here."""
    return Conclusion(False, False, why)


def conclude(
    settings: Settings,
    found: Sequence[Predicted],
    fast: Sequence[bool],
    costs: CostModel,
    accepted: Interval,
    how: str,
) -> Conclusion:
    """What the predictions amount to.

    Args:
        fast: of each rule, whether it is as fast as the best (`as_fast`).
        accepted: the share of first drafts.
        how: how the costs are known.
    """
    best = max(found, key=lambda one: one.speedup.estimate)
    busy = BUSY if costs.doubts else ""
    if not best.speedup.estimate > 1:
        return Conclusion(True, False, _why_not(best, found, costs, accepted, how) + busy)
    chosen = _recommended(found, fast, best)
    sure = chosen.speedup.low > 1
    doubt = "" if sure else " More prompts (--prompts) would tell."
    why = f"Drafting {'pays' if sure else 'may pay'}: {_said(chosen)}.{doubt}{busy}"
    return Conclusion(True, True, why, command(settings, chosen.policy))


def command(settings: Settings, policy: StoppingPolicy) -> str:
    """The command line that decodes with these settings and that policy."""
    told, usual = dataclasses.replace(settings, policy=repr(policy)), Settings()
    words = ["python", "-m", "specdec_jax", "generate", PROMPT]
    for name in (*ALWAYS, *WHERE_CHANGED, *SAMPLING):
        value = getattr(told, name)
        if name in ALWAYS or value != getattr(usual, name):
            words += [f"--{name.replace('_', '-')}", str(value)]
    return shlex.join(words + ([] if told.chat else ["--no-chat"]))


def _recommended(found: Sequence[Predicted], fast: Sequence[bool], best: Predicted) -> Predicted:
    """The rule that `generate` has unless told otherwise, if the texts do not show that another is faster."""
    usual = next(index for index, one in enumerate(found) if repr(one.policy) == Settings().policy)
    return found[usual] if fast[usual] and found[usual].speedup.estimate > 1 else best


def _why_not(best: Predicted, found: Sequence[Predicted], costs: CostModel, accepted: Interval, how: str) -> str:
    """What would have to be otherwise: the costs, by these replays, or the acceptance, were it the same everywhere."""
    cheap = max((one.break_even for one in found if math.isfinite(one.break_even)), default=0.0)
    least = break_even_acceptance(costs.ratio, costs.verification_times(costs.widths[-1] - 1))
    ways = []
    if cheap > 0:
        ways.append(f"with c below {cheap:.3f} ({how}: {costs.ratio:.3f})")
    if least is not None and least > accepted.estimate:
        ways.append(f"with more than {least:.2f} of the drafts accepted (measured: {accepted.estimate:.2f})")
    would = f" It is predicted to pay {', or '.join(ways)}." if ways else ""
    never = " At these costs no acceptance is high enough." if least is None else ""
    return f"Drafting will not pay: at best, {_said(best)}.{would}{never}"


def _said(one: Predicted) -> str:
    bounds = "" if math.isnan(one.speedup.low) else f" ({one.speedup.low:.2f} to {one.speedup.high:.2f})"
    return f"{one.policy!r} is predicted to be {one.speedup.estimate:.2f}{bounds} times as fast as plain decoding"
