"""Decodes with specdec_jax, as every other side does: in a process of its own, a request a line.

python -m experiments.lib.peer_sides.own_side TARGET DRAFTER DTYPE DRAFTS
"""

import json
import sys

from experiments.lib.peer_sides.peak_memory import peak
from specdec_jax.compilation_cache import enable
from specdec_jax.text.generation import Request, decode, prepare
from specdec_jax.text.pair import measured_pair
from specdec_jax.text.sampling_params import SamplingParams
from specdec_jax.text.strategies import choose


def main() -> int:
    """Answers requests until there are no more. DRAFTS: `plain`, or the policy's words."""
    target, drafter, dtype, words = sys.argv[1:]
    enable()
    base = peak()
    drafting = {} if words == "plain" else {"policy": choose("policy", words)}
    pair = measured_pair(target, None if words == "plain" else drafter, dtype=dtype, **drafting)
    print(json.dumps({"ready": "specdec_jax"}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        sampling = SamplingParams(
            max_new_tokens=asked["new"], temperature=asked["temperature"], seed=asked["seed"], stop_ids=()
        )
        made = prepare(pair, ["x"], sampling, chat=False, slots=asked["slots"])
        result = decode(pair, Request([asked["ids"]], made.options)).results[0]
        found = {
            "tokens": result.tokens,
            "seconds": result.seconds + result.prefill_seconds,
            "passes": result.statistics["num_rounds"],
            "peak_kb": peak(),
            "base_kb": base,
        }
        print(json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
