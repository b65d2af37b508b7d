"""What the README tells people to type is understood by the program, and the files that it names are there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from mpiinfer.cli.main import cli

PROJECT = Path(__file__).parents[2]
README = (PROJECT / "README.md").read_text()
COMMANDS = [line.strip() for line in README.splitlines() if re.match(r"    (mpiexec|srun|mpiinfer) ", line)]


@pytest.mark.parametrize("command", [line for line in COMMANDS if "mpiinfer" in line])
def test_commands_parse(command: str) -> None:
    words = shlex.split(command, comments=True)
    verb, *arguments = words[words.index("mpiinfer") + 1 :]
    parsed = cli.commands[verb]
    with click.Context(cli) as context:
        parsed.make_context(verb, arguments, parent=context)


def test_there_are_commands() -> None:
    assert len(COMMANDS) >= 4


def test_linked_files_are_there() -> None:
    linked = re.findall(r"\]\(([^)#]+)\)", README)
    assert linked and all((PROJECT / path).exists() for path in linked)


def test_the_tree_names_every_package() -> None:
    named = set(re.findall(r"^ +(\w+)/ ", README, flags=re.MULTILINE))
    packages = {path.parent.name for path in (PROJECT / "mpiinfer").glob("*/__init__.py")}
    assert packages <= named, packages - named
