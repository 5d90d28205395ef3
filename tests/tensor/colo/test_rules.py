"""Rules compute with slices: they send what they say, and values and gradients are those of one process."""

import copy
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import colossalai
from colossalai.communication import ledger
from colossalai.tensor import (
    ColoParameter,
    ColoTensor,
    ColoTensorSpec,
    ComputePattern,
    ComputeSpec,
    DistSpecManager,
    ProcessGroup,
    ReplicaSpec,
    ShardSpec,
    spec_of,
)
from colossalai.tensor.colo import _elementwise, _products, _views
from tests.launched import on_ranks
from tests.ranks import run_ranks

pytestmark = pytest.mark.dist

IDS = torch.tensor([[0, 3, 7], [5, 5, 2]])


class Case(NamedTuple):
    """A function, the shapes of its arguments, how each is cut, and what is sent."""

    run: Callable[..., torch.Tensor]
    shapes: tuple[tuple[int, ...], ...]
    dims: tuple[int | None, ...]
    forward: tuple[str, ...] = ()
    backward: tuple[str, ...] = ()


ONE, GATHER, SUM = (4, 6), "all_gather", "all_reduce"
CASES = {
    "linear, out": Case(F.linear, ((3, 4, 6), (8, 6), (8,)), (None, 0, 0), (), (SUM,)),
    "linear, out, whole bias": Case(F.linear, ((3, 4, 6), (8, 6), (8,)), (None, 0, None), (), (SUM, GATHER)),
    "linear, in": Case(F.linear, ((4, 6), (8, 6), (8,)), (None, 1, None), (SUM,), (GATHER,)),
    "linear, in, both": Case(F.linear, ((4, 6), (8, 6)), (1, 1), (SUM,)),
    "linear of other rows": Case(F.linear, ((4, 6), (8, 6), (8,)), (0, None, None), (), (SUM, SUM)),
    "addmm, out": Case(torch.addmm, ((8,), (4, 6), (6, 8)), (0, None, 1), (), (SUM,)),
    "addmm, in": Case(torch.addmm, ((8,), (4, 6), (6, 8)), (None, 1, 0), (SUM,)),
    "mm, rows": Case(torch.mm, ((4, 6), (6, 8)), (0, None), (), (SUM,)),
    "mm, contracted": Case(torch.mm, ((4, 6), (6, 8)), (1, None), (SUM,), (GATHER,)),
    "matmul, columns": Case(torch.matmul, ((2, 4, 6), (6, 8)), (None, 1), (), (SUM,)),
    "operator": Case(lambda a, b: a @ b, ((2, 4, 6), (6, 8)), (0, None), (), (SUM,)),
    "bmm, batch": Case(torch.bmm, ((4, 2, 6), (4, 6, 3)), (0, 0)),
    "embedding, features": Case(lambda w: F.embedding(IDS, w), ((8, 6),), (1,)),
    "embedding, rows": Case(lambda w: F.embedding(IDS, w, padding_idx=3), ((8, 6),), (0,), (SUM,)),
    "layer norm": Case(
        lambda x, w, b: F.layer_norm(x, (6,), w, b), ((4, 6), (6,), (6,)), (0, None, None), (), (SUM, SUM)
    ),
    "cross entropy": Case(
        lambda x: F.cross_entropy(x, torch.tensor([1, -100, 5, 2])), (ONE,), (1,), (SUM, SUM, SUM)
    ),
    "cross entropy, sum": Case(
        lambda x: F.cross_entropy(x, torch.tensor([1, 0, 5, 2]), reduction="sum"), (ONE,), (1,), (SUM,) * 3
    ),
    "elementwise": Case(lambda x: torch.tanh(0.5 * x + 1.0) * F.gelu(x) ** 2, (ONE,), (1,)),
    "elementwise, two": Case(lambda a, b: a * b - torch.exp(a) / 2, (ONE, ONE), (0, 0)),
    "elementwise, a whole one": Case(lambda a, b: a + b, (ONE, ONE), (1, None), (), (GATHER,)),
    "elementwise, broadcast": Case(lambda a, b: a * b, (ONE, (4, 1)), (1, None), (), (SUM,)),
    "elementwise, fewer dims": Case(lambda a, b: a * b, (ONE, (6,)), (0, None), (), (SUM,)),
    "elementwise, aligned": Case(lambda a, b: a * b, (ONE, (6,)), (1, 0)),
    "view": Case(lambda x: x.view(-1, 6) * 2, ((2, 4, 6),), (2,)),
    "view, of the slice": Case(lambda x: x.reshape(2, -1, x.shape[-1]), ((2, 2, 2, 6),), (3,)),
    "transpose": Case(lambda x: x.transpose(0, 1).unsqueeze(0).permute(2, 0, 1), (ONE,), (1,)),
    "T": Case(lambda x: x.T, (ONE,), (0,)),
    "split": Case(lambda x: x.split(2, dim=1)[1] * 3, (ONE,), (0,)),
    "expand": Case(lambda x: x.expand(3, -1, -1), ((1, 4, 6),), (2,)),
    "squeeze": Case(lambda x: x.squeeze(0), ((1, 4, 6),), (1,)),
    "clone": Case(lambda x: x.clone().contiguous().double(), (ONE,), (1,)),
    "dropout in eval": Case(lambda x: F.dropout(x, 0.5, False), (ONE,), (1,)),
}


