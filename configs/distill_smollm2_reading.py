"""How much better does a drafter for SmolLM2-135M-Instruct get by reading the target's hidden states?

Command:   python -m experiments.distill configs/distill_smollm2_reading.py
           (with the texts that docs/distillation.md names in runs/texts; without, descriptions of packages serve)
Hardware:  2 x86 cores, 16 GB of memory, 9 GB of disk; a GPU if there is one
Time:      about 130 minutes of writing, 70 of training and 2 of judging, without AMX
Expected:  held-out greedy agreement 0.649 (0.604 before), 0.746 along the demo's greedy answers (0.673); agreement on
           what it was trained on is 0.72. configs/distill_smollm2_gpu.py goes on from it
"""

import dataclasses

from configs.distill_smollm2 import config as plain
from specdec_jax.distillation.conversations import Temperatures
from specdec_jax.distillation.loop import Intervals
from specdec_jax.distillation.training import Schedule
from specdec_jax.distillation.unrolled import Unroll

config = dataclasses.replace(
    plain,
    name="distill-smollm2-reading",
    tokens=1_330_000,
    held_out=tuple(f"configs/prompts/{name}.jsonl" for name in ("demo", "math", "code", "mixed")),
    cycle=("short", "long"),  # more documents than the plain drafter saw: summaries are where it agrees least
    temperatures=Temperatures(weights=(0.5, 0.05, 0.4, 0.05)),  # those it will be used at
    hidden_layers=(10, 16, 22, 26, 30),
    start_from="smollm2-drafter",
    shape=dataclasses.replace(plain.shape, reads=(16, 22, 26)),
    schedule=Schedule(steps=1400, rate=4e-4, warmup=50),
    unroll=Unroll(share=0.25),
    intervals=Intervals(save_every=100, log_every=20),
    validation=1,
    seed=12,
)
