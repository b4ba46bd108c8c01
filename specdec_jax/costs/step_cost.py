"""Measures the time of rounds on this machine: target passes by width, drafter steps, and what stopping policies add.

Every figure is from rounds of the compiled decoder itself, whose static draft length is a traced number: two lengths
that one width verifies differ by drafter steps alone, and a round less its steps is a target pass. A policy's own time
is the difference to rounds in which it is evaluated and its answers are overruled. Programs alternate, so that slow
moments of a shared machine affect all of them; the result is the median over repeats with quartiles.
"""

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from specdec_jax.compilation_cache import compile_together
from specdec_jax.costs.cost_model import CostModel, RuleCost, cost_model
from specdec_jax.costs.machine import load_average
from specdec_jax.decoding import build_decoder
from specdec_jax.decoding.rounds import ModelParams
from specdec_jax.decoding.sampling import make_warp
from specdec_jax.drafters.draft_models import with_vocabulary
from specdec_jax.loading import LoadedModel
from specdec_jax.monitors.phases import phases
from specdec_jax.ranges import Count
from specdec_jax.stopping.static import static
from specdec_jax.types import Array, Drafter, LanguageModel, Params, PolicyState, StoppingPolicy
from specdec_jax.verification.rejection import rejection

SPREAD = 0.3  # maximum interquartile range on an idle machine, relative to the median
LEAST = 1e-3  # minimum time of a drafter step or a pass, in passes of plain decoding
SAMPLED = 0.7  # the temperature at which sampled rounds are timed; those at others take as long
DRAFTS = 7  # the draft length of the rounds that time drafter steps and policies
PROMPT = 96  # maximum number of tokens of TEXT before the timed rounds
TEXT = (
    "The town lies where the river leaves the hills. For two hundred years its people have built boats, and the "
    "oldest yard still stands below the bridge. In spring the water rises and the lower streets are closed for some "
    "days. Visitors come in summer, mostly by train, to walk along the old towpath and to see the market on the square "
    "in front of the church. When asked what has changed most, the baker says that the young leave after school, and "
    "that many of them come back with children of their own. This year the council wants to"
)

DrafterOf = Callable[[LanguageModel | None, int], Drafter]  # (language model, maximum draft length); None: no drafts
Timed = Callable[..., Callable[[], float]]  # (temperature, **hyperparameters of the policy) -> a call for seconds


class Cost(NamedTuple):
    """Seconds of one pass or step: median and quartiles over repeats."""

    median: float
    low: float
    high: float


class Overruled(NamedTuple):
    """The state of a policy whose answers are overruled by those of a static length."""

    draft_length: Array  # [B] int32
    policy: PolicyState


def overruled(policy: StoppingPolicy) -> StoppingPolicy:
    """`static`, with all computation of `policy`: its answers do not matter, which no compiler can know.

    Hyperparameters (`init`): draft_length. Those of `policy` have their defaults.
    """

    def init(batch: int, draft_length: Count = DRAFTS) -> Overruled:
        return Overruled(draft_length, policy.init(batch))

    def begin(state: Overruled, *arguments: Any) -> tuple[Array, Overruled]:
        answer, inner = policy.begin(state.policy, *arguments)
        return (answer | (state.draft_length >= 0)) & (state.draft_length > 0), state._replace(policy=inner)

    def check(state: Overruled, *arguments: Any) -> tuple[Array, Overruled]:
        answer, inner = policy.check(state.policy, *arguments)
        return answer | (state.draft_length >= 0), state._replace(policy=inner)

    def proceed(state: Overruled, seen: Any, token: Array, drafted: Array, context: Any) -> tuple[Array, Overruled]:
        answer, inner = policy.proceed(state.policy, seen, token, drafted, context)
        return (answer | (state.draft_length >= 0)) & (drafted < state.draft_length), state._replace(policy=inner)

    def update(state: Overruled, *arguments: Any) -> Overruled:
        return state._replace(policy=policy.update(state.policy, *arguments))

    return StoppingPolicy(init, begin, check, proceed, update, reads=policy.reads)


