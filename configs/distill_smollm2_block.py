"""How much of a reading drafter's agreement does a drafter of blocks keep, whose further drafts cost next to nothing?

Command:   python -m experiments.distill configs/distill_smollm2_block.py
           (or with the data of configs/distill_smollm2_reading.py in runs/distill-smollm2-block/data, whose hidden
           states of other layers `--stage label` replaces)
Hardware:  2 x86 cores, 16 GB of memory; configs/distill_smollm2_block_gpu.py is for a GPU
"""

import dataclasses

from configs.distill_smollm2_reading import config as reading
from specdec_jax.distillation.batches import Packing
from specdec_jax.distillation.loop import Intervals
from specdec_jax.distillation.training import Schedule
from specdec_jax.distillation.unrolled import Unroll

config = dataclasses.replace(
    reading,
    name="distill-smollm2-block",
    hidden_layers=(16, 22, 26),
    start_from="smollm2-drafter-reading",
    shape=dataclasses.replace(reading.shape, block=4),
    packing=Packing(slots=(448, 896), tokens=3584, candidates=8192),
    schedule=Schedule(steps=700, rate=6e-4, warmup=40),
    unroll=Unroll(steps=4, share=1.0),
    intervals=Intervals(save_every=50, log_every=10),
    validation=1,
    seed=31,
)
