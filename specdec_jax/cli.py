"""`python -m specdec_jax ...`: what a person types. Options are the fields of the dataclasses below."""

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

BAD_INPUT, INTERRUPTED = 2, 130


@dataclass(frozen=True)
class Generate:
    """Decode a prompt with adaptive speculative decoding and stream the text.

    On a terminal accepted drafts are green, tokens the target put in place of a rejected draft (struck out in red)
    yellow, its bonus tokens cyan; piped, the text is plain.

    Examples:
        python -m specdec_jax generate "Why is the sky blue?"
        python -m specdec_jax generate "Why is the sky blue?" --policy static --policy-options draft_length=3 --json
        echo "Tell a story" | python -m specdec_jax generate - --temperature 0.8 --seed 7
    """

    prompt: tyro.conf.Positional[str]
    """The prompt; - reads standard input."""
    target: str = "smollm2"
    """Target: a built-in name, a folder in Hugging Face format, a hub id, a .gguf file or an Orbax folder."""
    drafter: str = "smollm2-drafter"
    """Drafter, given like the target; none is plain decoding."""
    policy: str = "adaedl"
    """Stopping policy: the name of a file in specdec_jax/stopping, or a path to your own .py."""
    policy_options: tuple[str, ...] = ()
    """Its structure and numbers, as key=value: threshold=0.6 entropy_factor=0.2 keep_checked_token=true."""
    verifier: str = "rejection"
    """Verifier: rejection, block, greedy, or a path to your own .py."""
    verifier_options: tuple[str, ...] = ()
    """Its structure and numbers, as key=value."""
    max_draft_length: int = 7
    """Most tokens drafted in a round."""
    temperature: float = 0.0
    """0 is greedy."""
    top_k: int = 0
    """Keep the k most probable tokens; 0 is off."""
    top_p: float = 1.0
    """Keep the most probable tokens up to this mass; 1 is off."""
    min_p: float = 0.0
    """Keep tokens of at least this share of the largest probability; 0 is off."""
    max_new_tokens: int = 256
    """Most tokens to decode."""
    stop: tuple[str, ...] = ()
    """Strings that end the text; they are not printed."""
    seed: int = 0
    """The same seed gives the same tokens."""
    dtype: str = "bfloat16"
    """Weights and matrix products: bfloat16, float32 or float16."""
    chat: bool = True
    """Put the prompt through the model's chat template."""
    system: str | None = None
    """System prompt (needs the chat template)."""
    json: bool = False
    """Print tokens, text and statistics as one JSON object instead of streaming."""
    rejected: bool = True
    """Show rejected drafts on a terminal."""
    statistics: bool = True
    """Print a line of statistics to standard error at the end."""
    profile: Path | None = None
    """Write a JAX profile (scopes draft, verify, commit) to this folder."""


@dataclass(frozen=True)
class VerifyLossless:
    """Prove that a policy and a verifier leave the target's law unchanged: exact enumeration on toy models, then a
    chi-square test of the whole decoder. With a target and a drafter the sampled test runs on that pair too.

    Examples:
        python -m specdec_jax verify-lossless --policy adaedl --verifier block
        python -m specdec_jax verify-lossless --policy my_rule.py --target smollm2 --drafter smollm2-drafter
    """

    policy: str = "adaedl"
    """Stopping policy: a built-in name or a path to your own .py."""
    policy_options: tuple[str, ...] = ()
    """Its structure and numbers, as key=value."""
    verifier: str = "rejection"
    """Verifier: a built-in name or a path to your own .py."""
    verifier_options: tuple[str, ...] = ()
    """Its structure and numbers, as key=value."""
    sequences: int = 40960
    """Sequences of the sampled test."""
    target: str | None = None
    """A real target for the sampled test."""
    drafter: str | None = None
    """A real drafter for the sampled test."""
    prompt: str = "Once upon a time"
    """The prompt of the sampled test on a real pair."""
    temperature: float = 1.0
    """Its temperature."""
    json: bool = False
    """Print the report as JSON."""


Command = (
    Annotated[Generate, tyro.conf.subcommand("generate")]
    | Annotated[VerifyLossless, tyro.conf.subcommand("verify-lossless")]
)


