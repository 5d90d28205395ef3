"""Weights of a bucket between two steps, and the fragments of them that an optimizer updates.

The fragments of an optimizer (`_shards.py`) are parts of this memory, or are rounded into it. Stages 1 and 2
keep it whole on every rank; stage 3 keeps a rank's own section (`gemini/_section_weights.py`).

[Note: three kinds of memory]
The parameters of a bucket are views of one flat piece of memory. A fragment of a parameter that is updated in
its own dtype and place is a view of the same memory: the optimizer writes the parameter itself. A fragment
that is updated in float32 while the parameter is lower, or on the host while the parameter is on a device,
has memory of its own (the master), on its rank only; after a step it is rounded into the flat memory. Then
all ranks gather the flat memory.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import nn

from colossalai.tensor import set_fragment
from colossalai.zero._bucket_grads import BucketGrads
from colossalai.zero._exchange import start_gather
from colossalai.zero._layout import FlatBucket

MasterOf = Callable[[nn.Parameter], torch.Tensor | None]


class BucketWeights(ABC):
    """The weights of a bucket, as one rank holds them.

    Args:
        bucket: The layout.
        held: The numbers of those parameters in the bucket that are updated here; default: all.
        keeps_shapes: Whether a fragment that is a whole parameter has its shape; default: if no other exist.

    Attributes:
        bucket: As given.
        held: As given.
        keeps_shapes: As given.
        can_page: Whether `is_paged` is ever true: False unless there is a disk tier.
        has_lasting_homes: Whether homes are the memory of the bucket itself, and not made on request.
        moves_mean: Whether `take_mean` moves the mean gradient, so that the methods of means have an effect.
    """

    can_page: bool = False
    has_lasting_homes: ClassVar[bool] = True
    moves_mean: ClassVar[bool] = False

    def __init__(
        self, bucket: FlatBucket, *, held: Sequence[int] | None = None, keeps_shapes: bool | None = None
    ) -> None:
        self.bucket = bucket
        self.held = range(len(bucket.params)) if held is None else held
        self.keeps_shapes = not bucket.cuts_params if keeps_shapes is None else keeps_shapes

    @property
    def is_paged(self) -> bool:
        """Whether some of the bucket is on disk, so that it has to be updated by itself."""
        return False

    @abstractmethod
    def home(self, index: int) -> torch.Tensor:
        """Return the memory of this rank's fragment of a parameter, flat; there may be none of it.

        If homes do not last, it has values after `collect_homes` or a write.
        """

    def take_master(self, index: int) -> torch.Tensor | None:
        """Return a parameter's values in float32 for this rank's fragment, flat; None: it has no master.

        The fragment owns the result. Called once for each parameter; collective, in their order.
        """
        return None

    def collect_homes(self) -> None:  # noqa: B027 - lasting ones have them
        """Let homes that do not last have the values of the bucket."""

    def release_homes(self) -> None:  # noqa: B027 - most have lasting ones
        """Give back the memory of homes that do not last."""

    def take_mean(self, grads: BucketGrads) -> torch.Tensor | None:
        """Return this rank's section of the mean gradient, in the layout of `bucket`, if there is one.

        Args:
            grads: The gradients that include the parameters of `bucket`. Moved means are removed from them
                and add up until `forget_mean`. Collective then.
        """
        return grads.slice

    def scale_mean(self, factor: float) -> None:  # noqa: B027 - most have moved none
        """Multiply the means moved by `take_mean`."""

    @property
    def has_moved_mean(self) -> bool:
        """Whether there are means moved by `take_mean`."""
        return False

    def clear_mean(self, index: int) -> None:  # noqa: B027 - most have moved none
        """Set the mean moved by `take_mean` to zero for one parameter."""

    def forget_mean(self, *, set_to_none: bool) -> None:  # noqa: B027 - most have moved none
        """Drop the means moved by `take_mean`, or set them to zero."""

    def keep(self, state: torch.Tensor) -> torch.Tensor:
        """Return a state with the same values in the memory of this bucket's states, itself if there."""
        return state

    def give_back(self, tensors: Iterable[torch.Tensor]) -> None:  # noqa: B027 - most have nothing on disk
        """Release the memory of tensors on disk; nothing is lost."""

    @abstractmethod
    def take_written(self) -> set[nn.Parameter]:
        """Return the parameters written by others since the last `publish` or call of this method."""

    @abstractmethod
    def start_publishing(self) -> Callable[[], object]:
        """Start to send the values of this rank's homes to all ranks; return the wait. Collective."""


