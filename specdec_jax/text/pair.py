"""A target, who drafts for it, and the decoder that joins them."""

import difflib
import functools
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from jax.sharding import Mesh

from specdec_jax.costs.at_hand import measured
from specdec_jax.costs.choices import DRAFTS, ESTIMATED, costs_asked, longest_draft, widths_for
from specdec_jax.costs.cost_model import CostModel, between
from specdec_jax.costs.dtypes import dtype_of, faster_dtype
from specdec_jax.decoding import Decoder, build_decoder, default_widths
from specdec_jax.decoding.answers import check_parts
from specdec_jax.decoding.cache_feed import check_reads
from specdec_jax.decoding.decoder import widest_draft
from specdec_jax.decoding.rounds import ModelParams, Parts
from specdec_jax.decoding.sampling import make_warp
from specdec_jax.decoding.sources import fresh_request
from specdec_jax.decoding.user_code import is_users
from specdec_jax.drafters.multi_drafter import multi_drafter
from specdec_jax.drafters.no_drafter import no_drafter
from specdec_jax.drafters.reading import drafter_of
from specdec_jax.loading import LoadedModel, for_target, load_drafter, load_model, needs_translation
from specdec_jax.models.adapters import with_vocabulary
from specdec_jax.models.intersection import SharedParams
from specdec_jax.models.reduced_head import ReducedParams
from specdec_jax.monitors.phases import phases
from specdec_jax.sharding import bytes_here, mesh_here, spans_processes
from specdec_jax.stopping.survival import survival
from specdec_jax.strategy import nearest
from specdec_jax.text.strategies import FIRST, choose, find_factory, name_in, names, parse_call
from specdec_jax.types import Drafter, LanguageModel, Monitor, Params, StoppingPolicy, Verifier
from specdec_jax.verification.rejection import rejection

PHASES = phases()
NEED_MODELS = (
    "model",
    "reading",
    "retokenized",
    "no_drafter",
    "multi_drafter",
)  # files of drafters/ that no name asks for: models, none, or a sequence
SMOLLM2_DRAFTER = "smollm2-drafter-reading@8192"
FOR_ENCODERS = "prompt_lookup"
READS_NONE = "smollm2-drafter@8192"

OneDrafter = LoadedModel | Drafter | str


class Pair(NamedTuple):
    """A target, perhaps a drafter, and the decoder that joins them."""

    target: LoadedModel
    decoder: Decoder
    params: ModelParams
    policy: StoppingPolicy  # as asked for: the decoder's is the same without its hyperparameters
    verifier: Verifier
    monitor: Monitor | None
    first_drafter: Params = None  # the first with a model: its pass is what rules that weigh costs are told of
    costs: CostModel | None = None  # of that drafter and the target; None: estimated by bytes

    @property
    def drafter_cost(self) -> float | None:
        """c, a pass of that drafter in target passes: as measured, or the bytes that it reads over the target's.

        None without one.
        """
        if self.first_drafter is None:
            return None
        known = None if self.costs is None else self.costs.ratio
        return known or _relative_size(self.first_drafter, self.params.target)

    def using(
        self, policy: StoppingPolicy | None = None, verifier: Verifier | None = None, monitor: Monitor | None = None
    ) -> "Pair":
        """The same models under another policy, verifier or monitor; only other static options compile anew.

        Raises:
            ValueError: something that is none, or whose functions fail (`build_pair`).
        """
        policy, verifier = policy or self.policy, verifier or self.verifier
        parts = self.decoder.parts
        monitor = _watching(policy, verifier, monitor or self.monitor)
        decoder = _decoder(parts.target, parts.drafter, policy.bare, verifier.bare, _bare(monitor), parts.widths)
        return _checked(self._replace(decoder=decoder, policy=policy, verifier=verifier, monitor=monitor))


