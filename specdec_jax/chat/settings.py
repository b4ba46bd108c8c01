"""What a session decodes with, and the one check of it that needs no weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec_jax.calibrated import check_calibration
from specdec_jax.choices import Choice, choose, parse_options
from specdec_jax.generation import stop_strings
from specdec_jax.loading.load import check_dtype
from specdec_jax.options import Decoding, Drafting, Models, Rules
from specdec_jax.pairs import PHASES, Pair, build_pair, check_drafter_options
from specdec_jax.sampling import make_warp

LONGEST = 64  # most tokens drafted in a round; verification would be wider than a prefill chunk


@dataclass(frozen=True)
class Settings(Decoding, Drafting, Rules, Models):
    """Everything a command can change. A changed session has a changed copy, so what fails changes nothing."""

    phases: bool = False
    """Watch them, also where no rule reads them."""


def check(settings: Settings) -> tuple[Choice, Choice]:
    """The policy's and the verifier's Choice; refuses what needs no weights to be refused.

    Raises:
        ValueError: an unknown name, an option nobody takes, a number out of range, or a file that is no calibration.
        FileNotFoundError: there is no such calibration.
    """
    policy = _chosen("policy", settings.policy, settings.policy_options)
    verifier = _chosen("verifier", settings.verifier, settings.verifier_options)
    check_drafter_options(_drafters(settings), parse_options(settings.drafter_options))
    make_warp(1, settings.temperature, settings.top_k, settings.top_p, settings.min_p)
    check_dtype(settings.dtype)
    if settings.calibration is not None:
        check_calibration(settings.calibration)
    stop_strings(settings.stop)
    for name in ("max_draft_length", "max_new_tokens"):
        value = getattr(settings, name)
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if settings.max_draft_length > LONGEST:
        raise ValueError(f"max_draft_length must be at most {LONGEST}, got {settings.max_draft_length}")
    if verifier.strategy.greedy_only and settings.temperature > 0:
        raise ValueError(f"{settings.verifier} verification needs temperature 0, got {settings.temperature:g}")
    if not 0 <= settings.seed < 2**32:
        raise ValueError(f"seed must lie in [0, 2**32), got {settings.seed}")
    return policy, verifier


def build(settings: Settings, policy: Choice, verifier: Choice) -> Pair:
    """Loads what is not loaded yet and joins it. Equal static options give one decoder; hyperparameters compile none.

    Raises:
        ValueError, OSError: a model that is missing or damaged, or vocabularies that differ.
    """
    return build_pair(
        settings.target,
        _drafters(settings),
        drafter_options=parse_options(settings.drafter_options),
        policy=policy.strategy,
        verifier=verifier.strategy,
        monitor=PHASES if settings.phases else None,
        max_draft_length=settings.max_draft_length,
        dtype=settings.dtype,
    )


def _drafters(settings: Settings) -> Any:
    """The drafter's name, the names of several, or None."""
    names = tuple(name.strip() for name in settings.drafter.split(","))
    return None if names == ("none",) else names[0] if len(names) == 1 else names


def with_option(options: Sequence[str], key: str, value: Any) -> tuple[str, ...]:
    """The options with `key=value` in place of what was said of `key` before."""
    return (*(option for option in options if _key(option) != key), f"{key}={value}")


def option(options: Sequence[str], key: str, default: str) -> str:
    """The text of an option's value."""
    return next((given.partition("=")[2].strip() for given in options if _key(given) == key), default)


_strategies: dict[Any, Any] = {}  # by kind, name and static options


def _chosen(kind: str, name: str, options: Sequence[str]) -> Choice:
    """As `choose`, with the strategy made before for the same static options: a new one would be compiled anew."""
    choice = choose(kind, name, options)
    static_options = tuple(sorted(given for given in options if _key(given) not in choice.hyperparameters))
    edited = Path(name).expanduser().stat().st_mtime_ns if name.endswith(".py") else 0
    return choice._replace(strategy=_strategies.setdefault((kind, name, edited, static_options), choice.strategy))


def _key(given: str) -> str:
    return given.partition("=")[0].strip().replace("-", "_")