@final
class WholeWeights(BucketWeights):
    """The weights of a bucket in one flat piece of memory, of which the parameters are views.

    Args:
        bucket: The layout; its parameters become views, with the values that they have.
        master_of: Returns the float32 master of a parameter, which is whole, if it has one.
    """

    def __init__(self, bucket: FlatBucket, master_of: MasterOf) -> None:
        super().__init__(bucket)
        first = bucket.params[0]
        self._masters = list(map(master_of, bucket.params))  # until they are taken
        self._flat = torch.zeros(bucket.numel, dtype=first.dtype, device=first.device)
        self._views = bucket.views(self._flat)
        ranges = (bucket.overlap(index, bucket.axis.rank) for index in self.held)
        self._homes = [
            view.view(-1)[begin:end] for view, (begin, end) in zip(self._views, ranges, strict=True)
        ]
        for param, view in zip(bucket.params, self._views, strict=True):
            view.copy_(param.detach())
            param.data = view
        self._versions = [param._version for param in bucket.params]

    def home(self, index: int) -> torch.Tensor:
        """See the base class."""
        return self._homes[index]

    def take_master(self, index: int) -> torch.Tensor | None:
        """See the base class; a copy, so that the whole can be dropped."""
        master = self._masters[index]
        self._masters[index] = None
        begin, end = self.bucket.overlap(index, self.bucket.axis.rank)
        return None if master is None else master.detach().reshape(-1)[begin:end].clone()

    def take_written(self) -> set[nn.Parameter]:
        """See the base class; parameters that were given other memory come back to the bucket."""
        params, versions = self.bucket.params, self._versions
        written = set()
        for index, (param, view) in enumerate(zip(params, self._views, strict=True)):
            has_moved = param.data_ptr() != view.data_ptr()
            if has_moved:
                view.copy_(param)
                param.data = view
            if has_moved or param._version != versions[index]:
                written.add(param)
                versions[index] = param._version
        return written

    def start_publishing(self) -> Callable[[], object]:
        """See the base class: gather the sections."""
        wait = start_gather(self._flat, self.bucket)  # each rank sends its updated section to all others

        def end() -> None:
            wait()  # for the sections of the other ranks
            # Autograd does not see the write of the gather. Caches of results computed with a parameter (an
            # engine's cache, a graph's saved tensors) detect the change by its version.
            torch.autograd.graph.increment_version(self.bucket.params)
            self._versions = [param._version for param in self.bucket.params]

        return end


@dataclass(frozen=True, eq=False)
class Fragment:
    """This rank's part of a parameter, as its optimizer updates it.

    Attributes:
        param: The parameter.
        tensor: The optimizer's tensor; flat, or in the parameter's shape if it is the whole of it. Without
            elements it is not in the optimizer.
        weights: The weights of its bucket.
        index: The number of the parameter in the bucket.
        place: Begin and end of it in the section of this rank.
        has_own_memory: Whether it is not `home` itself; see [Note: three kinds of memory].
    """

    param: nn.Parameter
    tensor: nn.Parameter
    weights: BucketWeights
    index: int
    place: tuple[int, int]
    has_own_memory: bool

    @property
    def home(self) -> torch.Tensor:
        """The part of the parameter's memory that it represents, at its present place."""
        return self.weights.home(self.index).view(self.tensor.shape)

    def round_on_disk(self) -> None:
        """Round a master into its home, where that is done bucket by bucket."""
        if self.weights.is_paged and self.weights.has_lasting_homes:
            self.home.copy_(self.tensor)
            self.weights.give_back([self.home, self.tensor.detach()])


@dataclass(frozen=True, eq=False)
class BucketFragments:
    """The fragments of a bucket as flat lists, made once, over which the loops of a step run.

    Attributes:
        weights: The weights of the bucket.
        grads: The gradients of which those of the bucket are a part.
        sizes: Of the parts of this rank's section, one for each parameter in the layout of `weights`.
        numel: Their sum.
        parts: For each fragment, its tensor, the number of its part, and the number of its parameter in
            `marks` of the reducer.
        masters: The fragments that have memory of their own.
        first_mark: The number of the first parameter of `grads` in `marks`.
    """

    weights: BucketWeights
    grads: BucketGrads
    sizes: list[int]
    numel: int
    parts: list[tuple[nn.Parameter, int, int]]
    masters: list[Fragment]
    first_mark: int


def make_fragments(weights: BucketWeights, *, offload: bool) -> list[Fragment]:
    """Return this rank's fragments of the parameters of a bucket; collective.

    Args:
        weights: The weights of the bucket.
        offload: Keep the fragments in host memory.
    """
    bucket = weights.bucket
    first = bucket.params[0]
    device = torch.device("cpu") if offload else first.device
    rank = bucket.axis.rank
    found = []
    weights.collect_homes()
    for index in weights.held:
        param = bucket.params[index]
        begin, end = bucket.overlap(index, rank)
        whole = end - begin == param.numel() and weights.keeps_shapes
        shape = param.shape if whole else (end - begin,)
        home = weights.home(index).view(shape)
        master = weights.take_master(index)
        is_away = device != first.device or not weights.has_lasting_homes
        has_own_memory = master is not None or is_away
        own = home
        if has_own_memory:
            own = home.clone() if master is None else master.view(shape)
            own = weights.keep(own.cpu() if offload else own)
        tensor = nn.Parameter(own)
        set_fragment(tensor, param, bucket.axis.group)  # also a single fragment: it keeps the cut of `param`
        found.append(Fragment(param, tensor, weights, index, bucket.place(index, rank), has_own_memory))
    weights.release_homes()
    return found
