"""Block pool of the paged KV cache: reference counts, and a prefix cache of full blocks by their tokens.

A block is a number: the index of `block_size` tokens' keys and values in the memory of every layer
(2309.06180). The pool itself has no access to that memory. A block is in one of three states:

| state | references | has a key | use |
| --- | --- | --- | --- |
| used | 1 or more | maybe | belongs to that many sequences; a shared block is read-only |
| cached | 0 | yes | can be found by a later prompt; evicted in LRU order when no block is free |
| free | 0 | no | allocated first |

The key of a full block is a digest of the previous block's key and of its own tokens, so it identifies the
whole prefix, which keys and values depend on. The root of the chain covers their other dependencies: the
version of the weights and the adapter.
"""

import hashlib
from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence


class BlockPool:
    """All blocks of an engine.

    Args:
        num_blocks: Number of blocks.
        block_size: Number of tokens of a block.
        keeps_prefixes: Whether full blocks are cached by their tokens.
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
        """Number of blocks that `allocate` can return: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Number of unused blocks in the prefix cache."""
        return len(self._cached)

    @property
    def num_used(self) -> int:
        """Number of blocks with references."""
        return self.num_blocks - self.num_available

    def references(self, block: int) -> int:
        """Return the number of sequences that reference a block."""
        return self._references[block]

    def allocate(self) -> int:
        """Take an unused block and return it with one reference.

        Raises:
            IndexError: No block is available; check `num_available` first.
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
        """Add a reference to a used block."""
        assert self._references[block] > 0, f"nobody holds block {block}"
        self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each block of a sequence, given from its beginning on.

        The last block becomes the least recently used one: more prompts share a shorter prefix than a longer
        one.
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
        """Add a full block to the prefix cache; an existing block with the same key stays."""
        if self.keeps_prefixes and key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """Return the cached blocks of the longest known prefix of a chain of keys, without references."""
        found = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def take(self, blocks: Sequence[int]) -> None:
        """Add a reference to blocks from `find`, used or cached."""
        for block in blocks:
            if self._references[block] == 0:
                del self._cached[block]
            self._references[block] += 1

    def num_taken_from_available(self, blocks: Sequence[int]) -> int:
        """Return the decrease of `num_available` if found blocks are taken."""
        return sum(self._references[block] == 0 for block in blocks)

    def forget_all(self) -> None:
        """Clear the prefix cache, whose contents are out of date."""
        self._free.extend(self._cached)
        self._cached.clear()
        self._block_of.clear()
        self._key_of.clear()

    def forget(self, blocks: Sequence[int]) -> None:
        """Remove used blocks with invalid contents from the prefix cache."""
        for block in blocks:
            assert self._references[block] > 0, f"nobody holds block {block}"
            if block in self._key_of:
                self._forget(block)

    def check(self, held: Sequence[Sequence[int]]) -> None:
        """Assert that references agree with the blocks of the sequences.

        Args:
            held: Blocks of every sequence.
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
    """Return the root of a sequence's chain of keys."""
    # A digest, because keys of blake2b are short and names of adapters may be long.
    return hashlib.blake2b(f"{weights_version}:{adapter or ''}".encode(), digest_size=16).digest()


def next_key(previous: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the key of a full block.

    Args:
        previous: Key of the previous block, or the root.
        token_ids: Tokens of the block.
    """
    return hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=16, key=previous).digest()
