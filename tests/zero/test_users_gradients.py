"""What users do to `.grad` in torch's ways: gradients that are dropped, made zero, read and written."""

import copy
import random
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import GeminiPlugin, HybridParallelPlugin
from colossalai.core import global_context as gpc
from colossalai.nn.optimizer import Lamb
from tests.ranks import run_ranks
from tests.tiers import further
from tests.zero.training import Branches, Net, NoGradient, Twins, adamw, batch_of, part_of, plugin

pytestmark = pytest.mark.dist

NUM_PROGRAMS = 6
PLUGINS = {
    "zero1": lambda: plugin(1),
    "zero2": lambda: plugin(2),
    "late": lambda: plugin(1, overlap_communication=False),
    "gemini": lambda: GeminiPlugin(
        precision="fp32", min_chunk_size_mb=0.0003, search_range_mb=0.0003, hidden_dim=7
    ),
}


def whole_params(model: nn.Module) -> torch.optim.Optimizer:
    return Lamb(model.parameters(), lr=0.02, weight_decay=0.1)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5)


def twins_of(name: str, make_optimizer: Callable[[nn.Module], Optimizer] = adamw) -> Twins:
    """Return a model of which few samples use a part, and its twin; in chunks ranks call the same modules."""
    return Twins(PLUGINS[name](), Net if name == "gemini" else partial(Branches, 1.2), make_optimizer)


class Program:
    """Random steps of a loop on a boosted model, and on its twin, which has the whole batch."""

    def __init__(self, name: str, make_optimizer, seed: int) -> None:
        self.name, self.seed, self.rng = name, seed, random.Random(seed)
        self.twins = twins_of(name, make_optimizer)
        self.booster, self.model, self.optimizer, self.twin, self.plain = self.twins
        self.names = list(dict(self.twin.named_parameters()))
        self.done: list[str] = []

    def params(self, names):
        for module in (self.model, self.twin):
            params = dict(module.named_parameters())
            yield from (params[name] for name in names)

    def drop(self, names) -> None:
        for param in self.params(names):
            param.grad = None

    def make_zero(self, names) -> None:
        for param in self.params(names):
            if param.grad is not None:
                param.grad.zero_()

    def backward(self) -> None:
        self.twins.backward(batch_of(100 * self.seed + len(self.done))[:6])
        acts = {"drop some": self.drop, "make some zero": self.make_zero, "nothing": lambda names: None}
        act = self.rng.choice(list(acts))
        acts[act](self.rng.sample(self.names, 3))
        self.done += ["backward", act]

    def clip(self) -> None:
        if self.rng.random() < 0.3:
            self.done.append("read, then drop")
            grads = self.booster.gathered_grads(self.model)
            assert set(grads) == {name for name, p in self.twin.named_parameters() if p.grad is not None}
            self.drop(self.rng.sample(self.names, 2))
        norm = nn.utils.clip_grad_norm_(self.twin.parameters(), 0.3)
        torch.testing.assert_close(self.optimizer.clip_grad_by_norm(0.3), norm)
        self.done.append("clip")
        if self.rng.random() < 0.5:
            self.done.append("drop after it")
            self.drop(self.rng.sample(self.names, 2))

    def step(self) -> None:
        self.twins.step(f"{self.name} {self.seed}: {self.done}")

    def forget(self) -> None:
        ways = {
            "module": lambda: (self.model.zero_grad(), self.twin.zero_grad()),
            "raw module": lambda: (self.model.unwrap().zero_grad(), self.twin.zero_grad()),
            "to zero": lambda: (self.model.zero_grad(False), self.twin.zero_grad(False)),
            "None": lambda: self.drop(self.names),
            "optimizer": self.twins.zero_grad,
        }
        way = self.rng.choice(list(ways))
        ways[way]()
        self.done.append(way)

    def run(self) -> None:
        for _ in range(7):
            for _ in range(self.rng.choice((1, 1, 2))):
                self.backward()
            if self.rng.random() < 0.5:
                self.clip()
            self.step()
            self.forget()


def run_programs(plugin_name: str) -> None:
    colossalai.launch_from_torch({}, verbose=False)
    for seed in range(NUM_PROGRAMS):
        Program(plugin_name, whole_params if seed % 3 == 2 else adamw, seed).run()
    gpc.destroy()


@pytest.mark.parametrize(
    ("name", "num_ranks"), [("zero1", 2), ("zero2", 3), ("late", 2), ("gemini", 2), further("gemini", 3)]
)
def test_a_loop_drops_gradients_in_torchs_ways(name: str, num_ranks: int) -> None:
    run_ranks(run_programs, num_ranks, name)


def read_and_write(name: str) -> None:
    """Gradients without values refuse what needs some; the step after it is as if nothing had been asked."""
    colossalai.launch_from_torch({}, verbose=False)
    twins = twins_of(name)
    _, model, optimizer, twin, plain = twins
    twins.backward(batch_of(0))
    grad = model.first.weight.grad
    assert grad.shape == (7, 5)
    assert "cut over the ranks" in repr(grad)
    refused = [
        lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False),
        lambda: nn.utils.clip_grad_value_(model.parameters(), 1.0),
        lambda: grad.norm(),
        lambda: grad.add_(0.1),
        lambda: grad.add_(torch.zeros(7, 5).double()),
        lambda: grad + torch.zeros(7, 5).double(),
        lambda: grad.mul_(0.5),
        lambda: grad.isfinite().all(),
        lambda: grad.cpu().clone(),
        lambda: torch.optim.SGD(model.parameters(), lr=0.1).step(),
    ]
    for call in refused:
        with pytest.raises(ValueError, match="clip_grad_by_norm"):
            call()
    with pytest.raises(ValueError, match=r"step\(\) of the optimizer that was returned"):
        optimizer.unwrap().step()
    twins.step(name)
    model.unwrap().to(torch.float64)
    plain.zero_grad()
    model.zero_grad()
    for value in (model, twin):  # a gradient that was assigned is refused, or takes part in the mean
        value.last.bias.grad = torch.ones(3).double()
    plain.step()
    with pytest.raises(ValueError, match="assigned by hand"):
        optimizer.step()
    gpc.destroy()