def timed_rounds(
    target: LoadedModel,
    drafter: Drafter,
    params: Params,
    policy: StoppingPolicy,
    widths: Sequence[int],
    *,
    batch: int,
    slots: int,
    rounds: int,
) -> Timed:
    """Compiles a decoder and prefills TEXT. A call of the result times `rounds` rounds from there, for their mean,
    without what a call of no rounds takes: a generation pays once for buffers, at 16 rows a third of a pass."""
    monitor, reads = phases() if policy.needs_phases else None, target.model.spec.source
    decoder = build_decoder(target.model, drafter, policy, rejection(), monitor=monitor, verification_widths=widths)
    options: dict[str, Any] = {"max_new_tokens": rounds * widths[-1], "slots": slots, "stop_ids": ()}
    longest = min(PROMPT, target.model.spec.context - options["max_new_tokens"])
    if longest < 1:
        raise ValueError(f"a context of {target.model.spec.context} tokens is too short to measure costs in it")
    weights, prompts = ModelParams(target.params, params), [target.tokenizer.encode(TEXT)[:longest]] * batch
    if reads is not None:
        options["sources"], prompts = prompts, [[reads.first_token]] * batch
    ready = jax.block_until_ready(decoder.prefill(weights, prompts, **options))

    def at(temperature: float, **hyperparameters: Any) -> Callable[[], float]:
        begun = ready._replace(policy=policy.init(batch, **hyperparameters), warp=make_warp(batch, temperature))

        def call() -> float:
            state = jax.block_until_ready(jax.tree.map(lambda leaf: leaf.copy(), begun))  # `run` consumes its state
            times = [time.perf_counter()]
            for number in (0, rounds):
                state = jax.block_until_ready(decoder.run(weights, state, rounds=number))
                times.append(time.perf_counter())
            return float(np.diff(times) @ (-1, 1)) / int(np.max(state.statistics.num_rounds))

        return call

    at(0.0)()
    return at


def seven_drafts(
    target: LoadedModel, drafter: LoadedModel, drafter_of: DrafterOf, options: Mapping[str, int]
) -> tuple[Callable[[StoppingPolicy], Timed], int]:
    """Rounds of a policy with a drafter of seven drafts, in one width, and the passes of a round of seven drafts."""
    made = drafter_of(with_vocabulary(drafter.model, target.model.spec.vocab_size), DRAFTS)
    timed = partial(timed_rounds, target, made, drafter.params, widths=(DRAFTS + 1,), **options)
    return timed, made.num_passes(DRAFTS)


def pass_programs(
    target: LoadedModel, drafter: LoadedModel | None, widths: Sequence[int], *, drafter_of: DrafterOf, **options: int
) -> tuple[dict[str, Callable[[], float]], Callable[[Mapping[str, Sequence[float]]], dict[str, Cost]]]:
    """Rounds that time plain decoding, target passes by width and drafter steps, at temperatures 0 and 0.7.

    `drafter` is None for one without a model, whose steps cost nothing; `options` are those of `timed_rounds`. Returns
    programs for `turns`, and a function of its result that gives the seconds of "plain pass", "pass of W tokens" and
    "drafter step", each after its temperature: "0 plain pass", "0.7 plain pass" etc.
    """
    plain = partial(timed_rounds, target, drafter_of(None, 0), None, static(), **options)
    passes, longest = 0, None  # of a round of seven drafts; the drafter that fills the widest pass (blocks may not)
    if drafter is not None:
        longest = drafter_of(with_vocabulary(drafter.model, target.model.spec.vocab_size), max(widths[-1] - 1, 1))
        widths = [min(width, longest.max_draft_length + 1) for width in widths]
    names = {f"pass of {width} tokens": width for width in sorted(set(widths))}
    kinds: dict[str, Callable[[float], Callable[[], float]]]
    if drafter is None or longest is None:  # rounds without drafts, verified in each width
        timed = compile_together([partial(plain, (width,)) for width in (1, *names.values())])
        kinds = dict(zip(("plain pass", *names), timed, strict=True))
    else:
        seven, passes = seven_drafts(target, drafter, drafter_of, options)
        wide = partial(timed_rounds, target, longest, drafter.params, static(), [*names.values()], **options)
        timed = compile_together([partial(plain, (1,)), wide, partial(seven, static())])
        kinds = {"plain pass": timed[0]} | {name: partial(timed[1], draft_length=names[name] - 1) for name in names}
        kinds |= {str(length): partial(timed[2], draft_length=length) for length in (0, DRAFTS)}
    temperatures = [f"{temperature:g} " for temperature in (0.0, SAMPLED)]

    def seconds_of(spent: Mapping[str, Sequence[float]]) -> dict[str, Cost]:
        times = {at + name: np.asarray(spent[at + name]) for at in temperatures for name in ("plain pass", *names)}
        for at in temperatures if passes else ():
            short, long = (np.asarray(spent[f"{at}{length}"]) for length in (0, DRAFTS))
            times[f"{at}drafter step"] = steps = (long - short) / passes
            for name, width in names.items():
                times[at + name] -= np.median(steps) * (width - 1 if passes == DRAFTS else min(width - 1, 1))
        return {name: summary(each.tolist()) for name, each in times.items()}

    return {at + name: of(float(at)) for at in temperatures for name, of in kinds.items()}, seconds_of


