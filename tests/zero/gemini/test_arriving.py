"""Parameters come to their chunks one chunk after the other: the same values, and never the whole model."""

import copy
import gc
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import GeminiPlugin
from colossalai.core import global_context as gpc
from colossalai.lazy import LazyInitContext, is_lazy
from colossalai.zero.gemini import GeminiDDP
from tests.ranks import run_ranks
from tests.tiers import further
from tests.zero.gemini.nets import HardNet, batch
from tests.zero.gemini.test_memory import CHUNK, NUM_LAYERS, WIDTH, Peak, build, float_bytes

pytestmark = pytest.mark.dist

SMALL: dict[str, Any] = {"min_chunk_size_mb": 2000 / 2**20, "search_range_mb": 0, "hidden_dim": 16}
PRECISIONS = ("fp32", "bf16", "fp16")


class Awkward(nn.Module):
    """A tied weight, a recurrent layer, a buffer made from a parameter, and one that is its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.net = HardNet()
        self.lstm = nn.LSTM(16, 16)
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.net.embedding.weight
        self.register_buffer("scale", self.net.scale.detach() * 2)
        self.register_buffer("alias", self.net.reused.bias.detach())

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return a loss."""
        x = self.lstm(self.head.weight[ids] * self.scale + self.alias)[0]
        return self.net(ids, labels) + self.head(x).square().mean()


def trained(model: nn.Module, precision: str) -> tuple[list[float], dict[str, torch.Tensor], Any]:
    """Return the losses of three steps, the parameters then, and the states of the optimizer."""
    scale: dict[str, Any] = {"initial_scale": 2.0**8} if precision == "fp16" else {}
    booster = Booster(plugin=GeminiPlugin(precision=precision, **SMALL, **scale))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, *_ = booster.boost(model, optimizer)
    losses = []
    ids, labels = batch(dist.get_world_size())
    own = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
    for _ in range(3):
        loss = model(ids[own], labels[own])
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict(), optimizer.state_dict()


def lazily_and_eagerly(precisions: tuple[str, ...]) -> None:
    """Compare a lazily built model with one built at once, both of seeds that differ between ranks."""
    colossalai.launch_from_torch({}, verbose=False)
    for precision in precisions:
        torch.manual_seed(dist.get_rank())
        eager = Awkward()
        torch.manual_seed(dist.get_rank())
        with LazyInitContext():
            lazy = Awkward()
        assert is_lazy(lazy)
        first = copy.deepcopy(eager)
        for tensor in (*first.parameters(), *first.buffers()):
            dist.broadcast(tensor.data, src=0)
        found, wanted = trained(lazy, precision), trained(eager, precision)
        assert found[0] == wanted[0]
        torch.testing.assert_close(found[1], wanted[1], rtol=0, atol=0)
        torch.testing.assert_close(found[2], wanted[2], rtol=0, atol=0)
        # Both began as rank 0 was built, which the frozen layer still says.
        assert torch.equal(
            found[1]["net.frozen.weight"].float(), _rounded(first.net.frozen.weight, precision)
        )
    gpc.destroy()


def _rounded(tensor: torch.Tensor, precision: str) -> torch.Tensor:
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    return tensor.detach().to(dtypes[precision]).float()


@pytest.mark.parametrize(
    ("num_ranks", "precisions"),
    [further(1, PRECISIONS), (2, ("fp16",)), further(2, ("fp32", "bf16")), further(4, PRECISIONS)],
)
def test_a_lazy_model_trains_as_one_that_was_built_at_once(
    num_ranks: int, precisions: tuple[str, ...]
) -> None:
    run_ranks(lazily_and_eagerly, num_ranks, precisions)


def peak_at_the_door(put: Callable[[nn.Module], Any], *, lazy: bool) -> float:
    """Return the most bytes of float tensors while a model becomes chunks, for an element of a chunk."""
    gc.collect()
    gc.freeze()
    if lazy:
        with LazyInitContext():
            model = build(torch.float32)
    else:
        model = build(torch.float32)
    peak = Peak()
    with peak:
        kept = put(model)
    assert float_bytes() <= peak.bytes
    del kept
    return peak.bytes / CHUNK


def peaks_at_doors(precisions: tuple[str, ...]) -> list[tuple[float, float, float]]:
    """Return for each precision what a lazy model takes, a model on the host, and that at the other door."""
    colossalai.launch_from_torch({}, verbose=False)
    sizes: dict[str, Any] = {
        "min_chunk_size_mb": CHUNK / 2**20,
        "search_range_mb": 0,
        "hidden_dim": WIDTH,
    }
    Booster(plugin=GeminiPlugin()).boost(nn.Linear(1, 1))  # it imports a lot
    found = []
    for precision in precisions:

        def boost(model: nn.Module, precision: str = precision) -> Any:
            plugin = GeminiPlugin(precision=precision, **sizes)
            return Booster(plugin=plugin).boost(model, torch.optim.AdamW(model.parameters()))

        def wrap(model: nn.Module, precision: str = precision) -> Any:
            return GeminiDDP(model, precision=precision, **sizes)

        found.append(
            (
                peak_at_the_door(boost, lazy=True),
                peak_at_the_door(boost, lazy=False),
                peak_at_the_door(wrap, lazy=False),
            )
        )
    dist.barrier()  # rank 0 has the store, that a slower rank still takes its numbers from
    gpc.destroy()
    return found


@pytest.mark.parametrize(
    ("num_ranks", "precisions"), [further(2, PRECISIONS), (4, ("fp16",)), further(4, ("fp32", "bf16"))]
)
def test_no_rank_ever_has_the_whole_model_beside_what_it_was_given(
    num_ranks: int, precisions: tuple[str, ...]
) -> None:
    share = NUM_LAYERS / num_ranks
    for of_rank in run_ranks(peaks_at_doors, num_ranks, precisions):
        for precision, (lazy, boosted, wrapped) in zip(precisions, of_rank, strict=True):
            section = 4 if precision == "fp32" else 2 + 4  # with its master
            chunk = 4 if precision == "fp32" else 4 + 2  # as it was built, and cast
            end = share * section + section / num_ranks  # an optimizer takes masters chunk by chunk
            assert lazy <= end + chunk, precision
            given = 4 * NUM_LAYERS  # and each chunk leaves more than its section takes
            assert max(boosted, wrapped) <= given + chunk + section / num_ranks, precision


def resident_peak(folder: str) -> tuple[float, float]:
    """Return the bytes of a lazy model, and by how much resident memory has grown while it went to disk."""
    colossalai.launch_from_torch({}, verbose=False)
    with LazyInitContext():
        model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(32)))
    size = sum(param.numel() for param in model.parameters()) * 4
    plugin = GeminiPlugin(
        precision="fp32",
        placement_policy="nvme",
        offload_dir=folder,
        memory_budget=size // 4,
        min_chunk_size_mb=2,
        search_range_mb=0,
        hidden_dim=1024,
    )
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = resident()
    boosted = Booster(plugin=plugin).boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    grown = resident() - before
    del boosted
    gpc.destroy()
    return size, grown


def resident() -> int:
    """Return the most bytes of this process that were in memory since the last reset."""
    found = re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads the peak memory from /proc")
def test_a_lazy_model_that_is_larger_than_its_budget_goes_to_disk_within_it(tmp_path: Path) -> None:
    for size, grown in run_ranks(resident_peak, 1, str(tmp_path)):
        assert grown <= size / 4
