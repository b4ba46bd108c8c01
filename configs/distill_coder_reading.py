"""How good a drafter for Qwen2.5-Coder-Instruct 1.5B do two CPU cores make in an hour?

Command:   make coder; python -m experiments.distill configs/distill_coder_reading.py
Hardware:  2 x86 cores, 16 GB of memory, 4 GB of disk; measured on two of an AMD EPYC with AVX512-BF16
Time:      20 minutes of writing, 13 of training, 2 of judging
Expected:  greedy agreement 0.517 on the held-out shard; docs/drafters.md, "A drafter for Qwen2.5-Coder"

Its width is a third of the target's, and it reads three of its 28 layers. Nothing is shipped of it.
"""

import dataclasses

from configs.distill_smollm2_reading import config as reading
from specdec_jax.distillation.conversations import Pool
from specdec_jax.distillation.initial import Shape
from specdec_jax.distillation.training import Schedule

KINDS = ("demo", "code", "math", "summarise", "german", "instructions", "mixed")

config = dataclasses.replace(
    reading,
    name="distill-coder-reading",
    target="runs/coder-1.5b.gguf",
    tokens=180_000,
    held_out=tuple(f"configs/prompts/{name}.jsonl" for name in KINDS),
    short=Pool(32, 448, 512),
    long=Pool(16, 896, 1024),
    cycle=("short", "long", "short", "long", "short"),
    hidden_layers=(14, 22, 27),
    start_from=None,
    shape=Shape(
        layers=2, width=512, heads=8, kv_heads=2, head_dim=64, hidden=1536, init="induction", reads=(14, 22, 27)
    ),
    schedule=Schedule(steps=400, rate=1e-3, warmup=50),
    judge=("configs/prompts/demo.jsonl:2",),
    seed=31,
)
