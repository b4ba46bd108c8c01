"""How good does a drafter that reads SmolLM2-135M-Instruct get with twenty times the data, on one GPU?

Command:   mkdir runs/before
           W=specdec_jax/weights/smollm2-drafter-reading; git show f13c173:$W/drafter.gguf > runs/before/drafter.gguf
           python -m experiments.distill configs/distill_smollm2_gpu.py
           mkdir runs/distill-smollm2-gpu-end; ln -s ../distill-smollm2-gpu/data runs/distill-smollm2-gpu-end/
           python -m experiments.distill configs/distill_smollm2_gpu_end.py --stage train --stage judge
           (with the texts that docs/distillation.md names in runs/texts; without, descriptions of packages serve)
Hardware:  one GPU; measured on an H200 (141 GB) with 16 CPU cores
Time:      four minutes of writing there by three processes with seeds 21 to 23, whose shards were put into one folder
           (this command writes alone and takes longer), three of training, one for every 131 steps of the end; a minute
           of compiling before each
Expected:  greedy agreement on the shard held out: 0.674 before, 0.713 after this config, 0.733 after two ends of 131
           steps. The built-in smollm2-drafter-reading is the result

The target writes without labels (labels=0); every training step runs it for its distributions and hidden states.
"""

import dataclasses

from configs.distill_smollm2_reading import config as reading
from specdec_jax.distillation.batches import Packing
from specdec_jax.distillation.conversations import Pool
from specdec_jax.distillation.loop import Intervals
from specdec_jax.distillation.training import Schedule
from specdec_jax.distillation.unrolled import Unroll

config = dataclasses.replace(
    reading,
    name="distill-smollm2-gpu",
    tokens=26_500_000,
    short=Pool(2048, 448, 768),
    long=Pool(640, 1536, 1280),
    cycle=("short", "long"),
    labels=0,
    hidden_layers=(),
    start_from="runs/before/drafter.gguf",  # the built-in drafter is the result
    packing=Packing(slots=(2048,), tokens=32768, candidates=0),
    schedule=Schedule(steps=634, rate=1e-3, warmup=100, final=1.0),  # the end lowers the rate
    unroll=Unroll(steps=4, share=0.5),
    chunk=4096,
    intervals=Intervals(save_every=250, log_every=25),
    seed=21,
)
