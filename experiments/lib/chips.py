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
    topologies: dict[int, str]
    """Slices that the compiler takes, by how many chips they have; a program is compiled for the first of them."""
    bandwidth: float
    """Bandwidth of its memory, bytes a second."""
    memory: float
    """Bytes."""
    clock: float = 0.0
    """Hz, of a TPU's cycles."""

    @property
    def packages(self) -> str:
        """The requirements file whose environment compiles for it."""
        return "requirements-tpu.txt" if self.platform == "tpu" else "requirements-gpu.txt"

    def devices(self, count: int) -> list[Any]:
        """Those of the smallest slice with so many, for shardings of what is compiled. Needs that environment.

        Raises ValueError where no slice has as many.
        """
        from jax.experimental import topologies

        sizes = [size for size in sorted(self.topologies) if size >= count]
        if not sizes:
            raise ValueError(
                f"{count} chips of {self.name} are more than {max(self.topologies)}, the most that is served"
            )
        topology = self.topologies[sizes[0]]
        options: dict[str, Any] = {"topology_name": topology}
        if self.platform == "cuda":
            target = (TARGETS / f"{self.name}.txtpb").read_text(encoding="utf-8")
            options = {"target_config": target, "topology": topology}
        return list(topologies.get_topology_desc(platform=self.platform, **options).devices)


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("tpu-v5e", "tpu", {4: "v5e:2x2", 8: "v5e:2x4", 16: "v5e:4x4"}, 819e9, 16e9, 1.5e9),
        Chip("tpu-v5p", "tpu", {4: "v5p:2x2x1", 8: "v5p:2x2x2"}, 2765e9, 95e9, 1.75e9),
        Chip("tpu-v6e", "tpu", {4: "v6e:2x2", 8: "v6e:2x4", 16: "v6e:4x4"}, 1640e9, 32e9, 1.75e9),
        Chip("h100", "cuda", {1: "1x1x1", 8: "1x1x8"}, 3352e9, 85e9),
        Chip("b200", "cuda", {1: "1x1x1", 8: "1x1x8"}, 7672e9, 192e9),
    )
}