@pytest.mark.parametrize("name", ["zero1", "zero2", "late"])
def test_a_gradient_without_values_refuses_what_needs_some(name: str) -> None:
    run_ranks(read_and_write, 2, name)


def copies_and_failures(name: str) -> None:
    """Copies have nothing of the gradients; a backward that raises leaves what there was to be dropped."""
    colossalai.launch_from_torch({}, verbose=False)
    twins = twins_of(name)
    booster, model, optimizer, twin, _ = twins
    for step in range(3):
        x = batch_of(step)[:6]
        part = part_of(x)
        booster.backward(model(part).square().mean(), optimizer)
        if step == 0 and name != "gemini":
            copied = copy.deepcopy(model)
            assert all(param.grad is None for param in copied.unwrap().parameters())
            copy.deepcopy(optimizer)
        failing = model(part)
        failing.register_hook(lambda grad: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            booster.backward(failing.square().mean(), optimizer)
        model.zero_grad()
        twins.backward(x)
        if step == 2:
            both = [*model.parameters(), *twin.parameters()]
            torch.optim.SGD(both, lr=0.1, foreach=True).zero_grad(set_to_none=False)
        twins.step(f"{name} {step}")
        twins.zero_grad()
    gpc.destroy()


@pytest.mark.parametrize("name", ["zero1", "zero2", "gemini"])
def test_copies_and_backwards_that_fail_leave_gradients_alone(name: str) -> None:
    run_ranks(copies_and_failures, 2, name)


def add_noise(param: torch.Tensor) -> None:
    param.grad.add_(torch.ones_like(param))


def other_backwards(name: str) -> None:
    """Backwards that were not announced add to means, or give nothing; additions of hooks are refused."""
    colossalai.launch_from_torch({}, verbose=False)
    twins, x = twins_of(name), batch_of(0)[:6]
    for step in range(3):
        for given in (twins.raw, twins.twin):
            if step > 0:  # as that of another model, which goes through this one
                NoGradient.apply(given.first.bias, given.first.weight).sum().backward()
        twins.backward(x)
        twins.step(f"{name} {step}")
    twins = Twins(PLUGINS[name]())  # all of whose buckets are sent during the backward
    for param in twins.model.parameters():
        param.register_post_accumulate_grad_hook(add_noise)
    twins.backward(x)
    with pytest.raises(ValueError, match="an addition was called on the gradient"):
        twins.optimizer.step()
    gpc.destroy()


@pytest.mark.parametrize("name", ["zero1", "zero2"])
def test_backwards_that_were_not_announced_add_to_means(name: str) -> None:
    run_ranks(other_backwards, 2, name)


def drop_before_step() -> None:
    """The optimizer works on float32 copies of the gradients, which are there after the clipping."""
    colossalai.launch_from_torch({}, verbose=False)
    options = {"precision": "bf16", "max_norm": 1.0}
    gemini = GeminiPlugin(**options, min_chunk_size_mb=0.0003, search_range_mb=0.0003, hidden_dim=7)
    hybrids = (HybridParallelPlugin(zero_stage=stage, precision="bf16") for stage in (0, 1, 2))
    for made in (gemini, *hybrids):
        for make_optimizer in (sgd, whole_params):
            torch.manual_seed(0)
            model = Net()
            booster = Booster(plugin=made)
            model, optimizer, *_ = booster.boost(model, make_optimizer(model))
            booster.backward(model(batch_of(0).float()).square().mean(), optimizer)
            optimizer.clip_grad_by_norm(0.5)
            before = {name: value.clone() for name, value in model.state_dict().items()}
            named = dict(model.named_parameters())
            named["first.weight"].grad = None
            named["last.bias"].grad.zero_()
            named["norm.weight"].grad = None
            optimizer.step()
            after = model.state_dict()
            same = {name for name in before if torch.equal(before[name], after[name])}
            dropped = {"first.weight", "norm.weight"}
            assert same == (dropped | {"last.bias"} if make_optimizer is sgd else dropped), same
            optimizer.zero_grad()
    gpc.destroy()


def test_gradients_are_dropped_between_clipping_and_the_step() -> None:
    run_ranks(drop_before_step, 2)


def half_boosted() -> None:
    colossalai.launch_from_torch({}, verbose=False)
    for make in (lambda: plugin(1), lambda: HybridParallelPlugin(zero_stage=2, precision="fp32")):
        torch.manual_seed(0)
        model, *_ = Booster(plugin=make()).boost(Net().double())
        with torch.no_grad():
            model(batch_of(0))
        model(batch_of(0).requires_grad_())
        with pytest.raises(ValueError, match=r"booster.boost\(model, optimizer\)"):
            model(batch_of(0)).square().mean().backward()
        x = batch_of(0).requires_grad_()
        model.requires_grad_(False)
        model(x).square().mean().backward()
        assert x.grad is not None
    gpc.destroy()


def test_a_model_without_its_optimizer_is_not_trained() -> None:
    run_ranks(half_boosted, 2)
