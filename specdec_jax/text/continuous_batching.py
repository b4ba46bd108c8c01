"""Continuous batching: each row of a batch starts the next request as soon as its own is finished.

There is one compiled generation per shape: all rows of a state have the same number of cache slots, one of few sizes,
and requests are grouped by size. When no request of a size is left, smaller ones fill free rows while others run.
"""

import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import jax
import numpy as np

from specdec_jax.costs.machine import free_memory
from specdec_jax.decoding.state import readable, slots_for
from specdec_jax.drafters.multi_drafter import MultiDrafterState
from specdec_jax.meshes import bytes_of_caches, check_rows, row_groups
from specdec_jax.ranges import Between
from specdec_jax.sharding import on_host
from specdec_jax.text.generation import Generation, Prefilled, Request, end_at_stops, finish
from specdec_jax.text.pair import Pair
from specdec_jax.types import DecodeState

FEWEST_SLOTS = 128


class Size(NamedTuple):
    """The minimum size of a row for a request, one of few sizes."""

    slots: int  # cache slots
    source: int  # slots of an encoder's source; 0 without one


SHAPING = ("policy", "verifier", "monitor", "stop_ids")  # options that determine a state's shapes
LOOK_AHEAD = 16  # times the batch: how far requests may overtake the oldest unfinished one


class Completed(NamedTuple):
    """A finished request."""

    index: int  # index of the request
    rows: int  # rows of the state it was decoded in: the batch, or fewer if memory is short
    slots: int  # their cache slots
    result: Generation  # `seconds`: from prefill to end, with other rows; the first of a shape has `compile_seconds`
    source_slots: int = 0  # slots of an encoder's source; 0 without one


class _Held(NamedTuple):
    """A request that waits for a row, or has one."""

    index: int
    size: Size  # minimum size for the request
    request: Request
    since: float = 0.0
    compile_seconds: float = 0.0  # compilation of the shape, for the first request with it


def complete(
    pair: Pair, requests: Iterable[Request], batch: int = 8, *, look_ahead: int | None = None
) -> Iterator[Completed]:
    """Decode requests of one prompt each (`prepare`), `batch` at a time or as many as fit, in order of completion.

    A row's tokens depend on its request only, unless its policy reads other rows (it gets the costs of the pair, not of
    the batch). Requests are consumed as rows become free, at most `look_ahead` (16 times the batch) beyond the oldest
    unfinished one.

    Raises ValueError: a number below 1, a batch that cannot be sharded on the mesh, a request that `fresh_state`
    refuses, or not enough memory for the caches of a single row.
    """
    look_ahead = LOOK_AHEAD * batch if look_ahead is None else look_ahead
    for name, value in (("batch", batch), ("look_ahead", look_ahead)):
        Between(1, whole=True).check(name, value)
    check_rows(batch)
    waiting = _Waiting(pair, requests, look_ahead)
    while (size := waiting.next_size()) is not None:
        rows = rows_that_fit(pair, batch, size.slots, free_memory(), size.source)
        yield from _one_shape(pair, waiting, rows, size)


def size_of(pair: Pair, request: Request) -> Size:
    """The minimum size of a row for the request; its slots are 128, 192, 256, 384, 512 ..."""
    widest, sources = max(pair.decoder.parts.widths), request.options.get("sources")
    slots = slots_for(max(map(len, request.prompts)), request.options["max_new_tokens"], widest)
    return Size(max(FEWEST_SLOTS, slots), 0 if sources is None else slots_for(max(map(len, sources)), 0, 0))


def cache_bytes(pair: Pair, batch: int, slots: int, source_slots: int = 0) -> int:
    """Number of bytes per device of the caches of both models, from their shapes."""
    target, drafter, weights = pair.decoder.parts.target, pair.decoder.parts.drafter, pair.params
    shapes = jax.ShapeDtypeStruct((batch, source_slots), "int32"), jax.ShapeDtypeStruct((batch,), "int32")
    more = (shapes,) if source_slots else ()
    cache = jax.eval_shape(lambda params, *more: target.init_cache(params, batch, slots, *more), weights.target, *more)
    state = jax.eval_shape(lambda params, *more: drafter.init(params, batch, slots, *more), weights.drafter, *more)
    several = isinstance(state, MultiDrafterState)
    drafters = zip(weights.drafter, state.states, strict=True) if several else [(weights.drafter, state)]
    return bytes_of_caches(weights.target, cache) + sum(bytes_of_caches(*each) for each in drafters)


