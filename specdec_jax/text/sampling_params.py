"""Sampling parameters: how a text is sampled and when it ends, for all commands and functions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from specdec_jax.ranges import Between, check_fields
from specdec_jax.strategy import named_call

NewTokens = Annotated[int, Between(1)]
Temperature = Annotated[float, Between(0)]
Temperatures = Annotated[tuple[float, ...], Between(0)]
TopK = Annotated[int, Between(0, 2**31 - 1)]
TopP = Annotated[float, Between(0, 1, open="low")]
MinP = Annotated[float, Between(0, 1)]
Seed = Annotated[int, Between(0, 2**32 - 1)]


@dataclass(frozen=True)
class SamplingParams:
    """The sampling parameters of a request. The module imports nothing slow, because --help needs these fields.

    A JAX key as `seed` becomes its integer: `jax.random.key(7)` is 7.

    Raises:
        ValueError: a value out of range.
    """

    max_new_tokens: NewTokens = 128
    """Most tokens to decode."""
    temperature: Temperature = 0.0
    """0 is greedy: always the target's most probable token."""
    top_k: TopK = 0
    """Keep the k most probable tokens; 0 is off."""
    top_p: TopP = 1.0
    """Keep the most probable tokens up to this mass, in (0, 1]; 1 is off."""
    min_p: MinP = 0.0
    """Keep tokens of at least this share of the largest probability; 0 is off."""
    seed: Seed = 0
    """Gives the same tokens with the same prompt and draft lengths, hence costs (`--costs FILE`); row b: seed + b."""
    stop: str | Sequence[str] = ()
    """Strings that end the text and are not printed."""
    stop_ids: Sequence[int] | None = None
    """Tokens that end the text; none: the target's own."""

    def __post_init__(self) -> None:
        if hasattr(self.seed, "sharding"):  # a jax array
            from specdec_jax.decoding.sampling import seeds_of

            object.__setattr__(self, "seed", seeds_of(self.seed, 1).tolist())
        check_fields(self)
        if not all(self.stop_strings):
            raise ValueError(f"a stop string is empty: {self.stop_strings!r}")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple; a single string is allowed."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


SamplingParams.__init__ = named_call("SamplingParams", SamplingParams.__init__)  # a wrong keyword is one sentence
