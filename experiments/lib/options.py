"""Options that several experiments take, as dataclasses to inherit from: each is called and explained alike everywhere.

What an experiment inherits stands before its own options in its help; one of another default is set again there.
"""

from dataclasses import dataclass

from rich.console import Console

from specdec_jax.compilation_cache import enable
from specdec_jax.costs.store import say
from specdec_jax.decoding.cache_feed import check_reads
from specdec_jax.loading import LoadedModel, download, for_target, load_pair, refuse_encoders
from specdec_jax.text.options import ModelNames

LoadedPair = tuple[LoadedModel, LoadedModel]  # target and drafter


@dataclass(frozen=True)
class Output:
    """Where it writes."""

    out: str | None = None
    """Run folder; none: runs/<experiment>-<time>."""


@dataclass(frozen=True)
class Smoke:
    """Whether it is a trial."""

    smoke: bool = False
    """Made-up traces or tiny random models, and little of them: shows that it runs, nothing more."""


@dataclass(frozen=True)
class Models(ModelNames):
    """A pair of models by name."""

    drafter: str = "smollm2-drafter"
    """As target."""


@dataclass(frozen=True)
class Served(Models):
    """A pair of models as served."""

    dtype: str = "bfloat16"
    """Dtype of both models: bfloat16, float16, float32 or int8."""

    def load(self, console: Console, encoders: bool = False) -> LoadedPair:
        """Target and drafter, and the compilation cache switched on; models with an encoder only where they are served.

        Raises:
            ValueError, FileNotFoundError: no such model, vocabularies that cannot be joined, or an encoder.
        """
        if not encoders:
            refuse_encoders("this experiment", self.target, self.drafter)
        enable()
        download(self.target, self.drafter)
        with console.status("Loading the models"):
            target, drafter = load_pair(self.target, self.drafter, self.dtype)
        drafter = for_target(target, drafter, say)
        check_reads(target.model, drafter.model)
        return target, drafter
