"""What do the target's own first layers make of the same data? Four of them and its embedding, 42.5 M parameters.

Command:   python -m experiments.distill configs/distill_smollm2_base.py --stage train --stage judge
           (its data: copy or link runs/distill-smollm2/data to runs/distill-smollm2-base/data, or run all stages)
Hardware:  2 x86 cores, 8 GB of memory
Time:      25 minutes of training (2 s a step), 3 of judging, on the data of the default drafter
Expected:  greedy agreement 0.30 on Spec-Bench's greedy answers, 0.29 on those at 0.7: far below the default's 0.59
"""

import dataclasses

from configs.distill_smollm2 import config as small
from specdec_jax.distillation.initial import Shape
from specdec_jax.distillation.training import Schedule

config = dataclasses.replace(
    small,
    name="distill-smollm2-base",
    shape=Shape(layers=4, init="first_layers"),
    schedule=Schedule(steps=700, rate=4e-4, warmup=50),
)
