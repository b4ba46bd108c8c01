"""What a rule's work, or watching phases, adds to whole generations: timed in pairs that draft the same tokens."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from specdec_jax.costs.choices import ESTIMATED
from specdec_jax.costs.step_cost import Cost, summary
from specdec_jax.loading import LoadedModel
from specdec_jax.monitors import phases
from specdec_jax.stopping import adaedl, static, survival
from specdec_jax.text.generation import Pair, build_pair, decode, prepare, start
from specdec_jax.text.sampling_params import SamplingParams
from specdec_jax.types import Monitor, StoppingPolicy

PROMPT = "Explain in a few sentences how a bicycle stays upright."


class Work(NamedTuple):
    """A rule that does all its work and never says no, or who watches the target."""

    policy: StoppingPolicy | None  # None: a static length
    monitor: Monitor | None = None


def _work() -> dict[str, Work]:
    return {
        "adaedl": Work(adaedl(threshold=0.0, entropy_factor=1e-6, step=0.0)),
        "survival": Work(survival(drafter_cost=1e-30, verification_times=(1.0,))),
        "phases": Work(None, phases()),
    }


class Check(NamedTuple):
    """Whole generations with and without the work, paired."""

    without: Cost  # seconds
    added: Cost  # share of the generation's time that the check adds, run by run
    passes: int  # drafter passes of the generation


def measure_check(config: Any, target: LoadedModel, drafter: LoadedModel) -> dict[str, Check]:
    """Generations that draft the same tokens with and without that work, by "rule, temperature"; step_cost's config."""
    checks = {}
    plainly = static(draft_length=config.draft_length)
    for rule, work in _work().items():
        pairs = [
            build_pair(
                target, drafter, policy=policy, max_draft_length=config.draft_length, monitor=monitor, costs=ESTIMATED
            )
            for policy, monitor in ((plainly, None), (work.policy or plainly, work.monitor))
        ]
        for temperature in (0.0, 0.8):
            plain, checked = (_generation(config, pair, temperature) for pair in pairs)
            runs = []
            for index in range(config.repeats):  # in turns: neither is always the one that finds the caches warm
                timed = {run: run() for run in ((plain, checked) if index % 2 == 0 else (checked, plain))}
                runs.append((timed[plain], timed[checked]))
            if any(one.passes != other.passes for one, other in runs):
                raise AssertionError(
                    f"{rule} drafted other tokens than a static length: its check is not all that differs"
                )
            without = summary([one.seconds for one, _ in runs])
            added = summary([other.seconds / one.seconds - 1 for one, other in runs])
            checks[f"{rule}, {temperature:g}"] = Check(without, added, runs[0][0].passes)
    return checks


class _Timed(NamedTuple):
    seconds: float
    passes: int


def _generation(config: Any, pair: Pair, temperature: float) -> Callable[[], _Timed]:
    sampling = SamplingParams(max_new_tokens=config.max_new_tokens, temperature=temperature, stop_ids=())
    request = prepare(pair, [PROMPT] * config.batch, sampling)
    start(pair, request)

    def generate() -> _Timed:
        results, state = decode(pair, request)
        return _Timed(results[0].seconds, int(np.max(np.asarray(state.statistics.drafter_passes))))

    return generate
