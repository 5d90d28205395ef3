"""Optimizers of models in chunks: those that need whole parameters, several of one model, states on disk."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import colossalai
from colossalai.amp import NaiveFP16, OptimizerWrapper, PureBF16
from colossalai.booster import Booster
from colossalai.booster.plugin import GeminiPlugin
from colossalai.checkpoint_io import (
    load_model,
    load_optimizer,
    save_model,
    save_optimizer,
)
from colossalai.core import global_context as gpc
from colossalai.nn.optimizer import FusedLAMB, HybridAdam, Lamb, Lars
from colossalai.zero import GeminiAdamOptimizer, GeminiDDP, ZeroOptimizer
from tests.parity.table import stages
from tests.parity.tasks import DEEP_NET
from tests.parity.training import check_runs
from tests.ranks import run_ranks
from tests.tiers import further, in_soak
from tests.turns import run_each
from tests.zero.gemini.nets import Assembled, Block, far
from tests.zero.gemini.test_parity import GPT, SMALL, by_config, in_chunks

pytestmark = pytest.mark.dist

DTYPE = torch.float64
CPU = torch.device("cpu")


class ByRow(torch.optim.Optimizer):
    """A user's own class, which nobody has declared: steps of unit length for each row of a matrix."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                rows = param.grad.norm(dim=-1, keepdim=True) if param.ndim > 1 else param.grad.norm()
                state = self.state[param]
                state["length"] = state.get("length", torch.zeros_like(rows)) + rows
                param -= group["lr"] * param.grad / (state["length"] + 1e-6)


WHOLE: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "lamb": partial(Lamb, lr=0.01, weight_decay=0.1),
    "lars": partial(Lars, lr=0.1, momentum=0.9, weight_decay=0.1, epsilon=1e-3),
    "adafactor": partial(torch.optim.Adafactor, lr=0.01),
    "by row": partial(ByRow, lr=0.01),
}


def whole_parameters(
    names: Iterable[str], num_ranks: int, accumulation: int, folder: Path, memory_budget: int, **options: Any
) -> None:
    """Train with optimizers, some of them also with a budget that sends states to disk."""
    names = tuple(names)
    on_disk = {"placement_policy": "nvme", "offload_dir": str(folder), "memory_budget": memory_budget}
    both = [name for name in names if name in ("lamb", "adafactor")]
    losses = check_runs(
        num_ranks,
        [
            (in_chunks(replace(GPT, optimizer=WHOLE[name]), num_ranks, accumulation, 0.1, **options, **more),)
            for each, more in ((names, {}), (both, on_disk))
            for name in each
        ],
    )
    in_memory = dict(zip(names, losses, strict=False))
    assert losses[len(names) :] == [in_memory[name] for name in both]
    assert len({tuple(each) for each in in_memory.values()}) == len(names)


SOME = ("lamb", "lars", "by row")  # Adafactor is compared by its checkpoints below
OF_TWO = {"min_chunk_size_mb": 0.002, "recompute": True, "memory_budget": 170_000}


@pytest.mark.parametrize(
    ("names", "num_ranks", "accumulation", "options"),
    [
        (SOME, 2, 2, OF_TWO),
        further(WHOLE, 1, 2, {"min_chunk_size_mb": 0.002, "memory_budget": 280_000}),
        further(WHOLE, 2, 2, OF_TWO),
        further(WHOLE, 4, 1, {"min_chunk_size_mb": 0.001, "memory_budget": 150_000}),
    ],
)
def test_optimizers_that_are_not_elementwise_are_one_process(
    names: Iterable[str], num_ranks: int, accumulation: int, options: dict[str, Any], tmp_path: Path
) -> None:
    whole_parameters(names, num_ranks, accumulation, tmp_path, **options)


class Net(nn.Module):
    """Blocks and a head, for an optimizer each."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(3, 6)
        self.blocks = nn.ModuleList(Block(6) for _ in range(3))
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean of the squares."""
        x = self.stem(x)
        for block in self.blocks:
            x = block(x + self.frozen(x))
        return self.head(x).square().mean()


def one(net: Net, kind: str) -> list[torch.optim.Optimizer]:
    return [WHOLE[kind](param for param in net.parameters() if param.requires_grad)]


