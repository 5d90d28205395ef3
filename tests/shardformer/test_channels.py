"""Convolutions and norms cut by channels, by a plan, train as on one process; what is cut and what is not."""

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from colossalai.checkpoint_io import load_model, save_model
from colossalai.context import Layout, Mesh
from colossalai.core import global_context as gpc
from colossalai.lazy import LazyInitContext, Materialization
from colossalai.model_zoo.resnet import ResNet
from colossalai.nn.parallel import Bucketed
from colossalai.pipeline import PipelineOptions
from colossalai.runtime import Plan, assemble
from colossalai.shardformer import Rule, shard_model
from colossalai.tensor import PaddedSpec, spec_of
from tests.parity.training import SEED, Run, check_runs, grouped_runs, in_float64, whole
from tests.ranks import run_ranks
from tests.shardformer.by_plan import build_plain, first_step, images, run_by_plan
from tests.tiers import further

TP = Layout(tensor=2, mode="1d")
BY_FOUR = Layout(tensor=4, mode="1d")
DP_TP = Layout(data=2, tensor=2, mode="1d")
PP_TP = Layout(pipeline=2, tensor=2, mode="1d")
STAGES = PipelineOptions(num_microbatches=2, partition="balanced")

BLOCK = Rule(columns=("conv1",), channel_norms=("norm1",), rows=("conv2",), outside=("norm2", "shortcut"))
HEADS, SPLITS = Rule(heads=("classifier",)), Rule(splits=("classifier",))


def resnet() -> nn.Module:
    """Return a ResNet of two stages with five classes, which two ranks do not divide."""
    return ResNet((1, 1), num_classes=5, small_input=True, width=4)


def cuts_of(classifier: Rule) -> dict[str, Rule]:
    return {"blocks.0": BLOCK, "blocks.1": BLOCK, "": classifier}


def cut_by_channels(classifier, **options) -> Run:
    """Return a run of a ResNet whose blocks and classifier are cut."""
    plan = Plan(**{"layout": TP, "cuts": cuts_of(classifier), **options})
    return run_by_plan(resnet, plan, "stem", "shortcut")


def count_collectives():
    _, book = first_step(cut_by_channels(HEADS))
    return {(entry.op, entry.axis): book.count(entry.op, entry.axis) for entry in book.entries}


@pytest.mark.dist
def test_the_collectives_of_a_resnet():
    counts, _ = run_ranks(count_collectives, 2)
    # A block sums behind its row, and in the backward the gradient before its column; so does the head.
    assert counts == {("all_reduce", "tp"): 2 * 2 + 1, ("all_gather", "tp"): 1}


class Mixed(nn.Module):
    """Convolutions in one to three dimensions, with every kind of cut."""

    def __init__(self, num_dims: int):
        super().__init__()
        conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[num_dims - 1]
        batch_norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[num_dims - 1]
        self.up = conv(3, 8, 3, padding=1, padding_mode="circular")
        self.norm = batch_norm(8, affine=num_dims != 2)
        self.groups = nn.GroupNorm(4, 8)
        self.down = conv(8, 4, 2, stride=2, bias=num_dims != 3)
        self.gate = conv(4, 16, 1)
        self.gate_norm = batch_norm(16, momentum=None)
        self.join = conv(8, 6, 1)
        self.head = conv(6, 5, 1)
        self.last = conv(5, 4, 1)
        self.fewer = conv(4, 5, 1)

    def forward(self, x):
        hidden = self.down(self.groups(self.norm(self.up(x)).tanh()))
        gate, value = self.gate_norm(self.gate(hidden)).chunk(2, dim=1)
        hidden = self.head(self.join(gate.sigmoid() * value)).softmax(dim=1)
        return self.fewer(self.last(hidden)).flatten(2).mean(2)


MIXED = Rule(
    columns=("up", "gate"),
    channel_norms=("norm", "groups", "gate_norm"),
    rows=("down", "join"),
    heads=("head",),  # five channels: padded
    splits=("fewer",),
    packed=("gate", "gate_norm"),
    outside=("last",),
)


def mixed(num_dims: int) -> Run:
    """Return a run of every kind of cut."""
    build = partial(Mixed, num_dims)
    plan = Plan(layout=TP, cuts={"": MIXED})
    run = run_by_plan(build, plan, "last", batches=partial(signals, num_dims))
    return replace(run, check=partial(check_without_a_batch, build, run.check))


def signals(num_dims):
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn((8, 3, *[4] * num_dims), generator=generator),
            torch.randint(5, (8,), generator=generator),
        )
        for _ in range(3)
    ]


