"""The timeline of an iteration: its sums are what cache and tensors say, and stay within the budget."""

from itertools import groupby
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import GeminiPlugin
from colossalai.core import global_context as gpc
from colossalai.nn.optimizer import HybridAdam
from colossalai.zero.gemini import Iteration, Phase, record_timeline
from colossalai.zero.gemini._cache import ChunkCache
from colossalai.zero.gemini._chunk import Chunk
from colossalai.zero.gemini._hooks import handle_of
from colossalai.zero.gemini.planning import Home, OtherBytes
from tests.ranks import run_ranks
from tests.tiers import further
from tests.zero.gemini.nets import Block

NUM_STEPS = 2


class Watch:
    """Notes by itself what is present after each use, while it is on."""

    def __init__(self, cache: ChunkCache) -> None:
        self.seen: list[list[tuple[Any, ...]]] = [[]]
        self._cache = cache
        self._fetch = cache.fetch

    def fetch(self, chunk: Chunk, needed: Any = ()) -> torch.Tensor:
        """Fetch, and note."""
        was_used = chunk.whole is not None and chunk.num_uses > 0
        whole = self._fetch(chunk, needed)
        if (torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1) and not was_used:
            self._note(chunk)
        return whole

    def _note(self, chunk: Chunk) -> None:
        phase = Phase.FORWARD if torch._C._current_graph_task_id() == -1 else Phase.BACKWARD
        at_home = [its for its in self._cache.chunks if its.home is Home.COMPUTE]
        sections = sum(its.section.untyped_storage().nbytes() for its in at_home)
        gathered = sum(its.num_bytes for its in self._cache.gathered_at.values())
        self.seen[-1].append((phase, chunk.number, gathered, sections))

    def end(self) -> None:
        """End an iteration."""
        self.seen.append([])


def train(*, is_recorded: bool, **options: Any) -> Any:
    """Train six blocks; return losses, iterations, what was seen by the way, and bytes of states."""
    torch.manual_seed(0)
    net = nn.Sequential(*(Block(32) for _ in range(6)))
    booster = Booster(
        plugin=GeminiPlugin(min_chunk_size_mb=0.002, search_range_mb=0, hidden_dim=8, **options)
    )
    made = HybridAdam(net.parameters(), lr=0.01)
    model, optimizer, *_ = booster.boost(net, made)
    cache = handle_of(next(net.parameters())).hooks.cache
    watch = Watch(cache)
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(1 + dist.get_rank()))
    losses: list[float] = []

    def run() -> None:
        for _ in range(NUM_STEPS):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            booster.backward(loss, optimizer)
            optimizer.step()
            watch.end()
            with torch.no_grad():
                losses.append(loss.item() + model(x).sum().item())  # an evaluation is no part of it

    iterations = []
    if is_recorded:
        cache.fetch = watch.fetch  # type: ignore[method-assign]
        with record_timeline(model) as iterations:
            with pytest.raises(ValueError, match="is being recorded already"), record_timeline(net):
                pass
            run()
        assert cache.tracer is None or cache.tracer.timeline is None
    else:
        run()
    on_compute = 0
    for group in made.param_groups:
        for tensor in group["params"]:
            if options["precision"] == "fp32" or tensor.dtype == torch.float32:
                states = [value for value in made.state[tensor].values() if value.ndim]
                states += [tensor] * (options["precision"] != "fp32")
                on_compute += sum(value.nbytes for value in states if value.untyped_storage().resizable())
    return losses, iterations, watch.seen[:-1], on_compute


def runs(folder: str) -> list[Any]:
    """Train in memory and on disk, recorded and not."""
    colossalai.launch_from_torch({}, verbose=False)
    found = []
    budget = {"memory_budget": 180_000, "offload_dir": folder, "placement_policy": "nvme"}
    for options in ({}, budget, budget | {"precision": "bf16"}):
        losses, *rest = train(is_recorded=True, **{"precision": "fp32"} | options)
        found.append((options.get("memory_budget"), *rest))
    plain, *_ = train(is_recorded=False, precision="bf16", **budget)
    assert losses == plain  # bit for bit
    gpc.destroy()
    return found


