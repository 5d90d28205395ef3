"""Models train within the bytes that a solved graph says as they do without it."""

import copy
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from functools import cache

import psutil
import pytest
import torch
from torch import Tensor, nn

from colossalai.auto_parallel.checkpoint import CheckpointSolverChen, CheckpointSolverRotor, TracedGraph
from colossalai.auto_parallel.checkpoint._chain import simulate
from colossalai.fx import metainfo_trace, symbolic_trace
from colossalai.model_zoo.gpt import GPT, GPTConfig
from tests.auto_parallel.checkpoint.traced_models import (
    BUILDERS,
    LENGTH,
    WIDTH,
    Masked,
    Mlp,
    counted_bytes,
    gpt,
    traced,
    train,
)
from tests.tiers import further

pytestmark = pytest.mark.unit

Solve = Callable[[TracedGraph], TracedGraph]


def rotor(graph: TracedGraph, free_memory: float = 1.0, **options: float) -> TracedGraph:
    """Solve for bytes of activations alone."""
    return CheckpointSolverRotor(graph, free_memory=free_memory, optim_multiplier=0.0, **options).solve()


@cache
def graph_of(name: str) -> TracedGraph:
    """Return the graph of a model, which is a value, for tests that need nothing else."""
    return traced(name)[0].graph


def least_of(graph: TracedGraph) -> int:
    """Return the bytes that the refusal names."""
    with pytest.raises(ValueError, match=r"give at least [\d,]+ bytes") as caught:
        rotor(graph)
    (number,) = [part.split(" ")[0] for part in str(caught.value).split("give at least ")[1:]]
    return int(number.replace(",", ""))


def half(graph: TracedGraph) -> TracedGraph:
    return rotor(graph, (graph.peak_bytes + least_of(graph)) / 2)


def least(graph: TracedGraph) -> TracedGraph:
    return rotor(graph, least_of(graph))


def chen(graph: TracedGraph) -> TracedGraph:
    return CheckpointSolverChen(graph).solve()


@pytest.mark.each_value
@pytest.mark.parametrize("solve", [half, least, chen])
@pytest.mark.parametrize(
    "name", [further(name) if name in ("stack", "resnet") else name for name in BUILDERS]
)
def test_a_solved_model_trains_as_it_did_in_fewer_bytes(name: str, solve: Solve) -> None:
    gm, twin, arguments = traced(name)
    plain = counted_bytes(gm, arguments)
    assert 0.9 * gm.graph.peak_bytes <= plain <= gm.graph.peak_bytes
    gm.load_state_dict(twin.state_dict())  # counting has moved the statistics of batch norms
    gm.graph = solve(gm.graph)
    assert gm.graph.recomputed
    found, expected = train(gm, arguments), train(twin, arguments)
    assert len(found) == len(expected) > 12
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert counted_bytes(gm, arguments) <= gm.graph.peak_bytes < 0.85 * plain


@pytest.mark.parametrize("name", ["stack", further("gpt")])
def test_a_larger_budget_is_kept_and_takes_no_longer(name: str) -> None:
    gm, _, arguments = traced(name)
    whole, fewest = gm.graph.peak_bytes, least_of(gm.graph)
    seconds = []
    for share in (0.0, 0.2, 0.5, 0.9, 1.0):
        budget = fewest + share * (whole - fewest)
        gm.graph = rotor(gm.graph, budget)
        seconds.append(gm.graph.step_seconds)
        assert counted_bytes(gm, arguments) <= gm.graph.peak_bytes <= budget
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > seconds[-1]
    assert gm.graph.segments == ()


@pytest.mark.parametrize("name", ["stack", further("masked"), "gpt", further("resnet")])
def test_the_least_that_is_named_works_and_nothing_less(name: str) -> None:
    graph = graph_of(name)
    fewest = least_of(graph)
    assert rotor(graph, fewest).peak_bytes <= fewest
    with pytest.raises(ValueError, match=f"{graph.model} needs with any recomputation: give at least "):
        rotor(graph, fewest - 1)


def test_a_head_that_needs_most_is_known() -> None:
    """With a large vocabulary the peak is in the backward of the head; then the last block is recomputed."""
    torch.manual_seed(3)
    sizes = {"hidden_size": 16, "num_layers": 4, "num_attention_heads": 2, "max_position_embeddings": LENGTH}
    model = GPT(GPTConfig(vocab_size=4000, **sizes))
    arguments = {"input_ids": torch.randint(4000, (8, LENGTH))}
    gm = metainfo_trace(symbolic_trace(model, meta_args=arguments))
    plain = counted_bytes(gm, arguments)
    assert 0.9 * gm.graph.peak_bytes <= plain <= gm.graph.peak_bytes
    gm.graph = least(gm.graph)
    assert "blocks.3" in gm.graph.recomputed
    assert counted_bytes(gm, arguments) <= gm.graph.peak_bytes < plain


