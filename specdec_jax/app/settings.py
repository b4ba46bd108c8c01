"""The settings of a session, and their check without weights."""

import functools
from dataclasses import dataclass
from typing import Any

from specdec_jax.costs.choices import DRAFTS, costs_asked
from specdec_jax.decoding.user_code import is_users
from specdec_jax.loading.load import download
from specdec_jax.loading.precision import precision
from specdec_jax.text.calibration import check_calibration
from specdec_jax.text.options import Decoding, Drafting, Models, Rules
from specdec_jax.text.pair import PHASES, Pair, check_drafter, measured_pair, split_drafters
from specdec_jax.text.sampling_params import SamplingParams
from specdec_jax.text.strategies import choose
from specdec_jax.types import StoppingPolicy, Verifier


@dataclass(frozen=True)
class Settings(Decoding, Drafting, Rules, Models):
    """All settings that a command can change. A session replaces them by a copy, so that failures change nothing."""

    phases: bool = False
    """Watch them, also where no rule reads them."""
    log_probs: bool = False
    """Gather those of all tokens."""

    def __post_init__(self) -> None:
        SamplingParams.__post_init__(self)  # all ranges, those of other fields too

    @functools.cached_property
    def rules(self) -> tuple[StoppingPolicy, Verifier]:
        """The policy and the verifier, parsed once. Raises ValueError: an unknown name or option."""
        return choose("policy", self.policy), choose("verifier", self.verifier)


def check(settings: Settings) -> None:
    """The checks that need no weights.

    Raises ValueError: an unknown name or option, a function of a user's file that fails, a number out of range, or a
    file that is not a calibration. Raises FileNotFoundError: there is no such calibration.
    """
    policy, verifier = settings.rules
    if is_users([policy, verifier]):
        from specdec_jax.lossless import check_on_toy  # imports scipy

        check_on_toy(policy, verifier, None, DRAFTS)
    check_drafter(_drafters(settings))
    if settings.dtype != "auto":
        precision(settings.dtype)
    costs_asked(settings.costs)
    if settings.calibration is not None:
        check_calibration(settings.calibration)
    if verifier.greedy_only and settings.temperature > 0:
        raise ValueError(f"{verifier.name} verification needs temperature 0, got {settings.temperature:g}")


def download_models(settings: Settings) -> None:
    """Downloads models of the hub, before a spinner because of the progress bars. Raises ValueError, OSError."""
    download(settings.target, *split_drafters(settings.drafter))


def build(settings: Settings, **more: Any) -> Pair:
    """Loads models and builds the pair. Decoders are shared for equal static options, for any hyperparameters.

    `more` are further arguments of `measured_pair`, which override the settings. Raises ValueError, OSError: a model
    that is missing or damaged, or vocabularies that differ.
    """
    options: dict[str, Any] = {name: getattr(settings, name) for name in ("max_draft_length", "dtype", "costs")}
    options |= dict(zip(("policy", "verifier"), settings.rules, strict=True))
    options |= {"monitor": PHASES if settings.phases else None, **more}
    pair = measured_pair(settings.target, _drafters(settings), **options)
    return pair.with_log_probs() if settings.log_probs else pair


def _drafters(settings: Settings) -> Any:
    """The drafter's name, the names of several, or None."""
    names = split_drafters(settings.drafter)
    return None if names == ["none"] else names[0] if len(names) == 1 else tuple(names)
