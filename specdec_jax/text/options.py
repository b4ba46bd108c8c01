"""The options of a generation: name, type, default and help.

`build_pair`, the command line, the chat's settings, configs and experiments inherit from these dataclasses or use their
defaults; tyro shows a field's help also if a subclass changes the default. The module imports nothing slow, because
--help needs it.
"""

from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import tyro

from specdec_jax.ranges import Between
from specdec_jax.text.sampling_params import NewTokens, SamplingParams

T = TypeVar("T")
Many = Annotated[tuple[T, ...], tyro.conf.UseAppendAction]  # repeated options, because a list would consume the prompt
Maybe = tyro.conf.arg(metavar="TEXT", help_behavior_hint="")
MaybeInt, MaybeFile = (tyro.conf.arg(metavar=word, help_behavior_hint="") for word in ("INT", "FILE"))
Switch = Annotated[bool, tyro.conf.arg(help_behavior_hint="")]  # "--no-chat (default: True)" would be misleading

LONGEST = 64  # maximum draft length; beyond it verification would be wider than a prefill chunk


@dataclass(frozen=True)
class ModelNames:
    target: str = "smollm2"
    """A built-in name (smollm2), a folder in Hugging Face format, a hub id (org/name, org/name@revision), a .gguf file
    or an Orbax folder."""
    drafter: str = "smollm2-drafter-reading@8192"
    """Given like the target; or without a model: prompt_lookup(longest=4), ngram, a path to your own .py. a,b
    alternates between several. NAME@8192 proposes only its 8,192 most frequent tokens and the text's own rare ones.
    With another vocabulary, NAME@tokens proposes those that both have, NAME@text tokenises its text again; chosen
    unless given. A target with an encoder (T5) has prompt_lookup unless you name one. none: plain decoding."""
    mesh: Annotated[str | None, Maybe] = None
    """Decode on several devices, such as data=2,model=4: rows over two groups of four that share the target's
    weights."""


@dataclass(frozen=True)
class Models(ModelNames):
    dtype: str = "auto"
    """Data type of weights and matrix products: bfloat16, float32, or float16 (slow on CPUs); auto: bfloat16. int8:
    matrices take half of bfloat16's memory, rounded as they are read."""
    costs: Annotated[str | None, Maybe] = None
    """What passes cost, for rules that weigh it: measured (once a pair and machine, the default), estimated (by the
    bytes read), or a cost_model.json of experiments.step_cost."""
    calibration: Annotated[str | None, MaybeFile] = None
    """Hyperparameters calibrated for this pair (python -m experiments.calibrate), or built-in; those given explicitly
    take precedence."""


@dataclass(frozen=True)
class Rules:
    policy: str = "survival"
    """When to stop drafting: survival weighs measured costs, adaedl is the paper's rule (doctor compares them). Any
    file of specdec_jax/stopping or a path to your own .py, with options and hyperparameters:
    "adaedl(threshold=0.6, keep_checked_token=True)", "at_least(minimum=2, policy=survival)"."""
    verifier: str = "rejection"
    """How drafts are verified: rejection, block, greedy (temperature 0 only), or a path to your own .py. Lossy:
    "lenience(lenience=0.8)", typical, easd, by_phase."""


@dataclass(frozen=True)
class Drafting:
    max_draft_length: Annotated[int | None, Between(1, LONGEST), MaybeInt] = None
    """Most tokens drafted per round, whatever the policy; by default what pays here on predictable text."""


@dataclass(frozen=True)
class Decoding(SamplingParams):
    max_new_tokens: NewTokens = 256
    """Most tokens to decode."""
    stop: Annotated[Many[str], tyro.conf.arg(metavar="TEXT")] = ()
    """A string that ends the text and is not printed."""
    stop_ids: tyro.conf.Suppress[Any] = None
    chat: Switch = True
    """Put the prompt into the model's chat template; --no-chat takes it as it is."""
    system: Annotated[str | None, Maybe] = None
    """System prompt (needs the chat template)."""
    parse_special: Switch = False
    """Read special tokens in messages, such as <|im_end|>, as control tokens, as in prompts with --no-chat; by default
    they are plain text."""

    def __post_init__(self) -> None:
        """Skips validation while the command line is parsed, because of tyro's error format; Settings validates."""
