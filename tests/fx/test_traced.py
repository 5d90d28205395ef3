"""The documented names of traces: a module that is the user's own model, with its graph."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from colossalai.auto_parallel.checkpoint import CheckpointSolverChen, CheckpointSolverRotor
from colossalai.fx import ColoTracer, TracedModule, metainfo_trace, symbolic_trace
from tests.auto_parallel.checkpoint.traced_models import WIDTH, Masked, Mlp, stack, traced, train

pytestmark = pytest.mark.unit

X = torch.empty(8, WIDTH, device="meta")


def test_the_model_is_held_as_it_is() -> None:
    torch.manual_seed(0)
    model, arguments = stack()
    model.config = {"a": 1}
    model.register_buffer("counts", torch.zeros(2))
    rng = torch.get_rng_state()
    gm = symbolic_trace(model, meta_args={"input": arguments["input"].to("meta")})
    metainfo_trace(gm, arguments["input"])
    assert torch.equal(torch.get_rng_state(), rng)
    assert isinstance(gm, nn.Module)
    assert gm.unwrap() is model
    assert list(gm.state_dict()) == list(model.state_dict())
    assert [name for name, _ in gm.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert [name for name, _ in gm.named_buffers()] == ["counts"]
    assert all(own is other for own, other in zip(gm.parameters(), model.parameters(), strict=True))
    assert gm.config == {"a": 1}
    with pytest.raises(AttributeError, match="Sequential"):
        gm.confg  # noqa: B018
    gm.load_state_dict({name: torch.ones_like(value) for name, value in model.state_dict().items()})
    assert model[0].up.weight.eq(1).all()
    gm.eval()
    assert not model.training
    gm.float()
    assert model[0].up.weight.dtype == torch.float32


def test_the_mode_of_the_model_stays() -> None:
    model = Mlp().eval()
    gm = metainfo_trace(symbolic_trace(model, meta_args={"x": X}), X)
    assert not gm.training
    assert not model.training
    assert gm.graph.digest != symbolic_trace(Mlp(), meta_args={"x": X}).graph.digest  # which drops


def test_attributes_are_set_on_the_model() -> None:
    model = Mlp()
    gm = symbolic_trace(model, meta_args={"x": X})
    gm.scale = 3.0
    assert (model.scale, "scale" in vars(gm)) == (3.0, False)
    del gm.scale
    assert "scale" not in vars(model)


def test_arguments_that_are_no_tensors() -> None:
    model = Masked()
    plain = symbolic_trace(model, meta_args={"x": X, "mask": X})
    gated = symbolic_trace(model, concrete_args={"is_gated": True}, meta_args={"x": X, "mask": X})
    assert plain.graph.digest != gated.graph.digest
    assert symbolic_trace(model, {"x": X, "mask": X}).graph.digest == plain.graph.digest  # by position
    assert ColoTracer().trace(model, {"is_gated": True}, {"x": X, "mask": X}) == gated.graph
    metainfo_trace(plain, X, mask=X, is_gated=True)
    assert plain.graph.digest == gated.graph.digest
    with pytest.raises(ValueError, match="'x' is in concrete_args and in meta_args: give it once"):
        symbolic_trace(model, {"x": X}, {"x": X, "mask": X})
    with pytest.raises(ValueError, match="meta_args lacks 'mask'"):
        symbolic_trace(model, meta_args={"x": X})
    with pytest.raises(
        ValueError, match="names 'masks', which the forward of Masked does not have: use 'mask'"
    ):
        symbolic_trace(model, meta_args={"x": X, "masks": X})


def test_other_arguments_are_traced_again_and_equal_ones_are_not() -> None:
    gm = symbolic_trace(nn.Sequential(*(Mlp() for _ in range(4))), meta_args={"input": X})
    first = gm.graph
    assert not first.is_profiled
    assert metainfo_trace(gm, torch.randn(8, WIDTH)) is gm
    assert gm.graph.trace is first.trace
    small = gm.graph.peak_bytes
    gm.graph = CheckpointSolverChen(gm.graph).solve()
    metainfo_trace(gm, torch.randn(16, WIDTH))
    assert gm.graph.segments == ()
    assert gm.graph.digest != first.digest
    large = gm.graph.peak_bytes
    assert small < large <= 2 * small  # gradients of parameters do not grow with the batch
    with pytest.raises(ValueError, match="another trace"):
        gm.graph = first
    metainfo_trace(gm)  # of what was traced last
    assert gm.graph.peak_bytes == large


class Starred(nn.Module):
    """Takes arguments without names."""

    def forward(self, *inputs: Tensor, **more: Any) -> Tensor:
        return sum(inputs)


def test_calls_that_the_forward_does_not_take() -> None:
    gm = symbolic_trace(Mlp(), meta_args={"x": X})
    with pytest.raises(ValueError, match="the forward of Mlp cannot be called so: too many positional"):
        metainfo_trace(gm, X, None, X)
    with pytest.raises(ValueError, match=r"the forward of Mlp cannot be called so: .*'y'"):
        metainfo_trace(gm, y=X)
    with pytest.raises(ValueError, match=r"the forward of Starred takes \*inputs: a trace needs arguments"):
        metainfo_trace(TracedModule(Starred(), gm.graph, {}), X)
    with pytest.raises(ValueError, match="Mlp is not traced: call metainfo_trace"):
        metainfo_trace(Mlp(), X)
    for trace in (symbolic_trace, ColoTracer().trace):
        with pytest.raises(ValueError, match="this Mlp is traced already"):
            trace(gm, meta_args={"x": X})


def test_rates_of_another_machine() -> None:
    gm = metainfo_trace(symbolic_trace(nn.Sequential(Mlp(), Mlp()), meta_args={"input": X}))
    seconds, peak = gm.graph.step_seconds, gm.graph.peak_bytes
    metainfo_trace(gm, profile="h100")
    assert gm.graph.step_seconds != seconds
    assert gm.graph.peak_bytes == peak
    with pytest.raises(ValueError, match="there is no shipped profile 'h200'"):
        metainfo_trace(gm, profile="h200")


def test_a_model_without_memory_is_planned() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(Mlp() for _ in range(4)))
    gm = metainfo_trace(symbolic_trace(model, meta_args={"input": X}))
    free = 0.7 * gm.graph.peak_bytes
    gm.graph = CheckpointSolverRotor(gm.graph, free, optim_multiplier=0).solve()
    assert gm.graph.recomputed
    gm.to_empty(device="cpu")
    gm(torch.randn(8, WIDTH)).sum().backward()


def test_a_copy_has_a_graph_of_its_own() -> None:
    gm, twin, arguments = traced("stack")
    plain = gm.graph
    gm.graph = CheckpointSolverChen(gm.graph).solve()
    other = copy.deepcopy(gm)
    gm.graph = plain
    assert other.graph.recomputed
    calls = []
    other.unwrap()[0].up.register_forward_hook(lambda *_: calls.append(1))
    assert all(map(torch.equal, train(other, arguments, 1), train(copy.deepcopy(twin), arguments, 1)))
    assert len(calls) == 2
    other.graph = plain
    other.load_state_dict(twin.state_dict())
    assert all(map(torch.equal, train(other, arguments, 1), train(copy.deepcopy(twin), arguments, 1)))
    assert len(calls) == 3
    assert all(map(torch.equal, train(gm, arguments), train(twin, arguments)))
