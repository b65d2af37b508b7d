"""`mpiinfer`: the command line. Every rank parses the same words; the first rank speaks; all leave together.

Exit status: 0 done, 1 failed, 2 usage, 3 stopped early with work left.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import click

from mpiinfer.cli.bench import bench
from mpiinfer.cli.doctor import doctor
from mpiinfer.cli.generate import generate
from mpiinfer.cli.options import chosen_layout, layout_options
from mpiinfer.comm.agree import on_first
from mpiinfer.comm.facts import detect_launcher
from mpiinfer.comm.launch import World, launch
from mpiinfer.errors import DomainError, EngineError, LaunchError, MpiinferError
from mpiinfer.layout.spec import Layout
from mpiinfer.observe.log import LOGGER, start_log

# Asked for first or right after the verb; further on the word may be an option's value.
HELP = {"-h", "--help", "--version"}


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="mpiinfer")
def cli() -> None:
    """Large language model inference as an MPI program. Start it with mpiexec or srun, one process a device."""


cli.add_command(generate)
cli.add_command(bench)


@cli.command("doctor")
@layout_options
@click.pass_obj
def doctor_command(world: World, /, **options: Any) -> int:
    """Print facts of this launch and check them; with a layout, its domains and their timings."""
    layout = on_first(world.domain, lambda: chosen_layout(options))
    return 0 if doctor(world, layout or Layout(tensor=world.domain.size)) else 1


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Entry point of the console script and of `python -m mpiinfer`."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or HELP & set(words[:2]):  # needs no world
        if detect_launcher(os.environ).rank:
            sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115, PTH123 (to the end: one rank speaks)
        cli.main(words, prog_name="mpiinfer")  # exits
    verbose = os.environ.get("MPIINFER_LOG") == "debug"
    try:
        world = launch()
    except LaunchError as error:
        start_log(speaks=True, verbose=verbose)
        LOGGER.error("error: %s", error)
        sys.exit(error.exit_status)
    start_log(speaks=world.domain.is_first, verbose=verbose)
    sys.exit(_run(world, words))


def _run(world: World, words: list[str]) -> int:
    """Run a verb and return its exit status, the same on every rank.

    What only this rank raised goes on up, where the abort hook of `launch` says it and ends the job: the others may
    never come to a common end.
    """
    try:
        status = cli.main(words, prog_name="mpiinfer", standalone_mode=False, obj=world)
    except click.exceptions.Abort:
        raise KeyboardInterrupt from None
    except click.ClickException as error:
        verb = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "mpiinfer"
        return _say(world, f"error: {error.format_message()} (see {verb} --help)", 2)
    except (DomainError, EngineError):
        raise
    except MpiinferError as error:  # raised on every rank alike
        return _say(world, f"error: {error}", error.exit_status)
    world.close()
    return status if isinstance(status, int) else 0


def _say(world: World, line: str, status: int) -> int:
    if world.domain.is_first:
        LOGGER.error("%s", line)
    return status
