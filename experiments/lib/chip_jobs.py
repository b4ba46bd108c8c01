"""A program to compile for a chip, as one process tells another."""

from dataclasses import asdict, dataclass

from experiments.lib.chips import CHIPS

COMMAND = "experiments.lib.chip_compile"


@dataclass(frozen=True)
class Job:
    """What to compile, and the folder for the program's text, the compiler's dump and facts.json."""

    chip: str
    pair: str
    program: str
    out: str
    batch: int = 1
    slots: int = 512
    max_draft_length: int = 7
    one_graph: bool = True
    """On a GPU: compile as the decoder does there, with loops in command buffers."""
    mesh: str = "data=1,model=1"
    """Of how many chips, as `--mesh` elsewhere."""
    int8: bool = False
    """The matrices of both models in eight bits."""

    def arguments(self) -> list[str]:
        """For COMMAND's command line."""
        words = []
        for name, value in asdict(self).items():
            option = name.replace("_", "-")
            if isinstance(value, bool):
                words.append(f"--{option}" if value else f"--no-{option}")
            else:
                words += [f"--{option}", str(value)]
        return words


def environment(job: Job) -> dict[str, str]:
    """What the process needs before jax starts."""
    # The lock is for those who run on a TPU; one that a killed process left would stop every compilation after it.
    found = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    if CHIPS[job.chip].platform == "cuda":
        flags = ["--xla_gpu_autotune_level=0", f"--xla_dump_to={job.out}/dump", "--xla_dump_hlo_module_re=.*"]
        found["XLA_FLAGS"] = " ".join(flags)
    return found
