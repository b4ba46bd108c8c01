"""Choices based on a machine's costs: verification widths, maximum draft length, and hyperparameters of policies."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from specdec_jax.costs.cost_model import CostModel, between, load_cost_model
from specdec_jax.decoding import default_widths
from specdec_jax.meshes import spans_processes
from specdec_jax.strategy import Strategy, nearest
from specdec_jax.types import StoppingPolicy

MEASURED, ESTIMATED = "measured", "estimated"
VARIABLE = "SPECDEC_JAX_COSTS"  # the default of `costs`: one of these words, or a file
DRAFTS = 7  # maximum draft length for unknown or doubtful costs
LEAST_SAVING = 0.03  # share of a pass that a narrower width must save: each is compiled, about 3 s on two cores
PREDICTABLE = 0.9  # acceptance rate on text that a drafter predicts well, where long drafts pay


def costs_asked(costs: CostModel | str | Path | None = None) -> CostModel | str:
    """The cost model, or the word `measured` or `estimated`, of either or of a file of `save_cost_model`.

    None: the environment variable SPECDEC_JAX_COSTS, else measured, or estimated on a mesh of several processes, which
    must decide alike. Raises FileNotFoundError, ValueError: a missing file, a file that is not a cost model, or
    measuring on such a mesh.
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
    """Verification widths for drafts of at most `max_draft_length` tokens: the steps of the measured times.

    The widest holds the longest draft. A narrower one is included if it saves 3 % of the next wider pass. For doubtful
    costs they are powers of two, because a wrong table must not exclude widths.
    """
    if costs.doubts:
        return tuple(sorted({1, *default_widths(max_draft_length)}))
    full = max_draft_length + 1
    chosen = [full]
    for width in sorted((width for width in costs.widths if width < full), reverse=True):
        narrow, wide = between(costs, (width, chosen[0])).target_pass
        if narrow <= (1 - LEAST_SAVING) * wide:
            chosen.insert(0, width)
    return tuple(chosen)


def longest_draft(costs: CostModel) -> int:
    """The draft length with the most tokens per time at an acceptance rate of 0.9, within the measured widths.

    On less predictable text the policy stops earlier. 7 for doubtful costs.
    """
    if costs.doubts:
        return min(DRAFTS, max(costs.widths[-1] - 1, 1))
    lengths = np.arange(1, max(costs.widths[-1], 2))
    tokens = np.cumsum(PREDICTABLE ** np.arange(lengths[-1] + 1))[lengths]
    passes = np.interp(lengths + 1, costs.widths, costs.target_pass) / costs.plain_pass
    return int(lengths[np.argmax(tokens / (passes + costs.ratio * lengths))])


def costs_for(policy: StoppingPolicy, costs: CostModel, max_draft_length: int) -> dict[str, Any]:
    """The hyperparameters of a stopping policy that depend on costs and were not set explicitly.

    `drafter_cost` is c, `verification_times` the times of passes that verify k drafts and `verification_cost` the
    average cost of another verified token, all in passes of plain decoding.
    """
    longest = max_draft_length if policy.drafts_chains else costs.widths[-1] - 1  # a tree may fill the widest pass
    times = costs.verification_times(longest)
    decided: Mapping[str, Any] = {
        "verification_times": tuple(times.tolist()),
        "verification_cost": float(times[-1] - times[0]) / max(longest, 1),
        **({"drafter_cost": costs.ratio} if costs.ratio else {}),  # 0: a drafter without a model
    }
    return {name: value for name, value in decided.items() if name in policy.hyperparameters.keys() - policy.fixed}


def weighs_costs(policy: Strategy) -> bool:
    """Whether a policy has hyperparameters that depend on costs (`costs_for`)."""
    return bool({"drafter_cost", "verification_times", "verification_cost"} & policy.hyperparameters.keys())