def run_case(name: str) -> None:
    """Compare a function of cut arguments with that of whole ones, forward and backward."""
    case, group = CASES[name], ProcessGroup(tp_degree=2)
    torch.manual_seed(0)
    wholes = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in case.shapes]
    given = []
    for tensor, dim in zip(wholes, case.dims, strict=True):
        one: Any = ColoParameter(tensor.detach().clone())
        one.set_process_group(group)
        if dim is not None:
            one.set_dist_spec(ShardSpec([dim], [2]))
        given.append(one)
    wanted = case.run(*wholes)
    with ledger() as forward:
        found = case.run(*given)
    assert [entry.op for entry in forward.entries] == list(case.forward)
    weight = torch.randn(wanted.shape, dtype=torch.float64)
    (wanted * weight).sum().backward()
    whole = found.to_replicate() if isinstance(found, ColoTensor) else found
    loss = torch.sum(whole.as_subclass(torch.Tensor) * weight)
    with ledger() as backward:
        loss.backward()
    assert sorted(entry.op for entry in backward.entries) == sorted(case.backward)
    torch.testing.assert_close(whole.data, wanted.detach(), rtol=0, atol=1e-12)
    for one, other in zip(given, wholes, strict=True):
        spec = spec_of(one)
        expected = other.grad if spec is None else spec.cut(other.grad)
        torch.testing.assert_close(one.grad, expected, rtol=0, atol=1e-12)


@on_ranks(2)
def test_rules_send_what_they_say_and_are_one_process() -> None:
    failed = []
    for name in CASES:
        try:
            run_case(name)
        except Exception as error:
            failed.append(f"{name}: {error!r}")
    assert not failed, "\n".join(failed)


KINDS = {
    _products: "products, lookups, norms, losses",
    _views: "views",
    _elementwise: "element by element",
}
PAGE = Path(__file__).resolve().parents[3] / "docs" / "features" / "colotensor.md"


def rules_table() -> list[str]:
    """Return the table of functions with rules, as the page shows it."""
    rows = []
    for module, kind in KINDS.items():
        names = {getattr(func, "__name__", "") for func, _ in module.rules()} - {"__get__"}
        shown = [name for name in sorted(names) if not name.startswith("_")]
        if module is _elementwise:
            shown = [name for name in shown if not (name.endswith("_") and name[:-1] in shown)]
            shown += [
                "their forms in place",
                "operators",
                "`torch._foreach_*` and `_fused_*` without gradients",
            ]
        rows.append(f"| {kind} | {', '.join(shown)} |")
    return rows


@pytest.mark.unit
def test_the_page_lists_the_functions_with_rules() -> None:
    lines = PAGE.read_text().splitlines()
    begin = lines.index("| kind | functions |") + 2
    assert lines[begin : begin + len(KINDS)] == rules_table()


@on_ranks(2)
def test_a_norm_of_slices_is_that_of_the_whole() -> None:
    """Ask for norms of a list of slices, as torch clips, and add to each, as its optimizers do."""
    group = ProcessGroup(tp_degree=2)
    tensor = ColoTensor.from_torch_tensor(torch.ones(2, 3), ColoTensorSpec(group, ShardSpec([0], [2])))
    with torch.no_grad():
        [norm] = torch._foreach_norm([tensor])
        [more] = torch._foreach_add([tensor], 1.0)
    assert norm.item() == pytest.approx(12**0.5)
    assert torch.equal(more.to_replicate().data, torch.full((4, 3), 2.0))


