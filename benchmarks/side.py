"""What all sides of compare.py have in common, so that each measures the same thing. Needs Python only."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from typing import Any

NUM_PROMPTS, AT_ONCE = 64, 32
INPUT_TOKENS, OUTPUT_TOKENS = 32, 64
LONG_PROMPT = 512
WARM_UP_TOKENS = 4
VOCABULARY = 49152

# Answers prompts, so many at once at most, with so many new tokens each; returns the seconds that it took.
Answer = Callable[[list[list[int]], int, int], float]


def options_of(description: str | None, *more: tuple[str, Callable[[str], Any]]) -> argparse.Namespace:
    """The options of one side (name, type), all of which must be given."""
    parser = argparse.ArgumentParser(description=description)
    for name, kind in more:
        parser.add_argument(name, type=kind, required=True)
    return parser.parse_args()


def figures(answer: Answer) -> dict[str, float]:
    """Tokens a second: of a batch, new ones over the whole time; of one stream, new ones after the first; of a prompt.

    Prompts are random and all different, so that no side computes a beginning once for many.
    """
    chance = random.Random(0)

    def prompts(count: int, num_tokens: int) -> list[list[int]]:
        return [[chance.randrange(2, VOCABULARY) for _ in range(num_tokens)] for _ in range(count)]

    answer(prompts(AT_ONCE, INPUT_TOKENS), WARM_UP_TOKENS, AT_ONCE)
    batch_s = answer(prompts(NUM_PROMPTS, INPUT_TOKENS), OUTPUT_TOKENS, AT_ONCE)
    answer(prompts(1, INPUT_TOKENS), WARM_UP_TOKENS, 1)
    first_s = min(answer(prompts(1, INPUT_TOKENS), 1, 1) for _ in range(2))
    stream_s = min(answer(prompts(1, INPUT_TOKENS), OUTPUT_TOKENS, 1) for _ in range(2)) - first_s
    answer(prompts(1, LONG_PROMPT), 1, 1)
    prefill_s = min(answer(prompts(1, LONG_PROMPT), 1, 1) for _ in range(3))
    return {
        "batch": NUM_PROMPTS * OUTPUT_TOKENS / batch_s,
        "stream": (OUTPUT_TOKENS - 1) / stream_s,
        "prefill": LONG_PROMPT / prefill_s,
    }


def report(taken: dict[str, float]) -> None:
    """The last line that a side prints."""
    print(json.dumps(taken), flush=True)
