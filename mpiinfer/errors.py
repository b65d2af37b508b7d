"""The errors a user can cause. Each is one line: what is wrong, where (file, key, number), and the fix.

Anything else that is raised is our own bug and keeps its traceback. `exit_status` follows the command-line
contract: 2 for a request that could never work as written, 1 for one that failed.
"""

from __future__ import annotations


class MpiinferError(Exception):
    """Base of all user-facing errors; `str(error)` is the one line shown on rank 0."""

    exit_status = 1


class UsageError(MpiinferError):
    """A flag, argument or combination of them that means nothing."""

    exit_status = 2


class LayoutError(MpiinferError):
    """A layout that cannot be read, or that does not fit the world or the model."""

    exit_status = 2


class ModelError(MpiinferError):
    """A model that cannot be found, or whose config names something unsupported."""


class CheckpointError(MpiinferError):
    """Weights that are missing, truncated, duplicated, unclaimed or of the wrong shape or dtype."""


class RequestError(MpiinferError):
    """A prompt or sampling parameter that the model cannot serve."""

    exit_status = 2


class OutputError(MpiinferError):
    """Results that could not be written."""


class LaunchError(MpiinferError):
    """The processes do not form the world that the launcher meant."""


class DomainError(MpiinferError):
    """A communication domain was misused, or one of its waits failed."""


class DeadlineError(DomainError):
    """A wait in a domain outlived its deadline: a peer is dead or stuck."""


class AbortedError(DomainError):
    """Another rank of the same world failed; its cause is in the message."""


class EngineError(MpiinferError):
    """A rank of the engine failed while it served; the engine cannot be used any more."""
