"""What is a drafter that reads its target worth: over the drafter it started from, and with which verifier?

Command:   python -m experiments.compare configs/reading_drafter.py
           (--prompts spec_bench.jsonl:4, configs/prompts/math.jsonl, ...: any prompts)
Hardware:  2 x86 cores, 4 GB of memory, nothing else running
Time:      10 minutes; interrupted, the same command with --out goes on
Expected:  docs/drafters.md has the table

Every drafter has a draft vocabulary; `survival` gets the measured cost of each.
"""

from configs.base import CompareConfig, Method
from specdec_jax.stopping import survival
from specdec_jax.verification import block

PLAIN, READING = "smollm2-drafter@8192", "smollm2-drafter-reading@8192"

config = CompareConfig(
    name="reading-drafter",
    prompts="configs/prompts/demo.jsonl",
    methods=(
        Method("plain", policy=None),
        Method("drafter", survival(), drafter=PLAIN),
        Method("reading", survival(), drafter=READING),
        Method("drafter-block", survival(), drafter=PLAIN, verifier=block()),
        Method("reading-block", survival(), drafter=READING, verifier=block()),
    ),
    temperatures=(0.0, 0.7, 1.0),
    max_new_tokens=128,
)