@on_ranks(2)
def test_conversions_are_recorded() -> None:
    """Convert in every way, with gradients."""
    group = ProcessGroup(tp_degree=2)
    whole = torch.arange(24.0).view(4, 6)
    rank = group.tp_local_rank()
    for source in (0, 1):
        leaf = whole.chunk(2, source)[rank].clone().requires_grad_()
        tensor = ColoTensor.from_torch_tensor(leaf, ColoTensorSpec(group, ShardSpec([source], [2])))
        moved = tensor.redistribute(ShardSpec([1 - source], [2]))
        assert torch.equal(moved.data, whole.chunk(2, 1 - source)[rank])
        changed = moved * moved
        changed.set_dist_spec(ReplicaSpec())
        assert type(changed) is ColoTensor
        assert changed.is_replicate()
        assert changed.shape == (4, 6)
        torch.sum(changed).backward()
        assert torch.equal(leaf.grad, 2 * leaf.detach())
        plain = DistSpecManager.handle_trans_spec(
            leaf.detach(), ShardSpec([source], [2]), ReplicaSpec(), group
        )
        assert torch.equal(plain, whole)
        assert (tensor.size_global(), tensor.size_local()) == ((4, 6), leaf.shape)
        assert tensor.numel_global() == 24
        assert tensor.is_shard_1drow() == (source == 0)
        for copied in (copy.deepcopy(tensor.detach()), pickle.loads(pickle.dumps(tensor.detach()))):
            assert torch.equal(copied.to_replicate().data, whole)
            assert copied.dist_spec == tensor.dist_spec


class Block(nn.Module):
    """A layer whose weight is cut."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the layer makes."""
        return torch.tanh(self.layer(x))


@on_ranks(2)
def test_autograd_gives_gradients_of_cut_parameters() -> None:
    """Ask autograd for gradients of parameters, through a recomputation."""
    group = ProcessGroup(tp_degree=2)
    block, alone = Block(), Block()
    weight = ColoParameter(block.layer.weight.detach().clone())
    weight.set_process_group(group)
    weight.set_tensor_spec(ShardSpec([0], [2]), ComputeSpec(ComputePattern.TP1D))
    block.layer.weight = weight
    x = torch.ones(3, 4, dtype=torch.float64)
    for use_reentrant in (False,):
        loss = checkpoint(block, x, use_reentrant=use_reentrant).square().sum()
        [found] = torch.autograd.grad(loss, [weight])
        [wanted] = torch.autograd.grad(alone(x).square().sum(), [alone.layer.weight])
        torch.testing.assert_close(found, spec_of(weight).cut(wanted), rtol=0, atol=1e-12)


@on_ranks(2)
def test_mistakes_are_named() -> None:
    group = ProcessGroup(tp_degree=2)

    def cut_one() -> ColoTensor:
        return ColoTensor.from_torch_tensor(torch.ones(2, 3), ColoTensorSpec(group, ShardSpec([0], [2])))

    def parameter(*shape: int) -> ColoParameter:
        made = ColoParameter(torch.ones(shape))
        made.set_process_group(group)
        return made

    mistakes: list[Callable[[], Any]] = [
        lambda: ShardSpec([0, 1], [2, 2]),
        lambda: parameter(4, 3).set_dist_spec(ShardSpec([1], [2])),
        lambda: parameter(4, 3).set_dist_spec(ShardSpec([0], [4])),
        lambda: parameter(4, 3).set_dist_spec(ShardSpec([2], [2])),
        lambda: ComputeSpec(ComputePattern.TP2D),
        lambda: cut_one().set_process_group(ProcessGroup(dp_degree=2)),
        lambda: cut_one().cumsum_(0),
        lambda: torch.add(torch.ones(2, 3), torch.ones(2, 3), out=cut_one()),
        lambda: cut_one() + torch.ones(2, 3),
        lambda: ProcessGroup(tp_degree=3),
        lambda: ProcessGroup(tp_degree=2, dp_degree=2),
    ]
    said = []
    for mistake in mistakes:
        try:
            said.append(f"nothing: {mistake()}")
        except (ValueError, NotImplementedError) as error:
            said.append(f"{type(error).__name__}: {error}")
    wanted = (
        *("along one dimension", "which do not divide", "give \\[pg.tp_world_size", "has 2 dim"),
        *("NotImplementedError: .*colossalai.nn", "is cut over", "cumsum_ writes into", "add writes into"),
        *("extent 2 of a slice", "must divide the 2 ranks", "are 4 ranks"),
    )
    for text, part in zip(said, wanted, strict=True):
        assert re.search(part, text), text


