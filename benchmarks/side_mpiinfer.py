"""One side of decode.py: times mpiinfer; run under mpiexec. The last line of its output is JSON."""

from __future__ import annotations

import json
import time

from side import figures, options_of, prompt_of

from mpiinfer import Engine, SamplingParams


def main() -> None:
    options = options_of(__doc__)
    prompt = prompt_of(options.input_tokens)
    with Engine.open("smollm2-135m-instruct", weights="fp32") as engine:

        def seconds(num_tokens: int) -> float:
            started = time.perf_counter()
            engine.generate([prompt], SamplingParams(max_tokens=num_tokens, ignore_eos=True))
            return time.perf_counter() - started

        taken = figures(seconds, options.input_tokens, options.output_tokens)
        if engine.is_first:
            print(json.dumps(taken), flush=True)


if __name__ == "__main__":
    main()
