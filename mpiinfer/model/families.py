"""The supported architectures as records: options, and the checkpoint's name of each parameter. Data, not classes.

Sources: the config classes and modeling files of transformers for the options; the GGUF naming of llama.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpiinfer.errors import ModelError

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu")


@dataclass(frozen=True, kw_only=True)
class Family:
    """How one architecture departs from the common decoder.

    qkv_bias: query, key and value have biases whatever config.json says.
    output_bias_follows: the attention output has a bias where `attention_bias` is set.
    windows_from_layer: the first layer with a sliding window, where config.json sets one without listing layers.
    gguf: the architecture's name in GGUF files (Mistral's files say "llama").
    gguf_rotates_pairs: GGUF files of this family hold query and key rows in the order of rotated neighbours
        (row 2i with 2i+1), while Hugging Face checkpoints pair row i with i + head_dim/2.
    """

    name: str
    architecture: str
    gguf: str | None
    qkv_bias: bool = False
    output_bias_follows: bool = False
    mlp_bias_known: bool = False
    qk_norm: bool = False
    windows_known: bool = False
    windows_by_default: bool = False
    windows_from_layer: int = 0
    gguf_rotates_pairs: bool = False


FAMILIES = (
    Family(
        name="llama",
        architecture="LlamaForCausalLM",
        gguf="llama",
        output_bias_follows=True,
        mlp_bias_known=True,
        gguf_rotates_pairs=True,
    ),
    Family(
        name="mistral",
        architecture="MistralForCausalLM",
        gguf=None,
        windows_known=True,
        windows_by_default=True,
    ),
    Family(
        name="qwen2",
        architecture="Qwen2ForCausalLM",
        gguf="qwen2",
        qkv_bias=True,
        windows_known=True,
        windows_from_layer=28,
    ),
    Family(
        name="qwen3",
        architecture="Qwen3ForCausalLM",
        gguf="qwen3",
        output_bias_follows=True,
        qk_norm=True,
        windows_known=True,
        windows_from_layer=28,
    ),
)


def family_of(where: str, architecture: object, model_type: str | None) -> Family:
    """The family that config.json names, by `architectures` or else by `model_type`."""
    for family in FAMILIES:
        if family.architecture == architecture or (architecture is None and family.name == model_type):
            return family
    known = ", ".join(family.architecture for family in FAMILIES)
    raise ModelError(f"{where}: architecture {architecture or model_type!r} is not supported; known are {known}")


def family_of_gguf(where: str, architecture: object) -> Family:
    """The family of a GGUF file's `general.architecture`."""
    for family in FAMILIES:
        if family.gguf is not None and family.gguf == architecture:
            return family
    known = ", ".join(family.gguf for family in FAMILIES if family.gguf)
    raise ModelError(f"{where}: general.architecture = {architecture!r} is not supported; known are {known}")


# Canonical parameter names are those of Hugging Face checkpoints; {i} is the layer.
EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"

# What old checkpoints also store and every reader computes: never an unclaimed tensor.
COMPUTED_SUFFIXES = (".rotary_emb.inv_freq",)


def layer_name(layer: int, part: str) -> str:
    """The canonical name of a layer's parameter, e.g. part "self_attn.q_proj.weight"."""
    return f"model.layers.{layer}.{part}"
