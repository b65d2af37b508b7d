"""One side of decode.py: times transformers on the same file, dequantised to float32. Its last line is JSON."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
import transformers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--input-tokens", type=int, required=True)
    parser.add_argument("--output-tokens", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        options.gguf.parent, gguf_file=options.gguf.name, dtype=torch.float32
    ).eval()
    prompt = torch.tensor([[1000 + i for i in range(options.input_tokens)]])

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

    seconds(8)
    prefill_s = seconds(1)
    decode_s = seconds(options.output_tokens) - prefill_s
    figures = {
        "decode_tokens_per_s": (options.output_tokens - 1) / decode_s,
        "prefill_tokens_per_s": options.input_tokens / prefill_s,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
