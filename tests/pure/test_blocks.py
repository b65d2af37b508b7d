"""The pool of blocks under random use: none leaked, none in two hands by mistake, prefixes found and forgotten."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from mpiinfer.engine.blocks import ROOT, BlockPool

BLOCK_TOKENS = 2


class Pool(RuleBasedStateMachine):
    """Sequences of tokens 0 and 1 come, grow and go; a model says what every block holds."""

    sequences = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(num_blocks=7, block_tokens=BLOCK_TOKENS)
        self.holders: dict[int, int] = {}
        self.contents: dict[int, tuple[int, ...]] = {}

    def _keys(self, tokens: list[int]) -> list[bytes]:
        keys, key = [], ROOT
        for at in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            key = self.pool.next_key(key, tokens[at : at + BLOCK_TOKENS])
            keys.append(key)
        return keys

    @rule(target=sequences, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def begin(self, tokens: list[int]) -> list[int]:
        keys = self._keys(tokens)
        num_known, num_kept = self.pool.num_shareable(keys)
        wanted = self.pool.blocks_for(len(tokens)) - num_known
        if wanted + num_kept > self.pool.num_available:
            return []
        blocks = self.pool.share(keys)
        assert len(blocks) == num_known
        for index, block in enumerate(blocks):
            assert self.contents[block] == tuple(tokens[: (index + 1) * BLOCK_TOKENS]), "another prefix was shared"
        fresh = self.pool.allocate(wanted)
        assert not any(self.holders.get(block) for block in fresh), "a block in use was given out"
        for index, block in enumerate(fresh, start=num_known):
            self.contents[block] = tuple(tokens[: (index + 1) * BLOCK_TOKENS])
            if index < len(keys):
                self.pool.publish(block, keys[index])
        for block in blocks + fresh:
            self.holders[block] = self.holders.get(block, 0) + 1
        return blocks + fresh

    @rule(blocks=consumes(sequences))
    def end(self, blocks: list[int]) -> None:
        self.pool.release(blocks)
        for block in blocks:
            self.holders[block] -= 1

    @precondition(lambda self: self.pool.num_available)
    @rule()
    def take_one_and_give_it_back(self) -> None:
        self.pool.release(self.pool.allocate(1))

    @invariant()
    def counts_agree(self) -> None:
        self.pool.check()
        assert self.pool.num_used == sum(users > 0 for users in self.holders.values())


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_a_released_prefix_is_kept_until_its_blocks_are_needed_and_its_end_goes_first() -> None:
    pool = BlockPool(num_blocks=4, block_tokens=1)
    keys = [key := pool.next_key(ROOT if at == 0 else key, [at]) for at in range(3)]  # noqa: F821
    blocks = pool.allocate(3)
    for block, key in zip(blocks, keys, strict=True):
        pool.publish(block, key)
    pool.release(blocks)
    assert pool.num_available == 4
    pool.allocate(2)  # the free one, and the end of the prefix
    assert pool.share(keys) == blocks[:2]


def test_a_second_release_is_caught() -> None:
    pool = BlockPool(num_blocks=2, block_tokens=1)
    block = pool.allocate(1)
    pool.release(block)
    with pytest.raises(AssertionError, match="twice"):
        pool.release(block)
