"""The commands of the command line as dataclasses: their fields are the options. Nothing heavy is imported."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from specdec_jax.ranges import Between
from specdec_jax.text.options import Decoding, Drafting, Maybe, MaybeFile, MaybeInt, Models, Rules, Switch

ENGINE_LOGS, BEAM_SEARCH = "specdec_jax.contrib.engine_logs", "specdec_jax.contrib.beam_search"
"""The packages of `advise` and `--beams`, imported on use."""


@dataclass(frozen=True)
class Beams:
    beams: Annotated[
        int | None, Between(1), tyro.conf.arg(aliases=["--num-beams"], metavar="INT", help_behavior_hint="")
    ] = None
    """Beam search with this many beams instead of drafting; a table of all beams follows the text."""
    length_penalty: float = 1.0
    """With --beams: the score is the log-probability over length to this power; above 0 favours long texts."""
    min_new_tokens: int = 0
    """With --beams: no end of sequence before this many tokens."""


@dataclass(frozen=True)
class Output:
    json: Switch = False
    """Print text, tokens, statistics and times as one line of JSON instead of streaming."""
    compare: Switch = False
    """Also decode the prompt plainly, alternating with speculative decoding, and print the measured speed-up."""
    record: Switch = False
    """Add every round to the JSON: drafted, accepted, lambda, entropies."""
    log_probs: Switch = False
    """Add the target's log-probability of every token to the JSON: log_probs at temperature 1 without truncation,
    warped_log_probs as sampled, and tempered_log_probs at the temperature without truncation."""
    phases: Switch = False
    """Run the phase monitor even if no rule reads it; the page shades reasoning phases."""
    statistics: Switch = True
    """Print statistics to standard error at the end; --no-statistics prints none."""
    page: Annotated[Path | None, MaybeFile] = None
    """Write one HTML file: the text by kind of token, rejected drafts, entropies and thresholds, statistics."""


@dataclass(frozen=True)
class Decodes(Drafting):
    """What the commands that decode share."""

    cite: Switch = False
    """Print the BibTeX of the policy, verifier, drafter and proofs to standard error."""
    models: Models = field(default_factory=Models)
    rules: Rules = field(default_factory=Rules)
    decoding: Decoding = field(default_factory=Decoding)


@dataclass(frozen=True, kw_only=True)
class Generate(Decodes):
    """Decode a prompt speculatively and stream the text.

    A small drafter proposes tokens and the target verifies them in one pass; the output distribution is the target's.
    On a terminal accepted drafts are green, rejected ones struck out in red with the target's token in yellow after
    them; bonus tokens, after drafts that were all accepted, are cyan. Piped, the text is plain.

      python -m specdec_jax generate "Why is the sky blue?"
      python -m specdec_jax generate "Why is the sky blue?" --policy "adaedl(threshold=0.3)" --compare
      python -m specdec_jax generate "Name three rivers." --temperature 0.8 --seed 7 --stop "2." --json
      python -m specdec_jax generate "Name three rivers." --beams 4 --length-penalty 1.0
      echo "Once upon a time" | python -m specdec_jax generate - --no-chat --drafter none
    """

    prompt: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="PROMPT")]
    """- reads standard input."""
    beams: Beams = field(default_factory=Beams)
    output: Output = field(default_factory=Output)


@dataclass(frozen=True)
class Chat(Decodes):
    """Chat with a model under speculative decoding; slash commands change every setting.

    Alt-Enter is a new line, Tab completes, Ctrl-C stops an answer and keeps the session; /help lists the commands.
    If standard input is not a terminal, each of its lines is a message or a command.

      python -m specdec_jax chat
      python -m specdec_jax chat --policy "static(draft_length=3)" --temperature 0.8
      printf 'Name three rivers.\\n/stats\\n' | python -m specdec_jax chat
    """


@dataclass(frozen=True, kw_only=True)
class GenerateFile(Decodes):
    """Decode the prompts of a JSONL file as one batch.

    Rows whose text has ended take the next prompt, and every result is appended to the output, in the input's order. A
    line of the input is an object with `prompt` (text, or messages with role and content) and, where they differ from
    the options: system, max_new_tokens, temperature, top_k, top_p, min_p, seed, stop, and policy and verifier (objects
    of hyperparameters); `id` is passed on. Line i has seed + i. A run that was killed goes on with the same command. A
    bad line becomes a line with its error, and the exit code is 1.

      python -m specdec_jax generate-file prompts.jsonl results.jsonl
      python -m specdec_jax generate-file prompts.jsonl results.jsonl --batch 32 --temperature 0.7 --tokens
    """

    input: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="INPUT")]
    """A JSONL file."""
    output: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUTPUT")]
    """Results are appended to it; what they depend on is in OUTPUT.settings.json."""
    batch: Annotated[int, Between(1), tyro.conf.arg(metavar="INT")] = 8
    """Rows decoded at once, or as many as fit. Costs are measured for it, and draft lengths go by them (--costs)."""
    tokens: Switch = False
    """Write every result's token ids too."""
    log_probs: Switch = False
    """Write the target's log-probabilities of its tokens too, as `generate --log-probs` does."""
    overwrite: Switch = False
    """Begin anew where the output exists; what was there is kept as OUTPUT.old."""


@dataclass(frozen=True)
class Answers(Decoding):
    """How the answers are decoded that acceptance is measured on: a few short ones."""

    max_new_tokens: int = 64
    """Most tokens of an answer that acceptance is measured on."""
    stop: tyro.conf.Suppress[Any] = ()


