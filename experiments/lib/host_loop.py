"""The same generation with its loops in Python, as engines have that run a stopping rule outside of the program.

A round is a call that opens it, one for each draft, after which the host waits for what the rule said, and one that
verifies at the narrowest width that holds the draft.
"""

import functools
from typing import Any

import jax

from specdec_jax.decoding import Decoder, draft_loop
from specdec_jax.decoding.rounds import finish_round, narrowest, open_round
from specdec_jax.decoding.sampling import DRAFT
from specdec_jax.types import DecodeState


def on_host(decoder: Decoder) -> Decoder:
    """The decoder with a `run` whose loops the host turns. Drafters with a second source are not served."""
    parts = decoder.parts
    longest, widths = parts.drafter.max_draft_length, parts.widths

    def source(params: Any, state: DecodeState, context: Any) -> Any:
        return parts.drafter.source(params.drafter, state.drafter, state.tokens, context)

    @jax.jit
    def begin(params: Any, state: DecodeState) -> Any:
        context, chance, opened, log_q = open_round(parts, params, state)
        return chance, *draft_loop.opened(opened, parts.policy, state.policy, context, longest, log_q)

    @functools.partial(jax.jit, donate_argnums=4)
    def draft(params: Any, state: DecodeState, chance: Any, context: Any, loop: Any) -> Any:
        opened = source(params, state, context)
        return draft_loop.draft_one(opened, parts.policy, context, lambda step: chance[:, step, DRAFT], loop)

    @functools.partial(jax.jit, static_argnums=5, donate_argnums=1)
    def finish(params: Any, state: DecodeState, chance: Any, context: Any, drafted: Any, width: int) -> DecodeState:
        narrow, opened = parts._replace(widths=(width,)), source(params, state, context)
        return finish_round(narrow, params, state, context, chance, opened, drafted)

    def run(params: Any, state: DecodeState, rounds: int | None = None, leave: int | None = None) -> DecodeState:
        played = 0
        while state.done.sum() < (leave or len(state.done)) and played != rounds:
            chance, context, loop = begin(params, state)
            while loop.going.any():
                loop = draft(params, state, chance, context, loop)
            width = widths[int(narrowest(widths, loop.drafted.length))]
            state, played = finish(params, state, chance, context, loop.drafted, width), played + 1
        return state

    return decoder._replace(run=run)
