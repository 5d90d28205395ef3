"""A data method, a value of options, and its applied form, an object with state.

`set_sync` of the applied form comes before each backward; `optimizer_params` returns those of an optimizer.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from difflib import get_close_matches
from typing import Any, ClassVar, final

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from colossalai.amp import Masters, OptimizerParams
from colossalai.cluster import gather_values
from colossalai.communication import broadcast
from colossalai.context import Axis
from colossalai.nn.parallel._arriving import ArrivingParams
from colossalai.tensor import RowCache, gradient_sync, row_cache_of


class DataMethod(ABC):
    """A way to keep the ranks that share a model equal; a frozen dataclass of its options.

    Attributes:
        shards_parameters: Whether a rank holds only slices of the parameters.
        in_pipeline: Whether it synchronizes in pipelines only (True), only without one (False), or in both.
        allows_compile: Whether forwards of the model may be compiled.
        takes_runs: Whether `apply` takes parameters in runs; otherwise all have come before.
    """

    shards_parameters: ClassVar[bool] = False
    takes_runs: ClassVar[bool] = False
    allows_compile: ClassVar[bool] = True
    in_pipeline: ClassVar[bool | None] = None

    @property
    def name_in_pairs(self) -> str | None:
        """Its name in the table of methods that cannot be combined; None: it combines with all of them."""
        return None

    @property
    def label(self) -> str:
        """The name of the method in the log."""
        return self.name_in_pairs or type(self).__name__

    @property
    def cuts_gradients(self) -> bool:
        """Whether a rank that has whole parameters keeps only its slices of their gradients."""
        return False

    def allows_float32_grads(self, replicas: Axis) -> bool:
        """Return whether gradients of parameters in 16 bits may accumulate in float32."""
        return True

    def check(  # noqa: B027 - most methods take any model and optimizer
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        *,
        blocks: list[nn.Module],
        replicas: Axis,
    ) -> None:
        """Raise if `apply`, whose arguments these are, cannot take the module, or later steps the optimizers.

        Raises:
            ValueError: The method cannot take `module` or one of `optimizers`.
        """

    @abstractmethod
    def apply(
        self, module: nn.Module, *, blocks: list[nn.Module], replicas: Axis, arriving: ArrivingParams
    ) -> "AppliedDataMethod":
        """Put the method to work on a module; collective over the replicas, which then start equal.

        Args:
            module: The module; it may be changed in place, its parameters may be replaced.
            blocks: The repeated parts of it (transformer blocks, residual blocks).
            replicas: The ranks that see different parts of the batch.
            arriving: Its parameters and buffers. They are on the device of this rank, unless the method
                `takes_runs`; then it materializes them.
        """


class AppliedDataMethod(ABC):
    """A data method applied to one module, the result of `DataMethod.apply`. It has the method's state.

    Args:
        module: The module that computes as the one given does.

    Attributes:
        module: As given.
        shards_gradients: Whether a rank holds only slices of the averaged gradients.
    """

    shards_gradients: ClassVar[bool] = False

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    @abstractmethod
    def set_sync(self, enabled: bool, *, part: int | None = None) -> None:
        """Set whether the next forward and its backward synchronize.

        Args:
            enabled: Whether they do.
            part: Only of this child of an `nn.ModuleList`; None: of the whole module.
        """

    def finish(self) -> None:  # noqa: B027 - most methods are done with the backward
        """Wait until the gradients are equal on the replicas; collective over them."""

    def optimizer_params(
        self, optimizer: Optimizer, masters: Masters, *, late: Collection[nn.Parameter] = ()
    ) -> OptimizerParams:
        """Replace an optimizer's parameters by the tensors to update, and return them.

        Args:
            optimizer: An optimizer of the module's parameters; its groups and states are changed in place.
            masters: Float32 masters of the parameters that have one, equal on the replicas.
            late: Parameters whose gradients are complete after all backwards only.

        Raises:
            ValueError: The method cannot take the optimizer.
        """
        return masters.replace_params(optimizer)

    def gathered(self, params: Collection[nn.Parameter] | None = None) -> AbstractContextManager[None]:
        """Return a block within which parameters can be read and written; collective where a rank has slices.

        Args:
            params: Those that are wanted; default: all.

        Raises:
            ValueError: A rank never has whole parameters under the method.
        """
        return nullcontext()

    def state_dict(self, raw: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Return the state of the model under the method; collective where parameters have no values here.

        Args:
            raw: The model as it was given, whose names count.
            args: Those of `nn.Module.state_dict`.
            kwargs: As `args`.
        """
        return raw.state_dict(*args, **kwargs)

    def load_state_dict(
        self, raw: nn.Module, content: Mapping[str, Any], *, strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a state dict; all ranks call it, with the same values.

        Args:
            raw: The model as it was given.
            content: The values.
            strict: As in `nn.Module.load_state_dict`, whose result this returns.
            assign: As `strict`.

        Raises:
            ValueError: `assign` is set, and the parameters cannot be replaced.
        """
        return raw.load_state_dict(content, strict=strict, assign=assign)


def params_called(
    model: nn.Module, parts: Sequence[str | nn.Module | nn.Parameter]
) -> dict[nn.Parameter, None]:
    """Return the parameters of parts of a model, each given by its name in the model or as it is.

    Raises:
        ValueError: `parts` are not all modules or parameters of `model`.
    """
    known: dict[str, nn.Module | nn.Parameter] = dict(model.named_parameters(remove_duplicate=False))
    known.update(model.named_modules())
    own = set(known.values())
    found: dict[nn.Parameter, None] = {}
    for given in parts:
        part = known.get(given) if isinstance(given, str) else given
        if part is None or part not in own:
            near = get_close_matches(str(given), known, n=3) if isinstance(given, str) else []
            near = near or [name for name, _ in model.named_children()]
            raise ValueError(
                f"{given!r:.80} is not a module or parameter of this model: pass one of them, or a name, "
                f"such as {', '.join(map(repr, near))}"
            )
        found.update(dict.fromkeys([part] if isinstance(part, nn.Parameter) else part.parameters()))
    return found


@final
class NoSync(AppliedDataMethod):
    """A module whose backwards synchronize nothing."""

    def set_sync(self, enabled: bool, *, part: int | None = None) -> None:
        """Do nothing."""


def broadcast_from_first(module_or_tensors: nn.Module | Iterable[torch.Tensor], replicas: Axis) -> None:
    """Give all ranks that hold a parameter or buffer the values of the first of them; collective."""
    tensors: Iterable[torch.Tensor] = (
        (*module_or_tensors.parameters(), *module_or_tensors.buffers())
        if isinstance(module_or_tensors, nn.Module)
        else module_or_tensors
    )
    for tensor in tensors:
        holders = gradient_sync(tensor, replicas).axis
        if holders.size > 1:
            # From the first holder; every holder visits the tensors in the order of the module.
            dist.broadcast(tensor.detach(), src=holders.ranks[0], group=holders.group)


def broadcast_floating_buffers(module: nn.Module, replicas: Axis) -> None:
    """Broadcast the floating buffers of the first rank that holds them, once for each dtype and device."""
    kinds: dict[tuple[torch.dtype, torch.device, Axis], list[torch.Tensor]] = {}
    for buffer in module.buffers():
        if buffer.is_floating_point():
            holders = gradient_sync(buffer, replicas).axis
            kinds.setdefault((buffer.dtype, buffer.device, holders), []).append(buffer)
    for (_, _, holders), buffers in kinds.items():
        flat = broadcast(torch.cat([buffer.flatten() for buffer in buffers]), holders.ranks[0], holders)
        for buffer, part in zip(buffers, flat.split([buffer.numel() for buffer in buffers]), strict=True):
            buffer.copy_(part.view(buffer.shape))


def refuse_sparse_gradients(
    module: nn.Module, reason: str, *, held: Collection[nn.Parameter] | None = None
) -> None:
    """Refuse embeddings that are built with `sparse=True`.

    Args:
        module: The module.
        reason: Why, a clause that begins with "which" or "and".
        held: The parameters that count; default: all.

    Raises:
        ValueError: `module` has such an embedding.
    """
    for name, part in module.named_modules():
        is_sparse = isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse
        if is_sparse and (held is None or part.weight in held):
            raise ValueError(
                f"{name or type(part).__name__} gives sparse gradients, {reason}: build it with sparse=False"
            )


def check_row_caches(module: nn.Module, optimizers: Sequence[Optimizer], replicas: Axis) -> None:
    """Check that the tables of a module are divided among the replicas, and that optimizers can train them.

    Collective over all ranks if the module has tables, since each rank has its own.

    Args:
        module: The module.
        optimizers: Optimizers of its parameters.
        replicas: The ranks that see different parts of the batch.

    Raises:
        ValueError: A table was made for other ranks, or an optimizer does not change rows separately; on all
            ranks.
    """
    caches = {name: cache for name, param in module.named_parameters() if (cache := row_cache_of(param))}
    if not caches:
        return
    try:
        for name, cache in caches.items():
            _check_cache(name, cache, optimizers, replicas)
        failure = None
    except ValueError as error:
        failure = error
    # All ranks have caches, if one has: a rank without tables has a spare row.
    failures = gather_values(None if failure is None else str(failure))
    if failure is not None:
        raise failure
    if any(failures):
        rank, text = next((rank, text) for rank, text in enumerate(failures) if text is not None)
        raise ValueError(f"rank {rank}: {text}")


def _check_cache(name: str, cache: RowCache, optimizers: Sequence[Optimizer], replicas: Axis) -> None:
    num_ranks = replicas.mesh.world_size
    if cache.axis is None and num_ranks > 1:
        raise ValueError(
            f"{name} is the cache of {cache.name}, a table of one process, and the job has {num_ranks} "
            "ranks: use ParallelCachedEmbeddingBag or ParallelCachedEmbeddingBagTablewise, which divide "
            "tables among them"
        )
    if cache.axis is not None and cache.axis.ranks != replicas.ranks:
        raise ValueError(
            f"{name} is the cache of {cache.name}, whose tables the ranks {list(cache.axis.ranks)} divide, "
            f"and the data-parallel ranks are {list(replicas.ranks)}: lay the ranks out before the model is "
            "made, by Booster(plugin=...), plugin.configure() or the config of the launch"
        )
    for optimizer in optimizers:
        cache.check_optimizer(optimizer)
