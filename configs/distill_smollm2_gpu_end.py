"""The end of configs/distill_smollm2_gpu.py: the rate falls, and the loss becomes the rejection rate.

Command:   in configs/distill_smollm2_gpu.py
Expected:  acceptance on the shard held out 0.689 before, 0.720 after 131 steps (0.703 with the forward KL), 0.722 after
           another 131 from there with seed 99; greedy agreement 0.713, 0.731 (0.728) and 0.733
"""

import dataclasses

from configs.distill_smollm2_gpu import config as before
from specdec_jax.distillation.losses import lk_hybrid
from specdec_jax.distillation.training import Schedule

config = dataclasses.replace(
    before,
    name="distill-smollm2-gpu-end",
    start_from="runs/distill-smollm2-gpu/drafter",
    schedule=Schedule(steps=131, rate=1e-3, warmup=20, final=0.02),
    loss=lk_hybrid(),
)
