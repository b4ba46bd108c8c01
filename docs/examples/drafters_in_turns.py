"""Are several drafters, chosen per round, faster than each alone? A replay of traces of the same texts.

Command:   PYTHONPATH=. python docs/examples/drafters_in_turns.py COSTS.json TRACE.npz=C TRACE.npz=C [--follow 3]
           (traces of `experiments.record`, one a drafter, with the same texts; C is the cost of a drafter's pass in
           target passes; `--follow n` decodes n texts one after another as if they were one)
Time:      a minute on two cores
Expected:  docs/drafters.md, "Several at once"

`survival` decides when to stop. A drafter that was idle catches up, 16 tokens a pass of 1.5 times its cost.
"""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.costs.cost_model import load_cost_model
from specdec_jax.decoding.draft_loop import start_rows, step
from specdec_jax.drafters.multi_drafter import HOPED, MultiDrafterState, expected_rates, learnt
from specdec_jax.replay.trace import Trace, load_trace
from specdec_jax.stopping import survival
from specdec_jax.types import Distribution, Draft, RoundContext, VerificationResult, Warp

UNREAD: Any = None  # fields that no rule here reads
LONGEST, CATCH_UP, CATCH_UP_COST = 7, 16, 1.5


def chains(trace: Trace) -> tuple[np.ndarray, np.ndarray]:
    """Distributions [N, T+1, K, F] of a round that begins at each position, and its accepted drafts [N, T+1]."""
    run = np.minimum(trace.accepted_runs(), LONGEST)
    if trace.chains is not None:
        return trace.chains[:, :, :LONGEST], run
    texts, starts, place = np.ogrid[: len(run), : run.shape[1], :LONGEST]
    along = trace.path[texts, np.minimum(starts + place, run.shape[1] - 1)]
    end = np.minimum(starts + run[:, :, None], run.shape[1] - 1)
    after = trace.tails[trace.tail_of[texts, end], np.maximum(place - run[:, :, None], 0)]
    return np.where((place < run[:, :, None])[..., None], along, after), run


def speeds(traces: list[Trace], cost: np.ndarray, passes: np.ndarray, follow: int, always: int | None) -> np.ndarray:
    """Tokens, time, passes of catching up, and rounds of each drafter, [rows, 3 + N]; `always` one, or None."""
    policy, rows, count = survival(), traces[0].num_texts // follow, len(traces)
    seen, runs = (jnp.asarray(np.stack(leaf)) for leaf in zip(*map(chains, traces), strict=True))
    limit, length, temperature = (jnp.asarray(getattr(traces[0], name)) for name in ("limit", "length", "temperature"))
    price, verify, here = jnp.asarray(cost, jnp.float32), jnp.asarray(passes, jnp.float32), jnp.arange(rows)
    prior, zero = [[number] * count for number in HOPED[1]], jnp.zeros((rows,), jnp.int32)
    begun = policy.init(rows, drafter_cost=cost[0], verification_times=passes)
    last = here * follow + follow - 1

    def one_round(carry: tuple) -> tuple:
        text, at, before, done, state, shares, informed, counts = carry
        chosen = jnp.argmax(expected_rates(shares, price, LONGEST), axis=1).astype(jnp.int32)
        drafter = chosen if always is None else jnp.full_like(chosen, always)
        budget = jnp.where(done, 0, jnp.clip(limit[text] - at - 1, 0, LONGEST))
        warp = Warp(temperature[text], UNREAD, UNREAD, UNREAD)
        context = RoundContext(at, at, budget, ~done, zero, warp, None, (price / price[0])[drafter])
        going, state = start_rows(policy, state, context, context.alive)
        drafted, made = zero, zero
        for place in range(LONGEST):
            entropy, largest, margin, raw, raw_largest, _ = jnp.moveaxis(seen[drafter, text, at, place], -1, 0)
            made, known = made + going, Distribution(UNREAD, zero, entropy, largest, margin, raw, raw_largest)
            _, drafted, going, state = step(policy, state, context, going, drafted, known, zero)
        accepted = jnp.minimum(runs[drafter, text, at], drafted)
        draft = Draft(jnp.zeros((rows, LONGEST), jnp.int32), None, jnp.zeros((rows, LONGEST), bool), drafted)
        state = policy.update(state, draft, VerificationResult(draft.tokens, accepted + 1))
        emitted = jnp.where(done, 0, jnp.minimum(accepted + 1, length[text] - at))
        start = before + at
        shares = shares._replace(drafter=drafter, drafted=drafted, length=start)
        shares = learnt(shares, start + emitted, prior, 0.98)
        backlog = start - 1 - informed[here, drafter]
        fed = jnp.where((made > 0) & (backlog > 1), -(-backlog // CATCH_UP), 0)
        informed = informed.at[here, drafter].set(jnp.where(made > 0, start + emitted, informed[here, drafter]))
        time = jnp.where(done, 0.0, verify[drafted] + price[drafter] * (made + CATCH_UP_COST * fed))
        by_drafter = [~done & (drafter == index) for index in range(count)]
        counts = counts + jnp.stack([emitted, time, fed * ~done, *by_drafter], axis=1)
        at, ended = at + emitted, at + emitted >= length[text]
        more = ended & (text < last)
        before, at = jnp.where(more, before + at, before), jnp.where(more, 0, jnp.minimum(at, length[text]))
        return text + more, at, before, ended & ~more, state, shares, informed, counts

    accepted, verified = (jnp.tile(jnp.array([each]), (rows, 1)) for each in prior)
    shares = MultiDrafterState((), accepted, verified, zero, zero, zero)
    state, none = jax.tree.map(jnp.asarray, begun), jnp.zeros((rows, count), jnp.int32)
    carry = here * follow, zero, zero, zero > 0, state, shares, none, jnp.zeros((rows, 3 + count))
    played = jax.jit(lambda carry: jax.lax.while_loop(lambda carry: ~jnp.all(carry[3]), one_round, carry))
    return np.asarray(played(carry)[-1])


def main(costs: str, *arguments: str) -> None:
    """Prints the speed of each drafter alone, of both in turns, and of the best one for each text."""
    follow = int(arguments[-1]) if "--follow" in arguments else 1
    pairs = [argument.rsplit("=", 1) for argument in arguments if "=" in argument]
    traces = [load_trace(path) for path, _ in pairs]
    passes = load_cost_model(costs).verification_times(LONGEST)
    assert all((trace.tokens == traces[0].tokens).all() for trace in traces), "traces of other texts"
    cost, best = np.array([float(c) for _, c in pairs]), []
    for always in [*range(len(pairs)), None]:
        counts = speeds(traces, cost, passes, follow, always)
        name = "in turns" if always is None else pairs[always][0]
        best += [] if always is None else [counts[:, 1]]
        total = counts.sum(axis=0)
        print(
            f"{total[0] / total[1]:.3f}  {name}, rounds {total[3:].astype(int)}, passes of catching up {total[2]:.0f}"
        )
    print(f"{total[0] / np.min(best, axis=0).sum():.3f}  the better one of each text")


if __name__ == "__main__":
    main(*sys.argv[1:])
