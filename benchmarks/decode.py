"""One stream, both sides in one run: mpiinfer on two ranks of one thread against transformers on two threads.

    python benchmarks/decode.py --peer-python PEERS/bin/python [--rounds 5] [--input-tokens 32] [--output-tokens 64]

PEERS is a virtual environment with benchmarks/requirements.txt. The sides take turns, each in fresh processes, so that
a machine that gets slower does so for both; what counts is the median and the ratio of the pairs. Loading, the first
call (warm-up) and the prompt's own step are not part of the decode figure; both compute in float32. Keep the machine
quiet: anything else that runs on its cores is measured too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from mpiinfer.errors import ModelError
from mpiinfer.weights.source import resolve_model

HERE = Path(__file__).parent


def main() -> None:
    options = _options()
    shape = ["--input-tokens", str(options.input_tokens), "--output-tokens", str(options.output_tokens)]
    mpiexec = Path(sys.executable).parent / "mpiexec"
    ours = [str(mpiexec if mpiexec.exists() else "mpiexec"), "-n", "2", sys.executable, str(HERE / "side_mpiinfer.py")]
    peer = [options.peer_python, str(HERE / "side_transformers.py"), "--gguf", str(_model_file())]
    sides = {
        "mpiinfer, 2 ranks x 1 thread": ([*ours, *shape], {"OMP_NUM_THREADS": "1"}),
        "transformers, 2 threads": ([*peer, *shape, "--threads", "2"], {"OMP_NUM_THREADS": "2"}),
    }
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for number in range(options.rounds):
        for name, (command, environment) in sides.items():
            figures[name].append(_run(command, environment))
            print(f"round {number + 1}: {name}: {_line(figures[name][-1])}", flush=True)
    medians = {name: _medians(rounds) for name, rounds in figures.items()}
    for name, median in medians.items():
        print(f"median of {options.rounds}: {name}: {_line(median)}")
    first, second = figures.values()
    for figure in ("decode_tokens_per_s", "prefill_tokens_per_s"):
        ratios = [a[figure] / b[figure] for a, b in zip(first, second, strict=True)]
        print(
            f"ratio of {figure}: median {statistics.median(ratios):.2f} (from {min(ratios):.2f} to {max(ratios):.2f})"
        )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", required=True, help="Python of the virtual environment with transformers")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--input-tokens", type=int, default=32)
    parser.add_argument("--output-tokens", type=int, default=64)
    return parser.parse_args()


def _model_file() -> Path:
    """The GGUF of the packaged model, which both sides load."""
    try:
        return resolve_model("smollm2-135m-instruct")
    except ModelError as error:
        sys.exit(str(error))


def _run(command: list[str], environment: dict[str, str]) -> dict[str, float]:
    """Run one side; its last line is its figures as JSON."""
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")
    figures: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return figures


def _medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {figure: statistics.median(one[figure] for one in rounds) for figure in rounds[0]}


def _line(figures: dict[str, float]) -> str:
    return ", ".join(f"{figure} {value:.1f}" for figure, value in figures.items())


if __name__ == "__main__":
    main()
