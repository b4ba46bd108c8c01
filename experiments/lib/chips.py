"""Accelerators that programs are compiled for without one: their names, what is publicly known of them, and topologies.

A TPU's clock is not published. Here it is the public peak of bfloat16 products over the operations a cycle that the
compiler itself estimates for a large product (131,072 on v5e, 262,144 on v5p, 524,288 on v6e, to within 4 to 13 %).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

TARGETS = Path(__file__).resolve().parents[2] / "configs" / "chips"


@dataclass(frozen=True)
class Chip:
    """A kind of accelerator. Sources: Google Cloud's TPU pages; NVIDIA's data sheets (configs/chips/*.txtpb)."""

    name: str
    platform: str
    """tpu or cuda."""
    topology: str
    """The smallest slice that the compiler takes; programs are compiled for its first chip."""
    bandwidth: float
    """Of its memory, bytes a second."""
    memory: float
    """Bytes."""
    clock: float = 0.0
    """Hz, of a TPU's cycles."""

    @property
    def packages(self) -> str:
        """The requirements file whose environment compiles for it."""
        return "requirements-tpu.txt" if self.platform == "tpu" else "requirements-gpu.txt"

    def device(self) -> Any:
        """Its first device, for shardings of what is compiled. Needs that environment."""
        from jax.experimental import topologies

        options: dict[str, Any] = {"topology_name": self.topology}
        if self.platform == "cuda":
            target = (TARGETS / f"{self.name}.txtpb").read_text(encoding="utf-8")
            options = {"target_config": target, "topology": self.topology}
        return topologies.get_topology_desc(platform=self.platform, **options).devices[0]


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("tpu-v5e", "tpu", "v5e:2x2", 819e9, 16e9, 1.5e9),
        Chip("tpu-v5p", "tpu", "v5p:2x2x1", 2765e9, 95e9, 1.75e9),
        Chip("tpu-v6e", "tpu", "v6e:2x2", 1640e9, 32e9, 1.75e9),
        Chip("h100", "cuda", "1x1x1", 3352e9, 85e9),
        Chip("b200", "cuda", "1x1x1", 7672e9, 192e9),
    )
}
