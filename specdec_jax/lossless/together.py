"""Round-by-round proofs with different rows in a batch: several warps, and drafts drawn, chosen, or partly chosen.

Also verifiers without drafts, with narrow passes of short drafts, and with long drafts. Temperatures are drawn for
every proof, so that no rule can be correct only at the tested ones.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.hyperparameters import per_row
from specdec_jax.lossless.exact import monitor_for, warps_for
from specdec_jax.lossless.long_drafts import OFF, TOYS, RoundsReport, case_of, play, report_of, setting_of
from specdec_jax.lossless.toys import Toy, narrow_pair
from specdec_jax.stopping.static import static
from specdec_jax.strategy import strategy
from specdec_jax.types import Array, Monitor, StoppingPolicy, Verifier

LENGTHS = (0, 1, 2, 3, 4, 10)  # maximum draft lengths for proofs of verifiers: passes of 1 to 5 tokens, and of 11
SMALL = tuple(narrow_pair(4, seed=seed) for seed in range(2))
TRUNCATIONS: tuple[Mapping[str, Any], ...] = (
    {},
    {"top_k": 3, "top_p": 0.9},
    {"top_k": 3, "min_p": 0.05},
    {"top_p": 0.9, "min_p": 0.05},
    {"top_k": 3, "top_p": 0.9, "min_p": 0.05},
)
COOLEST, WARMEST, DRAWN_WARPS = 0.3, 1.5, 10


def drawn_warps(seed: int) -> tuple[Mapping[str, Any], ...]:
    """Greedy, temperature 1, and ten temperatures between 0.3 and 1.5, one in each tenth, with combined truncations."""
    edges = np.linspace(COOLEST, WARMEST, DRAWN_WARPS + 1)
    temperatures = np.round(np.random.default_rng(seed).uniform(edges[:-1], edges[1:]), 3)
    drawn = [{"temperature": float(t), **TRUNCATIONS[i % len(TRUNCATIONS)]} for i, t in enumerate(temperatures)]
    return ({"temperature": 0.0}, {"temperature": 1.0}, *drawn)


def prove_together(
    policy: StoppingPolicy,
    verifier: Verifier,
    *,
    warps: Sequence[Mapping[str, Any]],
    monitor: Monitor | None = None,
    max_draft_length: int = 5,
    rounds: int = 4,
    toys: Sequence[Toy] = TOYS,
    prompts: int = 2,
) -> RoundsReport:
    """As `prove_long_drafts`, with different rows: of all warps, and drafts drawn, chosen, and partly chosen.

    One case, whose warp is the arguments of `make_warp` with an entry per warp. Policies of trees draft chains here.

    Args:
        warps: a verifier for greedy decoding is tested with those at temperature 0.
        prompts: maximum number of prompts for each warp.
    """
    several = [{"temperature": 0.0, **OFF, **warp} for warp in warps_for(verifier, warps)]
    warp = {name: np.array([row_warp[name] for row_warp in several]) for name in several[0]}
    vocab, rng = toys[0].target.shape[-1], np.random.default_rng(0)
    each = [rng.permutation(len(toys) * vocab**2)[:prompts] for _ in several]
    index = np.repeat(np.arange(len(several)), [len(some) for some in each])
    toy, *last_two = np.unravel_index(np.concatenate(each), (len(toys), vocab, vocab))
    monitor = monitor or monitor_for(policy, verifier)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        setting = setting_of(policy, verifier, monitor, max_draft_length, rounds, warp, toys)._replace(chosen=None)
        played = play(setting, rounds, np.stack(last_two, axis=1), index * len(toys) + toy)
    return report_of([case_of(warp, setting, [played])], played.alone)


def prove_verifier(
    verifier: Verifier,
    *,
    warps: Sequence[Mapping[str, Any]],
    monitor: Monitor | None = None,
    lengths: Sequence[int] = LENGTHS,
) -> RoundsReport:
    """`prove_together` for a verifier with drafts of up to 0, 1, ... tokens; one case each, in the order of `lengths`.

    Drafts have all lengths up to that. Without drafts (plain decoding, passes of one token) the target decides alone.
    """
    reports = []
    for length in lengths:
        size: dict[str, Any] = {"prompts": 8, "rounds": 2} if length < 5 else {"prompts": 1, "rounds": 1}
        report = prove_together(
            uneven(), verifier, warps=warps, monitor=monitor, max_draft_length=length, toys=SMALL, **size
        )
        reports.append(report)
    return report_of([report.cases[0] for report in reports], all(report.alone for report in reports))


class Turn(NamedTuple):
    """State of `in_turn`."""

    draft_length: Array  # [B] int32, of this round
    played: Array  # [B] int32, rounds


@strategy
def in_turn(longest: int = 5) -> StoppingPolicy:
    """All rows of a batch draft `longest` tokens, then none, one less, one, and so on, for passes of all widths."""
    lengths = sum(([longest - k, k] for k in range(longest // 2 + 1)), [])[: longest + 1]

    def init(batch: int) -> Turn:
        return Turn(per_row(batch, longest, "longest", dtype=np.int32), per_row(batch, 0, "played", dtype=np.int32))

    def update(state: Turn, draft: Any, result: Any) -> Turn:
        played = state.played + 1
        return Turn(jnp.array(lengths, jnp.int32)[played % len(lengths)], played)

    return static().replace(init=init, update=update)


@strategy
def uneven() -> StoppingPolicy:
    """Drafts nothing in some rounds, and stops after token 0, so that a batch has drafts of all lengths."""

    def begin(state: Any, context: Any) -> Any:
        return context.emitted % 3 != 2, state

    def proceed(state: Any, distribution: Any, token: Any, drafted: Any, context: Any) -> Any:
        return jnp.not_equal(token, 0), state

    return static().replace(begin=begin, proceed=proceed)
