"""What can be set of a generation, wherever it is set: the options of the command line and the settings of a chat.

Defaults and help stand here alone. Nothing heavy is imported: the command line answers --help from these.
"""

from dataclasses import dataclass
from typing import Annotated, TypeVar

import tyro

T = TypeVar("T")
Many = Annotated[tuple[T, ...], tyro.conf.UseAppendAction]  # repeated, not listed: a list would swallow the prompt
KeyValue = tyro.conf.arg(metavar="KEY=VALUE ...", help_behavior_hint="")
Maybe = tyro.conf.arg(metavar="TEXT", help_behavior_hint="")
Switch = Annotated[bool, tyro.conf.arg(help_behavior_hint="")]  # "--no-chat (default: True)" reads as its opposite


@dataclass(frozen=True)
class Models:
    target: str = "smollm2"
    """A built-in name (smollm2), a folder in Hugging Face format, a hub id, a .gguf file or an Orbax folder."""
    drafter: str = "smollm2-drafter"
    """Given like the target, whose vocabulary it must share; or prompt_lookup, ngram or a path to your own .py, which
    need no model; several as a,b take turns. NAME@8192 drafts its 8,192 most frequent tokens only. none: plain
    decoding."""
    drafter_options: Annotated[Many[str], KeyValue] = ()
    """Of a drafter without a model. prompt_lookup: longest=4; ngram: order=3 fill=1."""
    dtype: str = "bfloat16"
    """Of weights and matrix products: bfloat16, float32, or float16 (slow on CPUs)."""
    calibration: Annotated[str | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """Thresholds learnt for this pair (python -m experiments.calibrate), or built-in; options overrule them."""


@dataclass(frozen=True)
class Rules:
    policy: str = "adaedl"
    """When to stop drafting: adaedl, static, at_least (any file of specdec_jax/stopping), or a path to your own .py."""
    policy_options: Annotated[Many[str], KeyValue] = ()
    """Its numbers and switches. adaedl: threshold=0.6 keep_checked_token=true; static: draft_length=3."""
    verifier: str = "rejection"
    """Which drafts survive: rejection, block, greedy (temperature 0 only), or a path to your own .py. Lossy, saying so:
    lenience, typical, easd, by_phase."""
    verifier_options: Annotated[Many[str], KeyValue] = ()
    """As --policy-options, for the verifier."""


@dataclass(frozen=True)
class Drafting:
    max_draft_length: int = 7
    """Most tokens drafted in a round, whatever the policy says."""


@dataclass(frozen=True)
class Decoding:
    max_new_tokens: int = 256
    """Most tokens to decode."""
    temperature: float = 0.0
    """0 is greedy: always the target's most probable token."""
    top_k: int = 0
    """Keep the k most probable tokens; 0 is off."""
    top_p: float = 1.0
    """Keep the most probable tokens up to this mass, in (0, 1]; 1 is off."""
    min_p: float = 0.0
    """Keep tokens of at least this share of the largest probability; 0 is off."""
    seed: int = 0
    """The same seed gives the same tokens."""
    stop: Annotated[Many[str], tyro.conf.arg(metavar="TEXT")] = ()
    """A string that ends the text and is not printed."""
    chat: Switch = True
    """Take the prompt as it is, without the model's chat template."""
    system: Annotated[str | None, Maybe] = None
    """System prompt (needs the chat template)."""
