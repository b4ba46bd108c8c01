"""How long does the first value of AdaEDL's lambda matter, if lambda is carried from text to text?

Command:   PYTHONPATH=. python docs/examples/long_lambda.py TRACE.npz
           (of `experiments.record`, any pair and temperature)
Time:      a minute on two cores
Expected:  docs/audit.md, "Lambda, static and dynamic"

The texts of a trace are replayed one after the other, in random orders until TOKENS are emitted, with ten first values
of lambda (0, 0.1 ... 0.9). A text begins with the state that the rule had after the one before it. Printed: the number
of tokens after which all ten values stay within 0.01 of each other, and their range on the way. A text that comes again
has the same random outcomes again.
"""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specdec_jax.replay.rounds import first_rows, replay_pass, texts_of
from specdec_jax.replay.trace import load_trace
from specdec_jax.stopping import adaedl

STARTS, TOKENS, LONGEST, WITHIN = np.arange(10, dtype=np.float32) / 10, 64_000, 7, 0.01


def main() -> None:
    """Prints when the first values are forgotten, and the values on the way."""
    trace, policy = load_trace(sys.argv[1]), adaedl()
    rng = np.random.default_rng(0)
    orders = -(-TOKENS // int(trace.length.sum()))
    order = np.concatenate([rng.permutation(trace.num_texts) for _ in range(orders)])
    texts = texts_of(trace, np.zeros(len(STARTS)))

    def after_text(state: Any, text: Any) -> tuple[Any, Any]:
        rows = texts._replace(text=jnp.full(len(STARTS), text))
        step = lambda carry: replay_pass(policy, rows, LONGEST, *carry)  # noqa: E731
        start = first_rows(rows, state, LONGEST, 0)
        state = lax.while_loop(lambda carry: jnp.any(~carry[0].done), step, start)[0].policy
        return state, policy.threshold(state)

    begun = jax.tree.map(jnp.asarray, policy.init(len(STARTS), threshold=STARTS))
    values = np.vstack([STARTS, jax.jit(lambda begun: lax.scan(after_text, begun, jnp.asarray(order)))(begun)[1]])
    tokens = np.concatenate([[0], np.cumsum(trace.length[order])])
    last = np.flatnonzero(np.ptp(values, axis=1) > WITHIN)[-1]
    forgotten = f"after {tokens[last + 1]:,} tokens" if last + 1 < len(tokens) else f"not in {tokens[-1]:,} tokens"
    print(f"first values within {WITHIN} of each other: {forgotten}")
    for at in 1000 * 2 ** np.arange(12):
        if at <= tokens[-1]:
            now = values[np.searchsorted(tokens, at)]
            print(f"{at:>10,} tokens: lambda {now.min():.3f} to {now.max():.3f}")


if __name__ == "__main__":
    main()
