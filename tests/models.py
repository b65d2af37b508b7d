"""Tiny random models in Hugging Face folders, and what transformers makes of them.

Promises: a folder holds config.json, safetensors, generation_config.json and a byte-level tokenizer; the same arguments
give the same bytes. Refuses to know: mpiinfer. transformers is imported inside the functions only, since that takes
seconds.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

# Family -> what the names of its classes in transformers begin with.
CLASS_NAMES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
FAMILIES = tuple(CLASS_NAMES)
BOS, EOS = "<|bos|>", "<|eos|>"
NUM_BYTES = 256

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<' + message['role'] + '>' + message['content'] + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


class Reference(NamedTuple):
    """Greedy continuation by transformers in float32."""

    token_ids: list[int]
    logprobs: list[float]  # of the chosen tokens, natural logarithm
    smallest_gap: float  # between the best two logits over all steps: how far from a tie it ever was


def tiny_model(
    folder: Path,
    family: str = "llama",
    *,
    seed: int = 0,
    dtype: str = "float32",
    max_shard_size: int | str | None = None,
    tokenizer: bool = True,
    **shape: Any,
) -> Path:
    """Write a random model of `family` into `folder` and return the folder.

    `shape` holds config fields by transformers' own names and overrides the defaults: 3 layers, 4 heads, 2 KV heads,
    head_dim 16, hidden_size heads x head_dim, intermediate_size 96, vocab_size 300, tied or not by
    `tie_word_embeddings`. `max_shard_size` in bytes (or "20KB") splits the weights into shards with an index.
    """
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    config = tiny_config(family, **shape)
    model = _model_class(family)(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_random_parameter(name, parameter.shape, generator))
    folder.mkdir(parents=True, exist_ok=True)
    sharding = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
    model.to(getattr(torch, dtype)).save_pretrained(folder, **sharding)
    if tokenizer:
        write_tokenizer(folder, vocab_size=config.vocab_size)
    return folder


def tiny_config(family: str, **shape: Any) -> Any:
    """The transformers config of a tiny model; see `tiny_model`."""
    import transformers

    num_heads = shape.get("num_attention_heads", 4)
    head_dim = shape.get("head_dim", 16)
    # Mistral's and Qwen's defaults describe models of billions of parameters: every size is given here.
    fields: dict[str, Any] = {
        "num_hidden_layers": 3,
        "num_attention_heads": num_heads,
        "num_key_value_heads": 2 if num_heads % 2 == 0 else num_heads,
        "head_dim": head_dim,
        "hidden_size": num_heads * head_dim,
        "intermediate_size": 96,
        "vocab_size": 300,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": None,
    }
    if family == "mistral":
        fields["sliding_window"] = None
    return getattr(transformers, f"{CLASS_NAMES[family]}Config")(**(fields | shape))


def _model_class(family: str) -> Any:
    import transformers

    return getattr(transformers, f"{CLASS_NAMES[family]}ForCausalLM")


def _random_parameter(name: str, shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """Values that make every mistake visible and no greedy choice a coin flip.

    With the usual initialisation (standard deviation 0.02) all logits are nearly equal: the best two differ by less
    than the rounding of a sum in another order, so equal tokens would prove nothing and unequal ones would be no
    mistake. Embedding and head are therefore scaled so that logits have a standard deviation of about 4: the best two
    then differ by about 1, while float32 rounds in the fifth digit. Biases are not zero and norms not one, since a bias
    or norm that is left out or applied twice must change the tokens.
    """
    import torch

    values = torch.randn(tuple(shape), generator=generator)
    if name.endswith("bias"):
        return 0.5 * values
    if len(shape) == 1:
        return 1.0 + 0.3 * values
    fan_in = shape[1]
    if "embed" in name or "lm_head" in name:
        return 4.0 * values / fan_in**0.5
    # What the layers add must outweigh a token's own embedding, else a tied head says the same token for ever.
    gain = 3.0 if "o_proj" in name or "down_proj" in name else 1.5
    return gain * values / fan_in**0.5


def write_tokenizer(folder: Path, *, vocab_size: int) -> Path:
    """Write a byte-level BPE tokenizer of at most `vocab_size` tokens, two of them special, and a chat template.

    ValueError when `vocab_size` cannot hold all bytes. The merges are learned from made-up words, so that a token may
    be a byte, a part of a character, or a word.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    specials = [BOS, EOS]
    if vocab_size < NUM_BYTES + len(specials):
        raise ValueError(f"a byte-level tokenizer needs vocab_size >= {NUM_BYTES + len(specials)}, not {vocab_size}")
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=specials,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([made_up_text()], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    return folder


def made_up_text(num_words: int = 2000) -> str:
    """Words of random syllables, some with letters of more than one byte."""
    chance = random.Random(0)
    syllables = [c + v for c in "bdfgklmnprstvz" for v in ("a", "e", "i", "o", "u", "\u00e4", "\u4f60", "\U0001f600")]
    weights = [1 / (rank + 1) for rank in range(len(syllables))]
    chance.shuffle(syllables)
    words = ["".join(chance.choices(syllables, weights, k=chance.randint(1, 4))) for _ in range(num_words)]
    return " ".join(words)


def random_prompt(num_tokens: int, *, vocab_size: int, seed: int = 0) -> list[int]:
    """Token ids without the two special ones."""
    chance = random.Random(seed)
    return [chance.randrange(2, vocab_size) for _ in range(num_tokens)]


def reference(folder: Path, token_ids: Sequence[int], num_tokens: int) -> Reference:
    """Greedy continuation of one prompt by `num_tokens` tokens, end-of-sequence tokens ignored."""
    import torch

    model = load_reference(folder)
    chosen: list[int] = []
    logprobs: list[float] = []
    gaps: list[float] = []
    with torch.inference_mode():
        for _ in range(num_tokens):
            # No cache: the whole sequence anew each time is the plainest reference, and these models are tiny.
            inputs = torch.tensor([[*token_ids, *chosen]])
            logits = model(input_ids=inputs, use_cache=False, logits_to_keep=1).logits[0, -1]
            best, ids = logits.topk(2)
            chosen.append(int(ids[0]))
            logprobs.append(float(logits.log_softmax(-1)[ids[0]]))
            gaps.append(float(best[0] - best[1]))
    return Reference(chosen, logprobs, min(gaps, default=float("inf")))


def reference_logits(folder: Path, token_ids: Sequence[int]) -> torch.Tensor:
    """Logits of every position of one prompt: float32 [tokens, vocabulary]."""
    import torch

    with torch.inference_mode():
        return load_reference(folder)(input_ids=torch.tensor([list(token_ids)])).logits[0].clone()


def load_reference(folder: Path) -> Any:
    """The transformers model of `folder` in float32, with attention written out."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    ).eval()
