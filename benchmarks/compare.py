"""mpiinfer on two ranks of one thread against other engines on two threads, all sides in one run.

    python benchmarks/compare.py --transformers PEERS/bin/python [--vllm PYTHON] [--llama-cpp PYTHON] [--rounds 3]

Each peer has a virtual environment of its own (requirements.txt says with what) and is named by its Python. The sides
take turns, each in fresh processes, so that a machine that gets slower does so for all; what counts is the median of
the ratios of each round. Loading and warm-up are not part of the figures (side.py defines them). Keep the machine
quiet: anything else that runs on its cores is measured too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from mpiinfer.errors import ModelError
from mpiinfer.weights.source import resolve_model

HERE = Path(__file__).parent
OURS = ("fp32", "auto")
Figures = dict[str, float]


def main() -> None:
    options = _options()
    with tempfile.TemporaryDirectory() as folder:
        sides = _sides(options, _model_file(), Path(folder))
        rounds: list[dict[str, Figures]] = []
        for number in range(options.rounds):
            rounds.append({})
            for name, command in sides.items():
                rounds[-1][name] = _run(command)
                print(f"round {number + 1}: {name}: {_line(rounds[-1][name])}", flush=True)
    _report(rounds)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transformers", help="Python of the virtual environment with transformers")
    parser.add_argument("--vllm", help="Python of the one with vLLM; needs --transformers too, which writes its model")
    parser.add_argument("--llama-cpp", help="Python of the one with llama-cpp-python")
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


def _sides(options: argparse.Namespace, model: Path, folder: Path) -> dict[str, list[str]]:
    beside = Path(sys.executable).parent / "mpiexec"
    ranks = [str(beside if beside.exists() else "mpiexec"), "-n", "2", "-genv", "OMP_NUM_THREADS", "1"]
    sides = {
        f"mpiinfer {weights}": [*ranks, sys.executable, str(HERE / "side_mpiinfer.py"), "--weights", weights]
        for weights in OURS
    }
    common = ["--gguf", str(model), "--threads", "2"]
    if options.transformers:
        sides["transformers"] = [options.transformers, str(HERE / "side_transformers.py"), *common]
    if options.llama_cpp:
        sides["llama.cpp"] = [options.llama_cpp, str(HERE / "side_llama_cpp.py"), *common]
    if options.vllm:
        export = [options.transformers, str(HERE / "export_folder.py"), "--gguf", str(model), "--folder", str(folder)]
        subprocess.run(export, check=True, capture_output=True)
        sides["vllm"] = [options.vllm, str(HERE / "side_vllm.py"), "--folder", str(folder)]
    return sides


def _model_file() -> Path:
    """The GGUF of the packaged model, which all sides load."""
    try:
        return resolve_model("smollm2-135m-instruct")
    except ModelError as error:
        sys.exit(str(error))


def _run(command: list[str]) -> Figures:
    """Run one side; its last line is its figures as JSON."""
    two_threads = {"OMP_NUM_THREADS": "2", "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(command, env={**os.environ, **two_threads}, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")
    taken: Figures = json.loads(done.stdout.strip().splitlines()[-1])
    return taken


def _report(rounds: list[dict[str, Figures]]) -> None:
    for name in rounds[0]:
        medians = {figure: statistics.median(one[name][figure] for one in rounds) for figure in rounds[0][name]}
        print(f"median of {len(rounds)}: {name}: {_line(medians)}")
    for ours in (f"mpiinfer {weights}" for weights in OURS):
        for peer in rounds[0]:
            if peer.startswith("mpiinfer"):
                continue
            for figure in rounds[0][peer]:
                ratios = [one[ours][figure] / one[peer][figure] for one in rounds]
                low, high = min(ratios), max(ratios)
                print(f"{ours} / {peer}, {figure}: {statistics.median(ratios):.2f} ({low:.2f} to {high:.2f})")


def _line(figures: Figures) -> str:
    return ", ".join(f"{figure} {value:.1f}" for figure, value in figures.items())


if __name__ == "__main__":
    main()
