"""What would trees bring where verification is flat? Rules take it to be; what counts is tokens and passes.

Command:   python -m experiments.compare configs/trees.py
Hardware:  any; only seconds depend on it, and on 2 cores they say nothing of a machine whose passes are flat
Time:      15 minutes for 12 prompts; interrupted, the same command with --out goes on
Expected:  docs/combs.md, "Trees"

A round takes 1 + c (draft length) passes there, c = 0.096, and brings the acceptance length: the ratio is the
speed-up over plain decoding.
"""

from configs.base import CompareConfig, Method
from specdec_jax.contrib.trees import survival_tree
from specdec_jax.stopping import survival

FLAT = {"drafter_cost": 0.096, "verification_times": (1.0,) * 17}

config = CompareConfig(
    name="trees",
    prompts="configs/prompts/math.jsonl",
    split="judge",
    against="survival",
    drafter="smollm2-drafter-reading@8192",
    verification_widths=(2, 4, 8, 17),
    methods=(
        Method("plain", policy=None),
        Method("survival", survival(**FLAT)),
        Method("siblings", survival_tree(siblings=3, **FLAT)),
        Method("one-expanded", survival_tree(siblings=3, expanded=1, **FLAT)),
        Method("two-expanded", survival_tree(siblings=3, expanded=2, **FLAT)),
    ),
    temperatures=(0.0, 0.7, 1.0),
    max_new_tokens=96,
    max_draft_length=7,
)
