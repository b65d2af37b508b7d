"""One side of decode.py: times mpiinfer; run under mpiexec. The last line of its output is JSON."""

from __future__ import annotations

import argparse
import json
import time

from mpiinfer import Engine, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--input-tokens", type=int, required=True)
    parser.add_argument("--output-tokens", type=int, required=True)
    options = parser.parse_args()
    prompt = [1000 + i for i in range(options.input_tokens)]
    with Engine.open("smollm2-135m-instruct", weights="fp32") as engine:

        def seconds(num_tokens: int) -> float:
            started = time.perf_counter()
            engine.generate([prompt], SamplingParams(max_tokens=num_tokens, ignore_eos=True))
            return time.perf_counter() - started

        seconds(8)
        prefill_s = seconds(1)
        decode_s = seconds(options.output_tokens) - prefill_s
        if engine.is_first:
            figures = {
                "decode_tokens_per_s": (options.output_tokens - 1) / decode_s,
                "prefill_tokens_per_s": options.input_tokens / prefill_s,
            }
            print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
