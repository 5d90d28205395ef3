"""Experts of any class, spread over ranks: each parameter of all of them is one tensor, cut along its dim 0.

Norms, ZeRO and checkpoints find tensors (experts, ...) with a spec, under the names of one expert's
parameters. The computation uses one expert without values, called with the values of each expert in turn.

[Note: initial values of experts]
Expert number e of a layer is drawn from a state of its own, which follows from the seed of `moe_set_seed`,
from a number that the layer draws when it is built (the same on all ranks), and from e. So experts differ
from each other, and a model starts from the same values for any ranks that share its experts.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.func import functional_call

from colossalai.communication import all_gather
from colossalai.context import drawing_expert
from colossalai.nn.layer.moe._dispatch import EXPERT_AXES, dispatch
from colossalai.nn.layer.moe._router import Routes
from colossalai.nn.layer.tensor_parallel import launched_job
from colossalai.tensor import ParameterHolder, SpecKeeper, cut_dims, set_built_for, set_spec, spec_of


class MoeExperts(SpecKeeper):
    """Base of the experts of a `MoeLayer`.

    Args:
        num_experts: Over all ranks.

    Attributes:
        num_experts: As given.
        axes: The axes of the ranks that share the experts, those of one rank left out.

    Raises:
        ValueError: `num_experts` is not positive or differs between ranks, or the tensor mode of the job is
            not "1d", or its ranks share sequences.
    """

    def __init__(self, num_experts: int) -> None:
        job = launched_job()
        super().__init__(job.mesh)
        if job.layout.tensor > 1 and job.mode != "1d":
            raise ValueError(
                f"experts and tensor mode {job.mode!r} cannot be combined: tokens and experts would be cut "
                "along the same axes; take mode '1d', or leave tensor parallelism out"
            )
        if job.layout.sequence > 1:
            raise ValueError(
                "experts and sequence parallelism cannot be combined: the ranks that share sequences would "
                "be replicas without experts of their own; leave it out (sp_size of HybridParallelPlugin, "
                "parallel.sequence in a config)"
            )
        self.axes = tuple(axis for axis in EXPERT_AXES if self.mesh.axes.get(axis, 1) > 1)
        self._check_agreement(num_experts, job.device)
        if num_experts < 1:
            raise ValueError(f"num_experts is {num_experts}; it must be at least 1")
        self.num_experts = num_experts
        set_built_for(self, expert=job.layout.expert, tensor=job.layout.tensor)

    @property
    def num_ranks(self) -> int:
        """The number of ranks that share the experts."""
        return self.mesh.axis_size(self.axes) if self.axes else 1

    @property
    def axis_rank(self) -> int:
        """Which of them this one is."""
        return self.mesh.axis_rank(self.axes) if self.axes else 0

    def forward(self, hidden: Tensor, routes: Routes) -> Tensor:
        """Return for each token (tokens, features) the weighted sum of its experts' results; collective."""
        raise NotImplementedError(f"{type(self).__name__} is MoeExperts and must define forward")

    def extra_repr(self) -> str:
        """See the base class."""
        return f"num_experts={self.num_experts}, ranks={self.num_ranks}"

    def own_experts(self) -> range:
        """Return the numbers of the experts that this rank holds.

        Raises:
            ValueError: The ranks do not divide `num_experts`.
        """
        if self.num_experts % self.num_ranks:
            fitting = [size for size in range(1, self.num_experts + 1) if self.num_experts % size == 0]
            raise ValueError(
                f"{type(self).__name__} has {self.num_experts} experts, which {self.num_ranks} ranks along "
                f"{' x '.join(self.axes)} do not divide: choose a multiple of {self.num_ranks}, or ranks "
                f"(expert-parallel size x tensor-parallel size) of which there are one of {fitting}"
            )
        num_own = self.num_experts // self.num_ranks
        return range(self.axis_rank * num_own, (self.axis_rank + 1) * num_own)

    def _check_agreement(self, num_experts: int, device: torch.device) -> None:
        """Compare the number of experts over the ranks that are to share them, before anything else."""
        if not self.axes:
            return
        found = all_gather(torch.tensor([num_experts], device=device), 0, self.mesh.axis(self.axes))
        if found.min() != found.max():
            raise ValueError(
                f"{type(self).__name__} is built with num_experts={num_experts} here, and the ranks that "
                f"share its experts have {found.tolist()}: build the same model on all ranks"
            )


