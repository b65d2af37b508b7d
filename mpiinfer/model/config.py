"""`ModelConfig`: what the network is, in one frozen value, read from config.json, GGUF metadata or a model card.

Refuses to know how it is cut over ranks. A key that is needed and absent, or a feature that is not supported, is an
error that names the file and the key.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpiinfer.errors import ModelError
from mpiinfer.model.families import ACTIVATIONS, Family, family_of, family_of_gguf

# Far above any model: what is larger is a damaged file, and would be found out by a program that never ends.
_MAX_COUNT = 2**31
_MAX_LAYERS = 10_000
_MAX_TOKEN_ID = 2**32 - 1
ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding. `theta` is the base of the frequencies; `kind` says how they are stretched.

    default: not at all. linear: all divided by `factor`. llama3: the low ones divided by `factor`, with a smooth
    passage. factors: each divided by its own of `factors` (head_dim / 2 of them), as GGUF files state llama3.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    factors: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Dimensions and options of a decoder.

    windows: for each layer the sliding attention window in tokens, or None for full attention.
    rms_eps, rope: as in the checkpoint. eos_token_ids: from the config only; the tokenizer may add to them.

    Raises ModelError for numbers that no model has. The message has the names below and no file: the readers of files
    check what they read before they come here.
    """

    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_positions: int
    rms_eps: float
    rope: Rope
    activation: str = "silu"
    tied_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int | None, ...] = ()
    bos_token_id: int | None = None
    eos_token_ids: frozenset[int] = frozenset()
    dtype: str = "float32"

    def __post_init__(self) -> None:
        where = f"{self.family} model"
        _check_count(where, "num_layers", self.num_layers, _MAX_LAYERS)
        counts = ("hidden_size", "num_heads", "num_kv_heads", "head_dim")
        for key in (*counts, "intermediate_size", "vocab_size", "max_positions"):
            _check_count(where, key, getattr(self, key))
        _check_heads(
            where, ("num_heads", self.num_heads), ("num_kv_heads", self.num_kv_heads), ("head_dim", self.head_dim)
        )
        for key, number in (("rms_eps", self.rms_eps), ("rope theta", self.rope.theta)):
            _check_number(where, key, number)

    @property
    def group_size(self) -> int:
        """Query heads that read one key/value head."""
        return self.num_heads // self.num_kv_heads


def _check_count(where: str, key: str, value: int, at_most: int = _MAX_COUNT) -> int:
    if value < 1:
        raise ModelError(f"{where}: {key} = {value!r:.40} must be 1 or more")
    if value > at_most:
        raise ModelError(f"{where}: {key} = {value!r:.40} must be {at_most} or less; correct it")
    return value


def _check_number(where: str, key: str, value: float) -> float:
    if not (math.isfinite(value) and value > 0):
        raise ModelError(f"{where}: {key} = {value} must be finite and above 0; correct it")
    return value


def _check_heads(where: str, heads: tuple[str, int], kv_heads: tuple[str, int], head_dim: tuple[str, int]) -> None:
    """Each is the name that `where` has for it, and its value."""
    if heads[1] % kv_heads[1]:
        raise ModelError(
            f"{where}: {heads[0]} = {heads[1]} is not a multiple of {kv_heads[0]} = {kv_heads[1]}: "
            "correct the one that is not the model's"
        )
    if head_dim[1] % 2:
        raise ModelError(
            f"{where}: {head_dim[0]} = {head_dim[1]} is odd, but rotary position embedding pairs the halves of a head: "
            "it must be even"
        )


class _Keys:
    """Typed look-ups in a checkpoint's own config, naming `where` and the key in every complaint."""

    def __init__(self, where: str, values: Mapping[str, Any]) -> None:
        self.where = where
        self.values = values

    def need(self, key: str, kind: type) -> Any:
        value = self.get(key, kind)
        if value is None:
            raise ModelError(f"{self.where}: needs the key {key!r} ({kind.__name__})")
        return value

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        value = self.values.get(key)
        if value is None:
            return default
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            try:
                return float(value)
            except OverflowError:
                raise ModelError(f"{self.where}: {key} = {value!r:.40} is too large; correct it") from None
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ModelError(f"{self.where}: {key} = {value!r:.80} must be of type {kind.__name__}")
        return value

    def count(self, key: str, default: int | None = None, at_most: int = _MAX_COUNT) -> int:
        value = self.need(key, int) if default is None else self.get(key, int, default)
        return _check_count(self.where, key, int(value), at_most)

    def number(self, key: str, default: float | None = None) -> float:
        value = self.need(key, float) if default is None else self.get(key, float, default)
        return _check_number(self.where, key, float(value))

    def token_ids(self, key: str) -> tuple[int, ...]:
        """Of one id or a list of them."""
        value = self.values.get(key)
        if value is None:
            return ()
        ids = tuple(value) if isinstance(value, (list, tuple)) else (value,)
        # -1 means none in some files, and so does the largest number in a GGUF file.
        if not all(type(i) is int and -1 <= i <= _MAX_TOKEN_ID for i in ids):
            raise ModelError(f"{self.where}: {key} = {value!r:.80} must be a token id or a list of them; correct it")
        return ids


