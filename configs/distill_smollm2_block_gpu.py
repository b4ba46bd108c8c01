"""The drafter of blocks of configs/distill_smollm2_block.py, on one GPU and the text of configs/distill_smollm2_gpu.py.

Command:   mkdir runs/distill-smollm2-block-gpu; ln -s ../distill-smollm2-gpu/data runs/distill-smollm2-block-gpu/
           python -m experiments.distill configs/distill_smollm2_block_gpu.py --stage train --stage judge
           (without that link all stages, `--stage write` first; --intervals.minutes 6 ends a call of training early)
Hardware:  one GPU; not run yet.
"""

import dataclasses

from configs.distill_smollm2_block import config as block
from configs.distill_smollm2_gpu import config as gpu
from specdec_jax.distillation.losses import lk_hybrid
from specdec_jax.distillation.training import Schedule
from specdec_jax.distillation.unrolled import Unroll

config = dataclasses.replace(
    gpu,
    name="distill-smollm2-block-gpu",
    start_from=block.start_from,
    shape=block.shape,
    schedule=Schedule(steps=800, rate=1e-3, warmup=60, final=0.02),
    unroll=Unroll(steps=4, share=0.5),
    loss=lk_hybrid(),
    seed=41,
)
