"""What can a drafter of blocks gain over the reading drafter that it starts from, by its times?

Question:  How much faster would a block decode that agreed with the target as often as its reading drafter, drafts of a
           round after the first included? That is a bound: masks know less than drafted tokens.
Command:   python -m experiments.lib.block_bound runs/traces/reading/trace-0.npz ... [--sizes 4 8]
           (traces of the reading drafter, by experiments.record)
Time:      three minutes; on a machine that does nothing else
Output:    runs/block_bound-<time>/ with results.jsonl and table.md

The weights are the reading drafter's before any training, which take as long as trained ones. A trace is replayed by
`survival` with either drafter's costs, and charged with the times measured here: of target passes as they are, and of
one token at every width (flat).
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from rich.console import Console
from tyro.conf import Positional

from experiments.lib.cells import markdown
from experiments.lib.commands import command
from experiments.lib.options import Output, check_least
from experiments.lib.run_folder import RunFolder
from experiments.lib.terminal import publish
from specdec_jax.contrib.block import llama_block
from specdec_jax.costs.step_cost import alternate, draft_round, target_pass
from specdec_jax.drafters.reading import drafter_of
from specdec_jax.loading import LoadedModel, load_model
from specdec_jax.loading.draft_vocabulary import with_draft_vocabulary
from specdec_jax.replay.replay import Replay, replay
from specdec_jax.replay.trace import Trace, load_trace
from specdec_jax.stopping import static
from specdec_jax.stopping.survival import survival
from specdec_jax.types import RoundContext, StoppingPolicy

PASSES, SLOTS = 4, 512


@dataclass(frozen=True)
class BlockBound(Output):
    """What is measured and replayed."""

    traces: Positional[tuple[str, ...]] = ()
    """Files trace-*.npz of the reading drafter."""
    target: str = "smollm2"
    """The target of the traces."""
    drafter: str = "smollm2-drafter-reading@8192"
    """The drafter of the traces, with its draft vocabulary."""
    sizes: tuple[int, ...] = (4, 8)
    """Tokens of a block."""
    repeats: int = 25
    """Timed runs of each program."""

    def __post_init__(self) -> None:
        check_least(self, 3, "repeats")
        if not self.traces or not self.sizes or min(self.sizes) < 2:
            raise ValueError(f"needs traces, and blocks of 2 tokens or more, got {self.traces} and {self.sizes}")


@dataclass(frozen=True)
class Times:
    """Seconds of a block's size K: a round of n drafts takes `opening` + n `step`."""

    opening: float
    step: float
    size: int

    def relative(self) -> tuple[float, float]:
        """Costs of the first and of a later draft, relative to a round of K."""
        whole = self.opening + self.size * self.step
        return (self.opening + self.step) / whole, self.step / whole

    def seconds(self, replayed: Replay, passes: np.ndarray) -> float:
        """Of all texts, with target passes [K+1] of 1, 2 ... tokens."""
        drafting = (replayed.rounds - replayed.by_length[..., 0]).sum() * self.opening
        return float((replayed.by_length @ passes).sum() + drafting + replayed.passes.sum() * self.step)


def block_bound(config: BlockBound, console: Console) -> None:
    """Measures, replays, and writes the run folder."""
    traces = {path: load_trace(path) for path in config.traces}
    folder = RunFolder.create("block_bound", config, config.out)
    with console.status("Measuring passes"):
        seconds = measured(config)
    lines, head = [], ["trace", "block of", "passes", "reading", "block", "gain at most"]
    for size in config.sizes:
        times = {name: line(seconds, name, size) for name in ("reading", "block")}
        for name, each in times.items():
            console.print(f"{name}, at most {size} drafts: {1e3 * each.opening:.2f} ms + {1e3 * each.step:.2f} a draft")
        passes = np.array([seconds[f"target {width}"] for width in range(1, size + 2)])
        for path, trace in traces.items():
            for kind, verified in (("measured", passes), ("flat", np.full_like(passes, passes[0]))):
                speeds = [speedup(trace, each, verified, name == "block") for name, each in times.items()]
                row = {"trace": path, "size": size, "passes": kind, "reading": speeds[0], "block": speeds[1]}
                folder.append(row)
                cells = [*(f"{speed:.3f}" for speed in speeds), f"{speeds[1] / speeds[0]:.3f}"]
                lines.append([path, str(size), kind, *cells])
    publish(folder, markdown(head, lines) + "\n", console)


