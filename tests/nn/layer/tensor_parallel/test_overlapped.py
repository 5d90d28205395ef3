"""The product with its communication behind its computation: order, memory, and mixed precision."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import colossalai
from colossalai.communication import ledger
from colossalai.core import global_context as gpc
from colossalai.nn.layer import COLUMN, ROW, Linear, ParallelLinear, restart
from colossalai.nn.layer.tensor_parallel import _linear
from tests.ranks import run_ranks
from tests.tiers import further

pytestmark = pytest.mark.dist


def launch(mode: str, size: int) -> None:
    colossalai.launch_from_torch({"parallel": {"tensor": {"size": size, "mode": mode}}}, verbose=False)
    restart(mode)


class NotedProducts(TorchDispatchMode):
    """Notes each product of two matrices as an event."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.mm.default:
            self.events.append("product")
        return func(*args, **(kwargs or {}))


def order_of_backward() -> list[str]:
    """Note when the sum of the input's gradient begins and ends, and when products are computed."""
    launch("1d", 2)
    events = []
    start = _linear.start_all_reduce

    def noted_start(*args):
        events.append("start")
        wait = start(*args)
        return lambda: (events.append("wait"), wait())

    _linear.start_all_reduce = noted_start
    layer = ParallelLinear(4, 6, scheme=COLUMN, weight_is_transposed=True)
    x = torch.ones(2, 4, requires_grad=True)
    loss = layer(x).sum()
    with NotedProducts(events):
        loss.backward()
    assert layer.weight.grad.is_contiguous()
    return events


def test_the_weight_gradient_is_computed_while_the_input_gradient_is_summed():
    assert run_ranks(order_of_backward, 2) == [["product", "start", "product", "wait"]] * 2


def without_input_gradient() -> None:
    launch("1d", 2)
    layer = ParallelLinear(4, 6, scheme=COLUMN)
    with ledger() as book:
        layer(torch.ones(2, 4)).sum().backward()
    assert book.entries == []  # nobody asks for it
    assert layer.weight.grad is not None
    layer = ParallelLinear(4, 6, scheme=ROW)
    layer.requires_grad_(False)
    x = torch.ones(2, 2, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None
    assert layer.weight.grad is None


def test_only_what_is_asked_for_is_computed():
    run_ranks(without_input_gradient, 2)


def mixed_precision(mode: str, size: int) -> None:
    launch(mode, size)
    torch.manual_seed(1)
    layers = torch.nn.Sequential(Linear(8, 16), Linear(16, 8))
    share = gpc.mesh.axis_size(layers[0].scheme.x.features)
    x = torch.randn(2, 3, 8 // share, requires_grad=True)
    whole = layers(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layers(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), whole, rtol=0.05, atol=0.05)  # 8 bits of mantissa
    wanted = torch.autograd.grad(whole.sum(), [x, *layers.parameters()])
    found = torch.autograd.grad(y.sum(), [x, *layers.parameters()])
    for grad, target in zip(found, wanted, strict=True):
        assert grad.dtype == torch.float32
        torch.testing.assert_close(grad, target, rtol=0.05, atol=0.2)


@pytest.mark.parametrize(("mode", "size"), [("1d", 2), further("2d", 4), further("3d", 8)])
def test_autocast_reaches_into_the_product(mode: str, size: int):
    run_ranks(mixed_precision, size, mode, size)
