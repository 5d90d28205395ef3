"""The line that both doors log at the start: the model, the plan, and the bytes that the first rank holds."""

from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import colossalai
from colossalai.amp import OptimizerWrapper
from colossalai.booster import Booster
from colossalai.booster.plugin import (
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from colossalai.core import global_context as gpc
from colossalai.logging import DistributedLogger
from colossalai.nn import HybridAdam, Lamb, Lars
from colossalai.runtime.memory import bytes_text, held_from_the_first_step
from colossalai.tensor import local_slice
from tests.ranks import run_ranks

PLUGINS: dict[str, Callable[[], object]] = {
    "DDP": TorchDDPPlugin,
    "ZeRO 1": lambda: LowLevelZeroPlugin(stage=1, precision="bf16"),
    "ZeRO 2": lambda: LowLevelZeroPlugin(stage=2, precision="fp32"),
    "ZeRO 2 on the host": lambda: LowLevelZeroPlugin(stage=2, precision="bf16", cpu_offload=True),
    "FSDP": TorchFSDPPlugin,
    "Gemini": lambda: GeminiPlugin(precision="fp32"),
}


class Net(nn.Sequential):
    """Layers that two ranks divide, and parameters that no one trains."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        self[2].bias.requires_grad_(False)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=16, n_positions=8))


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW((param for param in model.parameters() if param.requires_grad), lr=0.01)


def bytes_of_states(optimizer: OptimizerWrapper) -> int:
    """Return the bytes that are there after a step: states, and masters."""
    states = (value for state in optimizer.optim.state.values() for value in state.values())
    tensors = [local_slice(value) for value in states if isinstance(value, torch.Tensor) and value.dim()]
    held = (tensor for group in optimizer.optim.param_groups for tensor in group["params"])
    masters = [tensor for tensor in held if tensor.dtype != optimizer.masters.param_of(tensor).dtype]
    return sum(tensor.nbytes for tensor in (*tensors, *masters))


def counted_under(name: str) -> None:
    """Compare what is known at boost with what is there after a step."""
    colossalai.launch_from_torch({}, verbose=False)
    booster = Booster(plugin=PLUGINS[name]())
    model = Net()
    model, optimizer, *_ = booster.boost(model, adamw(model))
    known, unknown = held_from_the_first_step(model, [optimizer], plan=booster.plan, mesh=booster.mesh)
    booster.backward(model(torch.ones(2, 8)).square().mean(), optimizer)
    if name in ("DDP", "FSDP"):
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        assert known["gradients"] == sum(local_slice(grad).nbytes for grad in grads)
    optimizer.step()
    if name != "Gemini":  # whose parameters are in chunks
        assert known["parameters"] == sum(local_slice(param).nbytes for param in model.parameters())
    assert known["optimizer states"] == bytes_of_states(optimizer)
    assert unknown == []
    gpc.destroy()


@pytest.mark.dist
@pytest.mark.parametrize("name", PLUGINS)
def test_what_is_known_at_boost_is_there_after_a_step(name: str) -> None:
    run_ranks(counted_under, 2, name)


def lines_of(work: Callable[[], object]) -> list[str]:
    with mock.patch.object(DistributedLogger, "info") as info:
        work()
    return [call.args[0] for call in info.call_args_list]


def boost_over_four() -> list[str]:
    colossalai.launch_from_torch({}, verbose=False)
    plugin = HybridParallelPlugin(
        tp_size=2, pp_size=2, num_microbatches=2, zero_stage=1, precision="bf16", max_norm=1.0
    )

    def work() -> None:
        model = gpt2()
        Booster(plugin=plugin).boost(model, adamw(model))

    lines = lines_of(work)
    gpc.destroy()
    return [line for line in lines if "parameters" in line]


@pytest.mark.dist
def test_the_first_rank_logs_one_line_with_the_whole_plan() -> None:
    first, *others = run_ranks(boost_over_four, 4)
    number = sum(param.numel() for param in gpt2().parameters())
    (line,) = first
    assert line.startswith(
        f"GPT2LMHeadModel, {number:,} parameters: tp 2 x pp 2 x dp 1, ZeRO 1, bf16 autocast, "
        "clip_grad_norm=1.0, pipeline=PipelineOptions(num_microbatches=2, "
    )
    assert others == [[], [], []]


def doors() -> tuple[list[str], ...]:
    colossalai.launch_from_torch({"clip_grad_norm": 1.0}, verbose=False)

    def by_booster() -> None:
        model = Net()
        Booster(plugin=TorchDDPPlugin()).boost(model, adamw(model))

    def by_config(verbose: bool = True) -> None:
        model = Net()
        colossalai.initialize(model, adamw(model), nn.MSELoss(), verbose=verbose)

    found = lines_of(by_booster), lines_of(by_config), lines_of(lambda: by_config(verbose=False))
    teacher = lines_of(lambda: Booster().boost(Net()))
    gpc.destroy()
    return *found, teacher


@pytest.mark.dist
def test_both_doors_log_the_same_line() -> None:
    boosted, initialized, quiet, teacher = run_ranks(doors, 1)[0]
    line = (
        "Net, 212 parameters: DDP, fp32; rank 0 holds 3.27 KiB (parameters 848 B, gradients 832 B, optimizer "
        "states 1.62 KiB)"
    )
    assert boosted == [line]
    assert initialized == [line.replace("fp32;", "fp32, clip_grad_norm=1.0;")]
    assert quiet == []
    assert teacher == ["Net, 212 parameters: DDP, fp32; rank 0 holds 848 B (parameters 848 B)"]


class OwnStep(torch.optim.AdamW):
    """Keeps whatever it likes."""

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Do nothing."""


class OwnOptions(torch.optim.AdamW):
    """Steps as torch's does."""


def with_optimizers() -> None:
    colossalai.launch_from_torch({}, verbose=False)
    made: dict[str, tuple[Callable[..., Optimizer], int | None]] = {
        "SGD": (lambda params: torch.optim.SGD(params, lr=0.1), 0),
        "momentum": (lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9), 1),
        "RMSprop": (lambda params: torch.optim.RMSprop(params, momentum=0.5, centered=True), 3),
        "amsgrad": (lambda params: torch.optim.Adam(params, amsgrad=True), 3),
        "Adagrad": (torch.optim.Adagrad, 1),
        "Adadelta": (torch.optim.Adadelta, 2),
        "ASGD": (torch.optim.ASGD, 1),
        "NAdam": (torch.optim.NAdam, 2),
        "RAdam": (torch.optim.RAdam, 2),
        "Adamax": (torch.optim.Adamax, 2),
        "Rprop": (torch.optim.Rprop, 2),
        "Lamb": (Lamb, 2),
        "Lars": (lambda params: Lars(params, lr=0.1, momentum=0.9), 1),
        "HybridAdam": (HybridAdam, 2),
        "derived": (OwnOptions, 2),
        "own step": (OwnStep, None),
    }
    booster = Booster()
    for name, (make, number) in made.items():
        model = nn.Linear(4, 3)
        boosted, optimizer, *_ = booster.boost(model, make(model.parameters()))
        known, unknown = held_from_the_first_step(boosted, [optimizer], plan=booster.plan, mesh=booster.mesh)
        assert known["optimizer states"] == 60 * (number or 0), name
        assert unknown == ([] if number is not None else ["OwnStep"]), name
        booster.backward(boosted(torch.ones(2, 4)).square().mean(), optimizer)
        optimizer.step()
        if number is not None:
            assert known["optimizer states"] == bytes_of_states(optimizer), name
    gpc.destroy()


