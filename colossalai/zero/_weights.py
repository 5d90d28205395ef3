"""Where the weights of a bucket lie between two steps, and how what an optimizer has updated gets there.

The fragments of an optimizer (`_shards.py`) are parts of this memory, or are rounded into it. Stages 1 and 2
keep it whole on every rank; stage 3 keeps a rank's own section (`gemini/_section_weights.py`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar, final

import torch
from torch import nn

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
        can_page: Whether `is_paged` is ever true.
        has_lasting_homes: Whether homes are the memory of the bucket itself, and not made when they are asked
            for.
        moves_mean: Whether `take_mean` moves the mean gradient, so that the methods of means have an effect.
    """

    can_page: ClassVar[bool] = False
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
        """Whether some of the bucket lies on disk, so that it has to be updated by itself."""
        return False

    @abstractmethod
    def home(self, index: int) -> torch.Tensor:
        """Return the memory of this rank's fragment of a parameter, flat; there may be none of it.

        Where homes do not last, it has values from `collect_homes`, or from who writes into it, on.
        """

    def take_master(self, index: int) -> torch.Tensor | None:
        """Return a parameter's values in float32 for this rank's fragment, flat; None: it has no master.

        What is returned is the fragment's from then on. Once for each parameter; collective, in their order.
        """
        return None

    def collect_homes(self) -> None:  # noqa: B027 - lasting ones have them
        """Let homes that do not last have the values of the bucket."""

    def release_homes(self) -> None:  # noqa: B027 - most have lasting ones
        """Give back the memory of homes that do not last."""

    def take_mean(self, grads: BucketGrads) -> torch.Tensor | None:
        """Return this rank's section of the mean gradient, in the layout of `bucket`, if there is one.

        Args:
            grads: The gradients of which the parameters of `bucket` are a part. What is moved elsewhere
                goes from there; it adds up until `forget_mean`. Collective then.
        """
        return grads.slice

    def scale_mean(self, factor: float) -> None:  # noqa: B027 - most have moved none
        """Multiply what `take_mean` has moved."""

    @property
    def has_moved_mean(self) -> bool:
        """Whether `take_mean` has moved what has not been forgotten."""
        return False

    def clear_mean(self, index: int) -> None:  # noqa: B027 - most have moved none
        """Make what `take_mean` has moved zero for one parameter."""

    def forget_mean(self, *, set_to_none: bool) -> None:  # noqa: B027 - most have moved none
        """Drop what `take_mean` has moved, or make it zero."""

    def keep(self, state: torch.Tensor) -> torch.Tensor:
        """Return a state with the same values that lies where those of this bucket do: itself, if it does."""
        return state

    def give_back(self, tensors: Iterable[torch.Tensor]) -> None:  # noqa: B027 - most have nothing on disk
        """Give back the memory of what lies on disk; nothing is lost."""

    @abstractmethod
    def take_written(self) -> set[nn.Parameter]:
        """Return the parameters that others have written since the last `publish` or this was asked."""

    @abstractmethod
    def start_publishing(self) -> Callable[[], object]:
        """Begin to let all ranks have what this one wrote into its homes; return the wait. Collective."""


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
        wait = start_gather(self._flat, self.bucket)

        def end() -> None:
            wait()
            # The gather wrote into memory that autograd knows nothing of. Who keeps what was computed with a
            # parameter (an engine its cache, a graph its saved tensors) learns from versions that it changed.
            torch.autograd.graph.increment_version(self.bucket.params)
            self._versions = [param._version for param in self.bucket.params]

        return end
