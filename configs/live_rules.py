"""Do stopping rules rank by the clock as they rank in replays?

Command:   python -m experiments.compare configs/live_rules.py --prompts SPEC_BENCH.jsonl:12 --repeats 1
           (20 of its 240 questions, of each task alike; `python -m experiments.policies` replays the same)
Hardware:  2 x86 cores, 4 GB of memory, nothing else running
Time:      20 minutes; interrupted, the same command with --out goes on. :5 and three repeats take two hours
Expected:  total speed-up over plain, greedy / 0.7 / 1: survival 1.64 / 1.34 / 1.20, adaedl 1.32 / 1.16 / 0.96, the
           best static length 1.54 / 1.31 / 1.19 (docs/results.md, "By the clock")

Static lengths, thresholds and lambda's start are those that replays choose on configs/prompts. The survival rule is
given the costs of the machine it runs on.
"""

from configs.base import CompareConfig, Method
from specdec_jax.stopping import adaedl, at_least, cumulative_confidence, max_confidence, static, survival

LONGEST = 7
config = CompareConfig(
    name="live-rules",
    prompts="configs/prompts/demo.jsonl",
    methods=(
        Method("plain", policy=None),
        Method("static-2", static(draft_length=2)),
        Method("static-3", static(draft_length=3)),
        Method("adaedl", adaedl(threshold=0.3)),
        Method("adaedl-first", at_least(1, adaedl(threshold=0.3))),
        Method("adaedl-keep", adaedl(threshold=0.3, keep_checked_token=True)),
        Method("max-confidence-keep", max_confidence(threshold=0.5, keep_checked_token=True)),
        Method("cumulative-confidence", cumulative_confidence(threshold=0.3)),
        Method("survival", survival()),
    ),
    temperatures=(0.0, 0.7, 1.0),
    max_new_tokens=128,
    repeats=3,
    max_draft_length=LONGEST,
)