def several(net: Net) -> list[torch.optim.Optimizer]:
    """Of which chunks have parameters of two or three."""
    return [
        torch.optim.SGD([*net.stem.parameters(), *net.blocks[0].parameters()], lr=0.05, momentum=0.9),
        torch.optim.Adafactor([*net.blocks[1].parameters(), net.blocks[2].scale], lr=0.02),
        torch.optim.AdamW([*net.blocks[2].up.parameters(), *net.head.parameters()], lr=0.02),
    ]  # and some that nobody has


class Run(Assembled):
    """A training run of ranks that are launched."""

    def __init__(
        self, method: str, make: Callable[[Any], list[torch.optim.Optimizer]] = several, **options: Any
    ) -> None:
        super().__init__(Net, make, method, **options)

    def backward(self, step: int, optimizer: OptimizerWrapper, part: int = 0) -> None:
        drawn = torch.randn(8, 3, generator=torch.Generator().manual_seed(10 * step + part))
        x = drawn.to(torch.float64).chunk(dist.get_world_size())[dist.get_rank()]
        optimizer.backward(self.model(x.to(self.raw.stem.weight.dtype)))

    def train(self, steps: range) -> None:
        for step in steps:
            for part in range(2):
                self.backward(step, self.optimizers[part % len(self.optimizers)], part)
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()


def several_of_one_model(folder: Path, methods: list[str]) -> list[tuple[dict[str, Tensor], ...]]:
    """Train with each method; then skip steps, write into parameters, and drop the gradients of one alone."""
    found = []
    for method in methods:
        run = Run(method, folder=folder, clip_grad_norm=0.3)
        run.train(range(4))
        values = run.values()
        first, second, third = run.optimizers
        run.backward(7, first)
        second.step()  # alone: what the others have adds up
        second.zero_grad()
        run.backward(8, third)
        with torch.no_grad(), run.model.gathered():
            for param in run.raw.blocks[1].parameters():
                param.mul_(0.9)
        first.step()
        first.zero_grad()
        second.zero_grad(set_to_none=False)
        run.backward(9, second)
        third.step()
        second.step()
        found.append((values, run.values()))
        gpc.destroy()
    return found


@pytest.mark.parametrize(
    ("num_ranks", "methods"),
    [
        further(1, ["small chunks"]),
        (2, ["on disk"]),
        further(2, ["small chunks"]),
        further(2, ["chunks"]),
        further(4, ["chunks"]),
    ],
)
def test_several_optimizers_of_one_model(num_ranks: int, methods: list[str], tmp_path: Path) -> None:
    (expected,) = run_ranks(several_of_one_model, 1, tmp_path, ["plain"])[0]
    for of_rank in run_ranks(several_of_one_model, num_ranks, tmp_path, methods):
        for found in of_rank:
            assert far(found[0], expected[0]) < 1e-10
            assert far(found[1], expected[1]) < 1e-10


def in_low_precision(method: str) -> list[list[dict[str, Tensor]]]:
    """Train with masters, under stage 2 and with a method; in float16 the first three steps overflow."""
    found: list[list[dict[str, Tensor]]] = []
    for precision in (PureBF16(), NaiveFP16(initial_scale=2.0**17)):
        found.append([])
        for each in ("zero2", method):
            run = Run(each, precision=precision)
            run.train(range(5 if isinstance(precision, NaiveFP16) else 3))
            assert all(optimizer.stepped for optimizer in run.optimizers)
            with torch.no_grad(), run.model.gathered():
                run.raw.blocks[1].up.weight.mul_(2)
            run.train(range(20, 22))
            found[-1].append(run.values())
            gpc.destroy()
    return found


@pytest.mark.parametrize("method", ["small chunks", further("chunks")])
def test_masters_of_several_optimizers_follow_as_those_of_stage_2(method: str) -> None:
    for of_rank in run_ranks(in_low_precision, 2, method):
        for stage_2, values in of_rank:  # of which some are a rounding apart
            assert far(values, stage_2) <= 2**-6


