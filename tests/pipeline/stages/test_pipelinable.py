"""Models cut by the order in which their layers run."""

import pytest
import torch
from torch import nn

from colossalai.pipeline.stages._pipelinable import PipelinableContext

pytestmark = pytest.mark.unit


class Net(nn.Module):
    """A small convolutional network, its layers registered in another order than they run in."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 5)
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.relu = nn.ReLU()
        self.layers = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1))
        self.pool = nn.AdaptiveAvgPool2d(2)

    def forward(self, x):
        return self.fc(torch.flatten(self.pool(self.layers(self.relu(self.conv(x)))), 1) * 2)


SEQ = [
    "conv",
    "relu",
    "layers.0",
    "layers.1",
    "layers.2",
    "pool",
    (lambda x: torch.flatten(x, 1), "behind"),
    (lambda x: x * 2, "front"),
    "fc",
]


def build(policy="balanced", exec_seq=SEQ):
    torch.manual_seed(0)
    context = PipelinableContext(policy)
    with context:
        model = Net()
    context.to_layer_list(exec_seq)
    return model, context


@pytest.mark.parametrize("policy", ["balanced", "uniform"])
@pytest.mark.parametrize(("num_chunks", "size"), [(1, 1), (1, 2), (1, 4), (2, 2)])
def test_parts_make_the_whole(policy, num_chunks, size):
    model, context = build(policy)
    ranks = [context.partition(num_chunks, size, rank) for rank in range(size)]
    chunks = [rank if num_chunks == 1 else rank[c] for c in range(num_chunks) for rank in ranks]
    x = value = torch.randn(2, 3, 4, 4)
    for chunk in chunks:
        value = chunk(value)
    assert torch.equal(value, model(x))
    names = {name: param for rank in ranks for name, param in rank.named_parameters()}
    assert {name: id(p) for name, p in names.items()} == {n: id(p) for n, p in model.named_parameters()}
    for rank in ranks:
        assert set(rank.state_dict()) <= set(model.state_dict())
        assert all(rank.get_parameter(name) is param for name, param in rank.named_parameters())


def test_layers_and_functions_are_counted():
    context = PipelinableContext()
    with pytest.raises(ValueError, match="0 models were built"):
        _ = context.layers_count
    with context:
        Net()
    assert (context.layers_count, context.funcs_count) == (7, 0), "in the order of registration"
    context.to_layer_list(SEQ)
    assert (context.layers_count, context.funcs_count) == (7, 2)


def test_functions_stay_with_their_layer():
    _, context = build("uniform")
    # 7 layers on 7 ranks: flatten goes with the pool, the doubling with the last layer
    pool, last = (context.partition(1, 7, rank) for rank in (5, 6))
    assert pool(torch.ones(1, 4, 2, 2)).shape == (1, 16)
    fc = dict(last.named_modules())["fc"]
    x = torch.randn(1, 16)
    assert torch.equal(last(x), fc(x * 2))


def test_customized_cuts_where_the_user_says():
    seq = ["conv", "SPLIT_NODE", *SEQ[1:6], "SPLIT_NODE", *SEQ[6:]]
    with pytest.raises(ValueError, match="follows the layer"):
        build("customized", seq)
    seq = ["conv", "SPLIT_NODE", *SEQ[1:7], "SPLIT_NODE", *SEQ[7:]]
    _, context = build("customized", seq)
    assert set(context.partition(1, 3, 0).state_dict()) == {"conv.weight", "conv.bias"}
    assert set(context.partition(1, 3, 2).state_dict()) == {"fc.weight", "fc.bias"}
    with pytest.raises(ValueError, match="make 3 parts; 2 pipeline ranks x 1 chunks need 2"):
        context.partition(1, 2, 0)


def test_default_order_is_that_of_registration():
    context = PipelinableContext("uniform")
    with context:
        model = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.ReLU(), nn.Linear(3, 2)))
    first, last = context.partition(1, 2, 0), context.partition(1, 2, 1)
    assert set(first.state_dict()) == {"0.weight", "0.bias"}
    assert set(last.state_dict()) == {"1.1.weight", "1.1.bias"}
    x = torch.randn(1, 2)
    assert torch.equal(last(first(x)), model(x))


class Mixed(nn.Module):
    def forward(self, hidden, scale, ids=None):
        return hidden * scale + ids, scale


def test_layers_take_named_data_and_tuples():
    context = PipelinableContext("uniform")
    with context:
        nn.ModuleDict({"one": Mixed(), "two": Mixed()})
    context.to_layer_list(["one", "two"])
    one, two = context.partition(1, 2, 0), context.partition(1, 2, 1)
    data = {"hidden": torch.ones(2), "scale": 3, "ids": 1, "label": 0}
    received = one(**data)
    assert received[1] == 3
    assert two(*received, ids=1, label=0)[0].tolist() == [13, 13]


def test_nothing_is_recorded_outside():
    context = PipelinableContext()
    with context:
        nn.Sequential(nn.Linear(1, 1))
    nn.Sequential(nn.Linear(1, 1))
    context.to_layer_list()


@pytest.mark.parametrize(
    ("seq", "message"),
    [
        (["conv", "fd"], "exec_seq names 'fd', which is not a module of the model; there are .*'fc', 'conv'"),
        ([(torch.relu, "behind"), "fc"], "follows the layer"),
        (["fc", (torch.relu, "front")], "needs a layer"),
        (["fc", (torch.relu, "after")], "placed at 'after'"),
        (["fc", "relu", "fc"], "names .'fc'. twice"),
        ([], "needs a layer"),
    ],
)
def test_mistakes_are_named(seq, message):
    with pytest.raises(ValueError, match=message):
        build(exec_seq=seq)


def test_a_context_wants_one_model():
    context = PipelinableContext()
    with pytest.raises(ValueError, match="0 models"):
        context.to_layer_list()
    with context:
        nn.Sequential(nn.ReLU())
        nn.Sequential(nn.ReLU())
    with pytest.raises(ValueError, match="2 models"):
        context.to_layer_list()
    with pytest.raises(ValueError, match="policy='even'"):
        PipelinableContext("even")


def test_built_lazily_only_the_part_gets_memory():
    from colossalai.lazy import LazyInitContext

    context = PipelinableContext()
    torch.manual_seed(0)
    with LazyInitContext(), context:
        model = Net()
    context.to_layer_list(SEQ)
    part = context.partition(1, 2, 1)
    LazyInitContext.materialize(part)
    eager, _ = build()
    for name, param in part.named_parameters():
        assert torch.equal(param, eager.get_parameter(name))
    assert model.conv.weight.is_meta