def test_parameters_are_taken_off_first() -> None:
    gm, *_ = traced("gpt")
    graph = gm.graph
    assert graph.param_bytes == sum(param.nbytes for param in gm.parameters())
    free = (graph.peak_bytes + least_of(graph)) / 2
    for times in (0.0, 1.0, 2.5):
        solver = CheckpointSolverRotor(graph, free + times * graph.param_bytes, optim_multiplier=times)
        assert solver.solve() == rotor(graph, free)
    default = CheckpointSolverRotor(graph, free)  # 1: gradients
    with pytest.raises(ValueError, match=f"of which {graph.param_bytes:,} are for optim_multiplier=1"):
        CheckpointSolverRotor(graph, graph.param_bytes).solve()
    assert default.optim_multiplier == 1.0


def test_without_a_number_it_is_what_the_host_has_free(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = graph_of("stack")
    free = (graph.peak_bytes + least_of(graph)) // 2
    assert CheckpointSolverRotor(graph).solve().segments == ()
    memory = psutil.virtual_memory()._replace(available=free + graph.param_bytes)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    solved = CheckpointSolverRotor(graph).solve()
    assert solved == rotor(graph, free)
    assert solved.segments


def test_more_slots_find_better_answers() -> None:
    graph = graph_of("stack")
    free = 0.55 * graph.peak_bytes
    few, many = rotor(graph, free, memory_slots=2), rotor(graph, free, memory_slots=500)
    assert many.peak_bytes <= free
    assert few.peak_bytes <= free
    assert many.step_seconds < few.step_seconds


def test_segments_of_chen() -> None:
    graph = graph_of("stack")
    assert len(chen(graph).segments) == 2  # and the third keeps all
    assert chen(graph).recomputed == tuple(map(str, range(6)))
    for number in range(1, 10):
        solved = CheckpointSolverChen(graph, num_segments=number).solve()
        assert len(solved.segments) == number - 1
    for number in (0, 10):
        with pytest.raises(ValueError, match=f"num_segments={number}: Sequential has 9 blocks; give 1 to 9"):
            CheckpointSolverChen(graph, num_segments=number)


def test_assigning_another_graph_takes_the_first_back() -> None:
    gm, twin, arguments = traced("stack")
    plain, peak = gm.graph, counted_bytes(gm, arguments)
    peaks = []
    for graph in (chen(plain), half(plain), plain, least(plain), chen(plain)):
        gm.graph = graph
        assert gm.graph is graph
        gm.load_state_dict(twin.state_dict())
        copied = copy.deepcopy(twin)
        assert all(map(torch.equal, train(gm, arguments), train(copied, arguments)))
        peaks.append(counted_bytes(gm, arguments))
    assert peaks[0] == peaks[-1] < peak
    assert peaks[2] == peak
    assert peaks[3] < peaks[1] < peak
    assert type(gm.unwrap()[8]) is Mlp  # no block of Chen's last segment is touched


def test_in_evaluation_nothing_is_recomputed() -> None:
    gm, twin, arguments = traced("gpt")
    gm.graph = least(gm.graph)
    calls = []
    for part in gm.unwrap().blocks:
        part.register_forward_hook(lambda *_: calls.append(1))
    gm.eval()
    twin.eval()
    with torch.no_grad():
        assert torch.equal(gm(**arguments), twin(**arguments))
    assert len(calls) == 6
    gm.train()
    twin.train()
    assert all(map(torch.equal, train(gm, arguments), train(twin, arguments)))
    assert len(calls) > 6 + 3 * 6


def test_a_graph_is_a_value() -> None:
    graph = graph_of("stack")
    solved = half(graph)
    assert graph.segments == ()
    assert solved.trace is graph.trace
    assert solved.digest == graph.digest
    assert solved == half(graph) != graph
    assert solved.named_segments.names == graph.blocks == tuple(map(str, range(9)))
    assert solved.step_seconds - graph.step_seconds == pytest.approx(
        simulate(graph.costs.chain, solved.segments).seconds - simulate(graph.costs.chain, ()).seconds
    )
    with pytest.raises(FrozenInstanceError):
        graph.segments = solved.segments


def test_masks_are_shared() -> None:
    graph = graph_of("masked")
    assert (
        half(graph)
        == CheckpointSolverRotor(
            graph, (graph.peak_bytes + least_of(graph)) / 2, cnode=["mask", "mul"], optim_multiplier=0
        ).solve()
    )
    assert CheckpointSolverChen(graph, cnode=["mask"]).solve() == chen(graph)
    for kind in (CheckpointSolverRotor, CheckpointSolverChen):
        with pytest.raises(ValueError, match=r"cnode names 'masks', which is not a tensor .* use 'mask'"):
            kind(graph, cnode=["mask", "masks"])
        with pytest.raises(ValueError, match="cnode names 'linear', which has a gradient"):
            kind(graph, cnode=["linear"])
        with pytest.raises(ValueError, match=r"cnode='mask': give a list of names, \['mask'\]"):
            kind(graph, cnode="mask")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"free_memory": 0}, "free_memory=0: give bytes above 0, or -1"),
        ({"free_memory": -2}, "free_memory=-2: give bytes above 0, or -1"),
        ({"free_memory": float("nan")}, "free_memory=nan"),
        ({"free_memory": None}, "free_memory=None: give bytes above 0, or -1"),
        ({"free_memory": "1GB"}, "free_memory='1GB': give bytes above 0, or -1"),
        ({"memory_slots": 0}, "memory_slots=0: give an integer of 1 or more"),
        ({"memory_slots": 1.5}, r"memory_slots=1\.5: give an integer of 1 or more"),
        ({"optim_multiplier": None}, "optim_multiplier=None: give a number of 0 or more"),
        ({"cnode": 3}, "cnode=3: give a list of names"),
        ({"optim_multiplier": -1.0}, r"optim_multiplier=-1\.0: give a number of 0 or more"),
    ],
)
def test_numbers_out_of_range_are_refused(options: dict[str, float], message: str) -> None:
    graph = graph_of("stack")
    with pytest.raises(ValueError, match=message):
        CheckpointSolverRotor(graph, **options)


