"""One side of compare.py: transformers on the same file, dequantised to float32, in batches."""

from __future__ import annotations

import time
from pathlib import Path

import torch
import transformers
from side import figures, options_of, report


def main() -> None:
    options = options_of(__doc__, ("--gguf", Path), ("--threads", int))
    torch.set_num_threads(options.threads)
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        options.gguf.parent, gguf_file=options.gguf.name, dtype=torch.float32
    ).eval()

    def answer(prompts: list[list[int]], num_tokens: int, at_once: int) -> float:
        started = time.perf_counter()
        for first in range(0, len(prompts), at_once):
            inputs = torch.tensor(prompts[first : first + at_once])
            with torch.inference_mode():
                model.generate(
                    inputs,
                    attention_mask=torch.ones_like(inputs),
                    do_sample=False,
                    min_new_tokens=num_tokens,
                    max_new_tokens=num_tokens,
                )
        return time.perf_counter() - started

    report(figures(answer))


if __name__ == "__main__":
    main()
