"""Gradients in flat buckets: the same training as in one process, one all-reduce for each bucket."""

import copy
import math

import pytest
import torch
from torch import nn

import colossalai
from colossalai.amp import Casts, NaiveFP16
from colossalai.communication import ledger
from colossalai.context import Mesh
from colossalai.core import global_context as gpc
from colossalai.nn.parallel import ArrivingParams, Bucketed
from colossalai.nn.parallel._buckets import call_on_grad, has_users_hooks, make_buckets, remove_owners
from colossalai.testing import ParityCase, Subject, check_parity, full_gradients, full_parameters
from tests.ranks import run_ranks
from tests.tiers import further
from tests.turns import run_each
from tests.zero.training import NoGradient, part_of

TINY_MB = 300 / 2**20  # 37 float64 elements


class Net(nn.Module):
    """A tied, a frozen and an unused parameter, one without gradient, and one that only some samples use."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(5, 7, bias=False)
        self.spare = nn.Linear(7, 7)
        self.rare = nn.Linear(7, 7)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        rare = (x[:, 0] > 0).nonzero().flatten()
        x = torch.tanh(self.embed(x))
        if len(rare):
            x = x.index_add(0, rare, self.rare(x[rare]))
        return NoGradient.apply(self.frozen(x), self.spare.weight) @ self.head.weight


def loss_of(model, batch):
    x, y = batch
    return nn.functional.cross_entropy(model(x), y)


def make_case(build_model, compute_loss):
    generator = torch.Generator().manual_seed(3)
    batches = []
    for step in range(4):
        x = torch.randn(16, 5, generator=generator)
        x[:, 0] = -1.0
        x[:step, 0] = 1.0  # at first nobody uses the rare layer, then only the first rank
        batches.append((x, torch.randint(5, (16,), generator=generator)))
    return ParityCase(
        build_model=build_model,
        build_optimizer=lambda params: torch.optim.AdamW(params, lr=0.1, weight_decay=0.1),
        compute_loss=compute_loss,
        batches=batches,
    )


def put(model, axis="dp", **options):
    """Apply the method, with tiny buckets, over the ranks of an axis."""
    options = {"bucket_cap_mb": TINY_MB, **options}
    arriving = ArrivingParams(model, Casts(), torch.device("cpu"))
    return Bucketed(**options).apply(model, blocks=[], replicas=gpc.mesh.axis(axis), arriving=arriving)


def parity(options, accumulation):
    colossalai.launch_from_torch(config={}, verbose=False)
    case = make_case(Net, loss_of)

    def apply(model):
        applied = put(model, **options)
        assert applied.module is model
        optimizer = case.build_optimizer(model.parameters())

        def step(batch):
            optimizer.zero_grad()
            applied.set_sync(False)
            # As in a pipeline: all forwards come before the first backward.
            losses = [
                loss_of(model, part) for part in zip(*(t.chunk(accumulation) for t in batch), strict=True)
            ]
            for loss in losses[:-1]:
                (loss / accumulation).backward()
            applied.set_sync(True)
            (losses[-1] / accumulation).backward()
            applied.finish()
            optimizer.step()
            return sum(loss.detach() for loss in losses) / accumulation

        return Subject(
            step=step,
            gradients=lambda: full_gradients(model),
            parameters=lambda: full_parameters(model),
        )

    losses = check_parity(case, apply)
    gpc.destroy()
    return losses


@pytest.mark.dist
@pytest.mark.parametrize(
    ("world_size", "cases"),
    [
        (2, [({}, 1), ({}, 4), ({"overlap": False}, 2), ({"bucket_cap_mb": 25}, 2)]),
        further(4, [({}, 2)]),
    ],
)
def test_parity(world_size, cases):
    for losses in run_each(world_size, parity, cases):
        assert all(len(of_rank) == 4 for of_rank in losses)


def parts_of_a_pipeline():
    """Two parts with a weight in common, each with its own last backward."""
    colossalai.launch_from_torch(config={}, verbose=False)

    def build():
        first, second = nn.Linear(5, 5), nn.Linear(5, 5)
        chunks = nn.ModuleList(
            [nn.Sequential(first, nn.Tanh(), nn.Linear(5, 5)), nn.Sequential(second, nn.Tanh())]
        )
        second.weight = first.weight
        return chunks

    def compute_loss(chunks, batch):
        return nn.functional.cross_entropy(chunks[1](chunks[0](batch[0])), batch[1])

    case = make_case(build, compute_loss)

    def apply(chunks):
        applied = put(chunks)
        optimizer = case.build_optimizer(chunks.parameters())

        def step(batch):
            optimizer.zero_grad()
            applied.set_sync(False)
            total = 0.0
            parts = list(zip(*(t.chunk(2) for t in batch), strict=True))
            for number, (x, y) in enumerate(parts):
                hidden = chunks[0](x)
                received = hidden.detach().requires_grad_()
                loss = nn.functional.cross_entropy(chunks[1](received), y) / 2
                if number == 1:
                    applied.set_sync(True, part=1)
                loss.backward()
                if number == 1:
                    applied.set_sync(True, part=0)
                hidden.backward(received.grad)
                total += loss.detach()
            applied.finish()
            optimizer.step()
            return total

        return Subject(
            step=step,
            gradients=lambda: full_gradients(chunks),
            parameters=lambda: full_parameters(chunks),
        )

    check_parity(case, apply)
    gpc.destroy()


@pytest.mark.dist
def test_parts_synchronize_one_by_one():
    run_ranks(parts_of_a_pipeline, 2)


def what_is_sent(overlap):
    colossalai.launch_from_torch(config={}, verbose=False)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(6)))
    applied = put(model, bucket_cap_mb=2 * 64 / 2**20, overlap=overlap)  # two weights of 64 bytes
    during = []
    with ledger() as book:
        for _ in range(2):
            for number in range(3):
                applied.set_sync(number == 2)
                x = torch.ones(2, 4, requires_grad=True)
                x.register_hook(lambda grad: during.append(book.count()))
                model(x).sum().backward()
            applied.finish()
    per_step = book.count("all_reduce", "dp") / 2, book.num_bytes() / 2
    gpc.destroy()
    return per_step, during


@pytest.mark.dist
@pytest.mark.parametrize("world_size", [further(2), 4])
def test_gradients_are_sent_once_and_early(world_size):
    p = world_size
    num_bytes = 6 * 64 + 6 * 4  # and one element for each parameter
    for per_step, during in run_ranks(what_is_sent, world_size, True):
        assert per_step == (3, 2 * (p - 1) / p * num_bytes)
        # When the gradient of the input is there, all buckets but the last weight's are on their way.
        assert during[:2] == [0, 0]
        assert during[2] >= 2
        assert during[3:5] == [3, 3]


@pytest.mark.dist
def test_nothing_is_sent_early_without_overlap():
    for per_step, during in run_ranks(what_is_sent, 2, False):
        assert per_step == (3, 6 * 64 + 6 * 4)
        assert during == [0, 0, 0, 3, 3, 3]


def unfrozen_later():
    """A layer that was frozen when buckets were laid out trains as in one process."""
    colossalai.launch_from_torch(config={}, verbose=False)
    case = make_case(Net, loss_of)
    torch.manual_seed(0)
    twin = Net().double()
    model = copy.deepcopy(twin)
    applied = put(model)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (twin, model)]
    for step, (x, y) in enumerate(case.batches):
        for each in (twin, model):
            each.frozen.requires_grad_(step in (1, 3))
            each.zero_grad()
        loss_of(twin, (x.double(), y)).backward()
        loss_of(model, (part_of(x.double()), part_of(y))).backward()
        applied.finish()
        for optimizer in optimizers:
            optimizer.step()
        torch.testing.assert_close(model.state_dict(), twin.state_dict())
    gpc.destroy()


@pytest.mark.dist
def test_a_layer_that_is_unfrozen_later_is_averaged():
    run_ranks(unfrozen_later, 2)


def edges():
    colossalai.launch_from_torch(config={}, verbose=False)
    applied = put(nn.Linear(2, 2))
    model = applied.module
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(ValueError, match="after its average was started"):
        model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(ValueError, match="call finish first"):
        applied.set_sync(False)
    applied.finish()
    applied = put(nn.Embedding(3, 2, sparse=True))  # who drops it has given up its buckets
    with pytest.raises(ValueError, match="sparse=False"):
        applied.module(torch.tensor([1])).sum().backward()

    # The memory of a gradient is its bucket's, whatever zero_grad did.
    applied = put(nn.Linear(2, 2))
    linear = applied.module
    places = set()
    for set_to_none in (True, False, True):
        linear.zero_grad(set_to_none=set_to_none)
        linear(torch.full((1, 2), 1.0 + gpc.get_global_rank())).sum().backward()
        applied.finish()
        places.add(linear.weight.grad.data_ptr())
        assert linear.weight.grad.tolist() == [[1.5, 1.5], [1.5, 1.5]]
    assert len(places) == 1

    applied = put(nn.BatchNorm1d(2))
    norm = applied.module
    norm(torch.randn(4, 2, generator=torch.Generator().manual_seed(gpc.get_global_rank()))).sum().backward()
    applied.finish()
    bare = put(nn.Linear(1, 1), "tp")
    bare.set_sync(True)
    bare.finish()
    statistics = norm.running_mean.tolist()
    gpc.destroy()
    return statistics


@pytest.mark.dist
def test_edges():
    first, second = run_ranks(edges, 2)
    assert first == second != [0.0, 0.0]


def another_order_on_each_rank():
    colossalai.launch_from_torch(config={}, verbose=False)
    branches = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(4))
    whole = nn.Sequential(branches)
    applied = put(whole, bucket_cap_mb=4 / 2**20)  # a bucket for each weight
    order = list(range(4))
    for number in order if gpc.get_global_rank() == 0 else reversed(order):
        branches[number](torch.full((1, 1), 1.0 + number)).sum().backward()
    applied.finish()
    grads = [branch.weight.grad.item() for branch in branches]
    gpc.destroy()
    return grads


@pytest.mark.dist
def test_buckets_start_in_one_order():
    assert run_ranks(another_order_on_each_rank, 2) == [[1.0, 2.0, 3.0, 4.0]] * 2


def naive_with_buckets():
    colossalai.launch_from_torch(config={}, verbose=False)
    linear = nn.Linear(1, 1, bias=False)
    NaiveFP16().convert_model(linear, float32_grads=True)
    applied = put(linear)
    values = [1.0, *[2.0**-12] * 4]
    for number, value in enumerate(values):
        applied.set_sync(number == len(values) - 1)
        linear(
            torch.full((1, 1), value * (1 + 2 * gpc.get_global_rank()), dtype=torch.float16)
        ).float().sum().backward()
    applied.finish()
    grad = linear.weight.grad
    gpc.destroy()
    return grad.dtype, grad.item()


@pytest.mark.dist
def test_naive_gradients_stay_float32():
    for dtype, grad in run_ranks(naive_with_buckets, 2):
        assert (dtype, grad) == (torch.float32, 2 * (1 + 2.0**-10))


@pytest.mark.unit
def test_buckets_have_one_dtype_and_a_cap():
    shapes = [(10,), (3, 4), (30,), (5,), (2, 2), ()]
    params = [nn.Parameter(torch.ones(shape)) for shape in shapes]
    params[4].data = params[4].data.double()
    buckets = make_buckets(params, Mesh({"dp": 2}, rank=0).axis("dp"), cap_bytes=100)
    number_of = {param: number for number, param in enumerate(params)}
    laid_out = [[number_of[param] for param in bucket.params] for bucket in buckets]
    assert laid_out == [[0, 1], [2], [3, 5], [4]]
    for bucket in buckets:
        assert [view.shape for view in bucket.views] == [param.shape for param in bucket.params]
        assert {view.dtype for view in bucket.views} == {bucket.params[0].dtype}
        assert bucket.flat.numel() == sum(math.prod(p.shape) for p in bucket.params) + len(bucket.params)
        for index, view in enumerate(bucket.views):
            view.fill_(index + 1.0)
        bucket.marks.fill_(-1.0)
        sizes = [view.numel() for view in bucket.views]
        expected = [float(i + 1) for i, size in enumerate(sizes) for _ in range(size)] + [-1.0] * len(sizes)
        assert bucket.flat.tolist() == expected


@pytest.mark.unit
def test_a_bucket_has_a_size():
    with pytest.raises(ValueError, match="bucket_cap_mb is 0"):
        Bucketed(bucket_cap_mb=0)
    assert Bucketed() == Bucketed()


class Owner:
    """The owner of hooks; it keeps the numbers that it is called with."""

    def __init__(self):
        self.numbers = []

    @staticmethod
    def note(find_owner, number, param):
        find_owner().numbers.append(number)


@pytest.mark.unit
def test_a_parameter_has_one_owner():
    param, earlier, owner = nn.Parameter(torch.ones(2)), Owner(), Owner()
    for number, each in enumerate((earlier, owner)):
        call_on_grad(param, Owner.note, each, number)
    param.sum().backward()
    assert (earlier.numbers, owner.numbers) == ([], [1])
    assert not has_users_hooks(param)
    remove_owners([param])
    param.sum().backward()
    assert owner.numbers == [1]