@pytest.mark.parametrize("kind", [CheckpointSolverRotor, CheckpointSolverChen])
def test_the_traced_module_is_not_its_graph(kind: Callable[..., object]) -> None:
    with pytest.raises(ValueError, match=r"graph is a TracedModule: give gm\.graph of gm = metainfo_trace"):
        kind(traced("stack")[0])


def test_values_of_another_type_are_refused() -> None:
    with pytest.raises(ValueError, match=r"num_segments=1\.5: .* blocks; give 1 to"):
        CheckpointSolverChen(graph_of("stack"), num_segments=1.5)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match="meta_args is a Tensor: give a dict of the arguments of the forward"
    ):
        symbolic_trace(Mlp(), meta_args=torch.zeros(2, WIDTH))  # type: ignore[arg-type]


class WithoutBlocks(nn.Module):
    """Has nothing that repeats."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class Branches(nn.Module):
    """Calls its blocks side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Mlp() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.stem(x)
        return sum(block(hidden) for block in self.blocks)


@pytest.mark.parametrize("solver", [CheckpointSolverRotor, CheckpointSolverChen])
def test_models_without_a_chain_are_refused(solver: Callable[..., object]) -> None:
    x = torch.randn(4, WIDTH)
    with pytest.raises(ValueError, match="the graph of Mlp has no costs: call gm = metainfo_trace"):
        solver(symbolic_trace(Mlp(), meta_args={"x": x}).graph)
    with pytest.raises(ValueError, match=r"WithoutBlocks has no blocks .* nn\.ModuleList"):
        solver(metainfo_trace(symbolic_trace(WithoutBlocks(), meta_args={"x": x})).graph)
    with pytest.raises(ValueError, match=r"the 3 blocks of Branches \('blocks\.0' to .* do not form a chain"):
        solver(metainfo_trace(symbolic_trace(Branches(), meta_args={"x": x})).graph)
    gated = symbolic_trace(Masked(), {"is_gated": True}, {"x": x, "mask": x})
    with pytest.raises(ValueError, match="6 blocks of Masked"):
        solver(metainfo_trace(gated).graph)


def test_graphs_of_other_traces_are_refused() -> None:
    gm, *_ = traced("stack")
    other, *_ = traced("gpt")
    with pytest.raises(ValueError, match=r"of another trace of GPT \(.* a Sequential \("):
        gm.graph = chen(other.graph)
    smaller = {"input_ids": torch.zeros(2, LENGTH, dtype=torch.int64)}
    of_two = metainfo_trace(symbolic_trace(other.unwrap(), meta_args=smaller))
    with pytest.raises(ValueError, match="another trace of GPT"):
        other.graph = chen(of_two.graph)
    with pytest.raises(ValueError, match="graph is a NoneType: assign the result of solve"):
        gm.graph = None
    assert gm.graph.segments == other.graph.segments == ()


def test_a_graph_of_an_equal_model_is_taken() -> None:
    gm, twin, arguments = traced("stack")
    other, *_ = traced("stack")
    gm.graph = half(other.graph)
    assert all(map(torch.equal, train(gm, arguments), train(twin, arguments)))


def test_a_frozen_beginning_is_still_a_chain() -> None:
    model, arguments = gpt()
    for name, param in model.named_parameters():
        param.requires_grad_("blocks" in name)
    gm = metainfo_trace(symbolic_trace(model, meta_args=arguments))
    twin = copy.deepcopy(model)
    gm.graph = half(gm.graph)
    assert all(map(torch.equal, train(gm, arguments), train(twin, arguments)))