def measured(config: BlockBound) -> dict[str, float]:
    """Seconds of target passes by width and of rounds by drafter, size and drafts, greedy, in turns."""
    target, drafter = load_model(config.target, dtype="bfloat16"), load_model(config.drafter, dtype="bfloat16")
    programs: dict[str, Callable[[], Any]] = {}
    for size in config.sizes:
        for name, model in (("reading", drafter), ("block", as_block(drafter, size))):
            for drafts in (1, size):
                made, policy = drafter_of(model.model, size), static(draft_length=drafts)
                options: dict[str, Any] = {"batch": 1, "slots": SLOTS, "temperature": 0.0}
                programs[f"{name} {size} {drafts}"] = draft_round(made, model.params, policy, **options)
    for width in range(1, max(config.sizes) + 2):
        programs[f"target {width}"] = target_pass(target.model, target.params, width, 1, SLOTS, PASSES)
    per = {name: PASSES for name in programs if name.startswith("target")}
    return {name: cost.median for name, cost in alternate(programs, config.repeats, per).items()}


def as_block(drafter: LoadedModel, size: int) -> LoadedModel:
    """A reading drafter with a draft vocabulary as a drafter of blocks before training."""
    config = llama_block.block_config(drafter.config, size)
    whole, tokens = drafter.params.model, np.asarray(drafter.params.tokens)
    params = llama_block.with_block(config, whole, jnp.bfloat16)
    model = llama_block.language_model(config, jnp.bfloat16)
    return with_draft_vocabulary(drafter._replace(model=model, params=params, config=config), tokens)


def line(seconds: dict[str, float], name: str, size: int) -> Times:
    """The times of a drafter's rounds, from those of 1 and of K drafts."""
    few, many = (seconds[f"{name} {size} {drafts}"] for drafts in (1, size))
    step = (many - few) / (size - 1)
    return Times(few - step, step, size)


def speedup(trace: Trace, times: Times, passes: np.ndarray, is_block: bool) -> float:
    """Total speed-up over plain decoding of a replay by `survival`, which knows the costs."""
    whole, plain = times.opening + times.size * times.step, float(passes[0])
    policy = paired(survival(), times.relative()) if is_block else survival()
    cost = whole / plain if is_block else whole / plain / times.size
    hyperparameters = {"drafter_cost": np.array([cost]), "verification_times": (passes / plain)[None]}
    replayed = replay(trace, policy, hyperparameters, max_draft_length=times.size)
    return float(replayed.emitted.sum() * plain / times.seconds(replayed, passes))


def paired(policy: StoppingPolicy, cost: tuple[float, float]) -> StoppingPolicy:
    """The policy with the costs of a drafter of blocks, which a trace does not have."""

    def with_costs(context: RoundContext) -> RoundContext:
        both = jnp.broadcast_to(jnp.asarray(cost, jnp.float32), (*context.length.shape, 2))
        return context._replace(relative_drafter_cost=both)

    return dataclasses.replace(
        policy,
        begin=lambda state, context: policy.begin(state, with_costs(context)),
        check=lambda state, seen, drafted, context: policy.check(state, seen, drafted, with_costs(context)),
        proceed=lambda state, seen, token, drafted, context: policy.proceed(
            state, seen, token, drafted, with_costs(context)
        ),
    )


main = command(BlockBound, block_bound, __doc__)

if __name__ == "__main__":
    raise SystemExit(main())
