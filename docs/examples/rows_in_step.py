"""How fast are rows of a batch that wait for each other, by rules that decide per row and for the whole batch?

Command:   PYTHONPATH=. python docs/examples/rows_in_step.py TRACE.npz [TRACE.npz ...]
           (traces of `experiments.record` with a drafter that reads its target)
Time:      two minutes a trace on two cores
Expected:  docs/batches.md, "Rows wait for each other"

Texts of the trace are drawn as rows of a batch, which draft in step until the first of them is done. A round takes the
pass that verifies the longest draft, and the most drafter passes of any row. Every rule has the same batches.
"""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.costs.cost_model import CostModel, cost_model
from specdec_jax.decoding.draft_loop import start_rows, step
from specdec_jax.replay.trace import Trace, load_trace
from specdec_jax.stopping import static, survival
from specdec_jax.types import Array, Distribution, Draft, RoundContext, StoppingPolicy, VerificationResult, Warp

UNREAD: Any = None  # fields that no rule here reads
LONGEST, BATCHES = 7, 200
MACHINES = (  # the first two as measured for SmolLM2 and its reading drafter, bfloat16, two cores with AVX2
    ("two cores", 2, cost_model(0.096, {1: 1, 2: 1.25, 4: 2.39, 6: 3.16, 8: 4.14})),
    ("two cores", 4, cost_model(0.153, {1: 1, 2: 1.68, 4: 2.85, 6: 4.15, 8: 5.68})),
    ("another machine", 4, cost_model(0.077, {1: 1, 2: 1.37, 4: 2.04, 6: 2.48, 8: 3.1})),
    ("1 % a token", 4, cost_model(0.1, {width: 0.99 + 0.01 * width for width in range(1, 9)})),
    ("2 % a token", 16, cost_model(0.1, {width: 0.98 + 0.02 * width for width in range(1, 9)})),
)
RULES = {"survival": survival(), "together": survival(together=True)}
RULES |= {f"static {length}": static(draft_length=length) for length in (1, 2, 3, 5)}


def speed_up(trace: Trace, policy: StoppingPolicy, rows: int, costs: CostModel) -> float:
    """Tokens per time over plain decoding of the same batch, for BATCHES batches of so many texts of the trace."""
    rng, passes = np.random.default_rng(0), jnp.asarray(costs.pass_times(LONGEST) / costs.plain_pass, jnp.float32)
    replace = rows > trace.num_texts
    texts = jnp.asarray(np.stack([rng.choice(trace.num_texts, rows, replace=replace) for _ in range(BATCHES)]))
    names = {"drafter_cost": costs.ratio, "verification_times": np.asarray(passes)}
    begun = policy.init(rows, **{name: value for name, value in names.items() if name in policy.hyperparameters})
    chains, run, length = (jnp.asarray(leaf) for leaf in (trace.chains, trace.run, trace.length))
    limit, temperature = jnp.asarray(trace.limit), jnp.asarray(trace.temperature)

    def one_round(text: Array, at: Array, state: Any) -> tuple[Any, ...]:
        zero = jnp.zeros_like(at)
        budget = jnp.clip(limit[text] - at - 1, 0, LONGEST)
        warp = Warp(temperature[text], UNREAD, UNREAD, UNREAD)
        context = RoundContext(at, at, budget, at >= 0, zero, warp, None)
        going, state = start_rows(policy, state, context, context.alive)
        drafted, made = zero, zero
        for place in range(LONGEST):
            entropy, largest, margin, raw_entropy, raw_largest, _ = jnp.moveaxis(chains[text, at, place], -1, 0)
            seen = Distribution(UNREAD, zero, entropy, largest, margin, raw_entropy, raw_largest)
            made = made + going
            _, drafted, going, state = step(policy, state, context, going, drafted, seen, zero)
        accepted = jnp.minimum(run[text, at], drafted)
        draft = Draft(jnp.zeros((rows, LONGEST), jnp.int32), None, jnp.zeros((rows, LONGEST), bool), drafted)
        state = policy.update(state, draft, VerificationResult(draft.tokens, accepted + 1))
        emitted = jnp.minimum(accepted + 1, length[text] - at)
        return at + emitted, state, jnp.sum(emitted), passes[jnp.max(drafted)] + costs.ratio * jnp.max(made)

    def whole(text: Array) -> tuple[Array, Array]:
        def body(carry: tuple) -> tuple:
            at, state, tokens, time = carry
            at, state, emitted, spent = one_round(text, at, state)
            return at, state, tokens + emitted, time + spent

        carry = jnp.zeros((rows,), jnp.int32), jax.tree.map(jnp.asarray, begun), jnp.int32(0), jnp.float32(0)
        return jax.lax.while_loop(lambda carry: jnp.all(carry[0] < length[text]), body, carry)[2:]

    tokens, time = jax.jit(jax.vmap(whole))(texts)
    return float(tokens.sum() / time.sum()) / rows


def main(*paths: str) -> None:
    """Prints a table of speed-ups for each trace."""
    for path in paths:
        trace = load_trace(path)
        if trace.chains is None:
            raise SystemExit(f"{path} has no chains: record it with a drafter that reads its target")
        print(f"\n{path}, {trace.num_texts} texts\n\n| machine, rows | " + " | ".join(RULES) + " |")
        print("| --- |" + " ---: |" * len(RULES))
        for name, rows, costs in MACHINES:
            cells = [f"{speed_up(trace, policy, rows, costs):.2f}" for policy in RULES.values()]
            print(f"| {name}, {rows} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
