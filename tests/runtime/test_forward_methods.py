"""Methods of a model that are declared to run as its forward does."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import (
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from colossalai.core import global_context as gpc
from tests.ranks import run_ranks

pytestmark = pytest.mark.dist

PLUGINS = {
    "ddp": TorchDDPPlugin,
    "fsdp": TorchFSDPPlugin,
    "zero1": lambda: LowLevelZeroPlugin(stage=1, precision="fp32"),
    "gemini": lambda: GeminiPlugin(
        precision="fp32", min_chunk_size_mb=0.001, search_range_mb=0.001, hidden_dim=8
    ),
}


class Net(nn.Module):
    limit = 3

    def __init__(self) -> None:
        super().__init__()
        self.table, self.body, self.head = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 20)

    def encode(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.body(self.table(tokens)))

    def compute_loss(self, tokens: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return scale * F.cross_entropy(self.head(self.encode(tokens)).flatten(0, 1), tokens.flatten())

    def loss_of_forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self(tokens).flatten(0, 1), tokens.flatten())

    def fail(self) -> None:
        raise KeyError("its own")

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.encode(tokens))


def boost(plugin, **options):
    torch.manual_seed(0)
    twin = Net().double()
    model = copy.deepcopy(twin)
    booster = Booster(plugin=plugin, **options)
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=0.05))
    return booster, model, optimizer, twin, torch.optim.AdamW(twin.parameters(), lr=0.05)


def weights(model) -> dict[str, torch.Tensor]:
    state = model.state_dict()
    return {name: getattr(value, "full_tensor", lambda value=value: value)() for name, value in state.items()}


def train() -> None:
    colossalai.launch_from_torch({}, verbose=False)
    rank, size = gpc.mesh.axis("dp").rank, gpc.mesh.axis("dp").size
    for name, make in PLUGINS.items():
        booster, model, optimizer, twin, plain = boost(make())
        for method in ("compute_loss", "loss_of_forward", "encode", "fail"):
            booster.register_forward_method(model, method)
        generator = torch.Generator().manual_seed(1)
        for step in range(3):
            tokens = torch.randint(20, (4, 5), generator=generator)
            part = tokens.chunk(size)[rank]
            plain.zero_grad()
            optimizer.zero_grad()
            if step == 1:  # a forward of the model inside of one
                loss, expected = model.loss_of_forward(part), twin.loss_of_forward(tokens)
            else:
                loss, expected = model.compute_loss(part, scale=2.0), twin.compute_loss(tokens, scale=2.0)
            with pytest.raises(KeyError, match="its own"):
                model.fail()
            booster.backward(loss, optimizer)
            expected.backward()
            optimizer.step()
            plain.step()
        torch.testing.assert_close(weights(model), twin.state_dict(), msg=name)
        torch.testing.assert_close(model.encode(tokens), twin.encode(tokens))
        torch.testing.assert_close(model(tokens), twin(tokens))
        gpc.destroy()
        colossalai.launch_from_torch({}, verbose=False)
    gpc.destroy()


def test_losses_of_methods_train_as_in_one_process() -> None:
    run_ranks(train, 2)


def refusals() -> None:
    colossalai.launch_from_torch({}, verbose=False)
    booster, model, *_ = boost(TorchFSDPPlugin())
    tokens = torch.randint(20, (4, 5))
    for call in (lambda: model.compute_loss(tokens), lambda: model.unwrap().head(torch.zeros(2, 8).double())):
        with pytest.raises(ValueError, match=r"model.register_forward_method\('compute_loss'\)"):
            call()
    for name in ("absent", "limit", "head"):
        with pytest.raises(ValueError, match=f"no method {name!r}; its own are encode, compute_loss"):
            booster.register_forward_method(model, name)
    gpc.destroy()


def test_what_is_not_gathered_or_not_a_method_is_refused() -> None:
    run_ranks(refusals, 2)


def precision() -> None:
    colossalai.launch_from_torch({}, verbose=False)
    booster = Booster(plugin=TorchDDPPlugin(), mixed_precision="bf16")
    model = Net()
    model, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    booster.register_forward_method(model, "encode")
    tokens = torch.randint(20, (4, 5))
    seen = []
    model.unwrap().body.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    assert model.encode(tokens).dtype is torch.float32
    assert seen == [torch.bfloat16]
    gpc.destroy()


def test_a_method_runs_in_the_precision() -> None:
    run_ranks(precision, 1)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def stages() -> None:
    colossalai.launch_from_torch({}, verbose=False)
    booster = Booster(
        plugin=HybridParallelPlugin(tp_size=1, pp_size=2, num_microbatches=2, precision="fp32", zero_stage=0)
    )
    model = Stack()
    model, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="a stage of a pipeline"):
        booster.register_forward_method(model, "forward")
    gpc.destroy()


def test_a_stage_of_a_pipeline_has_no_forward_methods() -> None:
    run_ranks(stages, 2)