@dataclass(frozen=True)
class Doctor(Drafting):
    """Say whether a pair of models will work and pay.

    Families and vocabularies, memory by dtype, what passes cost here, how many drafts are accepted on a few prompts,
    the speed-up of every stopping rule, predicted by replay, and the command to decode with. The built-in pair takes
    two to three minutes on two cores the first time, less afterwards. Exit code 1: it does not work here, or drafting
    will not pay; the page says why.

      python -m specdec_jax doctor --target smollm2 --drafter smollm2-drafter
      python -m specdec_jax doctor --target my/target --drafter my/drafter --temperature 0.7 --prompts questions.jsonl
    """

    models: Models = field(default_factory=Models)
    decoding: Answers = field(default_factory=Answers)
    prompts: Annotated[Path | None, MaybeFile] = None
    """A JSONL file of prompts, each with `prompt`, `text` or `turns`; all are decoded as one batch. By default eight
    short ones of many kinds."""
    context: Annotated[int | None, MaybeInt] = None
    """Tokens of a row that memory is counted for; by default 2,048, or the target's context."""
    json: Annotated[Path | None, MaybeFile] = None
    """Also write the page's numbers to this file."""


@dataclass(frozen=True)
class Advise:
    """Say how many tokens to draft, from a log of any engine or a trace.

    The best static draft length, a table by batch size, whether to speculate at all, and the most that any rule could
    gain, each with an interval; and the options of vLLM, SGLang, TensorRT-LLM, transformers and llama.cpp. A trace has
    distributions and gets confidence thresholds too. Exit code 1: drafting pays at none of the batch sizes.

      python -m specdec_jax advise profile_export.jsonl --costs llama-3.1-8b-eagle-h100 --batch-sizes 1 16 64
      python -m specdec_jax advise traces/trace-0.npz --costs 0.1
      python -m specdec_jax advise answers.jsonl --costs cost_model.json --draft-length 5
    """

    log: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="LOG")]
    """A trace (.npz), records of vLLM or AIPerf (.jsonl), logs of SpecDecode-Bench (file or folder), answers of
    Spec-Bench, or a request table of speculators (.parquet)."""
    costs: tuple[str, ...] = ()
    """What passes cost: `c` or `c,slope` in passes of plain decoding (a drafter step, one more verified token),
    cost_model.json of experiments.step_cost (one a batch size), or a name of contrib/engine_logs/published.py; by
    default Llama-3.1-8B with an EAGLE head on an H100."""
    batch_sizes: Annotated[tuple[int, ...], Between(1)] = ()
    """Rows decoded at once, where the costs hold for any; by default 1, and 1, 4, 16 and 64 for the H100."""
    max_draft_length: Annotated[int, Between(1), tyro.conf.arg(metavar="INT")] = 16
    """The longest draft considered; costs that were measured for shorter ones end it earlier."""
    drafter: Annotated[str | None, Maybe] = None
    """Drafter in SpecDecode-Bench logs: acc_eagle or acc_ngram."""
    draft_length: Annotated[int | None, MaybeInt] = None
    """Draft length of Spec-Bench answers; by default the most tokens accepted in a round."""
    json: Annotated[Path | None, MaybeFile] = None
    """Also write the numbers to this file."""


@dataclass(frozen=True)
class VerifyLossless:
    """Prove that a policy and a verifier leave the target's distribution unchanged.

    Draws cases from a seed: warps, batches, draft lengths, texts, vocabularies, and numbers that the tested functions
    contain. Rounds are enumerated exactly on toy models, rows compared among other rows, verifiers and drafters tested
    at real vocabularies in float32, and long texts sampled with the whole decoder. The last lines say how much was
    drawn and what would escape. Exit code 1: not lossless; 2: an error in a file of yours or an option; 3: not shown,
    because the rule was never seen to stop at some draft, or something else never occurred.

      python -m specdec_jax verify-lossless --policy "adaedl(keep_checked_token=True)" --verifier block
      python -m specdec_jax verify-lossless --policy my_rule.py --target smollm2 --drafter smollm2-drafter
    """

    rules: Rules = field(default_factory=Rules)
    monitor: Annotated[str | None, Maybe] = None
    """What watches the text for rules that read it: phases, or a path to your own .py. By default phases, where a rule
    needs them."""
    max_draft_length: Annotated[int | None, Between(1, 8), MaybeInt] = None
    """The longest draft tested, at most 8; by default 8 on toys and 7 on a pair."""
    minutes: Annotated[float, Between(0, 1e5)] = 0.0
    """Draw for this many minutes; by default once, in about one minute."""
    target: Annotated[str | None, Maybe] = None
    """A real target for the sampled test."""
    drafter: Annotated[str | None, Maybe] = None
    """A real drafter for the sampled test; without --target a drafter that needs no model, such as your own .py."""
    mesh: Annotated[str | None, Maybe] = None
    """Test on several devices, as generate does."""
    prompt: str = "Once upon a time"
    """The prompt of the sampled test on a real pair."""
    temperature: float = 1.0
    """The temperature of the sampled test on a real pair."""
    pair_sequences: Annotated[int, Between(1)] = 512
    """Sequences of the sampled test on a real pair; 512 take some minutes on two CPU cores."""
    seed: Annotated[int | None, Between(0), MaybeInt] = None
    """Draws the cases; by default others every time, and the report says which seed."""
    json: Switch = False
    """Print the report as one line of JSON."""
