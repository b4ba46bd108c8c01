"""Generations to time: methods in turn inside every prompt, so that a slow minute of the machine hits all of them."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from experiments.lib.prompts import Prompt
from specdec_jax.loading import LoadedModel
from specdec_jax.text.generation import encode


class Job(NamedTuple):
    """One thing to measure."""

    temperature: float
    prompt: Prompt
    repeat: int
    method: Any  # something with a name

    @property
    def key(self) -> tuple[Any, ...]:
        return self.temperature, self.prompt.id, self.repeat, self.method.name


def jobs_of(config: Any, prompts: Iterable[Prompt], methods: Sequence[Any]) -> list[Job]:
    """All of them, at the config's temperatures and so often as it repeats, in the order of measuring."""
    order = itertools.product(config.temperatures, prompts, range(config.repeats), methods)
    return [Job(*entry) for entry in order]


def longest_text(config: Any, target: LoadedModel, prompts: Iterable[Prompt], **said: Any) -> int:
    """Tokens of the longest prompt and what may follow it; `said` as `encode` takes it.

    Raises:
        ValueError: a prompt that does not fit into the target's context.
    """
    lengths = {prompt.id: len(encode(target, prompt.turns[0], **said)) for prompt in prompts}
    longest = max(lengths, key=lengths.__getitem__)
    if lengths[longest] + config.max_new_tokens > target.model.spec.context:
        raise ValueError(
            f"prompt {longest!r} of {lengths[longest]} tokens and {config.max_new_tokens} new ones exceed the context "
            f"of {config.target}, {target.model.spec.context}"
        )
    return lengths[longest] + config.max_new_tokens
