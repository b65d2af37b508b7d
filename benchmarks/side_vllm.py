"""One side of compare.py: vLLM on CPUs, float32, on a folder that export_folder.py has written."""

from __future__ import annotations

import time
from pathlib import Path

from side import AT_ONCE, LONG_PROMPT, figures, options_of, report


def main() -> None:
    options = options_of(__doc__, ("--folder", Path))
    from vllm import LLM, SamplingParams

    model = LLM(
        model=str(options.folder),
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=2 * LONG_PROMPT,
        max_num_seqs=AT_ONCE,
    )

    def answer(prompts: list[list[int]], num_tokens: int, at_once: int) -> float:
        started = time.perf_counter()
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        model.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return time.perf_counter() - started

    report(figures(answer))


if __name__ == "__main__":
    main()
