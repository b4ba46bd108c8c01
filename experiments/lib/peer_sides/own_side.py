"""Decodes with specdec_jax in a separate process, as the other sides do: one request per line.

python -m experiments.lib.peer_sides.own_side TARGET DRAFTER DTYPE DRAFTS

DRAFTS: `plain`, or the policy's words.
"""

import sys
from typing import Any

from experiments.lib.peer_sides.serving import peak, serve
from specdec_jax.compilation_cache import enable
from specdec_jax.text.generation import Request, decode, prepare
from specdec_jax.text.pair import measured_pair
from specdec_jax.text.sampling_params import SamplingParams
from specdec_jax.text.strategies import choose


def main() -> None:
    """Answers requests until there are no more."""
    target, drafter, dtype, words = sys.argv[1:]
    enable()
    base = peak()
    drafting = {} if words == "plain" else {"policy": choose("policy", words)}
    pair = measured_pair(target, None if words == "plain" else drafter, dtype=dtype, **drafting)

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        options = {"max_new_tokens": request["new"], "temperature": request["temperature"], "seed": request["seed"]}
        made = prepare(pair, ["x"], SamplingParams(**options, stop_ids=()), chat=False, slots=request["slots"])
        result = decode(pair, Request([request["ids"]], made.options)).results[0]
        seconds = result.seconds + result.prefill_seconds
        return {"tokens": result.tokens, "seconds": seconds, "passes": result.statistics["num_rounds"]}

    serve("specdec_jax", answer, base)


if __name__ == "__main__":
    main()