def build_pair(
    target: LoadedModel | str = "smollm2",
    drafter: OneDrafter | Sequence[OneDrafter] | None = SMOLLM2_DRAFTER,
    *,
    drafter_params: Params = None,
    policy: StoppingPolicy = survival(),
    verifier: Verifier = rejection(),
    monitor: Monitor | None = None,
    max_draft_length: int | None = None,
    dtype: str = "auto",
    verification_widths: tuple[int, ...] | None = None,
    costs: CostModel | str | Path | None = None,
    batch: int = 1,
) -> Pair:
    """Load (where a name is given) and join. `drafter=None` is plain decoding.

    A policy or verifier that reads phases gets the monitor `phases()` unless another is given, and so do several
    drafters: each is judged by phase.

    Args:
        drafter: a model, by source or loaded (`NAME@8192` proposes the 8,192 most frequent tokens and the text's own
            rare ones; `smollm2-drafter-reading` reads hidden states of smollm2 and drafts for no other target); a file
            of drafters/ that needs none, or a .py file of yours, in words (`prompt_lookup(longest=4)`, `ngram`); a
            Drafter; or several of these, joined by `drafters.multi_drafter`. A target with an encoder has
            `prompt_lookup`, which copies from its source too, unless another is named.
        drafter_params: for a drafter without a model, such as a table of n-grams. A Drafter with models needs theirs.
            For several drafters a sequence, with None for those that bring their own or need none.
        max_draft_length: most tokens drafted a round. None: the length that pays on predictable text by `costs`, 7 if
            they are estimated or doubtful, and never less than a static policy's own.
        dtype: bfloat16, float16, float32 or int8 of models by name; auto: the target's if it is given loaded, else the
            faster of bfloat16 and float32 here, bfloat16 if costs are estimated.
        verification_widths: ascending. None: the steps of the measured pass; powers of two if costs are estimated or
            doubtful.
        costs: what passes cost, for whoever weighs it. "measured": once a pair and machine, kept in
            `~/.cache/specdec_jax/costs`; "estimated": c by the bytes that both models read; a CostModel, or a file that
            `experiments.step_cost` wrote. None: what SPECDEC_JAX_COSTS in the environment says, else measured. Of
            several drafters the first with a model is measured for rules; they are chosen among by their bytes.
        batch: rows that costs are measured for: a wide pass of many rows is no longer nearly free.

    Raises:
        ValueError: vocabularies without a token in common, a number out of range, options or parameters that no
            drafter takes, or a function of a user's file that fails (`decoding.answers.check_parts`).
        FileNotFoundError: a file of costs that is not there.
    """
    asked = costs_asked(costs)
    together = drafter is not None and not _one(drafter)
    monitor = PHASES if monitor is None and together else _watching(policy, verifier, monitor)
    big = _target(target, dtype, asked)
    if big.model.reduced is not None:
        raise ValueError(f"target {big.name!r} has a draft vocabulary: that is for drafters, a target needs all tokens")
    drafter = _fitting(big, drafter)
    each: list[Any] = [] if drafter is None else list(drafter) if together else [drafter]  # type: ignore[arg-type]
    found = [_found(big, one, dtype_of(big) if dtype == "auto" else dtype) for one in each]
    known = _known_costs(asked, big, found, batch)
    most = _longest(known, verification_widths, policy) if max_draft_length is None else max_draft_length
    own = _params_of_each(each, drafter_params) if together else [drafter_params]
    pairs = [_drafter(big, one, weights, most) for one, weights in zip(found, own, strict=False)]
    built, params = _joined(pairs, big.params) if together else pairs[0] if pairs else (no_drafter(), None)
    longest = built.max_draft_length
    widest = _most_places(longest, policy, known)
    usual = default_widths(widest) if known is None else widths_for(known, widest)
    widths = tuple(verification_widths or usual)
    decoder = _decoder(big.model, built, policy.bare, verifier.bare, _bare(monitor), widths)
    first_drafter = next((own for one, own in pairs if one.model is not None), None)
    models = ModelParams(big.params, params)
    known = known and between(known, widths)
    return _checked(Pair(big, decoder, models, policy, verifier, monitor, first_drafter, known))


def _checked(pair: Pair) -> Pair:
    """The same, where no function of a user's file fails for one row: nothing is compiled for one that does."""
    parts = pair.decoder.parts
    answered = _answered(parts)
    if not answered and is_users([parts.policy, parts.verifier, parts.drafter, parts.monitor]):
        sources, greedy = None if parts.target.spec.source is None else [[0]], make_warp(1, temperature=0.0)
        state, source = fresh_request(parts, [[0]], sources=sources, max_new_tokens=0, warp=greedy)
        check_parts(parts, pair.params, state, source)
    answered.add(True)
    return pair


@functools.lru_cache(maxsize=16)
def _answered(parts: Parts) -> set[bool]:
    """Empty until these parts have been checked."""
    del parts
    return set()


def _most_places(longest: int, policy: StoppingPolicy, costs: CostModel | None) -> int:
    """Tokens of a draft that are worth a width, up to what was measured."""
    measured = 2 * longest + 1 if costs is None else costs.widths[-1] - 1
    return max(longest, min(widest_draft(policy, longest), measured))


