"""A small model with experts: each rank along `ep` holds some of them, and computes for the tokens of all."""

import torch
from torch import Tensor, nn

from colossalai.communication import (
    all_gather,
    gather_forward_scatter_backward,
    scatter_forward_gather_backward,
)
from colossalai.context import Mesh
from colossalai.tensor import SpecKeeper, cut_dims, set_spec, spec_of

NUM_EXPERTS = 4
WIDTH = 6
ALONE = Mesh({"edp": 1, "ep": 1, "pp": 1, "tp": 1}, rank=0, views={"dp": ("edp", "ep")})


class Experts(SpecKeeper):
    """The expert that a gate chooses for each token; weights are cut over `ep`, the gate is not.

    Args:
        mesh: The ranks.
    """

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh)
        self.gate = nn.Linear(WIDTH, NUM_EXPERTS)
        for name, shape in {"weight": (NUM_EXPERTS, WIDTH, WIDTH), "bias": (NUM_EXPERTS, WIDTH)}.items():
            spec = cut_dims(shape, [("ep",), *[()] * (len(shape) - 1)], mesh)
            param = nn.Parameter(spec.slice_of(torch.randn(shape)))
            set_spec(param, spec)
            setattr(self, name, param)

    def forward(self, x: Tensor) -> Tensor:  # (batch, width)
        axis = self.mesh.axis("ep")
        share, choice = self.gate(x).softmax(-1).max(-1)
        tokens = gather_forward_scatter_backward(x, axis, 0)  # (batch * ep, width)
        choice = all_gather(choice, 0, axis)
        result = torch.zeros_like(tokens)
        num_own = NUM_EXPERTS // axis.size
        for number in range(num_own):
            is_mine = (choice == axis.rank * num_own + number).unsqueeze(-1)
            result = result + torch.tanh(tokens @ self.weight[number] + self.bias[number]) * is_mine
        return scatter_forward_gather_backward(result, axis, 0) * share.unsqueeze(-1)


class Block(nn.Module):
    """A residual block of experts."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.experts = Experts(mesh)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.experts(self.norm(x))


class Net(nn.Module):
    """Two blocks between linear layers.

    Args:
        mesh: The ranks.
    """

    def __init__(self, mesh: Mesh = ALONE) -> None:
        super().__init__()
        self.embed = nn.Linear(5, WIDTH)
        self.blocks = nn.Sequential(Block(mesh), Block(mesh))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(x)))


def cut_copy(plain: nn.Module, mesh: Mesh) -> Net:
    """Return a copy of a net cut over a mesh, with other values on all ranks but the first of each slice.

    A method has to make them equal, among the ranks that hold the same.
    """
    model = Net(mesh).double()
    with torch.no_grad():
        for name, param in model.named_parameters():
            spec, whole = spec_of(param), plain.get_parameter(name)
            param.copy_(whole if spec is None else spec.slice_of(whole))
            param += mesh.axis_rank("dp" if spec is None or not spec.axes else "edp")
    return model


def make_batches(num_steps: int = 3) -> list[tuple[Tensor, Tensor]]:
    """Return batches of 16 samples."""
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(16, 5, generator=generator), torch.randint(3, (16,), generator=generator))
        for _ in range(num_steps)
    ]