def check_without_a_batch(build, check, wrapped):
    """Compare layers with those of the twin, which has the same start, over a sample without a batch."""
    check(wrapped)
    torch.manual_seed(SEED)
    with in_float64():
        model, twin = wrapped.unwrap(), build()
    x = signals(model.up.weight.dim() - 2)[0][0][0].double()
    six = x[:1].expand(6, *x.shape[1:])
    torch.testing.assert_close(model.down(model.up(x)), twin.down(twin.up(x)), rtol=0, atol=1e-10)
    found, expected = (each.fewer(each.last(each.head(six))) for each in (model, twin))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


RUNS = [
    cut_by_channels(HEADS),
    *(mixed(num_dims) for num_dims in (1, 2, 3)),
    cut_by_channels(SPLITS, layout=PP_TP, pipeline=STAGES, data=Bucketed()),
    further(cut_by_channels(SPLITS, layout=DP_TP, sync_batch_norm=True)),
    further(cut_by_channels(SPLITS, layout=BY_FOUR, recompute=["blocks.1"])),
]


@pytest.mark.dist
@pytest.mark.parametrize(("num_ranks", "runs"), grouped_runs(RUNS))
def test_runs_are_one_process(num_ranks, runs):
    check_runs(num_ranks, runs)


def outputs_of(path, layout, saves):
    """Save a model with a step behind it, or load one; return its state, whole, and what it gives."""
    model = build_plain(resnet, layout)
    if layout == TP:
        shard_model(model, gpc.mesh, cuts_of(HEADS))
    if saves:
        x, _ = images()[0]
        model(x.double())  # moves the running statistics
        save_model(model, path)
    else:
        with torch.no_grad():
            for tensor in model.state_dict(keep_vars=True).values():
                tensor.zero_()
        load_model(model, path)
    x, _ = images()[1]
    logits = model.eval()(x.double()).tolist()
    state = {name: whole(each, each).tolist() for name, each in model.state_dict(keep_vars=True).items()}
    return state, logits


@pytest.mark.dist
@pytest.mark.parametrize(("saved_on", "loaded_on"), [(2, 1), (1, 2)])
def test_a_checkpoint_has_the_whole(tmp_path, saved_on, loaded_on):
    layouts = {1: Layout(), 2: TP}
    path = str(tmp_path / "model.safetensors")
    saved = run_ranks(outputs_of, saved_on, path, layouts[saved_on], True)
    loaded = run_ranks(outputs_of, loaded_on, path, layouts[loaded_on], False)
    for state, logits in (*saved, *loaded):
        assert state == saved[0][0]
        assert torch.allclose(torch.tensor(logits), torch.tensor(saved[0][1]), rtol=0, atol=1e-12)