def split_drafters(words: str) -> list[str]:
    """The drafters of `a,prompt_lookup(longest=4)`: split at commas outside brackets."""
    return [part.strip() for part in re.split(r",(?![^()]*\))", words)]


def without_model(drafter: Any) -> TypeGuard[str]:
    """Whether the words are for a drafter that needs no model: a file of drafters/, or a .py file."""
    return isinstance(drafter, str) and (name_in(drafter) in _modelless() or name_in(drafter).endswith(".py"))


def check_drafter(drafter: Any, vocab_size: int | None = None) -> None:
    """Refuses words for a drafter without a model that its factory refuses.

    Args:
        vocab_size: the target's; None: its weights are not read yet. A user's factory that takes `vocab_size` is then
            not called.

    Raises:
        ValueError: as said.
    """
    each: Sequence[Any] = [drafter] if drafter is None or _one(drafter) else drafter
    for one in each:
        if without_model(one):
            own_file = name_in(one).endswith(".py")
            parameters = inspect.signature(find_factory("drafter", name_in(one))).parameters if own_file else {}
            if {"vocab_size", "max_draft_length"} & parameters.keys():
                continue  # called by `_drafter`, with the pair's own numbers
            choose("drafter", one, max_draft_length=DRAFTS, vocab_size=vocab_size or FIRST.vocab_size)
        elif isinstance(one, str) and one.endswith(")"):
            name, _ = parse_call("drafter", one)
            raise ValueError(f"drafter {name!r} takes no options{nearest(name, _modelless())}")


def check_pair(big: LoadedModel, small: LoadedModel) -> None:
    """Refuses a drafter that cannot draft for a target. Weights are not looked at: `loading.outline` is enough.

    Raises:
        ValueError: vocabularies that differ and cannot be joined, it reads hidden states that the target does not have,
            or has an encoder and the target none.
    """
    needs_translation(big, small)
    if small.model.spec.source is not None and big.model.spec.source is None:
        raise ValueError(f"drafter {small.name!r} has an encoder, and target {big.name!r}, without one, has no source")
    try:
        check_reads(big.model, small.model.reading)
    except ValueError as error:
        raise ValueError(f"drafter {small.name!r} for target {big.name!r}: {error}, such as {READS_NONE}") from None


def _watching(policy: StoppingPolicy, verifier: Verifier, monitor: Monitor | None) -> Monitor | None:
    """The monitor given, or one of phases where a rule reads them."""
    for kind, part, wanted in (("policy", policy, StoppingPolicy), ("verifier", verifier, Verifier)):
        if not isinstance(part, wanted):
            raise ValueError(f"a {kind} must be a {wanted.__name__}, such as {kind}=..., got {part!r}")
    return PHASES if monitor is None and (policy.needs_phases or verifier.needs_phases) else monitor


def _bare(monitor: Monitor | None) -> Monitor | None:
    return None if monitor is None else monitor.bare


def _one(drafter: Any) -> TypeGuard[OneDrafter]:
    return isinstance(drafter, (str, LoadedModel, Drafter))


def _modelless() -> list[str]:
    return [name for name in names("drafter") if name not in NEED_MODELS]


def _target(target: LoadedModel | str, dtype: str, asked: CostModel | str) -> LoadedModel:
    if not isinstance(target, str):
        return target
    if dtype != "auto":
        return _loaded(target, dtype, mesh_here())
    big = _loaded(target, "bfloat16", mesh_here())
    if asked == ESTIMATED or spans_processes():  # nothing is measured
        return big
    faster = faster_dtype(big, lambda other: load_model(target, dtype=other))
    return big if faster == "bfloat16" else _loaded(target, faster, mesh_here())


def _fitting(big: LoadedModel, drafter: Any) -> Any:
    """The drafter asked for, but for a target with an encoder the one that is SmolLM2's alone, which nobody named.

    What such a target writes is often in its source: it is looked up there. A line on standard error says so.
    """
    if drafter != SMOLLM2_DRAFTER or big.model.spec.source is None:
        return drafter
    print(f"specdec_jax: {FOR_ENCODERS} drafts for {big.name}; a smaller model of its kind may too", file=sys.stderr)
    return FOR_ENCODERS


def _found(big: LoadedModel, drafter: OneDrafter, dtype: str) -> OneDrafter:
    """A drafter as it was given, the model loaded that a name stands for, and checked against the target."""
    check_drafter(drafter, big.model.spec.vocab_size)
    if isinstance(drafter, Drafter) or (isinstance(drafter, str) and without_model(drafter)):
        return drafter
    small = _loaded_drafter(drafter, dtype) if isinstance(drafter, str) else drafter
    check_pair(big, small)
    small = for_target(big, small)
    _check_draft_vocabulary(big, small)
    return small


