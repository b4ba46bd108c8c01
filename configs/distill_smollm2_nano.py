"""How small may a drafter be? 3.9 M parameters, embedding included, from the data of configs/distill_smollm2.py.

Command:   python -m experiments.distill configs/distill_smollm2_nano.py --stage train --stage judge
           (its data: copy or link runs/distill-smollm2/data to runs/distill-smollm2-nano/data, or run all stages)
Hardware:  2 x86 cores, 8 GB of memory
Time:      48 minutes of training beside other work; 10 of judging
Expected:  greedy agreement on Spec-Bench's greedy answers 0.489 (mean of six tasks), on those at 0.7 0.407;
           untrained it copies 0.47 of a sequence it has seen once. It is the built-in `smollm2-drafter-nano`.
"""

import dataclasses

from configs.distill_smollm2 import config as small
from specdec_jax.distillation.initial import Shape

config = dataclasses.replace(
    small,
    name="distill-smollm2-nano",
    shape=Shape(layers=4, width=72, heads=2, kv_heads=1, head_dim=64, hidden=256, init="induction", rope_theta=1e8),
)
