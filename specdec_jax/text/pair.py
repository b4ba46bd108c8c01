"""A target, its drafter and their decoder. `build_pair` loads and combines them; `measure_costs` times passes."""

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from jax.sharding import Mesh

from specdec_jax.costs.choices import DRAFTS, ESTIMATED, MEASURED, costs_asked, longest_draft, widths_for
from specdec_jax.costs.cost_model import CostModel, between
from specdec_jax.costs.this_machine import measured
from specdec_jax.decoding import Decoder, build_decoder, default_widths
from specdec_jax.decoding.cache_feed import check_reads
from specdec_jax.decoding.function_checks import check_parts
from specdec_jax.decoding.rounds import ModelParams, Parts
from specdec_jax.decoding.user_code import is_users
from specdec_jax.drafters.draft_models import with_vocabulary
from specdec_jax.drafters.draft_models.intersection import SharedParams
from specdec_jax.drafters.draft_models.reduced_head import ReducedParams
from specdec_jax.drafters.multi_drafter import multi_drafter
from specdec_jax.drafters.no_drafter import no_drafter
from specdec_jax.drafters.reading import drafter_of
from specdec_jax.kernels.compiled import say
from specdec_jax.loading import LoadedModel, for_target, load_drafter, load_model, needs_translation
from specdec_jax.meshes import bytes_here
from specdec_jax.monitors.log_probs import log_probs
from specdec_jax.monitors.phases import phases
from specdec_jax.sharding import mesh_here
from specdec_jax.stopping.survival import survival
from specdec_jax.strategy import nearest
from specdec_jax.text.options import Drafting, Models
from specdec_jax.text.strategies import choose, find_factory, name_in, names, parse_call
from specdec_jax.types import Drafter, DraftModel, Monitor, Params, StoppingPolicy, Verifier
from specdec_jax.verification.rejection import rejection

PHASES = phases()
MODEL_DRAFTERS = ("model", "reading", "no_drafter", "multi_drafter")  # files of drafters/ that are not selected by name
SMOLLM2_DRAFTER = Models.drafter
ENCODER_DEFAULT = "prompt_lookup"  # outputs of such a target are often in its source
EXAMPLE = "smollm2-drafter@8192"
VOCABULARY = 1024  # tokens for the first check of a drafter, before the target is known

OneDrafter = LoadedModel | Drafter | str
_decoder = functools.lru_cache(maxsize=16)(build_decoder)  # equal parts share a decoder and are compiled once
_answered: Callable[[Parts], set[bool]] = functools.lru_cache(maxsize=16)(lambda parts: set())


class Pair(NamedTuple):
    """A target, optionally a drafter, and their decoder."""

    target: LoadedModel
    decoder: Decoder
    params: ModelParams
    policy: StoppingPolicy  # as requested; the decoder's is the same without hyperparameters
    verifier: Verifier
    monitor: Monitor | None
    first_drafter: Params = None  # the first drafter with a model, whose cost policies weigh
    costs: CostModel | None = None  # costs of that drafter and the target; None: estimated by bytes
    drafters: tuple[OneDrafter, ...] = ()  # loaded models, Drafters, and names of those without a model
    arguments: tuple[Any, ...] | None = None  # of `_join`, from those of `build_pair`
    notices: tuple[str, ...] = ()  # lines for the user about the choice of the drafter

    @property
    def drafter_cost(self) -> float | None:
        """c, the cost of that drafter's pass in target passes: as measured, or the ratio of the bytes read.

        None without a drafter model.
        """
        if self.first_drafter is None:
            return None
        return (self.costs and self.costs.ratio) or _relative_size(self.first_drafter, self.params.target)

    def using(
        self, policy: StoppingPolicy | None = None, verifier: Verifier | None = None, monitor: Monitor | None = None
    ) -> "Pair":
        """The same models with another policy, verifier or monitor; only other static options need compilation.

        Raises ValueError: an argument of the wrong type, or whose functions fail (`build_pair`).
        """
        policy, verifier, parts = policy or self.policy, verifier or self.verifier, self.decoder.parts
        monitor = _watching(policy, verifier, monitor or self.monitor)
        rules, watched = (policy.bare, verifier.bare), monitor and monitor.bare
        decoder = _decoder(parts.target, parts.drafter, *rules, monitor=watched, verification_widths=parts.widths)
        return _checked(self._replace(decoder=decoder, policy=policy, verifier=verifier, monitor=monitor))

    def with_log_probs(self) -> "Pair":
        """The same pair, with the target's log-probability of every token (`monitors.log_probs`) in its Generations."""
        if self.monitor is not None and self.monitor.name == log_probs.__name__:
            return self
        return self.using(monitor=log_probs(self.target.model.spec.context, self.monitor))


