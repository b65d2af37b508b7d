"""How much memory a rank has taken and may still take. Linux facts."""

from __future__ import annotations

from pathlib import Path

import torch

MEMINFO = Path("/proc/meminfo")
STATUS = Path("/proc/self/status")
CGROUP_V2 = Path("/sys/fs/cgroup")
CGROUP_V1 = Path("/sys/fs/cgroup/memory")


def free_bytes(device: torch.device) -> int:
    """Free bytes for all ranks that share this node (CPU) or this GPU."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    limits = [limit for limit in (_meminfo(), _group_v2(), _group_v1()) if limit is not None]
    return min(limits)


def peak_rss_bytes() -> int:
    """The most resident memory that this process has had (VmHWM; a child's ru_maxrss would begin at its parent's)."""
    return _kibibytes(STATUS, "VmHWM")


def _meminfo() -> int:
    return _kibibytes(MEMINFO, "MemAvailable")


def _kibibytes(file: Path, name: str) -> int:
    """Bytes of the line `name:  n kB` of a file of /proc."""
    for line in file.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{file} has no {name}")


def _group_v2() -> int | None:
    return _room(CGROUP_V2 / "memory.max", CGROUP_V2 / "memory.current")


def _group_v1() -> int | None:
    return _room(CGROUP_V1 / "memory.limit_in_bytes", CGROUP_V1 / "memory.usage_in_bytes")


def _room(limit: Path, used: Path) -> int | None:
    """Bytes left in a control group, or None where it has no limit."""
    try:
        return max(0, int(limit.read_text()) - int(used.read_text()))
    except (OSError, ValueError):  # no such group, or the word "max"
        return None
