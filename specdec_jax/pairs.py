"""A target, who drafts for it, and the decoder that joins them."""

import difflib
import functools
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import jax

from specdec_jax.choices import build_drafter, find_factory, names, nearest
from specdec_jax.decoding import Decoder, build_decoder
from specdec_jax.drafters.model import model as model_drafter
from specdec_jax.drafters.nothing import nothing
from specdec_jax.drafters.several import several
from specdec_jax.loading import LoadedModel, check_same_vocabulary, load_model
from specdec_jax.models.adapters import with_vocabulary
from specdec_jax.models.reduced_head import ReducedParams
from specdec_jax.monitors.phases import phases
from specdec_jax.rounds import ModelParams
from specdec_jax.stopping.adaedl import adaedl
from specdec_jax.types import Drafter, LanguageModel, Monitor, Params, StoppingPolicy, Verifier
from specdec_jax.verification.rejection import rejection

ADAEDL, REJECTION, PHASES = adaedl(), rejection(), phases()  # made once, so that the default decoder is found again
NEED_MODELS = ("model", "nothing", "several")  # files of drafters/ that no name asks for: models, none, or a sequence

OneDrafter = LoadedModel | Drafter | str


class Pair(NamedTuple):
    """A target, perhaps a drafter, and the decoder that joins them."""

    target: LoadedModel
    decoder: Decoder
    params: ModelParams
    priced: Params = None  # of the first drafter with a model, whose pass is what rules that weigh costs are told of

    @property
    def drafter_cost(self) -> float | None:
        """A pass of that drafter in target passes, as far as the bytes that both read tell; None without one."""
        return None if self.priced is None else _relative_size(self.priced, self.params.target)


def build_pair(
    target: LoadedModel | str = "smollm2",
    drafter: OneDrafter | Sequence[OneDrafter] | None = "smollm2-drafter",
    *,
    drafter_options: Mapping[str, Any] | None = None,
    drafter_params: Params = None,
    policy: StoppingPolicy = ADAEDL,
    verifier: Verifier = REJECTION,
    monitor: Monitor | None = None,
    max_draft_length: int = 7,
    dtype: str = "bfloat16",
    verification_widths: tuple[int, ...] | None = None,
) -> Pair:
    """Load (where a name is given) and join. `drafter=None` is plain decoding.

    A policy or verifier that reads phases gets the monitor `phases()` unless another is given, and so do several
    drafters: each is judged by phase.

    Args:
        drafter: a model, by source or loaded (`smollm2-drafter@8192` proposes the 8,192 most frequent tokens only); a
            file of drafters/ that needs none (`prompt_lookup`, `ngram`) or a .py file of yours, by name; a Drafter; or
            several of these, joined by `drafters.several`.
        drafter_options: what the factory of a drafter without a model takes, such as {"longest": 4}. Of several
            drafters each gets those that it has.
        drafter_params: for a drafter without a model, such as a table of n-grams. A Drafter with models needs theirs.
            For several drafters a sequence, with None for those that bring their own or need none.

    Raises:
        ValueError: the vocabularies differ, a number is out of range, or options or parameters that no drafter takes.
    """
    together = drafter is not None and not _one(drafter)
    if monitor is None and (policy.needs_phases or verifier.needs_phases or together):
        monitor = PHASES
    big = _loaded(target, dtype) if isinstance(target, str) else target
    if big.model.reduced is not None:
        raise ValueError(f"target {big.name!r} has a draft vocabulary: that is for drafters, a target needs all tokens")
    options = dict(drafter_options or {})
    if drafter is None:
        check_drafter_options(None, options)
        decoder = _decoder(big.model, _nothing(), policy, verifier, monitor, verification_widths)
        return Pair(big, decoder, ModelParams(big.params))
    if _one(drafter):
        built, params = _drafter(big, drafter, options, drafter_params, max_draft_length, dtype)
        pairs = [(built, params)]
    else:
        check_drafter_options(drafter, options)
        each: list[Any] = list(drafter)
        own = _params_of_each(each, drafter_params)
        pairs = [
            _drafter(big, one, _own(one, options), weights, max_draft_length, dtype)
            for one, weights in zip(each, own, strict=True)
        ]
        params = tuple(pair[1] for pair in pairs)
        built = _joined(tuple(pair[0] for pair in pairs), tuple(_relative_size(own, big.params) for own in params))
    decoder = _decoder(big.model, built, policy, verifier, monitor, verification_widths)
    priced = next((own for one, own in pairs if one.model is not None), None)
    return Pair(big, decoder, ModelParams(big.params, params), priced)


def without_model(drafter: Any) -> bool:
    """Whether it names a drafter that needs no model: a file of drafters/, or a .py file."""
    return isinstance(drafter, str) and (drafter in _modelless() or drafter.endswith(".py"))