def build_pair(
    target: LoadedModel | str = Models.target,
    drafter: OneDrafter | Sequence[OneDrafter] | None = Models.drafter,
    *,
    drafter_params: Params = None,
    policy: StoppingPolicy = survival(),
    verifier: Verifier = rejection(),
    monitor: Monitor | None = None,
    max_draft_length: int | None = Drafting.max_draft_length,
    dtype: str = Models.dtype,
    verification_widths: tuple[int, ...] | None = None,
    costs: CostModel | str | Path | None = Models.costs,
) -> Pair:
    """Loads models that are given by name and builds the decoder. `drafter=None` is plain decoding.

    Nothing is measured, printed or written, except for downloads of models from the hub.

    A policy or verifier that reads phases gets the monitor `phases()` unless another is given.

    Args:
        drafter: a model, by source or loaded (`NAME@8192` proposes the 8,192 most frequent tokens and the text's own
            rare ones; `smollm2-drafter-reading` reads hidden states of smollm2 and works with no other target); the
            name or call of a drafter without a model, in drafters/ or a user's .py file (`prompt_lookup(longest=4)`,
            `ngram`); a Drafter; or a sequence of these, combined by `drafters.multi_drafter`. The default for a target
            with an encoder is `prompt_lookup`, which also copies from its source.
        drafter_params: for drafters without a model, such as a table of n-grams, and for a Drafter with models. For
            several drafters a sequence, with None for those that bring theirs (models) or need none.
        max_draft_length: maximum number of drafted tokens per round. None: the length that pays on predictable text by
            `costs`, 7 if they are estimated or doubtful, but at least that of a static policy.
        dtype: bfloat16, float16, float32 or int8 for models given by name; auto: that of a loaded target, else
            bfloat16.
        verification_widths: ascending. None: the steps of the measured pass; powers of two if costs are estimated
            (from 2) or doubtful (from 1).
        costs: costs of passes, for policies that weigh them: a CostModel, or a file from `experiments.step_cost`. None
            or "estimated": c by the bytes that both models read.

    Raises:
        ValueError: vocabularies without a common token, a number out of range, options or parameters that no drafter
            accepts, or a function of a user's file that fails (`decoding.function_checks.check_parts`).
        FileNotFoundError: a missing file of costs.
    """
    if costs == MEASURED:
        raise ValueError("build_pair measures nothing: measure_costs(pair) does")
    origin = ESTIMATED if costs is None else costs_asked(costs)
    several = drafter is not None and not _is_drafter(drafter)
    monitor = _watching(policy, verifier, monitor)
    loaded = "bfloat16" if dtype == "auto" else dtype
    big = _loaded(target, loaded, mesh_here()) if isinstance(target, str) else target
    if DraftModel.of(big.model).head is not None:
        raise ValueError(f"target {big.name!r} has a draft vocabulary: that is for drafters, a target needs all tokens")
    arguments = several, drafter_params, max_draft_length, verification_widths
    notices: list[str] = []
    if drafter == SMOLLM2_DRAFTER and big.model.spec.source is not None:
        drafter = ENCODER_DEFAULT
        notices.append(f"{drafter} drafts for {big.name}; a smaller model of its kind may too")
    each: list[Any] = [] if drafter is None else list(drafter) if several else [drafter]  # type: ignore[arg-type]
    drafters = tuple(_resolved(big, part, big.dtype if dtype == "auto" else dtype, notices) for part in each)
    pair = _join(big, drafters, arguments, policy, verifier, monitor, origin if isinstance(origin, CostModel) else None)
    return pair._replace(notices=tuple(notices))


def measure_costs(pair: Pair, batch: int = 1, rule_cost: bool = False) -> Pair:
    """The pair with its costs measured on this machine, once per pair and machine: takes half a minute, then cached in
    `~/.cache/specdec_jax/costs`. Progress is printed to standard error.

    Unless given to `build_pair`, draft length and verification widths are derived from the costs: the longest draft
    that pays, the steps of the target's measured pass. With several drafters every model is measured; both are derived
    from the costs of the first.

    Args:
        batch: number of rows: a wide pass of many rows costs more than one of a single row.
        rule_cost: also measure what the policy's own computation takes, which predictions add: as long again.

    Raises:
        ValueError: a mesh of several processes, which must decide alike, or a pair not built by `build_pair`.
    """
    costs_asked(MEASURED)
    if pair.arguments is None:
        raise ValueError("only a pair of build_pair can be measured: this one does not say what it was built of")
    if not pair.drafters:
        return pair
    models = {index: loaded for index, loaded in enumerate(pair.drafters) if isinstance(loaded, LoadedModel)}
    policy = pair.policy if rule_cost else None
    tables = {
        index: measured(pair.target, model, batch, drafter_of=drafter_of, policy=policy)
        for index, model in (models or {-1: None}).items()
    }
    strategies, ratios = (pair.policy, pair.verifier, pair.monitor), {i: table.ratio for i, table in tables.items()}
    joined = _join(pair.target, pair.drafters, pair.arguments, *strategies, next(iter(tables.values())), ratios)
    return joined._replace(notices=pair.notices)


