"""A model and its optimizers during `assemble`, and the interface of the methods that are applied to them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from colossalai.amp import Masters, OptimizerWrapper
from colossalai.context import Axis, Layout, Mesh
from colossalai.nn.parallel import AppliedDataMethod, ArrivingParams
from colossalai.tensor import ShardingSpec, set_spec, spec_of


class Assembly:
    """A model and its optimizers while methods are applied to them.

    Args:
        model: The given model; methods change it in place.
        optimizers: Optimizers of its parameters.
        mesh: The ranks.
        layout: Their layout.
        device: The device of this rank.
        accumulates: Whether the optimizers delay their steps to the end of a window of microbatches.

    Attributes:
        model: The part of the model that this rank trains: all of it, or its stages of a pipeline.
        computing: The module that computes as `model` does, inside of the methods applied so far.
        owners: The model as given, and the modules that stages of a pipeline were made of.
        replicas: The ranks that get different parts of the batch.
        tensor_axis: The ranks that share layers and have equal activations between layers; None for none.
        has_user_shards: Whether the user has sharded parameters of the model.
        names: Name of each parameter by its `id`, before the data method replaces parameters.
        blocks: The repeated parts of the model, found before methods change their forwards.
        params: The parameters of the model, to be moved to the device and cast to their dtype.
        data: The applied data method.
        masters: Float32 masters of parameters that are in no optimizer yet.
        late_params: Parameters whose gradients are complete after all backwards of a batch only.
        after_step: Callbacks after an update of the parameters.
        wrapped: The wrapped optimizers.
        names_of: Function of the model that returns the name of each parameter for its optimizers.
        optimizer_options: Further arguments of each `OptimizerWrapper`.
        wrapper_options: Further arguments of the `ModelWrapper`.
    """

    params: ArrivingParams
    data: AppliedDataMethod
    masters: Masters

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        *,
        mesh: Mesh,
        layout: Layout,
        device: torch.device,
        accumulates: bool = False,
    ) -> None:
        self.model = self.computing = model
        self.owners = [model]
        self.optimizers = list(optimizers)
        self.mesh = mesh
        self.layout = layout
        self.device = device
        self.accumulates = accumulates
        self.replicas: Axis = mesh.axis(mesh.batch_axes)
        self.tensor_axis = None if layout.alike_axis is None else mesh.axis(layout.alike_axis)
        self.has_user_shards = False
        self.names: dict[int, str] = {}
        self.blocks: list[nn.Module] = []
        self.late_params: list[nn.Parameter] = []
        self.after_step: list[Callable[[], None]] = []
        self.names_of: Callable[[nn.Module], dict[nn.Parameter, str]] = _names_in
        self.wrapped: list[OptimizerWrapper] = []
        self.optimizer_options: dict[str, Any] = {}
        self.wrapper_options: dict[str, Any] = {}
        self._specs: dict[str, ShardingSpec] = {}

    @property
    def shares_layers(self) -> bool:
        """Whether several ranks share layers and have equal activations between layers."""
        return self.tensor_axis is not None and self.tensor_axis.size > 1

    def save_names_and_specs(self) -> None:
        """Save the name and spec of each parameter: a data method can replace parameters, not names."""
        named = dict(self.model.named_parameters())
        self.names = {id(param): name for name, param in named.items()}
        self._specs = {name: spec for name, param in named.items() if (spec := spec_of(param)) is not None}

    def restore_specs(self) -> None:
        """Give parameters that have replaced others the specs of those."""
        for name, param in self.model.named_parameters():
            if name in self._specs and spec_of(param) is None:
                set_spec(param, self._specs[name])


class PlanMethod:
    """A method of a plan: a frozen dataclass of its options.

    `assemble` calls `validate` of all methods, then `apply` of all, then `after_apply` of all, each time in
    the order of `Plan.methods`, on every rank: all of them are collective for some methods.
    """

    def validate(self, job: Assembly) -> None:
        """Check the unchanged model and its optimizers, so that all ranks find a mistake.

        Raises:
            ValueError: The method cannot be applied to the model, or to one of the optimizers.
        """

    def apply(self, job: Assembly) -> None:
        """Apply the method to the model, in place.

        Raises:
            ValueError: The method cannot be applied to the model, or to one of the optimizers.
        """

    def after_apply(self, job: Assembly) -> None:
        """Finish with the model and the optimizers after all methods have been applied."""


def _names_in(model: nn.Module) -> dict[nn.Parameter, str]:
    return {param: name for name, param in model.named_parameters()}


def has_stepped(optimizer: Optimizer) -> bool:
    """Return whether an optimizer has states, except initial states of its class from before a step."""
    return any(state.get("step", 1) > 0 for state in optimizer.state.values())
