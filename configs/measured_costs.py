"""Does it pay to measure what passes cost here, or do the numbers that survival assumes do?

Command:   python -m experiments.compare configs/measured_costs.py --repeats 2
Hardware:  2 x86 cores, 4 GB of memory, nothing else running
Time:      10 minutes; interrupted, the same command with --out goes on
Expected:  docs/performance.md, "Costs of the machine at hand"

`measured` gets c and V(k) of this machine. `by-bytes` gets what `costs="estimated"` gives: the drafter's share of
the bytes that a target pass reads, and 2 % of a pass for every further token; `defaults` gets c = 0.1. All decode
with one longest draft and the same verification widths.
"""

from configs.base import CompareConfig, Method
from specdec_jax.stopping import survival

LONGEST = 7
ASSUMED = tuple(1.0 + 0.02 * drafts for drafts in range(LONGEST + 1))

config = CompareConfig(
    name="measured-costs",
    prompts="configs/prompts/demo.jsonl",
    methods=(
        Method("plain", policy=None),
        Method("measured", survival()),
        Method("by-bytes", survival(drafter_cost=0.035, verification_times=ASSUMED)),
        Method("defaults", survival(drafter_cost=0.1, verification_times=ASSUMED)),
    ),
    drafter="smollm2-drafter@8192",
    temperatures=(0.0, 0.8),
    max_new_tokens=64,
    max_draft_length=LONGEST,
)
