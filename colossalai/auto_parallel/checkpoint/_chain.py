"""Chain of blocks: seconds and live bytes of the forward and backward of a model's blocks.

`simulate` walks a forward and a backward with given segments as the runtime executes them, and is the
reference for the solvers.

[Note: live bytes of a chain]
Block k maps its input, `input_bytes`, to its output, which is the input of block k + 1. Live are

- the input of the first block, from before the forward to the end of the backward;
- for a block that keeps all: its output and its `saved_bytes`, from its forward to the end of its backward.
  An output that is not needed by the backward of its own block is freed earlier, with the backward of the
  next block; the peak is then lower than computed here, by one output at most;
- for a segment in the forward: its input and its output. While a block in it runs, the input and output of
  the block are live in addition, and its temporaries: `saved_bytes` + `forward_peak` at most, since nothing
  is kept;
- in the backward of a block: in addition to the kept bytes, the gradient of its output, and `backward_peak`.
  At its end, all of this and the bytes that the block kept are freed, and the gradient of its input is live;
- when the backward reaches a segment: its output is freed, the gradient of it is live. Then the segment is
  run forward from its input: its blocks as those that keep all, its inner segments as segments in the
  forward. Their backwards follow in the same way.

torch stops a recomputation as soon as all saved tensors exist. So an inner segment in the last place of
another segment is not run in the recomputation of the outer one: its own input is enough. (In the last place
of the whole chain it is run, in the forward.) The last block of a recomputation counts in full. Gradients of
parameters are counted as the fields of a block define: `gradient_bytes` from the end of its backward on, and
temporary ones in `backward_peak`. Arguments shared by all blocks, and tensors computed before and behind the
chain, are not counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

from colossalai.runtime import RecomputeSegment, parts_of


@dataclass(frozen=True, kw_only=True)
class ChainBlock:
    """Costs of a block.

    Attributes:
        name: Its full name in the model.
        forward_s: Seconds of its forward.
        backward_s: Seconds of its backward.
        saved_bytes: Bytes saved for its backward in addition to its input; its output is not counted.
        input_bytes: Bytes of its input, and of the gradient of it.
        output_bytes: Bytes of its output, and of the gradient of it.
        forward_peak: Peak of bytes in its forward in addition to its input, its output and its saved bytes.
        backward_peak: Peak of bytes in its backward in addition to the kept bytes and the gradient of its
            output. It includes the gradient of its input while the kept bytes are still alive, and gradients
            of parameters until they are accumulated.
        gradient_bytes: Bytes of gradients of its parameters that stay from the end of its backward on.

    Raises:
        ValueError: A number is negative.
    """

    name: str
    forward_s: float
    backward_s: float
    saved_bytes: int
    input_bytes: int
    output_bytes: int
    forward_peak: int = 0
    backward_peak: int = 0
    gradient_bytes: int = 0

    def __post_init__(self) -> None:
        for each in fields(self):
            if each.name != "name" and not getattr(self, each.name) >= 0:
                raise ValueError(
                    f"block {self.name!r} has {each.name}={getattr(self, each.name)}; seconds and bytes are "
                    "0 or more"
                )


@dataclass(frozen=True)
class Chain:
    """The blocks of a model in the order in which they run.

    Attributes:
        blocks: The blocks; at least one.

    Raises:
        ValueError: `blocks` is empty or has a name twice, or the input of a block has another size than the
            output of the previous one.
    """

    blocks: tuple[ChainBlock, ...]

    def __post_init__(self) -> None:
        if not self.blocks:
            raise ValueError("a chain of no blocks: give at least one")
        if len({block.name for block in self.blocks}) < len(self.blocks):
            names = [block.name for block in self.blocks]
            raise ValueError(
                f"blocks of one name in a chain: {sorted(n for n in names if names.count(n) > 1)}"
            )
        for before, block in pairwise(self.blocks):
            if before.output_bytes != block.input_bytes:
                raise ValueError(
                    f"block {block.name!r} has an input of {block.input_bytes} bytes, and {before.name!r}, "
                    f"which is before it, an output of {before.output_bytes}: in a chain they are one tensor"
                )

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the blocks."""
        return tuple(block.name for block in self.blocks)