def checkpoints(method: str, kind: str, folder: Path, expected: Path | None) -> tuple[float, float]:
    """Save, or load what was saved and go on; return how far values are from the expected ones."""
    make = several if kind == "several" else partial(one, kind=kind)
    run = Run(method, make, folder=folder, seed=0 if expected is None else 5)
    if expected is None:
        run.train(range(2))
        save_model(run.raw, folder / "model", shard=True, size_per_shard=0.001)
    else:
        run.train(range(7, 8))
        load_model(run.raw, expected / "model")
    for number, optimizer in enumerate(run.optimizers):
        if expected is None:
            save_optimizer(optimizer, folder / f"optimizer {number}", param_names=optimizer.param_names)
            content = optimizer.state_dict()
            if dist.get_rank() == 0:
                torch.save(content, folder / f"state {number}")
        else:
            load_optimizer(optimizer, expected / f"optimizer {number}", param_names=optimizer.param_names)
    values = run.values()
    run.train(range(2, 4))
    trained = run.values()
    if expected is None:
        if dist.get_rank() == 0:
            torch.save((values, trained), folder / "expected")
        gpc.destroy()
        return 0.0, 0.0
    known, goal = torch.load(expected / "expected")
    apart = far(values, known), far(trained, goal)
    if kind != "several":  # the state dict of torch, into a run that is elsewhere
        run.model.load_state_dict(known)
        [optimizer] = run.optimizers
        optimizer.load_state_dict(torch.load(expected / "state 0"))
        run.train(range(2, 4))
        apart = apart[0], max(apart[1], far(run.values(), goal))
    gpc.destroy()
    return apart


MOVES = [
    (("on disk", 2), [("plain", 1)]),
    (("chunks", 2), [("plain", 1), ("on disk", 2)]),
    (("zero2", 2), [("small chunks", 4)]),
    (("on disk", 2), [("chunks", 1)]),
    (("plain", 1), [("chunks", 2)]),
    (("chunks", 2), [("small chunks", 4)]),
]
KINDS = ("several", "adafactor", "lamb")


@pytest.mark.parametrize(
    ("kind", "source", "targets"),
    [
        *((kind, *MOVES[0]) for kind in KINDS),
        # Each move with two of the three, in turn, and the third in make soak.
        *(
            further(KINDS[place % 3], *move)
            for number, move in enumerate(MOVES[1:])
            for place in (number, number + 1)
        ),
        *(in_soak(KINDS[(number + 2) % 3], *move) for number, move in enumerate(MOVES[1:])),
    ],
)
def test_states_load_at_another_number_of_ranks(
    kind: str, source: tuple[str, int], targets: list[tuple[str, int]], tmp_path: Path
) -> None:
    run_ranks(checkpoints, source[1], source[0], kind, tmp_path, None)
    for method, num_ranks in targets:
        for loaded, trained in run_ranks(checkpoints, num_ranks, method, kind, tmp_path, tmp_path):
            assert loaded == 0
            assert trained < 1e-10


def memory_per_rank(kind: str) -> tuple[int, int, int, int, list[int]]:
    """Return elements: of the model, of sections, of copies and states beside them, and of whole states."""
    run = Run("chunks", partial(one, kind=kind))
    run.train(range(2))
    [optimizer] = run.optimizers
    sections = [chunk.section for chunk in run.cache.chunks if chunk.layout.params[0].requires_grad]
    addresses = {section.untyped_storage().data_ptr() for section in sections}
    held = [param for group in optimizer.optim.param_groups for param in group["params"]]
    copies = [param for param in held if param.untyped_storage().data_ptr() not in addresses]
    states = [value for state in optimizer.optim.state.values() for value in state.values()]
    numel = sum(param.numel() for param in run.raw.parameters() if param.requires_grad)
    gpc.destroy()
    return (
        numel,
        sum(section.numel() for section in sections),
        sum(copy.numel() for copy in copies),
        sum(value.numel() for value in states if value.ndim),
        [param.numel() for param in held],
    )


@pytest.mark.parametrize("num_ranks", [2, further(4)])
def test_each_parameter_is_updated_by_one_rank_and_nobody_has_all(num_ranks: int) -> None:
    found = run_ranks(memory_per_rank, num_ranks, "lamb")
    numel = found[0][0]
    largest = max(max(held) for *_, held in found)
    assert sum(sum(held) for *_, held in found) == numel
    for _, sections, copies, states, held in found:
        assert sections < numel  # padding included
        assert states == 2 * sum(held)
        assert sum(held) <= numel / num_ranks + largest  # of the dealing out
        assert copies <= sum(held)
    assert sum(copies for _, _, copies, _, _ in found) < numel  # what lies in one section is updated there


