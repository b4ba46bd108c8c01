"""What is each part of the default rule worth, and what does its prior lose on a target that it was not fitted to?

Command:   PYTHONPATH=. python docs/examples/survival_parts.py runs/evidence [TEMPERATURE [FIRST]]
           (the traces of `python -m experiments.record configs/evidence.py`, and the costs in results/; FIRST makes
           costs up: verifying takes so many plain passes however many drafts, a drafter pass 0.03)
Time:      half a minute a pair on two cores
Expected:  docs/method.md, "What each part is worth"

Every variant leaves out one part of `survival`, or replaces it, and is replayed over the texts of every pair with the
pair's own costs, or with those of FIRST. Printed: how much faster than the rule as it is, in per cent, and over all
targets with the interval of a bootstrap over targets and prompts. The rule's own computation is counted where the costs
have it.
"""

import sys
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from configs.base import load_config
from experiments.lib.archive import Texts, hierarchical, read_archive, recorded
from experiments.lib.rules import rule
from experiments.lib.tables import NONE, bold, markdown, percent_more
from experiments.lib.trace_runs import replay_rule
from experiments.record import cells
from specdec_jax.costs.cost_model import CostModel, cost_model_of
from specdec_jax.metrics.prior import fit_prior

SURVIVAL, REPLAY = (import_module(f"specdec_jax.{name}") for name in ("stopping.survival", "replay.replay"))
WHOLE, REFITTED = "all, as it is", "the prior fitted to the other targets"
ONE = np.ones((1, 1), np.int32)
ALONE: dict[str, Any] = {"FURTHER": ONE, "LAPSE": 0.0, "LATER_LAPSE": 0.0}
PARTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # constants of the module, hyperparameters
    WHOLE: ({}, {}),
    REFITTED: ({}, {}),
    "no prior (a factor of 1)": ({}, {"prior": (0.0, 0.0)}),
    "no lapse rate": ({"LAPSE": 0.0, "LATER_LAPSE": 0.0}, {}),
    "the lapse rate is not learnt": ({"LAPSE": 0.03, "LATER_LAPSE": 0.03, "LAPSE_WEIGHT": 1e6}, {}),
    "shares begin at 0.6, not optimistic": ({"HOPED": 0.6}, {}),
    "one draft ahead, not up to eight": ({"FURTHER": ONE}, {}),
    "R is not learnt": ({}, {"rate_weight": 1e6}),
    "nothing is forgotten": ({"DECAY": 1.0}, {}),
    "signal: probability": ({}, {"signal": "probability"}),
    "signal: AdaEDL's bound": ({}, {"signal": "bound"}),
    "price alone, probability": (ALONE, {"signal": "probability"}),
    "price alone, AdaEDL's bound": (ALONE, {"signal": "bound"}),
}


def times(texts: Texts, longest: int, settings: dict[str, Any]) -> np.ndarray:
    """[P, S], predicted time of all texts in passes of plain decoding."""
    variant, every = rule(f"survival(signal={settings.pop('signal', 'odds')})"), []
    for trace in texts.traces:
        counts = replay_rule(trace, variant, texts.costs, longest, [settings] if settings else None)
        every.append(counts.seconds(texts.costs.at(policy=variant.policy))[0] / texts.costs.plain_pass)
    return np.stack(every, axis=1)


def main() -> None:
    """Prints the table."""
    folder, temperature = Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 0.7
    archive, config = read_archive(), load_config("configs/evidence.py", experiment="record")
    costs = {pair: cost_model_of(fields) for pair, fields in archive.manifest["costs"].items()}
    if len(sys.argv) > 3:
        made_up = CostModel(0.03, (1, 2, 16), (1.0, float(sys.argv[3]), float(sys.argv[3])), 1.0)
        costs = dict.fromkeys(costs, made_up)
    done = [cell for cell in cells(config) if cell.temperature == temperature and (folder / cell.path).is_file()]
    groups = {
        key: each for key, each in recorded(config, folder, costs, done).items() if key[2] == config.max_new_tokens
    }
    target_of = {pair.name: pair.target for pair in config.pairs}
    lines, whole = [], {}
    for name, (module, hyperparameters) in PARTS.items():
        by_target: dict[str, list[Any]] = {}
        line = [name]  # and how much faster, bold where the interval over prompts excludes 0
        for key, texts in groups.items():
            settings = dict(hyperparameters)
            if name == REFITTED:
                others = [each.traces[0] for other, each in groups.items() if target_of[other[0]] != target_of[key[0]]]
                if not others or not temperature:
                    line.append(NONE)
                    continue
                settings["prior"] = tuple(fit_prior(*others))
            REPLAY._program.cache_clear()  # programs read the constants when they are traced
            with mock.patch.multiple(SURVIVAL, **module) if module else nullcontext():
                mine = times(texts, config.max_draft_length, settings)
            before = whole.setdefault(key, mine)
            by_target.setdefault(target_of[key[0]], []).append((before, mine))
            ratio = hierarchical([[(before, mine)]])
            line.append(bold(f"{100 * (ratio.estimate - 1):+.1f}", ratio))
        totals = [[tuple(np.sum(each, axis=0) for each in zip(*pairs, strict=True))] for pairs in by_target.values()]
        lines.append([*line, percent_more(hierarchical(totals)) if totals else NONE])
    print(markdown([f"at {temperature:g}, faster by %", *(key[0] for key in groups), "all targets"], lines))


if __name__ == "__main__":
    main()
