"""The papers behind a run, as BibTeX: the sources named in the files of its policy, verifier and drafter.

A source is an arXiv id, or a repository, in the docstring of a strategy's module; references.bib has the entries.
"""

import dataclasses
import functools
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from specdec_jax import __version__
from specdec_jax.strategy import Strategy
from specdec_jax.text.pair import Pair

ENTRIES = re.compile(r"^@\w+\{.*?^\}", re.MULTILINE | re.DOTALL)
SOURCE = re.compile(r"eprint = \{(.+?)\}|url = \{https://github.com/(.+?)\}")
ARXIV = re.compile(r"\b\d{4}\.\d{5}\b")
ALWAYS = "2211.17192 2302.01318"  # speculative decoding and its losslessness


def citations(*used: Pair | Strategy) -> str:
    """BibTeX of speculative decoding, of the parts used, and of this software; each entry once.

    Args:
        used: pairs, with their policy, verifier, monitor and drafter, or single strategies. An arXiv id in a user's
            file that is not in references.bib becomes an entry with the id only.

    Raises:
        ValueError: an argument that is neither.
    """
    for thing in used:
        if not isinstance(thing, (Pair, Strategy)):
            raise ValueError(f"citations are of pairs and strategies, got {thing!r}")
    modules = dict.fromkeys(name for thing in used for name in _modules(thing))
    texts = [ALWAYS, *(str(sys.modules[name].__doc__) for name in modules if name in sys.modules)]
    text, listed = "\n".join(texts), references()
    cited = [entry for source, entry in listed.items() if source in text]
    new = [source for source in dict.fromkeys(ARXIV.findall(text)) if source not in listed]
    cited += [f"@misc{{arxiv{source},\n  eprint = {{{source}}}, archivePrefix = {{arXiv}}\n}}" for source in new]
    title = "title = {specdec\\_jax: adaptive speculative decoding in {JAX} and {Flax}}"
    return "\n".join([*cited, f"@software{{specdec_jax,\n  {title},\n  version = {{{__version__}}}\n}}"])


@functools.cache
def references() -> Mapping[str, str]:
    """The entries of references.bib by arXiv id or repository."""
    text = (Path(__file__).resolve().parent.parent / "references.bib").read_text(encoding="utf-8")
    return {next(filter(None, SOURCE.findall(entry)[0])): entry for entry in ENTRIES.findall(text)}


def _modules(thing: Any) -> Iterator[str]:
    """Names of the modules of a strategy's factory, of strategies inside it, and of functions of draft models."""
    if isinstance(thing, Pair):
        thing = (thing.policy, thing.verifier, thing.monitor, thing.decoder.parts.drafter)
    if isinstance(thing, Strategy) and thing.call is not None:
        yield thing.call.factory.__module__
        thing = tuple(thing.options.values())
    if isinstance(thing, functools.partial):
        thing = thing.func
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        thing = tuple(vars(thing).values())
    if isinstance(thing, (tuple, list)):
        for part in thing:
            yield from _modules(part)
    elif callable(thing):
        yield str(thing.__module__)