@pytest.mark.dist
@pytest.mark.parametrize("num_ranks", [further(1), 2])
def test_moments_are_what_is_there_and_stay_within_the_budget(num_ranks: int, tmp_path: Any) -> None:
    for of_rank in run_ranks(runs, num_ranks, str(tmp_path)):
        others = [other_in_forward(iterations[-1]) for _, iterations, *_ in of_rank]
        assert others[0] == others[1]  # whatever is gathered
        for budget, iterations, seen, state_bytes in of_rank:
            assert len(iterations) == NUM_STEPS
            assert [its.is_planned for its in iterations] == [False, budget is not None]
            for iteration, uses in zip(iterations, seen, strict=True):
                check_against(iteration, uses, is_alone=budget is None and num_ranks == 1)
                assert iteration.memory_budget == budget
            last = iterations[-1]
            assert last.moments[-1].state_bytes == state_bytes
            assert (last.bytes_in > 0) == (last.bytes_out > 0) == (budget is not None)
            if budget is not None:
                assert max(its.peak_bytes for its in iterations) <= budget
                # Nobody reads in the step what no backward has written.
                written = sum(moment.bytes_out for moment in last.moments if moment.phase is not Phase.STEP)
                steps = [moment for moment in last.moments if moment.phase is Phase.STEP]
                assert sum(moment.bytes_in - moment.bytes_out for moment in steps) == written
                assert sum(moment.paged_bytes for moment in steps) == sum(moment.bytes_in for moment in steps)


def other_in_forward(iteration: Iteration) -> list[int]:
    """Return the other memory of the forward, but for the last use, after which the loss comes."""
    return [moment.other_bytes for moment in iteration.moments if moment.phase is Phase.FORWARD][:-1]


def check_against(iteration: Iteration, uses: list[tuple[Any, ...]], *, is_alone: bool) -> None:
    """Compare with what was seen by the way, moment by moment."""
    moments = [moment for moment in iteration.moments if moment.phase is not Phase.STEP]
    if is_alone:  # nobody fetches in the backward: moments are those of gradients
        assert {moment.phase for moment in moments} == {Phase.FORWARD, Phase.BACKWARD}
        moments = [moment for moment in moments if moment.phase is Phase.FORWARD]
    by_moment = [list(run) for _, run in groupby(uses, key=lambda use: use[:2])]
    assert [(moment.phase, moment.chunk) for moment in moments] == [run[0][:2] for run in by_moment]
    for moment, run in zip(moments, by_moment, strict=True):
        assert moment.gathered_bytes == max(gathered for *_, gathered, _ in run)
        assert moment.section_bytes == run[-1][-1]
    for moment in iteration.moments:
        parts = (moment.gathered_bytes, moment.section_bytes, moment.gradient_bytes, moment.state_bytes)
        assert moment.model_bytes == sum(parts) + moment.paged_bytes
        assert moment.num_bytes == moment.model_bytes + moment.other_bytes
    figures = iteration.as_dict()
    assert figures["peak_bytes"] == max(sum_of(moment) for moment in figures["moments"])


def sum_of(moment: dict[str, Any]) -> int:
    """Return the bytes of a moment as JSON has it."""
    no_memory = ("bytes_in", "bytes_out")
    return sum(size for name, size in moment.items() if name.endswith("_bytes") and name not in no_memory)


@pytest.mark.unit
def test_what_becomes_model_data_never_counts_as_other_memory() -> None:
    counter = OtherBytes(torch.device("cpu"), lambda _: False)
    counter.start()
    kept = torch.ones(10)
    whole = counter.set_aside(lambda: torch.empty(1000))
    assert counter.take_peak() == 40
    counter.stop()
    assert counter.take_peak() == 40
    assert len(whole) == 100 * len(kept)


@pytest.mark.unit
def test_a_model_without_chunks_has_no_timeline() -> None:
    no_chunk = pytest.raises(ValueError, match="no parameter of this Linear lies in a chunk")
    with no_chunk, record_timeline(nn.Linear(2, 2)):
        pass