def on_disk_by_itself(folder: Path, fraction: float) -> tuple[list[float], int]:
    """The plugin as the documents write it, and an optimizer that has its states on disk."""
    colossalai.launch_from_torch({}, verbose=False)
    torch.manual_seed(0)
    net = Net()
    made = HybridAdam(net.parameters(), lr=0.02, nvme_offload_fraction=fraction, nvme_offload_dir=str(folder))
    plugin = GeminiPlugin(placement_policy="auto", max_norm=1.0, initial_scale=2**5, min_chunk_size_mb=1e-4)
    booster = Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(net, made)
    losses = []
    for step in range(4):
        if step == 2:  # states are read from the files, and go to them
            booster.save_optimizer(optimizer, folder / "saved")
            booster.load_optimizer(optimizer, folder / "saved")
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(step)).half()
        loss = model(x.chunk(dist.get_world_size())[dist.get_rank()])
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    num_bytes = sum(path.stat().st_size for path in folder.rglob("*.exp_avg*"))
    gpc.destroy()
    return losses, num_bytes


def test_an_optimizer_that_has_its_states_on_disk(tmp_path: Path) -> None:
    in_memory, on_disk = run_each(2, on_disk_by_itself, [(tmp_path / "a", 0.0), (tmp_path / "b", 1.0)])
    for (losses, none), (its_losses, num_bytes) in zip(in_memory, on_disk, strict=True):
        assert its_losses == losses
        assert none == 0
        assert num_bytes > 0


def doors(folder: str) -> list[str]:
    """Return what is said to what is refused; then train through the doors without Booster."""
    colossalai.launch_from_torch({}, verbose=False)
    said = []
    on_disk = {"nvme_offload_fraction": 1.0, "nvme_offload_dir": folder}
    both = {"placement_policy": "nvme", "offload_dir": folder, "memory_budget": 2**30}

    def through_plugin(make: Callable[..., Any], **options: Any) -> None:
        net = Net()
        Booster(plugin=GeminiPlugin(**SMALL, **options)).boost(net, make(net))

    small: dict[str, Any] = SMALL
    model = GeminiDDP(Net(), **small)
    head, *rest = model.unwrap().head, *model.unwrap().blocks
    ZeroOptimizer(Lamb(head.parameters(), lr=0.1), model, clipping_norm=0.1)
    for act in (
        lambda: through_plugin(lambda net: HybridAdam(net.parameters(), **on_disk), **both),
        lambda: GeminiAdamOptimizer(GeminiDDP(Net(), **small, **both), **on_disk),
        lambda: through_plugin(lambda net: FusedLAMB(net.parameters())),
        lambda: through_plugin(lambda net: torch.optim.LBFGS(net.parameters())),
        lambda: GeminiAdamOptimizer(model, lr=0.1),
    ):
        try:
            act()
            said.append("nothing")
        except ValueError as error:
            said.append(str(error))
    later = [ZeroOptimizer(WHOLE["adafactor"](part.parameters()), model) for part in rest]
    losses = []
    for step in range(6):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(step % 2))
        loss = model(x)
        later[0].backward(loss)
        for optimizer in later:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[1]
    gpc.destroy()
    return said


def test_at_the_doors(tmp_path: Path) -> None:
    for said in run_ranks(doors, 2, str(tmp_path)):
        assert all("both put states on disk" in text for text in said[:2])
        assert "max_grad_norm=1.0" in said[2]
        assert "LBFGS treats all parameters as one vector" in said[3]
        assert "is in two optimizers of one model" in said[4]


@pytest.mark.long
def test_whole_parameters_in_a_pipeline() -> None:
    sizes = {**SMALL, "min_chunk_size_mb": 0.00002}
    task = replace(DEEP_NET, optimizer=partial(Lamb, lr=0.05))
    config = stages(2, num_microbatches=2, data=2)
    check_runs(4, [(by_config(task, 4, {**config, "gemini": sizes}, max_norm=0.3),)])
