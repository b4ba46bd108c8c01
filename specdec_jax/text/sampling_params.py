"""Sampling parameters: how a text is sampled and when it ends, for all commands and functions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SamplingParams:
    """The sampling parameters of a request. The module imports nothing slow, because --help needs these fields.

    A JAX key as `seed` becomes its integer: `jax.random.key(7)` is 7.

    Raises:
        ValueError: a value out of range.
    """

    max_new_tokens: int = 128
    """Most tokens to decode."""
    temperature: float = 0.0
    """0 is greedy: always the target's most probable token."""
    top_k: int = 0
    """Keep the k most probable tokens; 0 is off."""
    top_p: float = 1.0
    """Keep the most probable tokens up to this mass, in (0, 1]; 1 is off."""
    min_p: float = 0.0
    """Keep tokens of at least this share of the largest probability; 0 is off."""
    seed: int = 0
    """The same seed and prompt give the same tokens. Row b of a batch has seed + b."""
    stop: str | Sequence[str] = ()
    """Strings that end the text and are not printed."""
    stop_ids: Sequence[int] | None = None
    """Tokens that end the text; none: the target's own."""

    def __post_init__(self) -> None:
        _at_least("max_new_tokens", self.max_new_tokens, 1)
        _within("temperature", self.temperature, 0.0, float("inf"))
        _at_least("top_k", self.top_k, 0)
        _within("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _within("min_p", self.min_p, 0.0, 1.0)
        if hasattr(self.seed, "sharding"):  # a jax array
            from specdec_jax.decoding.sampling import seeds_of

            object.__setattr__(self, "seed", seeds_of(self.seed, 1).tolist())
        _at_least("seed", self.seed, 0)
        if self.seed >= 2**32:
            raise ValueError(f"seed must be below 2**32, got {self.seed!r}")
        if not all(self.stop_strings):
            raise ValueError(f"a stop string is empty: {self.stop_strings!r}")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple; a single string is allowed."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


def _at_least(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ValueError(f"{name} must be a whole number, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def _within(name: str, value: Any, low: float, high: float, open_low: bool = False) -> None:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} must be a number, got {value!r}") from None
    inside = (low < number if open_low else low <= number) and number <= high and number < float("inf")
    if not inside:
        left, right = "(" if open_low else "[", ")" if high == float("inf") else "]"
        raise ValueError(f"{name} must lie in {left}{low:g}, {high:g}{right}, got {value!r}")


def check_sampling(config: Any) -> None:
    """Raises ValueError if one of `temperatures`, top_k, top_p, min_p or seed is out of range.

    Only fields that `config` has are checked.
    """
    temperatures = getattr(config, "temperatures", (0.0,))
    if not temperatures or not all(0 <= temperature < float("inf") for temperature in temperatures):
        raise ValueError(f"temperatures must be one or more numbers of 0 or more, got {temperatures!r}")
    names = ("top_k", "top_p", "min_p", "seed")
    SamplingParams(**{name: getattr(config, name) for name in names if hasattr(config, name)})