def check_drafter_options(drafter: Any, options: Mapping[str, Any]) -> None:
    """Refuses options that nobody takes, and values their factory refuses, before any weights are read.

    Raises:
        ValueError: as said; for one drafter with its nearest option.
    """
    alone = drafter is None or _one(drafter)
    given: Any = [drafter] if alone else drafter
    named: list[str] = [one for one in given if without_model(one)]
    if options and not named:
        raise ValueError(
            f"drafter option {next(iter(options))!r} needs a drafter without a model, such as prompt_lookup"
        )
    for name in named:
        build_drafter(name, options if alone else _own(name, options), {})
    for key in options:
        if not alone and not any(key in _own(name, options) for name in named):
            raise ValueError(f"none of the drafters {', '.join(named)} has an option {key!r}")


def _one(drafter: Any) -> TypeGuard[OneDrafter]:
    return isinstance(drafter, (str, LoadedModel, Drafter))


def _modelless() -> list[str]:
    return [name for name in names("drafter") if name not in NEED_MODELS]


def _own(drafter: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Those options that this drafter's factory has."""
    if not without_model(drafter):
        return {}
    known = inspect.signature(find_factory("drafter", drafter)).parameters
    return {key: value for key, value in options.items() if key in known}


def _drafter(
    big: LoadedModel, drafter: OneDrafter, options: Mapping[str, Any], params: Params, most: int, dtype: str
) -> tuple[Drafter, Params]:
    """A drafter and its parameters; the same drafter for equal static options."""
    if isinstance(drafter, str) and without_model(drafter):
        edited = Path(drafter).expanduser().stat().st_mtime_ns if Path(drafter).is_file() else 0
        vocab = big.model.spec.vocab_size
        return _named_drafter(drafter, edited, tuple(sorted(options.items())), most, vocab), params
    check_drafter_options(drafter, options)
    if isinstance(drafter, Drafter):
        return drafter, params
    small = _loaded_drafter(drafter, dtype) if isinstance(drafter, str) else drafter
    check_same_vocabulary(big, small)
    _check_draft_vocabulary(big, small)
    return _model_drafter(small.model, big.model.spec.vocab_size, most), small.params


def _loaded_drafter(source: str, dtype: str) -> LoadedModel:
    try:
        return _loaded(source, dtype)
    except FileNotFoundError as error:
        # A misspelt drafter is looked for among models last: only then is it known to be neither.
        if difflib.get_close_matches(source, _modelless(), n=1):
            raise ValueError(f"no drafter {source!r}{nearest(source, _modelless())}; and {error}") from None
        raise


@functools.lru_cache(maxsize=4)
def _loaded(source: str, dtype: str) -> LoadedModel:
    return load_model(source, dtype=dtype)


@functools.lru_cache(maxsize=16)
def _named_drafter(name: str, edited: int, options: tuple[tuple[str, Any], ...], most: int, vocab: int) -> Drafter:
    del edited  # a changed file is another drafter
    return build_drafter(name, dict(options), {"max_draft_length": most, "vocab_size": vocab})


@functools.lru_cache(maxsize=16)
def _model_drafter(language_model: LanguageModel, vocab: int, most: int) -> Drafter:
    return model_drafter(with_vocabulary(language_model, vocab), most)


def _params_of_each(drafters: Sequence[Any], params: Params) -> list[Params]:
    """The parameters given for each of several drafters."""
    if params is None:
        return [None] * len(drafters)
    if not isinstance(params, (list, tuple)) or len(params) != len(drafters):
        raise ValueError(
            f"drafter_params for {len(drafters)} drafters must be a sequence of as many, None where not needed"
        )
    return list(params)


@functools.lru_cache(maxsize=16)
def _joined(drafters: tuple[Drafter, ...], costs: tuple[float, ...]) -> Drafter:
    return several(drafters, costs)


def _check_draft_vocabulary(target: LoadedModel, drafter: LoadedModel) -> None:
    """Refuses one with tokens that the target lacks: rows that only pad the drafter's embedding."""
    if drafter.model.reduced is not None:
        last, size = int(drafter.model.reduced.tokens(drafter.params)[-1]), target.model.spec.vocab_size
        if last >= size:
            raise ValueError(f"drafter {drafter.name!r} would propose token {last}, and the target has {size}")


def _relative_size(params: Params, target: Params) -> float:
    """What a pass of a drafter costs, in target passes, as far as the bytes of the weights it reads tell."""
    sizes = [sum(leaf.nbytes for leaf in jax.tree.leaves(tree)) for tree in (params, target)]
    if isinstance(params, ReducedParams):
        sizes[0] -= params.unread_bytes
    return sizes[0] / sizes[1]


@functools.lru_cache(maxsize=1)
def _nothing() -> Drafter:
    return nothing()


@functools.lru_cache(maxsize=16)
def _decoder(
    target: LanguageModel,
    drafter: Drafter,
    policy: StoppingPolicy,
    verifier: Verifier,
    monitor: Monitor | None,
    widths: tuple[int, ...] | None,
) -> Decoder:
    """One decoder for equal pieces: a second call compiles nothing."""
    return build_decoder(target, drafter, policy, verifier, monitor=monitor, verification_widths=widths)
