"""Block pool of the paged cache of keys and values: reference counts, and full blocks found by their tokens.

A block is a number: the place of the keys and values of `block_size` tokens in the memory of every layer
(2309.06180). The pool knows nothing of that memory. A block is in one of three states:

| state | references | known by a key | what becomes of it |
| --- | --- | --- | --- |
| used | 1 or more | maybe | belongs to that many sequences; who shares it does not write to it |
| cached | 0 | yes | a later prompt may find it; the least recently used one is given away when none is free |
| free | 0 | no | is given away first |

The key of a full block is a digest of the key of the block before it and of its tokens, so that it stands for
everything from the beginning of the sequence: keys and values depend on all of it. The first key of the chain
holds what else they depend on: the version of the weights and the adapter.
"""

import hashlib
from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence


class BlockPool:
    """All blocks of an engine.

    Args:
        num_blocks: How many there are.
        block_size: Tokens of a block.
        keeps_prefixes: Whether full blocks can be found by their tokens.
    """

    def __init__(self, num_blocks: int, block_size: int, *, keeps_prefixes: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.keeps_prefixes = keeps_prefixes
        self._references = [0] * num_blocks
        self._free = deque(range(num_blocks))
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def num_available(self) -> int:
        """Number of blocks that `allocate` can give away: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Number of blocks that nobody uses and that may still be found."""
        return len(self._cached)

    @property
    def num_used(self) -> int:
        """Number of blocks that sequences hold."""
        return self.num_blocks - self.num_available

    def references(self, block: int) -> int:
        """Return how many sequences hold a block."""
        return self._references[block]

    def allocate(self) -> int:
        """Return a block that nobody holds, with one reference.

        Raises:
            IndexError: No block is available; `num_available` says so before.
        """
        if self._free:
            block = self._free.popleft()
        elif self._cached:
            block, _ = self._cached.popitem(last=False)
            self._forget(block)
        else:
            raise IndexError("no block is available")
        self._references[block] = 1
        return block

    def share(self, block: int) -> None:
        """Add a reference to a block that somebody holds."""
        assert self._references[block] > 0, f"nobody holds block {block}"
        self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Take a reference from each of the blocks of a sequence, given from its beginning on.

        Its end becomes least recently used: a shorter prefix is of use to more prompts than a longer one.
        """
        for block in reversed(blocks):
            assert self._references[block] > 0, f"nobody holds block {block}"
            self._references[block] -= 1
            if self._references[block] == 0:
                if block in self._key_of:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def register(self, block: int, key: bytes) -> None:
        """Let a full block be found by its key; where another one is known by it, that one stays."""
        if self.keeps_prefixes and key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """Return the blocks of the longest known beginning of a chain of keys; nobody's references change."""
        found = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def take(self, blocks: Sequence[int]) -> None:
        """Add a reference to blocks that were found, used or not."""
        for block in blocks:
            if self._references[block] == 0:
                del self._cached[block]
            self._references[block] += 1

    def num_taken_from_available(self, blocks: Sequence[int]) -> int:
        """Return by how much `num_available` falls when found blocks are taken."""
        return sum(self._references[block] == 0 for block in blocks)

    def forget_all(self) -> None:
        """Let no block be found any more: what they hold is out of date."""
        self._free.extend(self._cached)
        self._cached.clear()
        self._block_of.clear()
        self._key_of.clear()

    def forget(self, blocks: Sequence[int]) -> None:
        """Let blocks that a sequence holds not be found any more: what they hold is of no use."""
        for block in blocks:
            assert self._references[block] > 0, f"nobody holds block {block}"
            if block in self._key_of:
                self._forget(block)

    def check(self, held: Sequence[Sequence[int]]) -> None:
        """Assert that the blocks which sequences hold are those that the pool counts as used.

        Args:
            held: The blocks of every sequence.
        """
        counts = [0] * self.num_blocks
        for blocks in held:
            assert len(set(blocks)) == len(blocks), f"a sequence holds a block twice: {blocks}"
            for block in blocks:
                counts[block] += 1
        assert counts == self._references, "references differ from what sequences hold"
        idle = [*self._free, *self._cached]
        assert sorted(idle) == [block for block, count in enumerate(counts) if count == 0], "a block is lost"
        assert self._block_of == {key: block for block, key in self._key_of.items()}, "keys differ"
        assert set(self._cached) <= self._key_of.keys(), "a cached block has no key"
        assert self._key_of.keys().isdisjoint(self._free), "a free block has a key"

    def _forget(self, block: int) -> None:
        del self._block_of[self._key_of.pop(block)]


def root_key(weights_version: int, adapter: str | None) -> bytes:
    """Return what the chain of keys of a sequence begins with."""
    # A digest: the keys of blake2b are short, and names of adapters need not be.
    return hashlib.blake2b(f"{weights_version}:{adapter or ''}".encode(), digest_size=16).digest()


def next_key(previous: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the key of a full block.

    Args:
        previous: The key of the block before it, or the root.
        token_ids: Its tokens.
    """
    return hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=16, key=previous).digest()
