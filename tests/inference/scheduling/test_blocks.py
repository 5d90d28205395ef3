"""Block pool: no block is lost, none is used twice, and what is found is what it was."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from colossalai.inference.scheduling._blocks import BlockPool, next_key, root_key
from tests.tiers import soaked

pytestmark = pytest.mark.unit

NUM_BLOCKS = 7


class PoolMachine(RuleBasedStateMachine):
    """Holders take, share and give back blocks; the content of a block is the key that it is known by."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, 4)
        self.held: list[list[int]] = []
        self.content: dict[int, bytes | None] = {}
        self.idle: list[int] = []  # known by a key and held by nobody, least recently used first

    @precondition(lambda self: self.pool.num_available)
    @rule(starts_new=st.booleans())
    def allocate(self, starts_new):
        has_free = self.pool.num_available > self.pool.num_cached
        block = self.pool.allocate()
        assert all(block not in blocks for blocks in self.held)
        if has_free:
            assert block not in self.idle, "a block that may be found was given away though others were free"
        else:
            assert block == self.idle.pop(0), "not the least recently used one was given away"
        self.content[block] = None
        if starts_new or not self.held:
            self.held.append([])
        self.held[-1].append(block)

    @precondition(lambda self: not self.pool.num_available)
    @rule()
    def allocate_none(self):
        with pytest.raises(IndexError, match="no block is available"):
            self.pool.allocate()

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def share(self, data):
        blocks = data.draw(st.sampled_from(self.held))
        for block in blocks:
            self.pool.share(block)
        self.held.append(list(blocks))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data):
        blocks = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pool.release(blocks)
        for block in reversed(blocks):
            if self.content[block] and all(block not in others for others in self.held):
                self.idle.append(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), key=st.integers(0, 4))
    def register(self, data, key):
        name = b"%d" % key
        block = data.draw(st.sampled_from([block for blocks in self.held for block in blocks]))
        is_new = name not in self.content.values() and self.content[block] is None
        self.pool.register(block, name)
        if is_new:
            self.content[block] = name
        assert self.pool.find([name]) == [b for b, content in self.content.items() if content == name]

    @rule(keys=st.lists(st.integers(0, 4), unique=True, max_size=3))
    def take(self, keys):
        block_of = {content: block for block, content in self.content.items() if content}
        names = [b"%d" % key for key in keys]
        expected = []
        for name in names:
            if name not in block_of:
                break
            expected.append(block_of[name])
        found = self.pool.find(names)
        assert found == expected
        falls_by = self.pool.num_taken_from_available(found)
        available = self.pool.num_available
        self.pool.take(found)
        assert self.pool.num_available == available - falls_by
        self.idle = [block for block in self.idle if block not in found]
        if found:
            self.held.append(found)

    @rule()
    def forget_all(self):
        self.pool.forget_all()
        self.content = dict.fromkeys(self.content)
        self.idle = []

    @invariant()
    def nothing_is_lost(self):
        self.pool.check(self.held)
        used = {block for blocks in self.held for block in blocks}
        assert self.pool.num_used == len(used)
        assert self.pool.num_cached == len(self.idle)
        for block in used:
            assert self.pool.references(block) == sum(block in blocks for blocks in self.held)

    def teardown(self):
        for blocks in self.held:
            self.pool.release(blocks)
        self.pool.check([])
        assert self.pool.num_available == NUM_BLOCKS


class TestPool(PoolMachine.TestCase):
    settings = settings(max_examples=50, stateful_step_count=30)


@pytest.mark.long
@pytest.mark.soak
class TestPoolAtLength(PoolMachine.TestCase):
    settings = settings(max_examples=soaked(10_000), stateful_step_count=30)


def test_the_end_of_a_sequence_is_given_away_before_its_beginning():
    pool = BlockPool(3, 4)
    blocks = [pool.allocate() for _ in range(3)]
    for number, block in enumerate(blocks):
        pool.register(block, b"%d" % number)
    pool.release(blocks)
    assert [pool.allocate() for _ in range(3)] == blocks[::-1]


def test_without_prefixes_nothing_is_found():
    pool = BlockPool(2, 4, keeps_prefixes=False)
    block = pool.allocate()
    pool.register(block, b"key")
    assert pool.find([b"key"]) == []
    pool.release([block])
    assert pool.num_cached == 0
    pool.check([])


def test_a_key_stands_for_everything_before_it():
    roots = [
        root_key(0, None),
        root_key(1, None),
        root_key(0, "poet"),
        root_key(1, "poet"),
        root_key(10, None),
    ]
    chains = [(1, 2, 3, 4), (1, 2, 4, 3), (1, 2, 3, 5), (0, 1, 2, 3)]
    firsts = [next_key(root, chain) for root in roots for chain in chains]
    keys = [*roots, *firsts, *(next_key(first, chain) for first in firsts for chain in chains)]
    assert len(set(keys)) == len(keys)
    assert next_key(roots[0], [1, 2, 3, 4]) == next_key(root_key(0, None), (1, 2, 3, 4))


def test_roots_of_long_names_differ_to_the_last_letter():
    names = ["a" * 100, "a" * 99 + "b"]
    assert len({next_key(root_key(0, name), (1, 2)) for name in names}) == 2
