"""Modules that all ranks gather at their entry: experts chosen by data train as on one process."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

import colossalai
from colossalai.booster.plugin import GeminiPlugin
from colossalai.context import ConfigException
from colossalai.core import global_context as gpc
from colossalai.nn.parallel import GeminiDDP
from colossalai.zero.gemini import Gemini
from tests.parity.tasks import language
from tests.parity.training import Batch, Run, Task, check_runs, grouped_runs
from tests.ranks import run_ranks
from tests.shardformer.models import planned
from tests.tiers import further
from tests.zero.gemini.experts import GUISES, Mixture, Routing, batches
from tests.zero.gemini.nets import put, trained
from tests.zero.gemini.test_parity import SMALL, in_chunks

pytestmark = pytest.mark.dist

RECOMPUTED = ("plain", "plain")  # two layers more: one is recomputed as a whole, of the other its mixture
OPTIONS = {
    "min_chunk_size_mb": 0.0001,  # 104 elements: two experts, or one and a part of a layer outside
    "whole_modules": [Mixture, "layers.0"],  # one in another
    "recompute": [f"layers.{len(GUISES)}", f"layers.{len(GUISES) + 1}.mixture"],
}


def batches_of_ranks() -> list[Batch]:
    return batches(dist.get_world_size())


ROUTING = Task(
    build=partial(Routing, *GUISES, *RECOMPUTED),
    batches=batches_of_ranks,
    optimizer=partial(torch.optim.AdamW, lr=0.02, weight_decay=0.1),
)


def mixtral() -> nn.Module:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 1, "experts_implementation": "eager"}
    return planned("Mixtral", **experts, attn_implementation="eager")


def by_class(num_ranks: int, accumulation: int, **options: Any) -> Run:
    """Return a run of a Mixtral whose class of experts is gathered whole."""
    optimizer = partial(torch.optim.AdamW, lr=0.01, eps=1e-4)
    task = replace(language(mixtral), optimizer=optimizer, context=nullcontext)
    options = {"whole_modules": [MixtralSparseMoeBlock], "min_chunk_size_mb": 0.001, **options}
    return in_chunks(task, num_ranks, accumulation, 0.1, **options)


RUNS = [
    in_chunks(ROUTING, 2, 2, 1.0, **OPTIONS),
    further(in_chunks(ROUTING, 4, 1, 1.0, **OPTIONS)),
    further(by_class(2, 2, recompute=True)),
    further(by_class(4, 1)),
]


@pytest.mark.parametrize(("num_ranks", "runs"), grouped_runs(RUNS))
def test_experts_chosen_by_data_are_one_process(num_ranks: int, runs: list[Any]) -> None:
    check_runs(num_ranks, runs)


def mechanics() -> dict[str, Any]:
    """Train, evaluate, fail and copy a net with experts in chunks; return what was seen on the way."""
    colossalai.launch_from_torch({}, verbose=False)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = Routing("plain", "dict").double()
    twin = copy.deepcopy(net)
    applied = put(net, 40, whole_modules=(Mixture,))
    cache, seen = applied.cache, {}
    x, y = batches(num_ranks, 1)[0]
    x, y = x[4 * rank : 4 * rank + 4].double(), y[4 * rank : 4 * rank + 4]
    step = trained(nn.Sequential(net), applied, partial(torch.optim.SGD, lr=0.1))
    loss = nn.CrossEntropyLoss()
    net.register_forward_hook(lambda *args: loss(args[-1], y), with_kwargs=False)
    seen["is called"] = step((x,)).item() == loss(twin(x), y).item()
    mixture = set(net.layers[0].mixture.parameters())
    largest = max(chunk.num_bytes for chunk in cache.chunks)
    whole = sum(chunk.num_bytes for chunk in cache.chunks if mixture & set(chunk.layout.params))
    seen["peak fits"] = largest * 2 < cache.peak_bytes <= whole + 2 * largest
    with torch.no_grad():
        net.eval()(x)
        net.train()
    seen["order"] = [chunk.number for chunk in cache._present]  # in which they would be let go of
    point = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(net(point), point)
    seen["slope"] = bool(slope[:, :-1].any())
    with pytest.raises(RuntimeError, match="create_graph=True, and the model has whole_modules"):
        torch.autograd.grad(net(point), point, create_graph=True)
    handle = net.layers[1].mixture.experts[3].register_forward_pre_hook(fail)
    for choice in (3.0, x[0, -1].item()):  # all ranks fail, then none
        with pytest.raises(KeyError) if choice == 3.0 else nullcontext():
            net(torch.cat([x[:, :-1], torch.full((4, 1), choice, dtype=x.dtype)], 1))
    handle.remove()
    with cache.gathered():
        double = copy.deepcopy(net)
    before = cache.num_gathers
    double(x)
    seen["a copy gathers nothing"] = cache.num_gathers == before
    seen["nothing is held"] = not any(chunk.num_uses for chunk in cache.chunks)
    step((x,))
    net.layers[0].mixture.register_forward_hook(lambda *_: [1.0], prepend=True)
    with pytest.raises(RuntimeError, match=r"'layers.0.mixture', one of whole_modules, returned a list in"):
        net(x)
    seen["num_gathers"] = cache.num_gathers
    gpc.destroy()
    return seen


def fail(*_: Any) -> None:
    raise KeyError("an expert of the user's")


def test_what_happens_around_whole_modules() -> None:
    found = run_ranks(mechanics, 2)
    for name in ("num_gathers", "order"):
        assert found[0][name] == found[1][name]
    for seen in found:
        assert len(seen) == 7
        assert all(seen.values()), seen


DOORS: list[Callable[[Any], Any]] = [
    lambda choices: GeminiPlugin(whole_modules=choices),
    lambda choices: GeminiDDP(Routing("plain"), whole_modules=choices),
    lambda choices: Gemini(whole_modules=choices),
]
WRONG_TYPES = {
    "whole_modules is 'layers'; it must be a list": "layers",
    "whole_modules is Mixture": Mixture("plain"),
    "whole_modules is <class": Mixture,
    "whole_modules is 3; it must be a list": 3,
    "whole_modules has 3; an entry must be the name": [3],
    "whole_modules has <class 'int'>; an entry": [int],
    "whole_modules has Linear": [nn.Linear(2, 2)],
}
WRONG_CHOICES = {
    r"names 'layer.0.mixture', and the model has no such module; it has 'layers.0.": "layer.0.mixture",
    r"names 'zzzzzz', and the model has no such module; it has 'start', 'layers'": "zzzzzz",
    r"has the class Conv1d, and the model has no module of it; it has modules of Expert, Layer": nn.Conv1d,
    r"has 'layers', a ModuleList, which is never called itself": "layers",
    r"has ModuleList, which is never called itself": nn.ModuleList,
    r"has 'act', a Tanh, which has no parameters to gather": "act",
}


def knock() -> list[tuple[str, str]]:
    """Come to all doors with wrong values; return what should be said, and what was."""
    config = {"gemini": {"whole_modules": ["zzzzzz"], "precision": "fp32"}}
    colossalai.launch_from_torch(config, verbose=False)
    heard = []

    def hear(words: str, run: Callable[[], Any]) -> None:
        try:
            heard.append((words, f"gave {run()}"))
        except ValueError as error:
            heard.append((words, str(error)))

    for words, choices in WRONG_TYPES.items():
        for door in DOORS:
            hear(words, partial(door, choices))
    for words, choice in WRONG_CHOICES.items():
        net = Routing("plain")
        net.act = nn.Tanh()
        hear(words, partial(GeminiDDP, net, whole_modules=[choice]))
    net = Routing("plain")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    hear("names 'zzzzzz', and", lambda: colossalai.initialize(net, optimizer, None, verbose=False))
    hear(
        "whole_modules and a pipeline cannot be combined",
        lambda: Gemini(keeps_grads=True, whole_modules=("layers.0",)),
    )
    gpc.destroy()
    return heard


def test_what_is_no_module_of_the_model_is_refused_at_the_door() -> None:
    (heard,) = run_ranks(knock, 1)
    for words, said in heard:
        assert words in said
    assert issubclass(ConfigException, ValueError)


@pytest.mark.long
def test_fp16_with_experts_trains_through_the_door_without_booster() -> None:
    run_ranks(train_fp16, 2)


def train_fp16() -> None:
    from colossalai.zero import GeminiAdamOptimizer

    colossalai.launch_from_torch({}, verbose=False)
    rank = dist.get_rank()
    torch.manual_seed(0)
    sizes = {name: value for name, value in SMALL.items() if name != "precision"}
    net = GeminiDDP(Routing("dict", "dataclass"), whole_modules=["layers.0.mixture", Mixture], **sizes)
    optimizer = GeminiAdamOptimizer(net, lr=0.02, initial_scale=2.0**5)
    x, y = batches(2, 1)[0]
    x, y = x[4 * rank : 4 * rank + 4], y[4 * rank : 4 * rank + 4]
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y)
        optimizer.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    gpc.destroy()
