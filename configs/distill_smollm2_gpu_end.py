"""The end of configs/distill_smollm2_gpu.py: the rate falls, and the loss becomes the rejection rate.

Command:   in configs/distill_smollm2_gpu.py; the second end, with its data linked likewise:
           python -m experiments.distill configs/distill_smollm2_gpu_end.py --name distill-smollm2-gpu-end-2 \\
               --seed 99 --start-from runs/distill-smollm2-gpu-end/drafter --stage train --stage judge
           (the forward KL: a copy of this file without its `loss`)
           from the built-in weights with ten times the text, not run yet, every stage in sittings as in
           configs/distill_coder_reading_gpu.py: --name distill-smollm2-gpu-more --tokens 265000000 \\
               --start-from smollm2-drafter-reading --schedule.steps 6340 --schedule.warmup 100 --seed 51
Expected:  acceptance on the shard held out 0.689 before, 0.720 after 131 steps (0.703 with the forward KL), 0.722 after
           another 131 from there with seed 99; greedy agreement 0.713, 0.731 (0.728) and 0.733. The first end was
           measured with seed 21, that is, on the first batches of the run before; 22 gives another order
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
    seed=22,
)
