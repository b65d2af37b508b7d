"""One side of compare.py: llama.cpp on the same file as it is, many sequences in one llama_decode."""

from __future__ import annotations

import ctypes
import time
from pathlib import Path

import llama_cpp
import numpy as np
from side import AT_ONCE, INPUT_TOKENS, LONG_PROMPT, OUTPUT_TOKENS, figures, options_of, report

CONTEXT = AT_ONCE * (INPUT_TOKENS + OUTPUT_TOKENS)


class Batched:
    """Greedy decoding of several sequences at once."""

    def __init__(self, file: Path, num_threads: int) -> None:
        self.quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)  # kept: it is called from C
        llama_cpp.llama_log_set(self.quiet, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(str(file).encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = CONTEXT
        params.n_batch = params.n_ubatch = max(LONG_PROMPT, AT_ONCE * INPUT_TOKENS)
        params.n_seq_max = AT_ONCE
        params.n_threads = params.n_threads_batch = num_threads
        params.kv_unified = True
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.batch = llama_cpp.llama_batch_init(params.n_batch, 0, 1)

    def step(self, tokens: list[list[int]], start: int) -> list[int]:
        """Feed each sequence its tokens at positions from `start` on; the likeliest next token of each."""
        batch, count, last = self.batch, 0, []
        for sequence, own in enumerate(tokens):
            for place, token in enumerate(own):
                batch.token[count], batch.pos[count] = token, start + place
                batch.n_seq_id[count], batch.seq_id[count][0] = 1, sequence
                batch.logits[count] = place == len(own) - 1
                count += 1
            last.append(count - 1)
        batch.n_tokens = count
        assert llama_cpp.llama_decode(self.context, batch) == 0
        return [self._best(row) for row in last]

    def clear(self) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)

    def _best(self, row: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self.context, row)
        return int(np.ctypeslib.as_array(logits, shape=(self.vocab_size,)).argmax())


def main() -> None:
    options = options_of(__doc__, ("--gguf", Path), ("--threads", int))
    batched = Batched(options.gguf, options.threads)

    def answer(prompts: list[list[int]], num_tokens: int, at_once: int) -> float:
        started = time.perf_counter()
        for first in range(0, len(prompts), at_once):
            batched.clear()
            part = prompts[first : first + at_once]
            tokens, position = batched.step(part, 0), len(part[0])
            for _ in range(num_tokens - 1):
                tokens = batched.step([[token] for token in tokens], position)
                position += 1
        return time.perf_counter() - started

    report(figures(answer))


if __name__ == "__main__":
    main()
