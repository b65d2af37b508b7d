"""One side of decode.py: times transformers on the same file, dequantised to float32. Its last line is JSON."""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch
import transformers
from side import figures, options_of, prompt_of


def main() -> None:
    options = options_of(__doc__, ("--gguf", Path), ("--threads", int))
    torch.set_num_threads(options.threads)
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        options.gguf.parent, gguf_file=options.gguf.name, dtype=torch.float32
    ).eval()
    prompt = torch.tensor([prompt_of(options.input_tokens)])

    def seconds(num_tokens: int) -> float:
        started = time.perf_counter()
        with torch.inference_mode():
            model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=False,
                min_new_tokens=num_tokens,
                max_new_tokens=num_tokens,
            )
        return time.perf_counter() - started

    print(json.dumps(figures(seconds, options.input_tokens, options.output_tokens)))


if __name__ == "__main__":
    main()