def time_policy(
    target: LoadedModel,
    drafter: LoadedModel,
    policy: StoppingPolicy,
    *,
    drafter_of: DrafterOf,
    repeats: int,
    seconds: float = math.inf,
    **options: int,
) -> tuple[RuleCost, dict[str, Cost]]:
    """What a policy's own computation adds to a drafter pass and to a round, at temperatures 0 and 0.7: the medians,
    and by temperature ("0", "0.7") the share that it adds to a round of seven drafts. `options`: of `timed_rounds`.
    """
    seven, passes = seven_drafts(target, drafter, drafter_of, options)
    timed = compile_together([partial(seven, rule) for rule in (static(), overruled(policy.bare))])
    medians, shares = [], {}
    for at in (0.0, SAMPLED):
        added = []
        for length in (0, DRAFTS):
            spent = turns({rule: timed[rule](at, draft_length=length) for rule in (0, 1)}, repeats, seconds / 4)
            added.append(float(np.median(spent[1]) - np.median(spent[0])))
            shares[f"{at:g}"] = summary((np.divide(spent[1], np.median(spent[0])) - 1).tolist())  # at last of DRAFTS
        short, long = added
        medians += [max((long - short) / passes, 0.0), max(short, 0.0)]
    return RuleCost(repr(policy.bare), *medians), shares


def costs_of(times: Mapping[str, Cost], **about: Any) -> CostModel:
    """The cost model of the seconds of `pass_programs`; `about` are further fields of `CostModel`."""
    each: list[dict[str, float]] = [{}, {}]
    for name, cost in times.items():
        at, _, kind = name.partition(" ")  # differences of rounds may be negative on a busy machine
        each[float(at) > 0][kind] = max(cost.median, LEAST * times[f"{at} plain pass"].median)
    (greedy, passes), (sampled, sampled_passes) = (
        (of, {int(kind.split()[2]): time for kind, time in of.items() if kind.startswith("pass of")}) for of in each
    )
    about |= {"plain_pass": greedy["plain pass"], "sampled_plain": sampled["plain pass"]}
    about |= {"sampled_step": sampled.get("drafter step", 0.0), "sampled_pass": tuple(sampled_passes.values())}
    return cost_model(greedy.get("drafter step", 0.0), passes, **about)


def clocked(call: Callable[[], Any]) -> Callable[[], float]:
    """A call that returns the seconds that `call` takes."""

    def timed() -> float:
        watch = time.perf_counter()
        call()
        return time.perf_counter() - watch

    return timed


def turns(programs: Mapping[Any, Callable[[], float]], repeats: int, seconds: float = math.inf) -> dict[Any, Any]:
    """The seconds that two or more programs return, run alternately, `repeats` times after a warm-up; lists by name.

    After `seconds` three turns are enough. Entry i of every program belongs to turn i. The first program is called
    before each other one, and its median says how fast the machine is in that turn: the others' times are those at its
    median speed, the first's are its medians by turn.
    """
    for program in programs.values():
        program()
    first, *others = programs
    pairs: list[list[tuple[float, float]]] = []  # [turns, others], seconds of the first program and of another one
    began = time.perf_counter()
    while len(pairs) < min(repeats, 3) or (len(pairs) < repeats and time.perf_counter() - began < seconds):
        pairs.append([(programs[first](), programs[name]()) for name in others])
    paces, spent = np.transpose(pairs)  # [others, turns] each
    pace = np.median(paces, axis=0)  # one for all: a pace of its own adds its noise to differences of programs
    even = spent * np.median(pace) / pace
    return {first: pace.tolist(), **dict(zip(others, even.tolist(), strict=True))}


def summary(times: Sequence[float]) -> Cost:
    """Median and quartiles."""
    low, median, high = np.percentile(times, (25, 50, 75))
    return Cost(float(median), float(low), float(high))


def busy_doubts() -> tuple[str, ...]:
    """A clause if the load average exceeds the number of cores."""
    load, cores = load_average(), os.cpu_count() or 1
    return (f"the load average was {load:.1f} on {cores} cores",) if load > cores else ()


def spread_doubts(times: Mapping[str, Cost]) -> tuple[str, ...]:
    """A clause about the time with the largest interquartile range, if that is too large."""
    spread = {name: (cost.high - cost.low) / max(cost.median, 1e-9) for name, cost in times.items()}
    name = max(spread, key=spread.__getitem__)
    low, high = 1e3 * times[name].low, 1e3 * times[name].high
    return (f"{name} took {low:.1f} to {high:.1f} ms (quartiles)",) if spread[name] > SPREAD else ()
