"""A target, who drafts for it, and the decoder that joins them."""

import difflib
import functools
import re
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeGuard

import jax

from specdec_jax.decoding import Decoder, build_decoder, default_widths
from specdec_jax.decoding.rounds import ModelParams
from specdec_jax.drafters.model import model as model_drafter
from specdec_jax.drafters.multi_drafter import multi_drafter
from specdec_jax.drafters.no_drafter import no_drafter
from specdec_jax.loading import LoadedModel, check_same_vocabulary, load_model
from specdec_jax.models.adapters import with_vocabulary
from specdec_jax.models.reduced_head import ReducedParams
from specdec_jax.monitors.phases import phases
from specdec_jax.stopping.survival import survival
from specdec_jax.strategy import nearest
from specdec_jax.text.strategies import choose, name_in, names, parse_call
from specdec_jax.types import Drafter, LanguageModel, Monitor, Params, StoppingPolicy, Verifier
from specdec_jax.verification.rejection import rejection

PHASES = phases()
NEED_MODELS = (
    "model",
    "no_drafter",
    "multi_drafter",
)  # files of drafters/ that no name asks for: models, none, or a sequence

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

    @property
    def drafter_cost(self) -> float | None:
        """A pass of that drafter in target passes, as far as the bytes that both read tell; None without one."""
        return None if self.first_drafter is None else _relative_size(self.first_drafter, self.params.target)

    def using(
        self, policy: StoppingPolicy | None = None, verifier: Verifier | None = None, monitor: Monitor | None = None
    ) -> "Pair":
        """The same models under another policy, verifier or monitor; only other static options compile anew.

        Raises:
            ValueError: something that is none.
        """
        policy, verifier = policy or self.policy, verifier or self.verifier
        parts = self.decoder.parts
        monitor = _watching(policy, verifier, monitor or self.monitor)
        decoder = _decoder(parts.target, parts.drafter, policy.bare, verifier.bare, _bare(monitor), parts.widths)
        return self._replace(decoder=decoder, policy=policy, verifier=verifier, monitor=monitor)


def build_pair(
    target: LoadedModel | str = "smollm2",
    drafter: OneDrafter | Sequence[OneDrafter] | None = "smollm2-drafter@8192",
    *,
    drafter_params: Params = None,
    policy: StoppingPolicy = survival(),
    verifier: Verifier = rejection(),
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
            file of drafters/ that needs none, or a .py file of yours, in words (`prompt_lookup(longest=4)`, `ngram`);
            a Drafter; or several of these, joined by `drafters.multi_drafter`.
        drafter_params: for a drafter without a model, such as a table of n-grams. A Drafter with models needs theirs.
            For several drafters a sequence, with None for those that bring their own or need none.

    Raises:
        ValueError: the vocabularies differ, a number is out of range, or options or parameters that no drafter takes.
    """
    together = drafter is not None and not _one(drafter)
    monitor = PHASES if monitor is None and together else _watching(policy, verifier, monitor)
    big = _loaded(target, dtype) if isinstance(target, str) else target
    if big.model.reduced is not None:
        raise ValueError(f"target {big.name!r} has a draft vocabulary: that is for drafters, a target needs all tokens")
    pairs, params = [], None
    if drafter is None:
        built = no_drafter()
    elif _one(drafter):
        built, params = _drafter(big, drafter, drafter_params, max_draft_length, dtype)
        pairs = [(built, params)]
    else:
        each: list[Any] = list(drafter)  # type: ignore[arg-type]
        own = _params_of_each(each, drafter_params)
        pairs = [_drafter(big, one, weights, max_draft_length, dtype) for one, weights in zip(each, own, strict=True)]
        params = tuple(pair[1] for pair in pairs)
        built = multi_drafter(
            tuple(pair[0] for pair in pairs), tuple(_relative_size(own, big.params) for own in params)
        )
    widths = tuple(verification_widths or default_widths(built.max_draft_length))
    decoder = _decoder(big.model, built, policy.bare, verifier.bare, _bare(monitor), widths)
    first_drafter = next((own for one, own in pairs if one.model is not None), None)
    return Pair(big, decoder, ModelParams(big.params, params), policy, verifier, monitor, first_drafter)


def split_drafters(words: str) -> list[str]:
    """The drafters of `a,prompt_lookup(longest=4)`: split at commas outside brackets."""
    return [part.strip() for part in re.split(r",(?![^()]*\))", words)]


def without_model(drafter: Any) -> TypeGuard[str]:
    """Whether the words are for a drafter that needs no model: a file of drafters/, or a .py file."""
    return isinstance(drafter, str) and (name_in(drafter) in _modelless() or name_in(drafter).endswith(".py"))


def check_drafter(drafter: Any) -> None:
    """Refuses words for a drafter without a model that its factory refuses, before any weights are read.

    Raises:
        ValueError: as said.
    """
    each: Sequence[Any] = [drafter] if drafter is None or _one(drafter) else drafter
    for one in each:
        if without_model(one):
            choose("drafter", one)
        elif isinstance(one, str) and one.endswith(")"):
            name, _ = parse_call("drafter", one)
            raise ValueError(f"drafter {name!r} takes no options{nearest(name, _modelless())}")


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


def _drafter(big: LoadedModel, drafter: OneDrafter, params: Params, most: int, dtype: str) -> tuple[Drafter, Params]:
    """A drafter and its parameters."""
    check_drafter(drafter)
    if isinstance(drafter, str) and without_model(drafter):
        return choose("drafter", drafter, max_draft_length=most, vocab_size=big.model.spec.vocab_size), params
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
