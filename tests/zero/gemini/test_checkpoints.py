"""Checkpoints of parameters in chunks: nothing is gathered, and they load under any other data method."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import colossalai
from colossalai.amp import PureBF16
from colossalai.booster import Booster
from colossalai.booster.plugin import GeminiPlugin
from colossalai.checkpoint_io import (
    TrainingState,
    load_checkpoint,
    load_model,
    load_optimizer,
    load_training_state,
    save_checkpoint,
    save_model,
    save_optimizer,
    save_training_state,
)
from colossalai.core import global_context as gpc
from colossalai.nn.parallel import FullySharded, Replicated
from colossalai.runtime import ModelWrapper, Plan, assemble
from colossalai.zero.gemini.planning import Home
from tests.ranks import run_ranks
from tests.tiers import further
from tests.zero.gemini.nets import Assembled, Block, far

pytestmark = pytest.mark.dist

BATCH, VOCAB, WIDTH = 12, 11, 6
BEFORE, AFTER = 2, 2  # steps before a save, and after it
FORMATS: dict[str, dict[str, Any]] = {
    "file": {},
    "shards": {"shard": True, "size_per_shard": 0.001, "use_safetensors": True},
    "folder": {"gather_dtensor": False},
}
FEW, ALL = ["file", "states"], [*FORMATS, "one file", "states", "async"]


class Net(nn.Module):
    """Tied, frozen and reused weights, one without dimensions, one without elements, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(2))
        self.gain = nn.Parameter(torch.tensor(1.25))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.long))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the mean loss."""
        self.num_calls += 1
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x + self.frozen(x)) * self.gain
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten()) + self.empty.sum()


def adamw(net: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW((p for p in net.parameters() if p.requires_grad), lr=0.01)]


class Run(Assembled):
    """A training run of ranks that are launched."""

    def __init__(self, method: str, **options: Any) -> None:
        super().__init__(Net, adamw, method, folder=tempfile.gettempdir(), **options)
        (self.optimizer,) = self.optimizers

    @property
    def state(self) -> TrainingState:
        return TrainingState(model=self.raw, optimizer=self.optimizer)

    def train(self, steps: range) -> None:
        for step in steps:
            drawn = torch.randint(0, VOCAB, (BATCH, 4), generator=torch.Generator().manual_seed(step))
            self.optimizer.zero_grad()
            self.optimizer.backward(self.model(drawn.chunk(dist.get_world_size())[dist.get_rank()]))
            self.optimizer.step()

    def save(self, folder: Path, name: str) -> None:
        """Save in the format of a name."""
        names = self.optimizer.param_names
        match name:
            case "one file":
                save_checkpoint(folder / name, 3, self.raw, self.optimizer)
            case "states" | "async":
                save_training_state(folder / name, self.state, step=BEFORE, save_async=name == "async")
            case _:
                save_model(self.raw, folder / f"model {name}", **FORMATS[name])
                save_optimizer(
                    self.optimizer, folder / f"optimizer {name}", param_names=names, **FORMATS[name]
                )

    def load(self, folder: Path, name: str) -> None:
        """Load what `save` saved."""
        names = self.optimizer.param_names
        match name:
            case "one file":
                load_checkpoint(folder / name, self.raw, self.optimizer)
            case "states" | "async":
                load_training_state(next((folder / name).glob("step-*")), self.state)
            case _:
                load_model(self.raw, folder / f"model {name}")
                load_optimizer(self.optimizer, folder / f"optimizer {name}", param_names=names)


def save(method: str, folder: Path) -> tuple[int, list[float]]:
    """Train, save, train on; return how many chunks were gathered for saving, and how many bytes."""
    run = Run(method)
    run.train(range(BEFORE))
    if method == "chunks on disk":
        assert {chunk.states_home for chunk in run.cache.chunks} > {Home.DISK}
    num_gathers, peak = 0, [0.0, 0.0]
    is_chunked = "chunks" in method
    if is_chunked:
        num_gathers = run.cache.num_gathers
        run.cache.peak_bytes = present = run.cache.present_bytes
        largest = max(chunk.num_bytes for chunk in run.cache.chunks)
    for name in ALL if is_chunked else FEW:
        run.save(folder, name)
    if is_chunked:
        num_gathers = run.cache.num_gathers - num_gathers
        peak[0] = run.cache.peak_bytes - present
    values = run.values()
    if is_chunked:
        peak[1] = run.cache.peak_bytes / largest
    run.train(range(BEFORE, BEFORE + AFTER))  # also while the one in the background is being written
    trained = run.values()
    if dist.get_rank() == 0:
        torch.save((values, trained), folder / "expected")
    gpc.destroy()
    return num_gathers, peak


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return what saves with a method when it is first asked for, and returns the folder."""

    @cache
    def folder_of(method: str) -> Path:
        folder = tmp_path_factory.mktemp(method)
        for num_gathers, peak in run_ranks(save, 1 if method == "plain" else 2, method, folder):
            assert num_gathers == 0
            assert peak[0] == 0
            assert peak[1] <= 2 or method == "chunks on disk"  # whose budget has room for more
        return folder

    return folder_of


