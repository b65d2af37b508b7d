"""The program's voice: one logger on standard error.

The first rank speaks; the others only when something fails. Results never go here.
"""

from __future__ import annotations

import logging
import sys

LOGGER = logging.getLogger("mpiinfer")


def start_log(*, speaks: bool, verbose: bool = False) -> None:
    """Send the package's messages to standard error.

    speaks: whether this rank's ordinary messages are shown. verbose: every rank's, with the causes of failures.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("mpiinfer: %(message)s"))
    LOGGER.handlers[:] = [handler]
    LOGGER.propagate = False
    LOGGER.setLevel(logging.DEBUG if verbose else logging.INFO if speaks else logging.ERROR)