def warned() -> list[str]:
    """Return what is logged of a function without a rule, twice."""
    colossalai.launch_from_torch({}, verbose=False)
    group = ProcessGroup(tp_degree=2)
    tensor = ColoTensor.from_torch_tensor(torch.ones(2, 3), ColoTensorSpec(group, ShardSpec([0], [2])))
    for _ in range(2):
        assert torch.equal(tensor.cumsum(0), torch.ones(4, 3).cumsum(0))
    return []


def test_a_function_without_a_rule_is_said_once(capfd: pytest.CaptureFixture[str]) -> None:
    run_ranks(warned, 2)
    assert capfd.readouterr().out.count("cumsum has no rule") == 1


LOGITS = torch.arange(24.0, dtype=torch.float64).view(4, 6).sin()
ROWS = torch.arange(48.0, dtype=torch.float64).view(8, 6).sin()
NOT_A_CLASS = "labels out of range: they are from .*{}.*, of 6 classes, from 0"
NOT_A_ROW = "ids out of range: they are from .*{}.*, of 8 rows, from 0"
AS_TORCH: dict[str, tuple[Callable[[torch.Tensor], Any], torch.Tensor, int, str]] = {
    # What is called, the whole of its argument, where that is cut, and what its error says; empty: none.
    "label 6": (lambda x: F.cross_entropy(x, torch.tensor([1, 6, 5, 2])), LOGITS, 1, NOT_A_CLASS.format(6)),
    "label -1": (
        lambda x: F.cross_entropy(x, torch.tensor([1, -1, -100, 2]), reduction="sum"),
        LOGITS,
        1,
        NOT_A_CLASS.format(-1),
    ),
    "ignored label": (
        lambda x: F.cross_entropy(x, torch.tensor([1, 77, -2, 2]), ignore_index=77),
        LOGITS,
        1,
        NOT_A_CLASS.format(-2),
    ),
    "only ignored ones": (
        lambda x: F.cross_entropy(x, torch.tensor([1, 77, 5, 77]), ignore_index=77, reduction="none"),
        LOGITS,
        1,
        "",
    ),
    "id 8": (lambda w: F.embedding(torch.tensor([[0, 8]]), w), ROWS, 0, NOT_A_ROW.format(8)),
    "id -1": (lambda w: F.embedding(torch.tensor([3, -1]), w, 3), ROWS, 0, NOT_A_ROW.format(-1)),
    "id 8, features": (lambda w: F.embedding(torch.tensor([[0, 8]]), w), ROWS, 1, "out of range"),
    "no ids": (lambda w: F.embedding(torch.empty(0, 2, dtype=torch.int64), w), ROWS, 0, ""),
    "padding_idx 8": (lambda w: F.embedding(IDS, w, 8), ROWS, 0, "num_embeddings"),
    "too few labels": (lambda x: F.cross_entropy(x, torch.tensor([1])), LOGITS, 1, "batch_size"),
    "reduction": (
        lambda x: F.cross_entropy(x, torch.tensor([1, 0, 5, 2]), reduction="average"),
        LOGITS,
        1,
        "average is not a valid",
    ),
    "size_average": (
        lambda x: F.cross_entropy(x, torch.tensor([1, 0, 5, 2]), size_average=False),
        LOGITS,
        1,
        "",
    ),
    "reduce": (lambda x: F.cross_entropy(x, torch.tensor([1, 0, 5, 2]), reduce=False), LOGITS, 1, ""),
    "max_norm": (lambda w: F.embedding(IDS, w, max_norm=0.0), ROWS, 0, ""),
}


def outcome(call: Callable[[torch.Tensor], Any], value: torch.Tensor) -> Any:
    """Return what a call returns, or the type and text of its error."""
    try:
        found = call(value)
    except Exception as error:
        return type(error).__name__, str(error)
    return found.to_replicate().data if isinstance(found, ColoTensor) else found


@on_ranks(2)
def test_what_torch_refuses_is_refused_on_all_ranks() -> None:
    """Calls with cut arguments do what those with whole ones do, and nothing is sent by a mistake."""
    group, wrong = ProcessGroup(tp_degree=2), []
    for name, (call, value, dim, said) in AS_TORCH.items():
        part = value.chunk(2, dim)[group.tp_local_rank()].clone()
        cut = ColoTensor.from_torch_tensor(part, ColoTensorSpec(group, ShardSpec([dim], [2])))
        wanted = outcome(call, value.clone())
        with ledger() as sent, torch.no_grad():
            found = outcome(call, cut)
        if isinstance(wanted, torch.Tensor):
            is_right = isinstance(found, torch.Tensor) and torch.allclose(found, wanted) and not said
        else:
            is_right = isinstance(found, tuple) and found[0] == wanted[0]
            is_right = is_right and re.search(said, found[1]) is not None
            is_right = is_right and not (sent.entries and wanted[0] == "IndexError")
        if not is_right:
            wrong.append(f"{name}: {found}, not {wanted}; sent {[entry.op for entry in sent.entries]}")
    assert not wrong, "\n".join(wrong)


