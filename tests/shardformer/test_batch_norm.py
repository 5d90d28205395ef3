"""Batch norms over replicas train as on one process with the whole batch; their kinds; what is refused."""

import copy

import pytest
import torch
from torch import nn

import colossalai
from colossalai.context import Layout, Mesh, relayout
from colossalai.core import global_context as gpc
from colossalai.model_zoo.resnet import ResNet
from colossalai.nn.parallel import Bucketed, FullySharded
from colossalai.pipeline import PipelineOptions
from colossalai.runtime import Plan, assemble
from colossalai.shardformer import follow_batches_once, sync_batch_norms
from tests.launched import on_ranks
from tests.parity.training import Run, check_runs, grouped_runs
from tests.ranks import run_ranks
from tests.shardformer.by_plan import first_step, run_by_plan
from tests.tiers import further

DP = Layout(data=2)
PP_DP = Layout(pipeline=2, data=2)


def resnet() -> nn.Module:
    return ResNet((1, 1), num_classes=5, small_input=True, width=4)


def in_stages(schedule):
    options = PipelineOptions(num_microbatches=2, partition="balanced", schedule=schedule)
    return {"layout": PP_DP, "pipeline": options, "data": Bucketed()}


def synchronized(**options) -> Run:
    """Return a run of a ResNet whose norms have the statistics of all replicas."""
    return run_by_plan(resnet, Plan(**{"layout": DP, "sync_batch_norm": True, **options}), "")


def statistics_of_a_step():
    model, book = first_step(synchronized())
    statistics = {name: each.tolist() for name, each in model.named_buffers()}
    return (
        statistics,
        [book.count(op, "dp") for op in ("all_gather", "all_reduce")],
        book.num_bytes("all_gather", "dp"),
    )


@pytest.mark.dist
def test_the_collectives_of_a_resnet():
    (statistics, counts, num_bytes), (others, _, _) = run_ranks(statistics_of_a_step, 2)
    assert statistics == others  # the same bits
    assert counts == [6, 6]  # stem, two blocks of two, shortcut
    assert num_bytes == 8 * sum(2 * channels + 1 for channels in (4, 4, 4, 8, 8, 8))  # to one other rank


RUNS = [
    synchronized(),
    synchronized(data=FullySharded()),
    synchronized(**in_stages("1f1b")),
    further(synchronized(recompute=["blocks.0", "blocks.1"])),  # test_a_recomputed_batch_is_followed_once
    further(synchronized(compile={"backend": "eager"})),
    further(synchronized(compile={"backend": "eager"}, recompute=True)),
    further(synchronized(**in_stages("zb-h1"))),
    further(synchronized(**in_stages("1f1b"), recompute=True)),
]


@pytest.mark.dist
@pytest.mark.parametrize(("num_ranks", "runs"), grouped_runs(RUNS))
def test_runs_are_one_process(num_ranks, runs):
    check_runs(num_ranks, runs)


NORMS = [
    (nn.BatchNorm1d(3), (7,)),
    (nn.BatchNorm1d(3, momentum=None), (7, 2)),
    (nn.BatchNorm2d(3, affine=False), (7, 2, 3)),
    (nn.BatchNorm3d(3, track_running_stats=False), (7, 2, 1, 3)),
    (nn.BatchNorm2d(3, momentum=0.3, eps=0.1), (7, 2, 3)),
]


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("num_own", [2, 7])  # 7: the other rank has no samples
@on_ranks(2)
def test_kinds_of_batch_norms_over_uneven_parts(num_own):
    """Compare the outputs, gradients and statistics of norms over parts of unequal sizes with the whole's."""
    axis, rank = gpc.mesh.axis("dp"), gpc.mesh.axis_rank("dp")
    generator = torch.Generator().manual_seed(1)
    for kind, (num_samples, *places) in NORMS:
        twin = copy.deepcopy(kind).double()
        for param in twin.parameters():  # which are ones and zeros at the start
            nn.init.uniform_(param, 0.5, 2.0, generator=generator)
        model = nn.Sequential(copy.deepcopy(twin))
        assert sync_batch_norms(model, axis) == 1
        norm = copy.deepcopy(model)[0]
        assert type(norm).__name__ == type(kind).__name__
        assert isinstance(norm, type(kind))
        for _ in range(2):
            x = torch.randn(num_samples, 3, *places, dtype=torch.float64, generator=generator) * 3 + 100
            wanted = x.clone().requires_grad_()
            own = x.split([num_own, num_samples - num_own])[rank].clone().requires_grad_()
            factors = torch.randn(x.shape, dtype=torch.float64, generator=generator)
            expected, found = twin(wanted), norm(own)
            own_factors = factors.split([num_own, num_samples - num_own])[rank]
            (expected * factors).sum().backward()
            (found * own_factors).sum().backward()
            parts = [num_own, num_samples - num_own]
            close(found, expected.split(parts)[rank])
            close(own.grad, wanted.grad.split(parts)[rank])
            for name, buffer in twin.named_buffers():
                close(norm.get_buffer(name), buffer)
        for name, param in twin.named_parameters():
            grad = norm.get_parameter(name).grad
            torch.distributed.all_reduce(grad)
            close(grad, param.grad)
        x = torch.randn(num_samples, 3, *places, dtype=torch.float64, generator=generator)
        close(norm.eval()(x), twin.eval()(x))


