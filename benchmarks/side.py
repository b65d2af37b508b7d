"""What the two sides of decode.py have in common, so that both measure the same thing. Needs Python only."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

WARM_UP_TOKENS = 8


def options_of(description: str | None, *more: tuple[str, Callable[[str], Any]]) -> argparse.Namespace:
    """The shape of the prompt and of the answer, and `more` options of one side (name, type)."""
    parser = argparse.ArgumentParser(description=description)
    for name, kind in (("--input-tokens", int), ("--output-tokens", int), *more):
        parser.add_argument(name, type=kind, required=True)
    return parser.parse_args()


def prompt_of(num_tokens: int) -> list[int]:
    """The prompt's token ids."""
    return [1000 + i for i in range(num_tokens)]


def figures(seconds: Callable[[int], float], num_input: int, num_output: int) -> dict[str, float]:
    """Tokens a second. `seconds(n)` answers the prompt with n tokens and returns the wall time that it took."""
    seconds(WARM_UP_TOKENS)
    prefill_s = seconds(1)
    decode_s = seconds(num_output) - prefill_s
    return {"decode_tokens_per_s": (num_output - 1) / decode_s, "prefill_tokens_per_s": num_input / prefill_s}
