"""`Layout`: which rank does what, and nothing else. A frozen value, and the strict TOML that it is read from.

An unknown key or a wrong type is an error that names file, table and key. `auto` and `balanced` stay as they are
here; plan/ resolves them into a new layout.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from mpiinfer.errors import LayoutError
from mpiinfer.files import read_toml

Order = Literal["tensor-inner", "launcher"]
Device = Literal["auto", "nccl", "mpi", "gloo"]

# Where each field of a layout stands in the file: field -> (table, key).
_KEYS: dict[str, tuple[str, str]] = {
    "tensor": ("parallel", "tensor"),
    "pipeline": ("parallel", "pipeline"),
    "replicas": ("parallel", "replicas"),
    "stages": ("pipeline", "stages"),
    "slots": ("pipeline", "slots"),
    "order": ("place", "order"),
    "device": ("comm", "device"),
    "deadline_s": ("comm", "deadline_s"),
    "block_tokens": ("cache", "block_tokens"),
    "memory": ("cache", "memory"),
}
MAX_SLOTS = 1024
_CHOICES = {"order": get_args(Order), "device": get_args(Device), "stages": ("balanced",), "slots": ("auto",)}
_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}


class Layout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the ranks of one model are arranged.

    tensor, pipeline, replicas: extents of the axes; their product is the number of ranks.
    stages: "balanced", or the number of layers of each stage, first to last.
    slots: micro-batches in flight ("auto": one a stage).
    order: "tensor-inner" places the shards of a stage on one node whatever order the launcher gave the ranks;
        "launcher" takes the ranks as they come.
    device: "nccl" for GPUs, "mpi" for CPUs, "auto" for GPUs where each rank has one; "gloo" is for tests.
    deadline_s: seconds after which a wait for a peer is a failure.
    block_tokens: tokens in one block of key/value cache.
    memory: key/value cache of one rank: "auto", bytes ("4GiB"), or the fraction of the rank's share of free memory.
    """

    tensor: int = 1
    pipeline: int = 1
    replicas: int = 1
    stages: Literal["balanced"] | tuple[int, ...] = "balanced"
    slots: Literal["auto"] | int = "auto"
    order: Order = "tensor-inner"
    device: Device = "auto"
    deadline_s: float = 120.0
    block_tokens: int = 16
    memory: str | float = "auto"

    def __post_init__(self) -> None:
        for field in ("tensor", "pipeline", "replicas", "block_tokens"):
            self._require(getattr(self, field) >= 1, field, "must be 1 or more")
        some = self.slots == "auto" or 1 <= self.slots <= MAX_SLOTS
        self._require(some, "slots", f'must be "auto", or 1 to {MAX_SLOTS}')
        self._require(self.deadline_s > 0, "deadline_s", "must be above 0")
        if self.stages != "balanced":
            self._require(min(self.stages, default=0) >= 1, "stages", "every stage needs 1 layer or more")
            counts = f"lists {len(self.stages)} stages, but pipeline = {self.pipeline}"
            self._require(len(self.stages) == self.pipeline, "stages", counts)
        self.cache_bytes(1 << 40)  # refuses a size that cannot be read

    @property
    def num_ranks(self) -> int:
        return self.tensor * self.pipeline * self.replicas

    @property
    def num_slots(self) -> int:
        """Micro-batches in flight; `auto` is one a stage, the fewest that keep all stages busy."""
        return self.pipeline if self.slots == "auto" else self.slots

    def cache_bytes(self, free_bytes: int) -> int:
        """Bytes of key/value cache on a rank whose share of its node's free memory is `free_bytes`."""
        if self.memory == "auto":
            return free_bytes // 2
        if isinstance(self.memory, (int, float)):
            self._require(0 < self.memory <= 1, "memory", 'a number is a fraction above 0, up to 1; bytes are "4GiB"')
            return int(free_bytes * self.memory)
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", self.memory)
        known = match is not None and match[2].lower() in _UNITS
        self._require(known, "memory", 'must be "auto", a size such as "4GiB", or a fraction')
        assert match is not None
        return int(float(match[1]) * _UNITS[match[2].lower()])

    def digest(self) -> str:
        """A short hash of the whole value; all ranks compare it before any weight is read."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:12]

    def __str__(self) -> str:
        axes = [f"tensor={self.tensor}", f"pipeline={self.pipeline}", f"replicas={self.replicas}"]
        stages = "balanced" if self.stages == "balanced" else "+".join(map(str, self.stages))
        return " ".join([*axes, f"layers={stages}", f"slots={self.num_slots}", f"device={self.device}"])

    def _require(self, condition: bool, field: str, problem: str) -> None:
        if not condition:
            table, key = _KEYS[field]
            raise LayoutError(f"layout: [{table}] {key} = {_shown(getattr(self, field))}: {problem}")


def read_layout(path: Path) -> Layout:
    """The layout of a TOML file.

    Raises LayoutError naming the file, and the table and key where there is one.
    """
    fields = _fields(path, read_toml(path, LayoutError))
    try:
        return msgspec.convert(fields, Layout)
    except msgspec.ValidationError as error:
        raise _type_error(path, fields, error) from None
    except LayoutError as error:
        raise LayoutError(f"{path}: {str(error).removeprefix('layout: ')}") from None


def _fields(path: Path, tables: dict[str, Any]) -> dict[str, Any]:
    """Flatten the file's tables into the fields of `Layout`, refusing what is not known."""
    known: dict[str, dict[str, str]] = {}
    for field, (table, key) in _KEYS.items():
        known.setdefault(table, {})[key] = field
    fields: dict[str, Any] = {}
    for table, content in tables.items():
        if table not in known:
            raise LayoutError(f"{path}: unknown table [{table}]{_hint(table, known)}")
        if not isinstance(content, dict):
            raise LayoutError(f"{path}: {table} = {_shown(content)}: [{table}] is a table of {', '.join(known[table])}")
        for key, value in content.items():
            if key not in known[table]:
                raise LayoutError(f"{path}: [{table}] unknown key {key!r}{_hint(key, known[table])}")
            fields[known[table][key]] = value
    return fields


def _type_error(path: Path, fields: dict[str, Any], error: msgspec.ValidationError) -> LayoutError:
    """msgspec names the field as a path in the flat value: say it in the words of the file."""
    match = re.search(r"at `\$\.(\w+)", str(error))
    if match is None:
        return LayoutError(f"{path}: {error}")
    field = match[1]
    table, key = _KEYS[field]
    problem = str(error).split(" - at ")[0].lower()
    if problem.startswith("invalid enum value"):
        problem = "must be " + " or ".join(f'"{choice}"' for choice in _CHOICES[field])
    return LayoutError(f"{path}: [{table}] {key} = {_shown(fields[field])}: {problem}")


def _hint(word: str, known: dict[str, Any]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(known)}"


def _shown(value: object) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    return str(list(value)) if isinstance(value, tuple) else str(value)
