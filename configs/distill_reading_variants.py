"""On how many drafts of a round, and with which loss, should a reading drafter be trained in the same seconds?

Command:   python -m experiments.distill configs/distill_smollm2_reading.py --stage write --tokens 90000 \\
               --short.batch 24 --long.batch 12 --out runs/distill-reading-small
           python -m experiments.distill compare configs/distill_reading_variants.py
Hardware:  2 x86 cores, 8 GB of memory; measured on two of an AMD EPYC with AVX2
Time:      6 minutes of writing, then 8 a variant
Expected:  docs/distillation.md, "Drafters that read the target": three or four, the same; `nla` and
           `lk_hybrid` accept more than the forward KL
"""

import dataclasses

from configs.base_distillation import VariantsConfig
from configs.distill_smollm2_reading import config as base
from specdec_jax.distillation.losses import forward_kl, lk_hybrid, nla

LOSSES = {"forward KL": forward_kl, "nla": nla, "lk_hybrid": lk_hybrid()}

config = VariantsConfig(
    base=base,
    seconds=300.0,
    texts=60,
    data="runs/distill-reading-small/data",
    out="runs/distill-reading-variants",
    variants={f"{steps} drafts": {"unroll": dataclasses.replace(base.unroll, steps=steps)} for steps in (2, 3, 4)}
    | {"nla": {"loss": nla}}
    | {f"{name}, seed 1": {"loss": loss, "seed": 1} for name, loss in LOSSES.items()},
)