class Dropping(nn.Module):
    """A dropout between a column and a row convolution, and one behind them."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Conv2d(3, 64, 1, bias=False), nn.Conv2d(64, 8, 1)

    def forward(self, x):
        hidden = nn.functional.dropout(self.up(x), 0.5)
        return hidden, nn.functional.dropout(self.down(hidden), 0.5)


def dropped():
    model = build_plain(Dropping, TP)
    rule = Rule(columns=("up",), rows=("down",), draws=True)
    wrapped, _ = assemble(Plan(layout=TP, cuts={"": rule}), model, mesh=gpc.mesh, device=torch.device("cpu"))
    inner, outer = wrapped(torch.ones(2, 3, 4, 4, dtype=torch.float64))
    return (inner == 0).tolist(), outer.tolist()


@pytest.mark.dist
def test_masks_differ_between_channels_and_agree_behind_the_row():
    (first, outer), (second, other_outer) = run_ranks(dropped, 2)
    assert first != second
    assert outer == other_outer
    assert 0.0 in torch.tensor(outer)


@pytest.mark.unit
def test_layers_stay_what_they_are():
    model = resnet()
    names, shapes = zip(
        *[(name, tuple(each.shape)) for name, each in model.state_dict().items()], strict=True
    )
    block = model.blocks[1]
    kept, values = block.conv1.weight, block.conv1.weight.detach().clone()
    statistics = block.norm1.running_mean.copy_(torch.arange(8.0)).clone()
    assert shard_model(model, Mesh({"tp": 2}, rank=1), cuts_of(HEADS)) == 3
    assert block.conv1.weight is kept
    assert torch.equal(kept, values[4:])
    assert tuple(block.conv2.weight.shape) == (8, 4, 3, 3)
    assert torch.equal(block.norm1.running_mean, statistics[4:])
    assert block.norm1.num_batches_tracked.shape == ()
    assert [type(block.conv1).__name__, type(block.norm1).__name__] == ["Conv2d", "BatchNorm2d"]
    assert isinstance(block.conv1, nn.Conv2d)
    assert isinstance(block.norm1, nn.BatchNorm2d)
    state = model.state_dict(keep_vars=True)
    assert tuple(state) == names
    wholes = [
        tuple(each.shape) if spec_of(each) is None else spec_of(each).whole_shape for each in state.values()
    ]
    assert tuple(wholes) == shapes


@pytest.mark.unit
def test_buffers_keep_their_specs():
    model = resnet()
    shard_model(model, Mesh({"tp": 2}, rank=1), cuts_of(HEADS))
    spec = spec_of(model.blocks[0].norm1.running_var)
    for changed in (copy.deepcopy(model), copy.deepcopy(model).double()):
        assert spec_of(changed.blocks[0].norm1.running_var) == spec
    model.load_state_dict({name: each.clone() for name, each in model.state_dict().items()}, assign=True)
    assert spec_of(model.state_dict(keep_vars=True)["blocks.0.norm1.running_var"]) == spec


@pytest.mark.unit
def test_a_lazily_built_one_is_cut_before_it_has_memory():
    torch.manual_seed(3)
    eager = resnet()
    torch.manual_seed(3)
    with LazyInitContext():
        model = resnet()
    shard_model(model, Mesh({"tp": 2}, rank=1), cuts_of(HEADS))
    Materialization(model).all()
    for name, tensor in model.state_dict(keep_vars=True).items():
        spec, expected = spec_of(tensor), eager.state_dict()[name]
        assert torch.equal(tensor, expected if spec is None else spec.slice_of(expected)), name


class Scaled(nn.Conv2d):
    """A convolution that does more."""

    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("layer", "rule", "message"),
    [
        (nn.Conv2d(4, 8, 1, groups=2), Rule(columns=("layer",)), "layer has groups=2, whose channels do not"),
        (nn.Conv2d(4, 5, 1), Rule(columns=("layer",)), "its number of output features of layer is 5, which"),
        (nn.Conv1d(5, 4, 1), Rule(rows=("layer",)), "its number of input features of layer is 5, which"),
        (nn.Conv3d(5, 4, 1), Rule(splits=("layer",)), "its number of input features of layer is 5, which"),
        (
            nn.Conv2d(4, 6, 1),
            Rule(columns=("layer",), packed=("layer",)),
            "features of each half of layer is 3",
        ),
        (Scaled(4, 4, 1), Rule(rows=("layer",)), "layer is a Scaled with a forward or a weight of its own"),
        (
            nn.ConvTranspose2d(4, 4, 1),
            Rule(rows=("layer",)),
            "ConvTranspose2d, and only torch.nn.Linear, Conv1d",
        ),
        (nn.BatchNorm1d(5), Rule(channel_norms=("layer",)), "its number of channels of layer is 5, which"),
        (nn.GroupNorm(3, 12), Rule(channel_norms=("layer",)), "its number of groups of layer is 3, which"),
        (
            nn.GroupNorm(2, 12),
            Rule(channel_norms=("layer",), packed=("layer",)),
            "its number of groups of each half of layer is 1, which",
        ),
        (
            nn.InstanceNorm1d(4),
            Rule(channel_norms=("layer",)),
            "InstanceNorm1d, and only torch.nn.BatchNorm1d",
        ),
    ],
)
def test_what_cannot_be_cut_is_refused(layer, rule, message):
    model = nn.Module()
    model.layer = layer
    with pytest.raises(ValueError, match=message):
        shard_model(model, Mesh({"tp": 2}, rank=0), {"": rule})
    assert not any(spec_of(each) for each in model.state_dict(keep_vars=True).values())


@pytest.mark.unit
def test_what_has_been_cut_is_refused():
    model = resnet()
    cuts = {"blocks.0": BLOCK}
    shard_model(model, Mesh({"tp": 2}, rank=0), cuts)
    with pytest.raises(ValueError, match="its conv1 has been cut already"):
        shard_model(model, Mesh({"tp": 2}, rank=0), cuts)
    with pytest.raises(ValueError, match="its norm1 has been cut already"):
        shard_model(model, Mesh({"tp": 2}, rank=0), {"blocks.0": Rule(channel_norms=("norm1",))})


@pytest.mark.unit
def test_the_output_channels_of_a_head_are_padded():
    model = nn.Module()
    model.head = nn.Conv2d(4, 5, 3)
    shard_model(model, Mesh({"tp": 2}, rank=0), {"": Rule(heads=("head",))})
    spec = spec_of(model.head.weight)
    assert isinstance(spec, PaddedSpec)
    assert spec.whole_shape == (5, 4, 3, 3)
    assert tuple(model.head.bias.shape) == (3,)
