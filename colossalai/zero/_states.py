"""Optimizer states between the slices of the ranks and the whole tensors of checkpoints.

A state of the shape of its fragment is a slice of the parameter's state, and the ranks put theirs together.
Numbers, and states of whole parameters, are passed as they are.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from colossalai.amp import MASTERS_KEY, STATE_KEY
from colossalai.cluster import gather_values
from colossalai.context import Axis

State = dict[str, Any]


class StateExchange:
    """Gathers the states of an optimizer's fragments, and cuts whole ones.

    Args:
        fragments: The optimizer's fragment of each parameter; empty if this rank has no part of it.
        ranges: For each parameter begin and end of the fragment of every rank that holds it.
        axes: The ranks that hold each parameter.
        replicas: The ranks that hold the model.
    """

    def __init__(
        self,
        fragments: Mapping[nn.Parameter, nn.Parameter],
        *,
        ranges: Mapping[nn.Parameter, Sequence[tuple[int, int]]],
        axes: Mapping[nn.Parameter, Axis],
        replicas: Axis,
    ) -> None:
        self._fragments = fragments
        self._ranges = ranges
        self._axes = axes
        self._replicas = replicas

    def own_range(self, param: nn.Parameter) -> tuple[int, int]:
        """Return begin and end of this rank's fragment of a parameter."""
        return self._ranges[param][self._axes[param].rank]

    @contextmanager
    def gathered(
        self, optimizer: Optimizer, *, masters: Mapping[nn.Parameter, torch.Tensor]
    ) -> Iterator[None]:
        """Within the block an optimizer has whole states, by parameter, in host memory; collective.

        Args:
            optimizer: The optimizer.
            masters: Masters that become states, in this rank's slices.
        """
        own = {
            param: optimizer.state.pop(fragment)
            for param, fragment in self._fragments.items()
            if fragment in optimizer.state
        }
        try:
            slices: dict[int, State] = {}
            for number, (param, fragment) in enumerate(self._fragments.items()):
                state = dict(own.get(param, {}))
                if param in masters:
                    state[STATE_KEY] = masters[param]
                if state and fragment.numel() > 0:
                    slices[number] = state
            everywhere = self._described(slices)
            for number, param in enumerate(self._fragments):
                descriptions = [everywhere[rank].get(number) for rank in self._axes[param].ranks]
                if any(descriptions):
                    optimizer.state[param] = self._whole(param, slices.get(number, {}), descriptions)
            yield
        finally:
            for param, fragment in self._fragments.items():
                optimizer.state.pop(param, None)
                if param in own:
                    optimizer.state[fragment] = own[param]

    def cut(self, optimizer: Optimizer) -> None:
        """Replace whole states of an optimizer by this rank's parts, by fragment."""
        for param, fragment in self._fragments.items():
            state: State | None = optimizer.state.pop(param, None)
            if state and fragment.numel() > 0:
                optimizer.state[fragment] = self._part(param, state)

    def numbered(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of an optimizer that holds whole states, with the masters added."""
        content = optimizer.state_dict()
        states = {
            number: {key: value for key, value in state.items() if key != STATE_KEY}
            for number, state in content["state"].items()
        }
        masters = {
            number: state[STATE_KEY] for number, state in content["state"].items() if STATE_KEY in state
        }
        content["state"] = {number: state for number, state in states.items() if state}
        return {**content, MASTERS_KEY: masters} if masters else content

    def load_numbered(
        self, optimizer: Optimizer, content: Mapping[str, Any], groups: Sequence[Sequence[nn.Parameter]]
    ) -> dict[nn.Parameter, torch.Tensor]:
        """Load a state of `numbered`; return this rank's parts of its masters.

        Args:
            optimizer: The optimizer, which holds fragments.
            content: The state.
            groups: The parameters of each of its groups.

        Raises:
            ValueError: The groups that were saved have other sizes.
        """
        saved = [group["params"] for group in content["param_groups"]]
        if [len(numbers) for numbers in saved] != [len(params) for params in groups]:
            raise ValueError(
                f"the state has groups of {[len(numbers) for numbers in saved]} parameters, the optimizer of "
                f"{[len(params) for params in groups]}: load it into an optimizer that was built alike"
            )
        param_of = {
            number: param
            for numbers, params in zip(saved, groups, strict=True)
            for number, param in zip(numbers, params, strict=True)
        }
        held = [param for group in optimizer.param_groups for param in group["params"]]
        new_number = {param: number for number, param in enumerate(held)}
        number_of = {
            number: new_number[self._fragments.get(param, param)]
            for number, param in param_of.items()
            if self._fragments.get(param, param) in new_number
        }
        optimizer.load_state_dict(
            {
                "state": {
                    number_of[number]: self._part(param_of[number], state)
                    for number, state in content["state"].items()
                    if number in number_of
                },
                "param_groups": [
                    {
                        **group,
                        "params": [number_of[number] for number in group["params"] if number in number_of],
                    }
                    for group in content["param_groups"]
                ],
            }
        )
        return {
            param_of[number]: self._part(param_of[number], {STATE_KEY: master})[STATE_KEY]
            for number, master in content.get(MASTERS_KEY, {}).items()
            if param_of[number] in self._fragments
        }

    def _described(self, slices: Mapping[int, State]) -> dict[int, dict[int, State]]:
        """Return the states of all replicas, by global rank; tensors as empty ones on the device "meta"."""
        described = {
            number: {key: _description(value) for key, value in state.items()}
            for number, state in slices.items()
        }
        if self._replicas.size == 1:
            return {self._replicas.ranks[0]: described}
        # All replicas exchange descriptions first: those decide which states are broadcast, in which shape.
        everywhere: list[dict[int, State]] = gather_values(described, self._replicas.group)
        return dict(zip(self._replicas.ranks, everywhere, strict=True))

    def _whole(self, param: nn.Parameter, own: State, descriptions: Sequence[State | None]) -> State:
        """Return the whole state of a parameter of which some ranks have slices."""
        first = next(state for state in descriptions if state)
        return {
            key: self._joined(param, key, own, descriptions) if _is_sliced(value) else value
            for key, value in first.items()
        }

    def _joined(
        self, param: nn.Parameter, key: str, own: State, descriptions: Sequence[State | None]
    ) -> torch.Tensor:
        pieces: list[torch.Tensor] = []
        axis = self._axes[param]
        for rank, state in enumerate(descriptions):
            if state is None:
                continue
            described = state[key]
            if rank == axis.rank:
                piece = own[key].detach().to(param.device).contiguous()
            else:
                piece = torch.empty(described.shape, dtype=described.dtype, device=param.device)
            if axis.size > 1:  # each rank sends its piece, in the order of parameters, keys and ranks
                dist.broadcast(piece, src=axis.ranks[rank], group=axis.group)
            pieces.append(piece.cpu())
        if len(pieces) == 1 and pieces[0].numel() != param.numel():
            return pieces[0]  # the state of a whole parameter, in a shape of its own
        return torch.cat([piece.reshape(-1) for piece in pieces]).view(param.shape)

    def _part(self, param: nn.Parameter, state: Mapping[str, Any]) -> State:
        """Return this rank's part of the whole state of a parameter, in memory of its own."""
        if param not in self._fragments:
            return dict(state)
        fragment = self._fragments[param]
        begin, end = self.own_range(param)

        def part(key: str, value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or key == "step" or value.shape != param.shape:
                return value
            cut = value.detach().reshape(-1)[begin:end].to(fragment.device, copy=True)
            return cut.view(fragment.shape)

        return {key: part(key, value) for key, value in state.items()}


def _is_sliced(described: Any) -> bool:
    return isinstance(described, torch.Tensor) and described.is_meta


def _description(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().cpu() if value.ndim == 0 else value.detach().to("meta")
