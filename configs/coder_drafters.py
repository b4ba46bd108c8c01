"""Which drafter for Qwen2.5-Coder-Instruct 1.5B: the 0.5B model, SmolLM2-135M, or one distilled to read the target?

Command:   make coder; python -m experiments.distill configs/distill_coder_reading.py
           D=runs/distill-coder-reading; python -m experiments.distill rank_tokens --data $D/data --out $D/drafter
           python -m experiments.compare configs/coder_drafters.py
Hardware:  2 x86 cores, 12 GB of memory, nothing else running
Time:      7 minutes
Expected:  docs/drafters.md, "A drafter for Qwen2.5-Coder"
"""

from configs.base import CompareConfig, Method
from specdec_jax.stopping import survival

SMALLER, READING = "runs/coder-0.5b.gguf", "runs/distill-coder-reading/drafter@8192"

config = CompareConfig(
    name="coder-drafters",
    prompts="configs/prompts/demo.jsonl:2",
    target="runs/coder-1.5b.gguf",
    drafter=SMALLER,
    methods=(
        Method("plain", policy=None),
        Method("0.5B", survival()),
        Method("smollm2", survival(), drafter="smollm2"),  # the 39,237 tokens that both have
        Method("reading", survival(), drafter=READING),
        Method("both", survival(), drafter=(READING, SMALLER)),
    ),
    temperatures=(0.0, 0.7),
    max_new_tokens=64,
)
