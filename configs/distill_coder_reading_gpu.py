"""The drafter of configs/distill_coder_reading.py on one GPU, with 50 M tokens and the loss of acceptance.

Command:   make coder; python -m experiments.distill configs/distill_coder_reading_gpu.py --stage write
           (killed after ten minutes it goes on with the same command, as does `--stage train --intervals.minutes 6`;
           then `--stage judge`, and `rank_tokens` as in docs/drafters.md)
Hardware:  one GPU with 80 GB; not run yet
Expected:  greedy agreement of at least 0.70 is the aim; 0.18 M tokens give 0.517, a doubling 0.07 (docs/drafters.md)

As configs/distill_smollm2_gpu.py the target writes without labels and is run in every training step. Its vocabulary is
three times as large, so the loss takes half as many positions at once. Steps are one pass over the text.
"""

import dataclasses

from configs.distill_coder_reading import config as coder
from configs.distill_smollm2_gpu import config as gpu
from specdec_jax.distillation.conversations import Pool
from specdec_jax.distillation.losses import lk_hybrid
from specdec_jax.distillation.training import Schedule

config = dataclasses.replace(
    coder,
    name="distill-coder-reading-gpu",
    tokens=50_000_000,
    short=Pool(1024, 448, 768),
    long=Pool(384, 1536, 1280),
    cycle=gpu.cycle,
    labels=0,
    hidden_layers=(),
    packing=gpu.packing,
    schedule=Schedule(steps=1500, rate=1e-3, warmup=100, final=0.02),
    unroll=gpu.unroll,
    loss=lk_hybrid(),
    chunk=2048,
    intervals=gpu.intervals,
    seed=33,
)