class Experts(MoeExperts):
    """Experts of one class.

    Args:
        expert: The class, or another callable that returns a module: `forward(x)` maps (rows, width) to the
            same width.
        num_experts: Over all ranks.
        expert_args: Arguments of `expert`.

    Raises:
        ValueError: `num_experts` is refused by `MoeExperts`, or the ranks do not divide it; `expert` returns
            no module with a `forward(x)`, or a module with buffers or sharded parameters.
    """

    def __init__(self, expert: Callable[..., nn.Module], num_experts: int, **expert_args: Any) -> None:
        super().__init__(num_experts)
        own = self.own_experts()
        layer = int(torch.randint(2**31, ()))  # see [Note: initial values of experts]
        stacked: dict[str, nn.Parameter] = {}  # a tied parameter once, under its first name
        for place, number in enumerate(own):
            with drawing_expert(layer, number):
                one = expert(**expert_args)
            _check_expert(one, expert)
            with torch.no_grad():
                for name, param in one.named_parameters():
                    if place == 0:
                        whole = param.new_empty((len(own), *param.shape))
                        stacked[name] = nn.Parameter(whole, requires_grad=param.requires_grad)
                    stacked[name][place] = param
            first_names = {param: name for name, param in one.named_parameters()}
        for name, param in one.named_parameters(remove_duplicate=False):
            self._hold(name, stacked[first_names[param]])
        # Not a sub-module: its parameters have no values, and are not the layer's.
        object.__setattr__(self, "_template", one.to("meta"))

    def forward(self, hidden: Tensor, routes: Routes) -> Tensor:
        """See the base class."""
        return dispatch(
            hidden,
            routes.experts,
            routes.weights,
            self._compute,
            num_experts=self.num_experts,
            mesh=self.mesh,
            served=routes.served,
            training=self.training,
        )

    def train(self, mode: bool = True) -> Self:
        """See the base class."""
        super().train(mode)
        self.__dict__["_template"].train(mode)
        return self

    def _hold(self, name: str, param: nn.Parameter) -> None:
        """Register a parameter of all experts under the name that it has in one."""
        *path, last = name.split(".")
        holder: SpecKeeper = self
        for part in path:
            if part not in holder._modules:
                holder.add_module(part, ParameterHolder(self.mesh))
            below = holder._modules[part]
            assert isinstance(below, SpecKeeper), "the parts of an expert are held by holders"
            holder = below
        shape = (self.num_experts, *param.shape[1:])
        set_spec(param, cut_dims(shape, [self.axes, *[()] * (param.dim() - 1)], self.mesh))
        holder.register_parameter(last, param)

    def _compute(self, rows: Tensor, sizes: Sequence[int]) -> Tensor:
        template: nn.Module = self.__dict__["_template"]
        names = dict(self.named_parameters(remove_duplicate=False))  # every name of a tied parameter
        values_of = {param: param.unbind(0) for param in self.parameters()}
        results = []
        # One by one, also those without rows: their gradients are zeros then, and not none.
        for number, part in enumerate(rows.split(list(sizes))):
            values = {name: values_of[param][number] for name, param in names.items()}
            # The template has no ties: they are lost where it goes to the meta device.
            result = functional_call(template, values, (part,), tie_weights=False)
            if not isinstance(result, Tensor) or result.shape != part.shape:
                found = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
                raise ValueError(
                    f"an expert, a {type(template).__name__}, made {found} of rows {tuple(part.shape)}: the "
                    "results of a token's experts are added, so an expert must keep the width"
                )
            results.append(result)
        return torch.cat(results)


def _check_expert(one: object, expert: Callable[..., object]) -> None:
    """Refuse a module that cannot be one of many experts."""
    name = getattr(expert, "__name__", type(expert).__name__)
    if not isinstance(one, nn.Module):
        raise ValueError(f"expert={name} returned a {type(one).__name__}; it must return a torch.nn.Module")
    try:
        inspect.signature(one.forward).bind(None)
        has_forward = type(one).forward is not nn.Module.forward
    except TypeError:
        has_forward = False
    if not has_forward:
        raise ValueError(
            f"expert={name} has no forward(x) of one argument: an expert maps rows (rows, width) to the same "
            "width"
        )
    if not any(True for _ in one.parameters()):
        raise ValueError(f"expert={name} has no parameters: there is nothing for ranks to share")
    if buffers := [each for each, _ in one.named_buffers()]:
        raise ValueError(
            f"expert={name} has the buffer {buffers[0]!r}, of which experts on different ranks would have "
            "values of their own that are not saved: take layers without running statistics, or a parameter "
            "with requires_grad=False"
        )
    for each, param in one.named_parameters():
        if (spec := spec_of(param)) is not None and spec.axes:
            raise ValueError(
                f"expert={name}: {each} is cut over {' x '.join(spec.axes)} by itself; build experts of "
                "layers of torch.nn: whole experts are shared by these ranks"
            )