def _known_costs(asked: CostModel | str, big: LoadedModel, found: Sequence[OneDrafter], batch: int) -> CostModel | None:
    """The costs asked for, measured if need be; None: estimated, or nobody drafts."""
    if asked == ESTIMATED or not found:
        return None
    if isinstance(asked, CostModel):
        return asked
    model = next((one for one in found if isinstance(one, LoadedModel)), None)
    return measured(big, model, batch, drafter_of=drafter_of)


def _longest(known: CostModel | None, widths: Sequence[int] | None, policy: StoppingPolicy) -> int:
    """Most drafts a round where nobody says: what pays here or the policy was told, in the widths that are given."""
    most, told = DRAFTS if known is None else longest_draft(known), policy.given.get("draft_length", 0)
    most = max(most, told) if isinstance(told, int) else most
    return max(min(most, max(widths) - 1), 1) if widths else most


def _drafter(big: LoadedModel, drafter: OneDrafter, params: Params, most: int) -> tuple[Drafter, Params]:
    """A drafter and its parameters."""
    if isinstance(drafter, LoadedModel):
        return _model_drafter(drafter.model, big.model.spec.vocab_size, most), drafter.params
    if isinstance(drafter, Drafter):
        return drafter, params
    return choose("drafter", drafter, max_draft_length=most, vocab_size=big.model.spec.vocab_size), params


def _joined(pairs: Sequence[tuple[Drafter, Params]], target: Params) -> tuple[Drafter, Params]:
    """Several drafters as one."""
    params = tuple(own for _, own in pairs)
    return multi_drafter(tuple(one for one, _ in pairs), tuple(_relative_size(own, target) for own in params)), params


def _loaded_drafter(source: str, dtype: str) -> LoadedModel:
    try:
        return _loaded(source, dtype, mesh_here(), load_drafter)
    except FileNotFoundError as error:
        # A misspelt drafter is looked for among models last: only then is it known to be neither.
        if difflib.get_close_matches(source, _modelless(), n=1):
            raise ValueError(f"no drafter {source!r}{nearest(source, _modelless())}; and {error}") from None
        raise


@functools.lru_cache(maxsize=4)
def _loaded(source: str, dtype: str, mesh: Mesh | None, load: Callable[..., LoadedModel] = load_model) -> LoadedModel:
    """`mesh` is the one that was set: what was loaded on another is loaded again."""
    del mesh
    return load(source, dtype=dtype)


@functools.lru_cache(maxsize=16)
def _model_drafter(language_model: LanguageModel, vocab: int, most: int) -> Drafter:
    return drafter_of(with_vocabulary(language_model, vocab), most)


def _params_of_each(drafters: Sequence[Any], params: Params) -> list[Params]:
    """The parameters given for each of several drafters."""
    if params is None:
        return [None] * len(drafters)
    if not isinstance(params, (list, tuple)) or len(params) != len(drafters):
        raise ValueError(
            f"drafter_params for {len(drafters)} drafters must be a sequence of as many, None where not needed"
        )
    return list(params)


def _check_draft_vocabulary(target: LoadedModel, drafter: LoadedModel) -> None:
    """Refuses one with tokens that the target lacks: rows that only pad the drafter's embedding."""
    if isinstance(drafter.params, ReducedParams):
        last, size = int(drafter.params.tokens[-1]), target.model.spec.vocab_size
        if last >= size:
            raise ValueError(f"drafter {drafter.name!r} would propose token {last}, and the target has {size}")


def _relative_size(params: Params, target: Params) -> float:
    """What a pass of a drafter costs, in target passes, as far as the bytes of the weights it reads tell."""
    sizes = [bytes_here(tree) for tree in (params, target)]
    if isinstance(params, (ReducedParams, SharedParams)):
        sizes[0] -= params.unread_bytes
    return sizes[0] / sizes[1]


@functools.lru_cache(maxsize=16)
def _decoder(
    target: LanguageModel,
    drafter: Drafter,
    policy: StoppingPolicy,
    verifier: Verifier,
    monitor: Monitor | None,
    widths: tuple[int, ...],
) -> Decoder:
    """One decoder for equal pieces: a second call compiles nothing."""
    return build_decoder(target, drafter, policy, verifier, monitor=monitor, verification_widths=widths)
