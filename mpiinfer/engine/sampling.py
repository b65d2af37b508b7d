"""`Sampling`: how the ranks choose a sequence's tokens, as it travels in a plan. A value over integers and floats."""

from __future__ import annotations

import msgspec


class Sampling(msgspec.Struct, array_like=True, frozen=True):
    """`SamplingParams` with what only the head knows put in: a seed, and the ids that words and endings stand for.

    logprobs, prompt_logprobs: how many of the likeliest tokens to report, -1 for no log probabilities at all.
    bias: (id, addend). endings: ids that end a text, which may not come before `min_tokens` new ones. bad_words: the
    token ids of each.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    logprobs: int = -1
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias: list[tuple[int, float]] = []
    min_tokens: int = 0
    endings: list[int] = []
    bad_words: list[list[int]] = []
    prompt_logprobs: int = -1

    @property
    def edits_logits(self) -> bool:
        """Whether logits are changed before a token is chosen."""
        penalised = self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
        return penalised or bool(self.bias) or bool(self.bad_words) or (self.min_tokens > 0 and bool(self.endings))
