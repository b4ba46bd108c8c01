"""Which loss, and which beginning, makes the better drafter from the same seconds of training?

Command:   python -m experiments.distill compare configs/distill_variants.py --data runs/distill-smollm2/data
Hardware:  2 x86 cores, 8 GB of memory
Time:      half an hour: two and a half minutes of training each, and one of compiling and judging
Expected:  docs/distillation.md has the table
"""

from configs.base_distillation import VariantsConfig
from configs.distill_smollm2 import config as base
from specdec_jax.distillation.initial import Shape
from specdec_jax.distillation.losses import lk_hybrid

SIZE = {"width": 224, "heads": 4, "kv_heads": 2, "head_dim": 64, "hidden": 768}

config = VariantsConfig(
    base=base,
    seconds=150.0,
    variants={
        "induction, forward KL": {},
        "projection": {"shape": Shape(4, init="projection", **SIZE)},
        "random": {"shape": Shape(4, init="random", **SIZE)},
        "first 4 layers of the target (42 M)": {"shape": Shape(4, init="first_layers")},
        "induction, LK hybrid": {"loss": lk_hybrid()},
    },
)