def measured_pair(
    *models: Any, costs: CostModel | str | Path | None = None, batch: int = 1, rule_cost: bool = False, **options: Any
) -> Pair:
    """`build_pair` with its options, then `measure_costs` unless `costs` are given or "estimated": the pair of
    `generate` and of the commands. Without `costs` the environment variable SPECDEC_JAX_COSTS decides (`costs_asked`).
    """
    origin = costs_asked(costs)
    pair = build_pair(*models, costs=ESTIMATED if origin == MEASURED else origin, **options)
    for line in pair.notices:
        say(line)
    return measure_costs(pair, batch, rule_cost) if origin == MEASURED else pair


def _join(
    big: LoadedModel,
    drafters: Sequence[OneDrafter],
    arguments: tuple[Any, ...],
    policy: StoppingPolicy,
    verifier: Verifier,
    monitor: Monitor | None,
    costs: CostModel | None,
    ratios: Mapping[int, float] = {},
) -> Pair:
    """The pair of loaded models; `costs` determine what the `arguments` of `build_pair` leave open.

    `ratios` are the measured costs of drafters by index, in target passes; those of others are estimated by bytes.
    """
    several, drafter_params, limit, widths = arguments
    costs = costs if drafters else None
    if limit is None:  # the longest that pays, or that the policy drafts, within the given widths
        limit, draft_length = DRAFTS if costs is None else longest_draft(costs), policy.given.get("draft_length", 0)
        limit = max(limit, draft_length) if isinstance(draft_length, int) else limit
        limit = max(min(limit, max(widths) - 1), 1) if widths else limit
    weights = drafter_params if several else [drafter_params]
    weights = [None] * len(drafters) if weights is None else weights
    if several and (not isinstance(weights, (list, tuple)) or len(weights) != len(drafters)):
        raise ValueError(
            f"drafter_params for {len(drafters)} drafters must be a sequence of as many, None where not needed"
        )
    pairs, size = [], big.model.spec.vocab_size
    for part, weight in zip(drafters, weights, strict=False):
        if isinstance(part, LoadedModel):
            pairs.append((drafter_of(with_vocabulary(part.model, size), limit), part.params))
        elif isinstance(part, Drafter):
            pairs.append((part, weight))
        else:
            pairs.append((choose("drafter", part, max_draft_length=limit, vocab_size=size), weight))
    built, params = pairs[0] if pairs and not several else (no_drafter(), None)
    if several:
        params = tuple(weight for _, weight in pairs)
        sizes = enumerate(_relative_size(weight, big.params) for weight in params)
        built = multi_drafter(tuple(part for part, _ in pairs), tuple(ratios.get(i, size) for i, size in sizes))
    longest = built.max_draft_length
    measured_drafts = 2 * longest + 1 if costs is None else costs.widths[-1] - 1
    widest = max(longest, min(policy.max_tokens(longest), measured_drafts))  # a tree may fill the widest pass
    widths = tuple(widths or (default_widths(widest) if costs is None else widths_for(costs, widest)))
    rules, watched = (policy.bare, verifier.bare), monitor and monitor.bare
    decoder = _decoder(big.model, built, *rules, monitor=watched, verification_widths=widths)
    first_drafter = next((weight for part, weight in pairs if part.model is not None), None)
    models, priced = ModelParams(big.params, params), costs and between(costs, widths)
    pair = Pair(big, decoder, models, policy, verifier, monitor, first_drafter, priced, tuple(drafters), arguments)
    return _checked(pair)


def _checked(pair: Pair) -> Pair:
    """The same pair, after checking the functions of a user's file."""
    parts = pair.decoder.parts
    answered = _answered(parts)  # a cached set, empty until these parts were checked
    if not answered and is_users([parts.policy, parts.verifier, parts.drafter, parts.monitor]):
        check_parts(parts, pair.params)
    answered.add(True)
    return pair


def split_drafters(words: str) -> list[str]:
    """The drafters of `a,prompt_lookup(longest=4)`: split at commas outside brackets."""
    return [part.strip() for part in re.split(r",(?![^()]*\))", words)]


