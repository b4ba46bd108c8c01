"""What configs/evidence.py asks to record: cells, in their order, and prompts."""

from pathlib import Path
from typing import NamedTuple

from configs.base import EvidenceConfig, RecordedPair
from experiments.lib.prompts import Prompt, load_prompts

SEEDS = 1000  # between the seeds of two cells, more than prompts have
USUAL = 1.0  # temperatures above it are recorded later
Key = tuple[str, float, int]  # pair, temperature and limit of tokens: of all seeds' cells


class Cell(NamedTuple):
    """A trace: the texts of a pair at a temperature, with a seed, of up to so many tokens."""

    pair: RecordedPair
    temperature: float
    seed: int
    tokens: int

    @property
    def path(self) -> Path:
        """Below the folder of the recording."""
        return Path(self.pair.name, f"{self.tokens}-seed{self.seed}", f"trace-{self.temperature:g}.npz")

    @property
    def key(self) -> Key:
        """Of its group."""
        return self.pair.name, self.temperature, self.tokens


def cells(config: EvidenceConfig) -> list[Cell]:
    """In the order of recording, by temperature: the first seed of every pair, long texts, high temperatures, then more
    seeds."""
    rounds: dict[tuple[int, bool, bool], list[Cell]] = {}
    temperatures = sorted({temperature for pair in config.pairs for temperature in pair.temperatures})
    for temperature in temperatures:
        for pair in (pair for pair in config.pairs if temperature in pair.temperatures):
            for number in range(pair.seeds if temperature > 0 else 1):
                hot, of_pair = temperature > USUAL, (pair, temperature, SEEDS * number)
                rounds.setdefault((number, hot, False), []).append(Cell(*of_pair, config.max_new_tokens))
                if number == 0 and not hot:
                    rounds.setdefault((number, hot, True), []).append(Cell(*of_pair, config.long_tokens))
    return [cell for key in sorted(rounds) for cell in rounds[key]]


def prompts_of(config: EvidenceConfig, pair: RecordedPair) -> tuple[list[Prompt], list[Prompt]]:
    """The prompts of a pair, and those of them that are also answered at length. Raises ValueError for a kind of which
    the file has too few, and as `load_prompts`."""
    chosen, at_length = [], []
    for kind in config.kinds:
        each = [prompt for prompt in load_prompts(Path(config.data) / kind.file) if prompt.category in kind.categories]
        if len(each) < pair.prompts:
            raise ValueError(f"{kind.file} has {len(each)} prompts of {kind.name}, {pair.prompts} are asked for")
        spread = [
            each[number * len(each) // pair.prompts]._replace(category=kind.name) for number in range(pair.prompts)
        ]
        few = max(round(pair.prompts / config.long_share), 1)
        chosen += spread
        at_length += [spread[number * pair.prompts // few] for number in range(few)]
    return chosen, at_length