@dataclass(frozen=True)
class ChainCost:
    """Costs of one forward and one backward of a chain.

    Attributes:
        seconds: Seconds of all forwards, including the repeated ones, and of all backwards.
        peak_bytes: Peak of live bytes.
        num_forwards: Number of forwards of each block.
        gradients_at_peak: Part of `peak_bytes` for parameter gradients of blocks whose backward is done.
    """

    seconds: float
    peak_bytes: int
    num_forwards: tuple[int, ...]
    gradients_at_peak: int = 0


def simulate(chain: Chain, segments: Sequence[RecomputeSegment]) -> ChainCost:
    """Return the costs of a chain with some segments; blocks outside of the segments keep all.

    Args:
        chain: The chain.
        segments: The segments in order, without overlap.

    Raises:
        ValueError: `segments` extend beyond the blocks.
    """
    if segments and segments[-1].last > len(chain.blocks):
        raise ValueError(
            f"a segment ends with block {segments[-1].last - 1}, and the chain has {len(chain.blocks)} "
            "blocks, which count from 0"
        )
    walk = _Walk(chain)
    parts = parts_of(0, len(chain.blocks), segments)
    for part in parts:
        walk.forward(part)
    walk.hold(chain.blocks[-1].output_bytes)  # the gradient of the output
    walk.backward(parts, has_output=True)
    seconds = sum(
        times * block.forward_s + block.backward_s
        for times, block in zip(walk.num_forwards, chain.blocks, strict=True)
    )
    return ChainCost(seconds, walk.peak, tuple(walk.num_forwards), walk.gradients_at_peak)


class _Walk:
    """The events of a forward and a backward, with their live bytes.

    See [Note: live bytes of a chain].

    Args:
        chain: The chain.

    Attributes:
        live: Live bytes between two events.
        peak: Peak of live bytes so far.
        num_forwards: Number of forwards of each block so far.
        gradients: Bytes of parameter gradients among the live ones.
        gradients_at_peak: Bytes of parameter gradients at the peak.
    """

    def __init__(self, chain: Chain) -> None:
        self._blocks = chain.blocks
        self.live = self.peak = chain.blocks[0].input_bytes
        self.num_forwards = [0] * len(chain.blocks)
        self.gradients = self.gradients_at_peak = 0

    def hold(self, num_bytes: int, *, besides: int = 0) -> None:
        """Add bytes (negative: free them), with temporary bytes (`besides`) until the end of the event."""
        if self.live + num_bytes + besides > self.peak:
            self.peak, self.gradients_at_peak = self.live + num_bytes + besides, self.gradients
        self.live += num_bytes

    def forward(self, part: int | RecomputeSegment) -> None:
        """Run a block that keeps all, or a segment that keeps its input."""
        if isinstance(part, int):
            block = self._blocks[part]
            self.num_forwards[part] += 1
            self.hold(block.saved_bytes + block.output_bytes, besides=block.forward_peak)
            return
        for number in range(part.first, part.last):
            block = self._blocks[number]
            self.num_forwards[number] += 1
            own_input = block.input_bytes if number > part.first else 0
            self.hold(0, besides=own_input + block.output_bytes + block.saved_bytes + block.forward_peak)
        self.hold(self._blocks[part.last - 1].output_bytes)

    def backward(self, parts: Sequence[int | RecomputeSegment], *, has_output: bool) -> None:
        """Run parts backward, the last one first; the gradient of its output is live.

        Args:
            parts: The parts of the chain or of a segment.
            has_output: Whether the output of the last part is live, too.
        """
        for part in reversed(parts):
            if isinstance(part, int):
                block = self._blocks[part]
                self.hold(0, besides=block.backward_peak)
                self.hold(block.input_bytes - block.saved_bytes - 2 * block.output_bytes)
                self.gradients += block.gradient_bytes
                self.hold(block.gradient_bytes)
            else:
                self.live -= has_output * self._blocks[part.last - 1].output_bytes
                *before, last = part.parts
                for each in before:
                    self.forward(each)
                if isinstance(last, int):
                    self.forward(last)
                self.backward(part.parts, has_output=isinstance(last, int))
            has_output = True