def config_from_hf(where: str, values: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """The config of a Hugging Face folder: `values` of config.json and, where present, of generation_config.json.

    Both spellings are read: transformers 5's `rope_parameters` and `dtype`, and the older `rope_theta`,
    `rope_scaling` and `torch_dtype`.
    """
    keys = _Keys(where, values)
    quantization = keys.get("quantization_config", dict)
    if quantization is not None:
        method = quantization.get("quant_method")
        raise ModelError(
            f"{where}: quantization_config ({method}) is not supported: use the unquantised model or a GGUF"
        )
    architectures = keys.get("architectures", list) or [None]
    family = family_of(where, architectures[0], keys.get("model_type", str))
    num_heads = keys.count("num_attention_heads")
    num_kv_heads = keys.count("num_key_value_heads", num_heads)
    hidden_size = keys.count("hidden_size")
    num_layers = keys.count("num_hidden_layers", at_most=_MAX_LAYERS)
    head_dim = keys.count("head_dim", _even_head_dim(where, hidden_size, num_heads, keys))
    head_dim_key = "hidden_size / num_attention_heads" if values.get("head_dim") is None else "head_dim"
    _check_heads(
        where,
        ("num_attention_heads", num_heads),
        ("num_key_value_heads", num_kv_heads),
        (head_dim_key, head_dim),
    )
    generation_keys = _Keys(str(Path(where).with_name("generation_config.json")), generation or {})
    attention_bias = keys.get("attention_bias", bool, family.qkv_bias)
    return ModelConfig(
        family=family.name,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=keys.count("intermediate_size"),
        vocab_size=keys.count("vocab_size"),
        max_positions=keys.count("max_position_embeddings"),
        rms_eps=keys.number("rms_norm_eps"),
        rope=_rope_from_hf(keys),
        activation=_activation(where, keys.get("hidden_act", str, "silu")),
        tied_embeddings=keys.get("tie_word_embeddings", bool, False),
        qkv_bias=attention_bias or family.qkv_bias,
        output_bias=attention_bias and family.output_bias_follows,
        mlp_bias=keys.get("mlp_bias", bool, False) and family.mlp_bias_known,
        qk_norm=family.qk_norm,
        windows=_windows(keys, family, num_layers),
        bos_token_id=next(iter(keys.token_ids("bos_token_id")), None),
        eos_token_ids=frozenset(keys.token_ids("eos_token_id") + generation_keys.token_ids("eos_token_id")),
        dtype=_dtype(keys),
    )


def config_from_gguf(
    where: str,
    metadata: Mapping[str, Any],
    tensors: Collection[str],
    rope_factors: tuple[float, ...] = (),
) -> ModelConfig:
    """The config of a GGUF file: its metadata, its tensors' GGUF names, and the values of its rope_freqs.weight."""
    arch = metadata.get("general.architecture")
    family = family_of_gguf(where, arch)
    keys = _Keys(where, {k.removeprefix(f"{arch}."): v for k, v in metadata.items()})
    num_heads = keys.count("attention.head_count")
    num_kv_heads = keys.count("attention.head_count_kv", num_heads)
    hidden_size = keys.count("embedding_length")
    num_layers = keys.count("block_count", at_most=_MAX_LAYERS)
    head_dim = keys.count("attention.key_length", hidden_size // num_heads)
    head_dim_key = (
        "embedding_length / attention.head_count"
        if keys.values.get("attention.key_length") is None
        else "attention.key_length"
    )
    _check_heads(
        where,
        ("attention.head_count", num_heads),
        ("attention.head_count_kv", num_kv_heads),
        (head_dim_key, head_dim),
    )
    rotated = keys.get("rope.dimension_count", int, head_dim)
    if rotated != head_dim:
        raise ModelError(f"{where}: rope.dimension_count = {rotated} of {head_dim}: partial rotation is not supported")
    # Some files say 0 for none.
    window = keys.count("attention.sliding_window") if keys.get("attention.sliding_window", int) else None
    num_tokens = len(keys.get("tokenizer.ggml.tokens", list) or ())
    return ModelConfig(
        family=family.name,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=keys.count("feed_forward_length"),
        vocab_size=keys.count("vocab_size", num_tokens or None),
        max_positions=keys.count("context_length"),
        rms_eps=keys.number("attention.layer_norm_rms_epsilon"),
        rope=_rope_from_gguf(keys, rope_factors, head_dim),
        tied_embeddings="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_down.bias" in tensors,
        qk_norm=family.qk_norm,
        windows=(window,) * num_layers if window else (),
        bos_token_id=next(iter(keys.token_ids("tokenizer.ggml.bos_token_id")), None),
        eos_token_ids=frozenset(keys.token_ids("tokenizer.ggml.eos_token_id")),
        dtype="float32",
    )


def _even_head_dim(where: str, hidden_size: int, num_heads: int, keys: _Keys) -> int:
    if keys.values.get("head_dim") is None and hidden_size % num_heads:
        raise ModelError(f"{where}: hidden_size = {hidden_size} is not a multiple of {num_heads} heads: give head_dim")
    return hidden_size // num_heads


def _rope_from_hf(keys: _Keys) -> Rope:
    name = "rope_parameters" if keys.get("rope_parameters", dict) else "rope_scaling"
    scaling = dict(keys.get(name, dict) or {})
    rope = _Keys(f"{keys.where}: {name}", scaling)
    theta = keys.number("rope_theta", 10000.0) if scaling.get("rope_theta") is None else rope.number("rope_theta")
    kind = scaling.get("rope_type", scaling.get("type")) or "default"
    rotated = scaling.get("partial_rotary_factor", keys.values.get("partial_rotary_factor")) or 1.0
    if rotated != 1.0:
        raise ModelError(f"{keys.where}: partial_rotary_factor = {rotated}: partial rotation is not supported")
    if kind == "default":
        return Rope(theta=theta)
    if kind == "linear":
        return Rope(theta=theta, kind=kind, factor=rope.number("factor"))
    if kind == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if low >= high:
            raise ModelError(f"{rope.where}: low_freq_factor = {low} must be below high_freq_factor = {high}")
        return Rope(
            theta=theta,
            kind=kind,
            factor=rope.number("factor"),
            low_freq_factor=low,
            high_freq_factor=high,
            original_max_positions=rope.count("original_max_position_embeddings"),
        )
    raise ModelError(f"{keys.where}: rope type {kind!r} is not supported; known are default, linear, llama3")


def _rope_from_gguf(keys: _Keys, factors: tuple[float, ...], head_dim: int) -> Rope:
    theta = keys.number("rope.freq_base", 10000.0)
    if factors:
        if 2 * len(factors) != head_dim:
            raise ModelError(f"{keys.where}: {ROPE_FACTORS} has {len(factors)} values, not half of head_dim {head_dim}")
        for index, factor in enumerate(factors):
            _check_number(keys.where, f"{ROPE_FACTORS}[{index}]", factor)
        return Rope(theta=theta, kind="factors", factors=factors)
    kind = keys.get("rope.scaling.type", str, "none")
    if kind == "none":
        return Rope(theta=theta)
    if kind == "linear":
        return Rope(theta=theta, kind="linear", factor=keys.number("rope.scaling.factor"))
    raise ModelError(f"{keys.where}: rope.scaling.type = {kind!r} is not supported; known are none and linear")


def _windows(keys: _Keys, family: Family, num_layers: int) -> tuple[int | None, ...]:
    """Which layers attend to a sliding window only, by the rules of the family's own config."""
    window = keys.get("sliding_window", int)
    if (
        window is None
        or not family.windows_known
        or not keys.get("use_sliding_window", bool, family.windows_by_default)
    ):
        return ()
    _check_count(keys.where, "sliding_window", window)
    types = keys.get("layer_types", list)
    if types is not None:
        if len(types) != num_layers:
            raise ModelError(f"{keys.where}: layer_types lists {len(types)} layers, num_hidden_layers = {num_layers}")
        return tuple(window if kind == "sliding_attention" else None for kind in types)
    first = keys.get("max_window_layers", int, family.windows_from_layer)
    return tuple(window if layer >= first else None for layer in range(num_layers))


def _activation(where: str, name: str) -> str:
    if name not in ACTIVATIONS:
        raise ModelError(f"{where}: hidden_act = {name!r} is not supported; known are {', '.join(ACTIVATIONS)}")
    return name


def _dtype(keys: _Keys) -> str:
    return str(keys.values.get("dtype") or keys.values.get("torch_dtype") or "float32").removeprefix("torch.")
