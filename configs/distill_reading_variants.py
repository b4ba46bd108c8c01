"""How many drafts of a round should a reading drafter be trained on, from the same seconds of training?

Command:   python -m experiments.distill configs/distill_smollm2_reading.py --stage write --tokens 240000
           python -m experiments.distill compare configs/distill_reading_variants.py
Hardware:  2 x86 cores, 16 GB of memory
Time:      10 minutes of writing, eight of training a variant and two of compiling and judging
Expected:  docs/distillation.md, "Drafters that read the target"
"""

import dataclasses

from configs.base_distillation import VariantsConfig
from configs.distill_smollm2_reading import config as base

config = VariantsConfig(
    base=base,
    seconds=480.0,
    texts=60,
    data="runs/distill-smollm2-reading/data",
    out="runs/distill-reading-variants",
    variants={f"{steps} drafts": {"unroll": dataclasses.replace(base.unroll, steps=steps)} for steps in (2, 3, 4)},
)