@on_ranks(2)
def test_a_view_with_two_meanings_is_refused() -> None:
    """It fits the slice and the whole; others have one meaning."""
    group = ProcessGroup(tp_degree=2)
    rank, said = group.tp_local_rank(), []

    def cut(value: torch.Tensor, dim: int) -> ColoTensor:
        part = value.chunk(2, dim)[rank].clone()
        return ColoTensor.from_torch_tensor(part, ColoTensorSpec(group, ShardSpec([dim], [2])))

    whole = torch.arange(24.0).view(2, 3, 4)
    x = cut(whole, 2)  # a slice of shape (2, 3, 2): two heads of two features on two ranks
    for refused in ((2, 3, -1, 2), (-1, 2), (6, -1, 2)):
        try:
            said.append(f"nothing: {x.view(*refused).shape}")
        except ValueError as error:
            said.append(str(error))
    for shape in ((-1, x.shape[-1]), (-1, x.size(2)), (6, 2), (-1, 4), (6, -1), (6, *x.size()[2:])):
        found = x.reshape(shape)
        assert found.shape == (6, 2), shape
        assert torch.equal(found.to_replicate().data, whole.view(6, 4)), shape
    extent = pickle.loads(pickle.dumps(x.shape[-1]))
    assert (type(extent), type(x.shape[0]), x.shape) == (int, int, (2, 3, 2))
    y = cut(whole.view(2, 12), 0)  # a slice of shape (1, 12)
    try:
        said.append(f"nothing: {y.view(1, 1, 12).shape}")
    except ValueError as error:
        said.append(str(error))
    assert torch.equal(y.view(1, *y.shape).to_replicate().data, whole.view(1, 2, 12))
    for text in said[:3]:
        assert re.search(r"fits the slice, of shape \(2, 3, 2\), and the whole, \(2, 3, 4\)", text), text
    assert "more than one dimension" in said[3]


@on_ranks(2)
def test_copies_and_flags_are_those_of_torch() -> None:
    """Copy parameters with compute specs, and make tensors of tensors that are trained or not."""
    group = ProcessGroup(tp_degree=2)
    compute = ComputeSpec(ComputePattern.TP1D)
    model = nn.ParameterList()
    for _ in range(2):
        param = ColoParameter(torch.ones(4, 4))
        param.set_process_group(group)
        param.set_tensor_spec(ShardSpec([0], [2]), compute)
        model.append(param)
    copied = copy.deepcopy(model)
    copied[0].compute_spec.set_output_replicate(False)
    assert compute.output_replicate
    assert copied[1].compute_spec is copied[0].compute_spec  # as those of the original
    model[0].to_replicate().compute_spec.set_output_replicate(False)
    assert compute.output_replicate

    x = torch.ones(2, 3)
    spec = ColoTensorSpec(group, ShardSpec([0], [2]))
    for made, is_trained in (
        (ColoParameter.from_torch_tensor(x), True),
        (ColoParameter.from_torch_tensor(x, spec), True),
        (ColoParameter.from_torch_tensor(x, spec, requires_grad=False), False),
        (ColoParameter.from_torch_tensor(nn.Parameter(x, requires_grad=False), spec), False),
        (ColoParameter(x, False, spec), False),
        (ColoTensor.from_torch_tensor(x, spec), False),
        (ColoTensor.from_torch_tensor(x, spec, requires_grad=True), True),
        (ColoTensor.from_torch_tensor(x.clone().requires_grad_(), spec), True),
        (ColoTensor.from_torch_tensor(x.clone().requires_grad_(), spec, requires_grad=False), False),
    ):
        assert made.requires_grad is is_trained
        assert made.data_ptr() != 0
    leaf = ColoTensor.from_torch_tensor(x.clone(), spec, requires_grad=True)
    torch.sum(leaf * 3.0).backward()
    assert torch.equal(copy.deepcopy(leaf).grad, torch.full((2, 3), 3.0))
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.deepcopy(leaf * 2.0)
