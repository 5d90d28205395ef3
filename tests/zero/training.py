"""Train a model under ZeRO and its twin in one process, and compare them after every step."""

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import LowLevelZeroPlugin
from colossalai.core import global_context as gpc

WIDTH = 5
BATCH = 8
NUM_STEPS = 4


class Net(nn.Module):
    """Layers whose sizes no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 7)
        self.norm = nn.LayerNorm(7)
        self.middle = nn.Linear(7, 7)
        self.last = nn.Linear(7, 3)
        self.gain = nn.Parameter(torch.tensor(1.2))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.first(x)))
        return self.last(torch.tanh(self.middle(x))) * self.gain


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)


class Warm(torch.optim.SGD):
    """SGD with momentum whose buffers are there before the first step, with a value for each element."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 0.05) -> None:
        super().__init__(params, lr=lr, momentum=0.9)
        for param in self.param_groups[0]["params"]:
            values = torch.linspace(-1, 1, param.numel(), dtype=param.dtype)
            self.state[param] = {"step": torch.zeros(()), "momentum_buffer": values.view(param.shape)}


class WarmWholes(Warm):
    """Such an optimizer that looks at whole tensors."""

    def step(self, closure: None = None) -> None:
        super().step(closure)


def mean_square(model: nn.Module, x: Tensor, step: int, part: int) -> Tensor:
    return model(x).square().mean()


@dataclass(frozen=True, kw_only=True)
class Case:
    """A training run.

    Attributes:
        build: Makes the model.
        optimizer: Makes the optimizer of a model.
        loss: The loss on a slice of the batch; it knows the step and which slice it is.
        before: Called before every forward and backward.
        options: Arguments of the plugin.
        tolerance: Greatest difference allowed; float64 leaves room for another order of summation.
    """

    build: Callable[[], nn.Module] = Net
    optimizer: Callable[[nn.Module], Optimizer] = adamw
    loss: Callable[[nn.Module, Tensor, int, int], Tensor] = mean_square
    before: Callable[[nn.Module, int], None] = lambda model, step: None
    options: dict = field(default_factory=dict)
    tolerance: float = 1e-10


def batch_of(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64)


def plugin(stage: int, **options) -> LowLevelZeroPlugin:
    """Return a plugin with small buckets that leaves the precision to the model."""
    defaults = {"precision": "fp32", "reduce_bucket_size_in_m": 0.0003}
    return LowLevelZeroPlugin(stage, **{**defaults, **options})


def compare(case: Case, stage: int) -> None:
    """Run on every rank: train under ZeRO, train the twin on the whole batch, compare all parameters."""
    compare_all({"the case": (case, stage)})


def compare_all(cases: Mapping[str, tuple[Case, int]]) -> None:
    """Compare as `compare` does, one case with its stage after the other, in one job."""
    colossalai.launch_from_torch({}, verbose=False)
    for name, (case, stage) in cases.items():
        try:
            _compare(case, stage)
        except Exception as error:
            error.add_note(f"in {name!r} under stage {stage}")
            raise
    gpc.destroy()


def _compare(case: Case, stage: int) -> None:
    replicas = gpc.mesh.axis("dp")
    num_parts, part = replicas.size, replicas.rank
    torch.manual_seed(0)
    model = case.build().double() if case.tolerance <= 1e-10 else case.build()
    twin = copy.deepcopy(model)
    twin_optimizer, optimizer = case.optimizer(twin), case.optimizer(model)
    booster = Booster(plugin=plugin(stage, **case.options))
    model, optimizer, *_ = booster.boost(model, optimizer)
    for step in range(NUM_STEPS):
        parts = batch_of(step).chunk(num_parts)
        twin_optimizer.zero_grad()
        case.before(twin, step)
        for number, x in enumerate(parts):
            (case.loss(twin, x, step, number) / num_parts).backward()
        twin_optimizer.step()
        optimizer.zero_grad()
        case.before(model, step)
        booster.backward(case.loss(model, parts[part], step, part), optimizer)
        optimizer.step()
        assert_same(model, twin, step, case.tolerance)


def assert_same(model: nn.Module, twin: nn.Module, step: int, tolerance: float = 1e-10) -> None:
    """Compare all parameters by name."""
    expected = dict(twin.named_parameters())
    for name, param in named(model):
        error = (param - expected[name]).abs().max().item()
        assert error <= tolerance, f"step {step}: {name} differs by {error:.3g}"


def named(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    return [(name, param.detach()) for name, param in model.named_parameters()]