@dataclass(frozen=True)
class _Arguments:
    command: tyro.conf.OmitSubcommandPrefixes[Command] = field()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, 1 (a proof failed), 2 (bad input), 130 (interrupted)."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    command = tyro.cli(
        tyro.conf.OmitSubcommandPrefixes[Command],  # type: ignore[arg-type]
        args=given,
        prog="python -m specdec_jax",
        description="Adaptive speculative decoding in JAX.",
        config=(tyro.conf.FlagConversionOff,) if False else (),
    )
    try:
        return run_generate(command) if isinstance(command, Generate) else run_verify(command)
    except (ValueError, FileNotFoundError, IsADirectoryError, PermissionError) as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED


def run_generate(command: Generate) -> int:
    """The `generate` command."""
    from specdec_jax.choices import choose
    from specdec_jax.compilation_cache import enable
    from specdec_jax.generation import build_pair, generate

    policy = choose("policy", command.policy, command.policy_options)
    verifier = choose("verifier", command.verifier, command.verifier_options)
    prompt = sys.stdin.read().strip() if command.prompt == "-" else command.prompt
    _check_request(command, prompt)
    enable()
    pair = build_pair(
        command.target,
        None if command.drafter == "none" else command.drafter,
        policy=policy.strategy,
        verifier=verifier.strategy,
        max_draft_length=command.max_draft_length,
        dtype=command.dtype,
    )
    numbers = {} if command.drafter == "none" else policy.numbers
    options: dict[str, Any] = {
        name: getattr(command, name)
        for name in ("temperature", "top_k", "top_p", "min_p", "max_new_tokens", "stop", "seed", "chat", "system")
    }
    options |= {"policy_numbers": numbers, "verifier_numbers": verifier.numbers, "pair": pair}
    with _profiled(command.profile):
        if command.json:
            print(json.dumps(generate(prompt, **options)._asdict(), ensure_ascii=False))
            return 0
        return _stream(command, prompt, options)


def _check_request(command: Generate, prompt: str) -> None:
    """Refuses what needs no weights to be refused, before they are read."""
    from specdec_jax.sampling import make_warp

    if not prompt:
        raise ValueError("the prompt is empty")
    make_warp(1, command.temperature, command.top_k, command.top_p, command.min_p)
    if command.max_draft_length < 1:
        raise ValueError(f"max_draft_length must be at least 1, got {command.max_draft_length}")
    if command.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {command.max_new_tokens}")
    if command.verifier == "greedy" and command.temperature > 0:
        raise ValueError(f"greedy verification needs temperature 0, got {command.temperature:g}")


def _stream(command: Generate, prompt: str, options: dict[str, Any]) -> int:
    from rich.console import Console

    from specdec_jax.streaming import stream
    from specdec_jax.views.terminal import coloured_chunk, legend

    console = Console(highlight=False, soft_wrap=True)
    chunks = stream(prompt, **options)
    decode = options["pair"].target.tokenizer.decode
    colours = console.is_terminal and not console.no_color
    code, result = 0, None
    try:
        while True:
            try:
                chunk = next(chunks)
            except StopIteration as end:
                result = end.value
                break
            if colours:
                console.print(coloured_chunk(chunk, decode, command.rejected), end="")
            else:
                print(chunk.text, end="", flush=True)
    except KeyboardInterrupt:
        code = INTERRUPTED
    print(flush=True)
    if colours and command.rejected:
        Console(stderr=True).print(legend())
    if command.statistics and result is not None:
        print(_summary(result), file=sys.stderr)
    return code


def _summary(result: Any) -> str:
    """One line: speed, acceptance, lengths."""
    figures, count = result.statistics, len(result.tokens)
    parts = [f"{count} tokens", f"{count / result.seconds:.1f} tokens/s" if result.seconds > 0 else ""]
    if figures["num_draft_tokens"]:
        parts += [
            f"acceptance {figures['draft_acceptance_rate']:.2f}",
            f"mean draft {figures['mean_draft_length']:.2f}",
            f"mean acceptance length {figures['mean_acceptance_length']:.2f}",
        ]
    parts += [f"compiled in {result.compile_seconds:.1f} s" if result.compile_seconds else "", result.finish_reason]
    return "[" + ", ".join(part for part in parts if part) + "]"


@contextlib.contextmanager
def _profiled(folder: Path | None) -> Iterator[None]:
    if folder is None:
        yield
        return
    import jax

    folder.mkdir(parents=True, exist_ok=True)
    with jax.profiler.trace(str(folder)):
        yield


def run_verify(command: VerifyLossless) -> int:
    """The `verify-lossless` command; 1 when a proof fails."""
    from specdec_jax.views.proof import verify

    return 0 if verify(**vars(command)) else 1
