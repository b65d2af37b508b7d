"""What a weight format does to a model: perplexity of tests/fixtures/text.txt, and the bytes that its weights take.

    python benchmarks/perplexity.py [--model smollm2-135m-instruct] [--weights exact fp16 int8 ...]

One rank. Perplexity is e to the mean negative log probability of each token but the first, given all before it.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import torch

from mpiinfer.comm.solo import SoloDomain
from mpiinfer.model.batch import Batch, Segment
from mpiinfer.model.stage import Stage
from mpiinfer.text.tokenizer import Tokenizer
from mpiinfer.weights.checkpoint import Checkpoint, open_checkpoint
from mpiinfer.weights.choose import CHOICES, new_weight
from mpiinfer.weights.load import load
from mpiinfer.weights.source import resolve_model

TEXT = Path(__file__).parent.parent / "tests" / "fixtures" / "text.txt"
CPU = torch.device("cpu")
BLOCK_TOKENS = 16


def stage_of(checkpoint: Checkpoint, weights: str) -> Stage:
    """The whole model on one rank, its weights held in the format `weights`."""

    allocate = partial(new_weight, choice=weights, index=checkpoint.index, dtype=torch.float32, device=CPU)
    layers = range(checkpoint.config.num_layers)
    stage = Stage(checkpoint.config, layers, SoloDomain(), torch.float32, CPU, allocate)
    load(checkpoint, stage.manifest, stage.weights)
    return stage


def token_ids_of(checkpoint: Checkpoint) -> list[int]:
    """The text in the model's tokens."""
    if checkpoint.is_gguf:
        tokenizer = Tokenizer.from_gguf(checkpoint.metadata, checkpoint.path)
    else:
        tokenizer = Tokenizer.from_folder(checkpoint.path)
    return tokenizer.encode(TEXT.read_text())


@torch.inference_mode()
def perplexity(stage: Stage, token_ids: list[int]) -> float:
    """Of all tokens but the first."""
    num_tokens = len(token_ids) - 1
    stage.allocate_cache(-(-num_tokens // BLOCK_TOKENS), BLOCK_TOKENS)
    segment = Segment(range(-(-num_tokens // BLOCK_TOKENS)), 0, 0, num_tokens)
    batch = Batch.of(token_ids[:-1], [segment], range(num_tokens), BLOCK_TOKENS, CPU)
    logprobs = stage(batch, None).double().log_softmax(dim=1)
    return float((-logprobs[torch.arange(num_tokens), token_ids[1:]].mean()).exp())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--weights", nargs="+", default=[choice for choice in CHOICES if choice != "exact"])
    options = parser.parse_args()
    checkpoint = open_checkpoint(resolve_model(options.model))
    token_ids = token_ids_of(checkpoint)
    print(f"{options.model}, {len(token_ids)} tokens")
    exact = perplexity(stage_of(checkpoint, "exact"), token_ids)
    for weights in options.weights:
        stage = stage_of(checkpoint, weights)
        found = perplexity(stage, token_ids)
        print(
            f"{weights:8} {stage.weight_formats:10} perplexity {found:.4f} ({found / exact - 1:+.2%} of exact), "
            f"{stage.num_bytes / 1e6:.0f} MB"
        )


if __name__ == "__main__":
    main()