def rows_that_fit(pair: Pair, batch: int, slots: int, free: int | None, source_slots: int = 0) -> int:
    """How many of `batch` rows of `slots` slots fit into `free` bytes per device, with another row for prefill.

    Raises ValueError: not a single row fits.
    """
    if free is None:
        return batch
    groups, extra = row_groups(), cache_bytes(pair, 1, slots, source_slots)  # a prefilled row is replicated
    divided = cache_bytes(pair, groups, slots, source_slots)
    fitting = next((rows for rows in range(batch, 0, -groups) if rows // groups * divided + extra <= free), 0)
    if not fitting:
        raise ValueError(
            f"{slots} cache slots take {extra / 1e9:.2f} GB a row, two rows while one is prefilled, "
            f"and {free / 1e9:.2f} GB are free"
        )
    return fitting


class _Waiting:
    """The queue of requests that wait for a row, up to the look-ahead."""

    def __init__(self, pair: Pair, requests: Iterable[Request], look_ahead: int):
        self._pair, self._look_ahead = pair, look_ahead
        self._source = enumerate(requests)
        self._queue: list[_Held] = []  # oldest first
        self._unfinished: set[int] = set()  # indices of requests in the queue or in a row
        self._newest = -1  # index of the last request from the source

    def next_size(self) -> Size | None:
        """The size of the oldest request; None: no request is left."""
        self._look()
        return self._queue[0].size if self._queue else None

    def pop_fitting(self, size: Size, smaller: bool) -> _Held | None:
        """The oldest request of this size, else, with `smaller`, the oldest one that fits."""
        self._look()
        fitting = [request for request in self._queue if request.size == size]
        if smaller and not fitting:
            fitting = [held for held in self._queue if all(np.less_equal(held.size, size))]
        if not fitting:
            return None
        self._queue.remove(fitting[0])
        return fitting[0]

    def done(self, index: int) -> None:
        self._unfinished.remove(index)

    def _look(self) -> None:
        """Fills the queue up to the look-ahead."""
        while self._newest + 1 < min(self._unfinished, default=self._newest + 1) + self._look_ahead:
            taken = next(self._source, None)
            if taken is None:
                return
            self._newest, request = taken
            self._unfinished.add(self._newest)
            self._queue.append(_Held(self._newest, size_of(self._pair, request), request))


def _one_shape(pair: Pair, waiting: _Waiting, batch: int, size: Size) -> Iterator[Completed]:
    """Decodes with one state until no request fits and all rows are finished."""
    decoder = pair.decoder
    held: list[_Held | None] = [None] * batch
    state: DecodeState | None = None
    while True:
        for row in range(batch):
            running = any(request is not None and request.size == size for request in held)
            new = waiting.pop_fitting(size, smaller=running) if held[row] is None else None
            if new is None:
                continue
            compiling, options = 0.0, new.request.options | ({"source_slots": size.source} if size.source else {})
            if state is None:  # free rows; every program is run once without work, and compilation timed
                watch, programs = time.perf_counter(), decoder.num_programs("run")
                shared = {name: options[name] for name in (*SHAPING, "source_slots") if name in options}
                state = decoder.idle(pair.params, batch, size.slots, **shared)
                nothing = {"sources": [[0]]} if size.source else {}
                state = decoder.refill(pair.params, state, 0, [0], **{**shared, "max_new_tokens": 0}, **nothing)
                state = jax.block_until_ready(decoder.run(pair.params, state, rounds=0))
                if decoder.num_programs("run") > programs:
                    compiling = time.perf_counter() - watch
            state = decoder.refill(pair.params, state, row, new.request.prompts[0], **options)
            held[row] = new._replace(since=time.perf_counter(), compile_seconds=compiling)
        busy = [row for row in range(batch) if held[row] is not None]
        if not busy or state is None:
            return
        stops = [() if request is None else request.request.stop for request in held]
        state = decoder.run(pair.params, state, rounds=1 if any(stops) else None, leave=batch - len(busy) + 1)
        state = end_at_stops(pair, state, stops) if any(stops) else state
        done = on_host(state.done)
        ended = [row for row in busy if done[row]]
        finished, now = readable(state) if ended else state, time.perf_counter()  # read without caches
        for row in ended:
            request, held[row] = held[row], None
            assert request is not None
            one_row = jax.tree.map(lambda leaf, row=row: leaf[row : row + 1], finished)
            seconds, prefilled = now - request.since, Prefilled(one_row, 0.0, request.compile_seconds)
            result = finish(pair, request.request, one_row, 0, seconds, prefilled)
            waiting.done(request.index)
            yield Completed(request.index, batch, size.slots, result, size.source)
