"""What a machine's costs decide: verification widths, the longest draft, and hyperparameters of rules."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from specdec_jax.costs.cost_model import CostModel, between, load_cost_model
from specdec_jax.decoding import default_widths
from specdec_jax.sharding import spans_processes
from specdec_jax.strategy import Strategy, nearest
from specdec_jax.types import StoppingPolicy

MEASURED, ESTIMATED = "measured", "estimated"
VARIABLE = "SPECDEC_JAX_COSTS"  # the default of `costs`: one of these words, or a file
DRAFTS = 7  # of a round at the most, where nothing certain is known of the machine
LEAST_SAVING = 0.03  # of a pass, that a narrower width must save: each is compiled, about 3 s on two cores
BATCH_COST_FACTOR = 1.5  # factor on the cost of drafting for rules that decide by row in a batch (docs/batches.md)
PREDICTABLE = 0.9  # acceptance of a token on text that a drafter predicts well; longer drafts pay nowhere else


def costs_asked(costs: CostModel | str | Path | None = None) -> CostModel | str:
    """A cost model, or one of the words `measured` and `estimated`.

    Args:
        costs: either, or a file that `save_cost_model` wrote. None: what SPECDEC_JAX_COSTS says, else measured, or
            estimated on a mesh of several processes, which must all decide alike.

    Raises:
        FileNotFoundError, ValueError: a file that is not there, or that is no cost model; measuring on such a mesh.
    """
    usual = ESTIMATED if spans_processes() else MEASURED
    source = (os.environ.get(VARIABLE) or usual) if costs is None else costs
    if source == MEASURED and spans_processes():
        raise ValueError("costs are measured by one process: give several the file of a cost model, or 'estimated'")
    if isinstance(source, CostModel):
        return source
    if source in (MEASURED, ESTIMATED):
        return str(source)
    if not Path(source).is_file():
        near = nearest(str(source), (MEASURED, ESTIMATED))
        raise FileNotFoundError(f"no cost model {str(source)!r}{near}; python -m experiments.step_cost writes one")
    return load_cost_model(source)


def widths_for(costs: CostModel, max_draft_length: int) -> tuple[int, ...]:
    """Verification widths for drafts of up to that many tokens: the steps of the measured staircase.

    The widest holds the longest draft. A narrower one is there if it saves 3 % of a pass of the next wider one. Where
    costs are doubtful they are powers of two, as where nothing is measured: a wrong table must not leave widths out.
    """
    if costs.doubts:
        return default_widths(max_draft_length)
    full = max_draft_length + 1
    chosen = [full]
    for width in sorted((width for width in costs.widths if width < full), reverse=True):
        narrow, wide = between(costs, (width, chosen[0])).target_pass
        if narrow <= (1 - LEAST_SAVING) * wide:
            chosen.insert(0, width)
    return tuple(chosen)


def longest_draft(costs: CostModel) -> int:
    """The draft length of most tokens per time where nine drafts of ten are accepted, at most what was measured.

    On text that is less predictable a rule stops earlier by itself. 7 where costs are doubtful.
    """
    if costs.doubts:
        return min(DRAFTS, max(costs.widths[-1] - 1, 1))
    lengths = np.arange(1, max(costs.widths[-1], 2))
    tokens = np.cumsum(PREDICTABLE ** np.arange(lengths[-1] + 1))[lengths]
    passes = np.interp(lengths + 1, costs.widths, costs.target_pass) / costs.plain_pass
    return int(lengths[np.argmax(tokens / (passes + costs.ratio * lengths))])


def costs_for(policy: StoppingPolicy, costs: CostModel, max_draft_length: int) -> dict[str, Any]:
    """The hyperparameters that a stopping policy has, was not given, and that these costs decide.

    `drafter_cost` is c, `verification_times` the pass that verifies k drafts and `verification_cost` what one more
    verified token costs on average, all in passes of plain decoding. In a batch whose rows decide for themselves the
    rounds are as long as the longest draft: there drafting costs `BATCH_COST_FACTOR` times as much.
    """
    longest = max_draft_length if policy.rounds is None else costs.widths[-1] - 1  # a tree may fill the widest pass
    waiting = BATCH_COST_FACTOR if costs.batch > 1 and not policy.joins_rows else 1.0
    times = costs.verification_times(longest)
    times = times[0] + waiting * (times - times[0])
    decided: Mapping[str, Any] = {
        "verification_times": tuple(times.tolist()),
        "verification_cost": float(times[-1] - times[0]) / max(longest, 1),
        **({"drafter_cost": waiting * costs.ratio} if costs.ratio else {}),  # 0: what drafts is no model
    }
    return {name: value for name, value in decided.items() if name in policy.hyperparameters.keys() - policy.fixed}


def weighs_costs(policy: Strategy) -> bool:
    """Whether a rule has hyperparameters that `costs_for` decides."""
    return bool({"drafter_cost", "verification_times", "verification_cost"} & policy.hyperparameters.keys())