@on_ranks(2)
def test_statistics_of_sixteen_bits_are_of_thirty_two():
    """Statistics of bfloat16 are in float32, where a mean of 100 does not drown a deviation of 1."""
    axis, rank = gpc.mesh.axis("dp"), gpc.mesh.axis_rank("dp")
    model = nn.Sequential(nn.BatchNorm1d(3))
    twin = copy.deepcopy(model)
    sync_batch_norms(model, axis)
    x = (torch.randn(64, 3, generator=torch.Generator().manual_seed(1)) + 100).bfloat16()
    found = model(x.chunk(2)[rank])
    assert found.dtype == torch.bfloat16
    expected = twin(x.float())
    torch.testing.assert_close(found.float(), expected.chunk(2)[rank], rtol=0.01, atol=0.01)
    torch.testing.assert_close(model[0].running_var, twin[0].running_var, rtol=1e-5, atol=0)


class Own(nn.BatchNorm2d):
    """A batch norm that computes by itself."""

    def forward(self, x):
        return nn.functional.batch_norm(x, self.running_mean, self.running_var, training=True).relu()


@pytest.mark.unit
def test_a_forward_of_ones_own_is_refused_before_anything_changes():
    model = nn.Sequential(nn.BatchNorm2d(3), Own(3))
    with pytest.raises(
        ValueError, match=r"sync_batch_norm: '1' is a tests\S+\.Own, with a forward of its own"
    ):
        sync_batch_norms(model, Mesh({"dp": 2}, rank=0).axis("dp"))
    assert type(model[0]) is nn.BatchNorm2d


@pytest.mark.unit
def test_a_mode_that_cuts_the_batch_again_is_refused():
    with pytest.raises(
        ValueError, match="sync_batch_norm goes with tensor mode '1d' or none: mode '2d' cuts"
    ):
        Plan(layout=Layout(tensor=4, mode="2d"), sync_batch_norm=True)
    assert "sync_batch_norm=True" in str(Plan(sync_batch_norm=True))


@pytest.mark.unit
def test_one_replica_needs_nothing():
    model = nn.Sequential(nn.BatchNorm2d(3))
    assert sync_batch_norms(model, Mesh({"dp": 1}, rank=0).axis("dp")) == 1
    assert type(model[0]) is nn.BatchNorm2d


@pytest.mark.unit
@pytest.mark.parametrize("kind", [nn.BatchNorm2d, Own])
def test_a_recomputed_batch_is_followed_once(kind):
    model, twin = nn.Sequential(kind(3)), nn.Sequential(kind(3))
    assert len(follow_batches_once(model)) == 1
    assert isinstance(model[0], kind)
    x = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(1))
    (other := x.clone()).requires_grad_()
    x.requires_grad_()
    y = colossalai.nn.checkpoint(model, False, x)
    y.square().sum().backward()
    twin(other).square().sum().backward()
    torch.testing.assert_close(x.grad, other.grad)
    for name, buffer in twin.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer), name


def without_any():
    colossalai.launch_from_torch({}, verbose=False)
    relayout(DP)
    assemble(
        Plan(layout=DP, sync_batch_norm=True), nn.Linear(2, 2), mesh=gpc.mesh, device=torch.device("cpu")
    )


@pytest.mark.dist
def test_a_model_without_any_is_told(capfd):
    run_ranks(without_any, 2)
    assert "sync_batch_norm has no effect: Linear has no batch norms" in capfd.readouterr().out
