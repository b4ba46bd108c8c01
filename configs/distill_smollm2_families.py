"""Does the entropy criterion hold across architectures? Drafters of three families for SmolLM2, on equal data.

Command:   python -m experiments.distill configs/distill_smollm2_families.py --name families-llama
           python -m experiments.distill configs/distill_smollm2_families.py --name families-gpt2 --shape.family gpt2
           python -m experiments.distill configs/distill_smollm2_families.py --name families-gpt-neox \
               --shape.family gpt_neox
           (their data: copy or link runs/distill-smollm2/data to runs/families-.../data, or run all stages once)
Hardware:  2 x86 cores, 8 GB of memory
Time:      45 minutes of training each, on the data of configs/distill_smollm2.py
Expected:  docs/audit.md has what smaller ones made of less data; these are not measured

All start from the target's projected embedding: an induction circuit is written into llamas alone. Heads have keys of
their own, as in GPT-2 and GPT-NeoX; --shape.hidden 1152 gives those two as many weights a layer as the llama has.
"""

import dataclasses

from configs.distill_smollm2 import config as small
from specdec_jax.distillation.initial import Shape

config = dataclasses.replace(
    small,
    name="families-llama",
    shape=Shape(layers=4, width=224, heads=4, kv_heads=4, head_dim=56, hidden=768, init="projection"),
)
