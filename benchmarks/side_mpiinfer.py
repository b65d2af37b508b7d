"""One side of compare.py: mpiinfer; run under mpiexec."""

from __future__ import annotations

import time

from side import figures, options_of, report

from mpiinfer import Engine, SamplingParams


def main() -> None:
    options = options_of(__doc__, ("--weights", str))
    with Engine.open("smollm2-135m-instruct", weights=options.weights) as engine:

        def answer(prompts: list[list[int]], num_tokens: int, at_once: int) -> float:
            started = time.perf_counter()
            params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
            engine.generate(prompts, params, concurrency=at_once)
            return time.perf_counter() - started

        taken = figures(answer)
        if engine.is_first:
            report(taken)


if __name__ == "__main__":
    main()