@pytest.mark.dist
def test_states_of_each_optimizer() -> None:
    run_ranks(with_optimizers, 1)


class Sparse(nn.Module):
    """A model with a parameter that has no number of bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.eye = nn.Parameter(torch.eye(3).to_sparse(), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def boost_odd_models(folder: str) -> list[str]:
    colossalai.launch_from_torch({}, verbose=False)
    booster = Booster()
    with mock.patch.object(DistributedLogger, "_log") as log:
        for model in (Sparse(), nn.Tanh()):
            booster.boost(model)
        linear = nn.Linear(2, 2)
        booster.boost(
            linear, HybridAdam(linear.parameters(), nvme_offload_fraction=1.0, nvme_offload_dir=folder)
        )
    gpc.destroy()
    return [call.args[1] for call in log.call_args_list]


@pytest.mark.dist
def test_a_line_stops_no_training(tmp_path: Path) -> None:
    ((sparse, empty, on_disk),) = run_ranks(boost_odd_models, 1, str(tmp_path))
    assert sparse.startswith("Sparse, 21 parameters: ")
    assert "bytes unknown: " in sparse
    assert "no parameters; rank 0 holds 0 B" in empty
    assert "optimizer states 48 B, a part of them on disk" in on_disk


@pytest.mark.unit
def test_bytes_as_text() -> None:
    numbers = (0, 1023, 1024, 3 * 2**20, 5 * 2**29)
    assert [*map(bytes_text, numbers)] == ["0 B", "1023 B", "1.00 KiB", "3.00 MiB", "2.50 GiB"]