def load(method: str, folders: list[Path]) -> list[tuple[str, float, float]]:
    """Load each checkpoint, and train on; return how far the values then are from those expected."""
    run = Run(method, seed=5)
    run.train(range(7, 8))  # what is loaded takes the place of what is there
    found = []
    for folder in folders:
        values, trained = torch.load(folder / "expected")
        for name in ALL if (folder / "async").exists() else FEW:
            run.load(folder, name)
            loaded = far(run.values(), values)
            run.train(range(BEFORE, BEFORE + AFTER))
            found.append((f"{folder.name} {name}", loaded, far(run.values(), trained)))
    gpc.destroy()
    return found


@pytest.mark.parametrize(
    ("method", "num_ranks", "sources"),
    [
        ("small chunks", 3, ["chunks", "zero2"]),
        further("small chunks", 3, ["plain"]),
        further("chunks", 1, ["chunks", "chunks on disk"]),
        further("chunks on disk", 1, ["chunks", "chunks on disk"]),
        further("chunks on disk", 2, ["chunks on disk"]),
        further("chunks on disk", 2, ["plain"]),
        further("chunks on disk", 4, ["zero2"]),
        further("zero2", 2, ["chunks"]),
        further("plain", 2, ["chunks"]),
    ],
)
def test_a_run_goes_on(method: str, num_ranks: int, sources: list[str], saved: Callable[[str], Path]) -> None:
    for of_rank in run_ranks(load, num_ranks, method, [saved(source) for source in sources]):
        for name, loaded, trained in of_rank:
            assert loaded == 0, name
            assert trained < 1e-12, name


def low_precision(method: str, folder: Path) -> list[dict[str, torch.Tensor]]:
    """Train in bfloat16 with float32 masters, load weights alone, then all, and train on after each."""
    run = Run(method, precision=PureBF16())
    run.train(range(BEFORE))
    if method == "chunks":
        save_model(run.raw, folder / "model")
        save_training_state(folder, run.state, step=BEFORE)
    run.train(range(BEFORE, BEFORE + AFTER))
    found = [run.values()]
    load_model(run.raw, folder / "model")
    run.train(range(BEFORE, BEFORE + AFTER))
    found.append(run.values())
    load_training_state(folder / f"step-{BEFORE:08d}", run.state)
    run.train(range(BEFORE, BEFORE + AFTER))
    found.append(run.values())
    gpc.destroy()
    return found


def low_precisions(folder: Path) -> list[list[dict[str, torch.Tensor]]]:
    return [low_precision(method, folder) for method in ("chunks", "zero2")]


@pytest.mark.long
def test_float32_masters_follow_as_those_of_stage_2(tmp_path: Path) -> None:
    chunks, stage_2 = run_ranks(low_precisions, 2, tmp_path)[0]
    # Means are float32 in chunks, and rounded to bfloat16 in stage 2: weights are a rounding apart.
    for found, expected in zip(chunks, stage_2, strict=True):
        assert far(found, expected) <= 2**-7
    assert far(chunks[2], chunks[0]) == 0
    assert far(chunks[1], chunks[0]) > 0


