"""Chain of blocks: what forward and backward of a model's blocks take, in seconds and live bytes.

`simulate` walks a forward and a backward with given segments as the runtime executes them, and is what the
solvers are measured by.

[Note: live bytes of a chain]
Block k maps its input, `input_bytes`, to its output, which is the input of block k + 1. Live are

- the input of the first block, from before the forward to the end of the backward;
- of a block that keeps all: its output and its `saved_bytes`, from its forward to the end of its backward. An
  output that the backward of its own block has no use for goes earlier, with the backward of the next block;
  the peak is then lower than what is said here, by one output at most;
- of a segment in the forward: its input and its output. While a block in it runs, its own input and output
  are live besides, and what it computes in between: `saved_bytes` + `forward_peak` at most, since there is
  nothing to keep;
- in the backward of a block: besides what is kept, the gradient of its output, and `backward_peak`. When it
  ends, all of this and what the block kept is gone, and the gradient of its input is live;
- where the backward comes to a segment: its output goes, the gradient of it is live. Then the segment is run
  forward from its input: its blocks as those that keep all, its inner segments as segments in the forward.
  Their backwards follow in the same way.

torch stops a recomputation as soon as it has all that was saved. So a segment in the last place of another
one is not run in the recomputation of that: it is what follows from its own input. (In the last place among
the blocks of the whole chain it is run, in the forward.) The last block of a recomputation counts in full.
Gradients of parameters are counted as far as a block says so: `gradient_bytes` from the end of its backward
on, and what is in `backward_peak`. Not counted are arguments that all blocks have, and what is computed
before and behind the chain.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

from colossalai.runtime import RecomputeSegment, parts_of


@dataclass(frozen=True, kw_only=True)
class ChainBlock:
    """What a block takes.

    Attributes:
        name: Its full name in the model.
        forward_s: Seconds of its forward.
        backward_s: Seconds of its backward.
        saved_bytes: What its backward keeps besides its input; its output is not counted.
        input_bytes: Its input, and the gradient of it.
        output_bytes: Its output, and the gradient of it.
        forward_peak: The most bytes that its forward needs besides its input, its output and what it saves.
        backward_peak: The most bytes that its backward needs besides what was kept for it and the gradient
            of its output. The gradient of its input is in it, as far as it is there before what was kept
            goes; so are those of parameters until they are added to what is there.
        gradient_bytes: Gradients of its parameters that are there from the end of its backward on.

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
        blocks: At least one.

    Raises:
        ValueError: `blocks` is empty or has a name twice, or the input of a block has another size than the
            output of the one before.
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
    """What one forward and one backward of a chain take.

    Attributes:
        seconds: All forwards, the repeated ones too, and all backwards.
        peak_bytes: The most bytes that are live at once.
        num_forwards: For each block, how often its forward is run.
        gradients_at_peak: The part of `peak_bytes` that is gradients of parameters of blocks that are done.
    """

    seconds: float
    peak_bytes: int
    num_forwards: tuple[int, ...]
    gradients_at_peak: int = 0


def simulate(chain: Chain, segments: Sequence[RecomputeSegment]) -> ChainCost:
    """Return what a chain takes with some segments; its blocks in no segment keep all.

    Args:
        chain: The chain.
        segments: In order, apart from each other.

    Raises:
        ValueError: A segment goes beyond the blocks.
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
    """The events of a forward and a backward, with the bytes that are live.

    See [Note: live bytes of a chain].

    Args:
        chain: The chain.

    Attributes:
        live: What is live between two events.
        peak: The most that has been.
        num_forwards: For each block, how often it has run.
        gradients: The gradients of parameters among what is live.
        gradients_at_peak: Those at the peak.
    """

    def __init__(self, chain: Chain) -> None:
        self._blocks = chain.blocks
        self.live = self.peak = chain.blocks[0].input_bytes
        self.num_forwards = [0] * len(chain.blocks)
        self.gradients = self.gradients_at_peak = 0

    def hold(self, num_bytes: int, *, besides: int = 0) -> None:
        """Let bytes become live (or go), with others that are gone at the end of the event."""
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
            parts: Those of the chain or of a segment.
            has_output: Whether the output of the last one is live, too.
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
