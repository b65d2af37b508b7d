"""The small files that come with this installation, or that a user writes in their manner."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from mpiinfer.errors import MpiinferError

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover
    import tomli as tomllib


def shipped_dir(name: str) -> Path:
    """`name`/ of the repository ("layouts", "models"), or its copy inside the wheel."""
    package = Path(__file__).resolve().parent
    inside = package / "data" / name
    return inside if inside.is_dir() else package.parent / name


def read_toml(file: Path, error: type[MpiinferError]) -> dict[str, Any]:
    """The tables of a TOML file; raises `error` naming the file where it cannot be read."""
    try:
        tables: dict[str, Any] = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as problem:
        raise error(f"{file}: cannot be read: {problem.strerror or problem}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        raise error(f"{file}: not valid TOML: {problem}") from None
    return tables
