"""A net whose sizes no number of ranks divides, trained under ZeRO beside its twin in one process."""

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from colossalai.booster import Booster
from colossalai.booster.plugin import LowLevelZeroPlugin, Plugin
from colossalai.core import global_context as gpc

WIDTH = 5
BATCH = 8
SMALL = 0.0003  # MB of a bucket, of which there are several


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


class Branches(Net):
    """`middle` is used by the samples whose first feature is above a bound.

    Args:
        above: The bound.
    """

    def __init__(self, above: float = 0.0) -> None:
        super().__init__()
        self.above = above

    def forward(self, x: Tensor) -> Tensor:
        users = (x[:, 0] > self.above).nonzero().flatten()
        x = torch.tanh(self.norm(self.first(x)))
        if len(users):
            x = x.index_copy(0, users, self.middle(x[users]))
        return self.last(x) * self.gain


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


class NoGradient(torch.autograd.Function):
    """The first argument; the second one has no gradient, and autograd says so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None


def batch_of(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64)


def part_of(x: Tensor) -> Tensor:
    """Return the part of a batch that this rank trains on."""
    replicas = gpc.mesh.axis("dp")
    return x.chunk(replicas.size)[replicas.rank]


def plugin(stage: int, **options: Any) -> LowLevelZeroPlugin:
    """Return a plugin with small buckets that leaves the precision to the model."""
    defaults = {"precision": "fp32", "reduce_bucket_size_in_m": SMALL}
    return LowLevelZeroPlugin(stage, **{**defaults, **options})


class Twins:
    """A boosted model, which has a part of each batch, and its twin, which has all of it.

    Args:
        plugin: How the model is parallelized.
        build: Makes the model.
        make_optimizer: Makes the optimizer of a model.
    """

    def __init__(
        self,
        plugin: Plugin,
        build: Callable[[], nn.Module] = Net,
        make_optimizer: Callable[[Any], Optimizer] = adamw,
    ) -> None:
        torch.manual_seed(3)
        self.raw = build().double()
        self.twin: Any = copy.deepcopy(self.raw)
        self.plain = make_optimizer(self.twin)
        self.booster = Booster(plugin=plugin)
        boosted = self.booster.boost(self.raw, make_optimizer(self.raw))
        self.model: Any = boosted[0]
        self.optimizer: Any = boosted[1]

    def __iter__(self) -> Iterator[Any]:
        return iter((self.booster, self.model, self.optimizer, self.twin, self.plain))

    def losses(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of this rank's part of a batch, and the twin's of all of it."""
        return self.model(part_of(x)).square().mean(), self.twin(x).square().mean()

    def backward(self, x: Tensor) -> None:
        loss, of_twin = self.losses(x)
        of_twin.backward()
        self.booster.backward(loss, self.optimizer)

    def step(self, where: object = "") -> None:
        self.plain.step()
        self.optimizer.step()
        assert_same(self.model, self.twin, where)

    def zero_grad(self, **options: bool) -> None:
        self.plain.zero_grad(**options)
        self.optimizer.zero_grad(**options)


def assert_same(model: nn.Module, twin: nn.Module, where: object, tolerance: float = 1e-10) -> None:
    """Compare all parameters by name, chunked ones as well."""
    found = model.state_dict()
    for name, param in twin.named_parameters():
        error = (found[name] - param.detach()).abs().max().item()
        assert error <= tolerance, f"{where}: {name} differs by {error:.3g}"
