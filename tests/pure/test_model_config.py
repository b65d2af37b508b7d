"""What config.json and GGUF metadata may say of a model, and one line with file and key for what they may not."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest

from mpiinfer.errors import ModelError
from mpiinfer.model.config import ModelConfig, Rope, config_from_gguf, config_from_hf
from mpiinfer.weights.checkpoint import open_checkpoint
from mpiinfer.weights.source import CardConfig
from tests.checkpoint_files import hf_values, tiny_config

HF = "folder/config.json"
GENERATION = "folder/generation_config.json"
GGUF = "folder/m.gguf"
HUGE = 10**400
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": 8,
    "llama.feed_forward_length": 6,
    "llama.attention.head_count": 2,
    "llama.attention.head_count_kv": 1,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.vocab_size": 10,
}


def from_hf(generation: dict[str, Any] | None = None, **changes: Any) -> ModelConfig:
    return config_from_hf(HF, hf_values(tiny_config()) | changes, generation)


def from_gguf(changes: dict[str, Any], factors: tuple[float, ...] = ()) -> ModelConfig:
    return config_from_gguf(GGUF, METADATA | changes, {"output.weight"}, factors)


def assert_names(error: pytest.ExceptionInfo[ModelError], where: str, key: str) -> None:
    text = str(error.value)
    assert text.startswith(f"{where}: ") and key in text
    assert "\n" not in text and len(text) < 300


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"head_dim": 5}, "head_dim = 5 is odd"),
        ({"head_dim": None, "hidden_size": 25}, "hidden_size / num_attention_heads = 5 is odd"),
        ({"num_key_value_heads": 2}, "num_attention_heads = 5 is not a multiple of num_key_value_heads = 2"),
        *[({"rms_norm_eps": eps}, "rms_norm_eps") for eps in (0, 0.0, -1e-5, math.nan, math.inf, HUGE, "x", True)],
        *[({"rope_theta": theta}, "rope_theta") for theta in (0, -1.0, math.nan, math.inf, HUGE)],
        ({"rope_parameters": {"rope_theta": 0}}, "rope_parameters: rope_theta = 0.0"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "rope_scaling: factor = 0.0"),
        ({"rope_scaling": {"type": "linear", "factor": math.nan}}, "factor = nan"),
        ({"rope_parameters": LLAMA3 | {"factor": -8.0}}, "rope_parameters: factor = -8.0"),
        ({"rope_parameters": LLAMA3 | {"factor": math.inf}}, "factor = inf"),
        ({"rope_parameters": LLAMA3 | {"low_freq_factor": 0}}, "low_freq_factor = 0.0"),
        ({"rope_parameters": LLAMA3 | {"high_freq_factor": 1.0}}, "low_freq_factor = 1.0 must be below high_freq"),
    ],
)
def test_numbers_of_config_json_that_no_model_has(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ModelError) as error:
        from_hf(**changes)
    assert_names(error, HF, key)


@pytest.mark.parametrize(
    "key",
    [
        *("num_attention_heads", "num_key_value_heads", "hidden_size", "num_hidden_layers", "head_dim"),
        *("intermediate_size", "vocab_size", "max_position_embeddings"),
    ],
)
@pytest.mark.parametrize("value", [HUGE, 2**31 + 1, 0, -1, True, 1.5, [1]])
def test_counts_have_bounds(key: str, value: Any) -> None:
    with pytest.raises(ModelError) as error:
        from_hf(**{key: value})
    assert_names(error, HF, f"{key} = ")


def test_layers_have_a_bound_of_their_own() -> None:
    start = time.monotonic()
    assert from_hf(num_hidden_layers=10_000).num_layers == 10_000
    with pytest.raises(ModelError) as error:
        from_hf(num_hidden_layers=1_000_000)
    assert_names(error, HF, "num_hidden_layers = 1000000 must be 10000 or less")
    with pytest.raises(ModelError) as error:
        from_gguf({"llama.block_count": 1_000_000, "llama.attention.sliding_window": 4})
    assert_names(error, GGUF, "block_count = 1000000 must be 10000 or less")
    assert time.monotonic() - start < 5


def test_sliding_window_has_bounds() -> None:
    mistral: dict[str, Any] = {"architectures": ["MistralForCausalLM"]}
    assert from_hf(sliding_window=4, **mistral).windows == (4, 4)
    for window in (0, -4, HUGE):
        with pytest.raises(ModelError) as error:
            from_hf(sliding_window=window, **mistral)
        assert_names(error, HF, "sliding_window = ")
    assert from_gguf({"llama.attention.sliding_window": 0}).windows == ()


@pytest.mark.parametrize("value", [[[1]], {"a": 1}, [{"a": 1}], "x", True, [False], 1.0, [None], HUGE, -2])
def test_token_ids_are_integers(value: Any) -> None:
    for key in ("eos_token_id", "bos_token_id"):
        with pytest.raises(ModelError) as error:
            from_hf(**{key: value})
        assert_names(error, HF, f"{key} = ")
        with pytest.raises(ModelError) as error:
            from_gguf({f"tokenizer.ggml.{key}": value})
        assert_names(error, GGUF, f"tokenizer.ggml.{key} = ")
    with pytest.raises(ModelError) as error:
        from_hf({"eos_token_id": value})
    assert_names(error, GENERATION, "eos_token_id = ")


def test_token_ids_that_files_hold() -> None:
    config = from_hf({"eos_token_id": [3, 4]}, bos_token_id=[1, 2], eos_token_id=2)
    assert config.bos_token_id == 1 and config.eos_token_ids == {2, 3, 4}
    nothing: tuple[Any, ...] = (None, [])
    for none in nothing:
        config = from_hf({"eos_token_id": none}, bos_token_id=none, eos_token_id=none)
        assert config.bos_token_id is None and not config.eos_token_ids
    config = from_gguf({"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2})
    assert config.bos_token_id == 1 and config.eos_token_ids == {2}


def test_errors_name_the_files_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(hf_values(tiny_config())))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "x"}')
    with pytest.raises(ModelError) as error:
        open_checkpoint(tmp_path)
    assert_names(error, str(tmp_path / "generation_config.json"), "eos_token_id = 'x'")
    (tmp_path / "config.json").write_text(json.dumps(hf_values(tiny_config()) | {"vocab_size": HUGE}))
    with pytest.raises(ModelError) as error:
        open_checkpoint(tmp_path)
    assert_names(error, str(tmp_path / "config.json"), "vocab_size = 1000")


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"attention.key_length": 5}, "attention.key_length = 5 is odd"),
        ({"embedding_length": 10}, "embedding_length / attention.head_count = 5 is odd"),
        ({"attention.head_count_kv": 3}, "attention.head_count = 2 is not a multiple of attention.head_count_kv = 3"),
        ({"attention.layer_norm_rms_epsilon": math.nan}, "attention.layer_norm_rms_epsilon = nan"),
        ({"attention.layer_norm_rms_epsilon": 0.0}, "attention.layer_norm_rms_epsilon = 0.0"),
        ({"rope.freq_base": 0.0}, "rope.freq_base = 0.0"),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 0.0}, "rope.scaling.factor = 0.0"),
        ({"vocab_size": 2**40}, "vocab_size = "),
        ({"context_length": 2**63}, "context_length = "),
    ],
)
def test_numbers_of_a_gguf_file_that_no_model_has(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ModelError) as error:
        from_gguf({f"llama.{name}": value for name, value in changes.items()})
    assert_names(error, GGUF, key)


def test_rope_factors_of_a_gguf_file() -> None:
    assert from_gguf({}, (1.0, 8.0)).rope.factors == (1.0, 8.0)
    for factor in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ModelError) as error:
            from_gguf({}, (1.0, factor))
        assert_names(error, GGUF, "rope_freqs.weight[1] = ")


@pytest.mark.parametrize("architecture", [None, "", "mistral", "gpt2", 5, ["llama"]])
def test_gguf_architecture_that_is_missing_or_unknown(architecture: Any) -> None:
    with pytest.raises(ModelError) as error:
        from_gguf({"general.architecture": architecture})
    assert_names(error, GGUF, f"general.architecture = {architecture!r}")
    assert "llama, qwen2, qwen3" in str(error.value)
    without = {key: value for key, value in METADATA.items() if key != "general.architecture"}
    with pytest.raises(ModelError, match=r"general\.architecture = None"):
        config_from_gguf(GGUF, without, ())


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"num_kv_heads": 0}, "num_kv_heads = 0"),
        ({"num_kv_heads": 2}, "num_heads = 5 is not a multiple of num_kv_heads = 2"),
        ({"head_dim": 5}, "head_dim = 5 is odd"),
        ({"num_layers": 1_000_000}, "num_layers = 1000000"),
        ({"vocab_size": HUGE}, "vocab_size = "),
        ({"rms_eps": 0.0}, "rms_eps = 0.0"),
        ({"rope": Rope(theta=0.0)}, "rope theta = 0.0"),
    ],
)
def test_a_config_that_comes_from_no_file_is_checked_by_its_own_names(changes: dict[str, Any], key: str) -> None:
    """A card's names are these too."""
    assert {name for name in changes if name != "rope"} <= set(CardConfig.__struct_fields__)
    with pytest.raises(ModelError) as error:
        tiny_config(**changes)
    assert_names(error, "llama model", key)