def through_the_booster(folder: Path) -> list[float]:
    """Save and load by the methods of Booster, in float16; return how far values are apart."""
    colossalai.launch_from_torch({}, verbose=False)
    booster = Booster(plugin=GeminiPlugin(initial_scale=2.0**5, min_chunk_size_mb=0.0001, search_range_mb=0))
    torch.manual_seed(0)
    net = Net()
    model, optimizer, *_ = booster.boost(net, torch.optim.AdamW(net.parameters(), lr=0.01))

    def train(step: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, VOCAB, (BATCH, 4), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        booster.backward(model(ids.chunk(2)[dist.get_rank()]), optimizer)
        optimizer.step()
        return {name: value.clone() for name, value in model.state_dict().items()}

    saved = train(0)
    booster.save_model(model, folder / "model", shard=True, use_safetensors=True)
    booster.save_optimizer(optimizer, folder / "optimizer", shard=True)
    booster.save(folder / "run", model, optimizer, step=1)
    later = train(1)
    booster.load_model(model, folder / "model")
    booster.load_optimizer(optimizer, folder / "optimizer")
    found = [far(model.state_dict(), saved), far(train(1), later)]
    booster.load(folder / "run", model, optimizer)
    found += [far(model.state_dict(), saved), far(train(1), later)]
    gpc.destroy()
    return found


def test_through_the_booster(tmp_path: Path) -> None:
    assert run_ranks(through_the_booster, 2, tmp_path) == [[0.0] * 4] * 2


def refusals(model: ModelWrapper) -> Iterator[str]:
    """Do what is refused; yield what is said."""
    for kind, act in (
        (ValueError, lambda: model.gathered("blocks.0.dwn")),
        (ValueError, lambda: model.gathered(nn.Linear(2, 2))),
        (ValueError, lambda: model.load_state_dict({}, assign=True)),
        (RuntimeError, lambda: model.load_state_dict({"gain": torch.ones(2)})),
        (RuntimeError, lambda: model.unwrap().state_dict()),
        (RuntimeError, lambda: model.unwrap().load_state_dict({"gain": torch.ones(())}, strict=False)),
    ):
        with ExitStack() as stack:
            try:
                block = act()
                if hasattr(block, "__enter__"):
                    stack.enter_context(block)
                yield "nothing"
            except kind as error:
                yield str(error)


def through_the_wrapper(folder: Path) -> tuple[list[str], dict[str, bool]]:
    run = Run("chunks")
    model, raw = run.model, run.raw
    said = list(refusals(model))
    torch.manual_seed(0)
    expected = Net().double().state_dict()
    found = model.state_dict()
    good = {
        "all values": far(found, expected) == 0,
        "names": list(found) == list(expected),
        "tied": found["head.weight"] is found["embedding.weight"],
        "plain": all(type(value) is torch.Tensor for value in found.values()),
        "a prefix": next(iter(model.state_dict(prefix="a."))) == "a." + next(iter(expected)),
        "the parameters": model.state_dict(keep_vars=True)["gain"] is raw.gain,
    }
    save_model(raw, folder / "x")
    with model.gathered("blocks.0", raw.frozen, "gain", raw.empty), torch.no_grad():
        good["named"] = torch.equal(raw.frozen.weight, expected["frozen.weight"])
        if dist.get_rank() == dist.get_world_size() - 1:
            raw.blocks[0].scale.fill_(3.0)
        for act in (save_model, load_model):
            try:
                act(raw, folder / "x")
            except RuntimeError as error:
                said.append(str(error))
        good["written"] = bool((model.state_dict()["blocks.0.scale"] == 3.0).all())
        save_model(raw, folder / "x")
    good["written for all"] = bool((model.state_dict()["blocks.0.scale"] == 3.0).all())
    good["saved"] = bool((torch.load(folder / "x")["blocks.0.scale"] == 3.0).all())
    num_gathers = run.cache.num_gathers
    report = model.load_state_dict({**expected, "more": torch.ones(1)}, strict=False)
    good["nothing is gathered to load"] = run.cache.num_gathers == num_gathers
    good["report"] = report.unexpected_keys == ["more"] and not report.missing_keys
    good["loaded"] = far(model.state_dict(), expected) == 0
    changed = {name: value + 1 for name, value in expected.items()}
    save_model(raw, folder / "model")
    model.load_state_dict(changed)
    with model.gathered():
        good["all"] = torch.equal(raw.gain, changed["gain"])
        load_model(raw, folder / "model")
        good["loaded inside"] = far(dict(raw.state_dict()), expected) == 0
        good["the state inside"] = far(model.state_dict(), expected) == 0
        model.load_state_dict(changed)
        good["set inside"] = torch.equal(raw.frozen.weight, changed["frozen.weight"])
    good["kept"] = far(model.state_dict(), changed) == 0
    gpc.destroy()
    return said, good


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_wrapper_gives_and_takes_the_whole(num_ranks: int, tmp_path: Path) -> None:
    for said, good in run_ranks(through_the_wrapper, num_ranks, tmp_path):
        assert all(good.values()), good
        assert "blocks.0.dwn" in said[0]
        assert "blocks.0.down" in said[0]
        assert "is not a module or parameter of this model" in said[1]
        assert "assign=True" in said[2]
        assert "size mismatch for gain" in said[3]
        assert "Missing key(s)" in said[3]
        assert "values lie in a chunk" in said[4]
        assert "values lie in a chunk" in said[5]
        assert all("leave the block first" in text for text in said[6:]) or num_ranks == 1


def other_methods() -> list[str]:
    """Enter `gathered` under methods that have whole parameters, and under one that has not."""
    colossalai.launch_from_torch({}, verbose=False)
    said = []
    for method in (Replicated(), FullySharded()):
        net = nn.Linear(3, 3)
        model, _ = assemble(Plan(data=method), net, mesh=gpc.mesh, device=torch.device("cpu"))
        try:
            with model.gathered():
                said.append(f"a {type(net.weight).__name__}")
        except ValueError as error:
            said.append(str(error))
    gpc.destroy()
    return said


def test_gathered_under_other_methods() -> None:
    ((plain, fsdp),) = run_ranks(other_methods, 1)
    assert plain == "a Parameter"
    assert "full_tensor()" in fsdp