def without_model(drafter: Any) -> TypeGuard[str]:
    """Whether `drafter` names a drafter without a model: a file of drafters/, or a .py file."""
    return isinstance(drafter, str) and (name_in(drafter) in modelless() or name_in(drafter).endswith(".py"))


def check_drafter(drafter: Any, vocab_size: int | None = None) -> None:
    """Checks the call of a drafter without a model by its factory; `vocab_size` is the target's, if known already.

    Raises ValueError: the factory refuses it, or a model is given options.
    """
    each: Sequence[Any] = [drafter] if drafter is None or _is_drafter(drafter) else drafter
    for part in each:
        if without_model(part):
            parameters = inspect.signature(find_factory("drafter", name_in(part))).parameters
            if name_in(part).endswith(".py") and {"vocab_size", "max_draft_length"} & parameters.keys():
                continue  # a user's factory is called by `_join`, with the pair's values
            choose("drafter", part, max_draft_length=DRAFTS, vocab_size=vocab_size or VOCABULARY)
        elif isinstance(part, str) and part.endswith(")"):
            name, _ = parse_call("drafter", part)
            raise ValueError(f"drafter {name!r} takes no options{nearest(name, modelless())}")


def check_pair(big: LoadedModel, small: LoadedModel) -> None:
    """Checks that a drafter can draft for a target; `loading.outline` of both is enough.

    Raises ValueError: different vocabularies that cannot be translated, hidden states that the target does not provide,
    or a drafter with an encoder for a target without one.
    """
    needs_translation(big, small)
    if small.model.spec.source is not None and big.model.spec.source is None:
        raise ValueError(f"drafter {small.name!r} has an encoder, and target {big.name!r}, without one, has no source")
    try:
        check_reads(big.model, small.model)
    except ValueError as error:
        raise ValueError(f"drafter {small.name!r} for target {big.name!r}: {error}, such as {EXAMPLE}") from None


def _watching(policy: StoppingPolicy, verifier: Verifier, monitor: Monitor | None) -> Monitor | None:
    """The given monitor, or one of phases if a policy or verifier reads them."""
    for kind, part, wanted in (("policy", policy, StoppingPolicy), ("verifier", verifier, Verifier)):
        if not isinstance(part, wanted):
            raise ValueError(f"a {kind} must be a {wanted.__name__}, such as {kind}=..., got {part!r}")
    return PHASES if monitor is None and (policy.needs_phases or verifier.needs_phases) else monitor


def _is_drafter(drafter: Any) -> TypeGuard[OneDrafter]:
    return isinstance(drafter, (str, LoadedModel, Drafter))


def modelless() -> list[str]:
    """The names of drafters without a model: files of drafters/."""
    return [name for name in names("drafter") if name not in MODEL_DRAFTERS]


def _resolved(big: LoadedModel, drafter: OneDrafter, dtype: str, notices: list[str]) -> OneDrafter:
    """The drafter, with its model loaded if given by name, checked against the target."""
    check_drafter(drafter, big.model.spec.vocab_size)
    if isinstance(drafter, Drafter) or (isinstance(drafter, str) and without_model(drafter)):
        return drafter
    try:
        small = _loaded(drafter, dtype, mesh_here(), load_drafter) if isinstance(drafter, str) else drafter
    except FileNotFoundError as error:
        # A misspelt drafter is searched among models last; only then is it known to be neither.
        if difflib.get_close_matches(str(drafter), modelless(), n=1):
            raise ValueError(f"no drafter {drafter!r}{nearest(str(drafter), modelless())}; and {error}") from None
        raise
    check_pair(big, small)
    small = for_target(big, small, notices.append)
    size = big.model.spec.vocab_size
    if isinstance(small.params, ReducedParams) and (last := int(small.params.tokens[-1])) >= size:
        # padding rows of the drafter's embedding
        raise ValueError(f"drafter {small.name!r} would propose token {last}, and the target has {size}")
    return small


@functools.lru_cache(maxsize=4)
def _loaded(source: str, dtype: str, mesh: Mesh | None, load: Callable[..., LoadedModel] = load_model) -> LoadedModel:
    """A cached load; `mesh` is the current mesh, so that a model is loaded again for another mesh."""
    del mesh
    return load(source, dtype=dtype)


def _relative_size(params: Params, target: Params) -> float:
    """The cost of a drafter pass in target passes, estimated by the bytes of the weights read."""
    unread = params.unread_bytes if isinstance(params, (ReducedParams, SharedParams)) else 0
    return (bytes_here(params) - unread) / bytes_here(target)
