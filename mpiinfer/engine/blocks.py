"""`BlockPool`: which block of the key/value cache holds what. Pure bookkeeping over integers, on the head rank only.

Promises: a block is in exactly one of three states: in use (reference count above 0), kept (nobody uses it, but its
contents are a known prefix that a later sequence may take up again), or free. `allocate` takes free blocks first, then
the kept ones that were used longest ago. Two prefixes are the same only if all their tokens are (a collision of
SHA-256 apart). Refuses to know which sequences exist and when a rank writes: every rank executes plans in their order,
so a block whose filling is planned counts as filled, and one released may be given out at once.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

ROOT = b""


class BlockPool:
    """`num_blocks` blocks of `block_tokens` tokens each, numbered from 0."""

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self._num_users = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._kept: OrderedDict[int, None] = OrderedDict()  # unused longest ago first
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_available(self) -> int:
        """Blocks that nobody uses."""
        return len(self._free) + len(self._kept)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_available

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-num_tokens // self.block_tokens)

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one user each. At least that many must be available."""
        assert count <= self.num_available
        blocks = []
        for _ in range(count):
            block = self._free.pop() if self._free else self._forget_oldest()
            self._num_users[block] = 1
            blocks.append(block)
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """One user less of each. Those whose contents are known are kept, the end of a sequence to go first."""
        for block in reversed(blocks):
            assert self._num_users[block] > 0, f"block {block} is released twice"
            self._num_users[block] -= 1
            if not self._num_users[block]:
                if block in self._key_of:
                    self._kept[block] = None
                else:
                    self._free.append(block)

    def share(self, keys: Iterable[bytes]) -> list[int]:
        """The blocks of the longest run of `keys` whose contents are known; each has one user more."""
        blocks = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            self._kept.pop(block, None)
            self._num_users[block] += 1
            blocks.append(block)
        return blocks

    def num_shareable(self, keys: Iterable[bytes]) -> tuple[int, int]:
        """How many blocks `share` would give, and how many of them are available blocks."""
        num_known = num_kept = 0
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            num_known += 1
            num_kept += block in self._kept
        return num_known, num_kept

    def publish(self, block: int, key: bytes) -> None:
        """From now on `block` holds the prefix `key`, for others to share. A prefix keeps its first block."""
        assert self._num_users[block] > 0 and block not in self._key_of
        if key not in self._block_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def next_key(self, key: bytes, tokens: Sequence[int]) -> bytes:
        """The key of a prefix that is one block longer: `key` (ROOT for none), then these tokens."""
        assert len(tokens) == self.block_tokens
        return hashlib.sha256(key + array("q", tokens).tobytes()).digest()

    def check(self) -> None:
        """Assert that every block is in one state and every index agrees: for tests, in time linear in the blocks."""
        free, kept = set(self._free), set(self._kept)
        used = {block for block, users in enumerate(self._num_users) if users > 0}
        assert len(free) == len(self._free) and not free & kept and not used & (free | kept)
        assert free | kept | used == set(range(self.num_blocks))
        assert not free & self._key_of.keys() and kept <= self._key_of.keys()
        assert {key: block for block, key in self._key_of.items()} == self._block_of

    def _forget_oldest(self) -> int:
        block, _ = self._kept.popitem(last=False)
        del self._block_of[self._key_of.pop(block)]
        return block
