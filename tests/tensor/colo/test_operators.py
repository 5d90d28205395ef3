"""Every operator, with one argument cut over two ranks, is that of one process; of torch's database: long."""

import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from colossalai.tensor import ColoTensor, ColoTensorSpec, ProcessGroup, ShardSpec
from tests.launched import on_ranks

pytestmark = pytest.mark.dist

NUM_SAMPLES = 4  # of an operator, in which some argument can be cut
# What is drawn, or is not there before it is written, is no value to compare.
UNDEFINED = ("empty", "new_empty", "rand", "bernoulli", "multinomial", "dropout", "normal", "exponential")
UNDEFINED = (*UNDEFINED, "uniform", "cauchy", "geometric", "log_normal", "rrelu", "resize_")


def is_defined(name: str) -> bool:
    """Return whether the results of an operator are the same twice, and it is one.

    Functions of `torch.masked` are Python that computes with shapes; a slice's are not those of a mask.
    """
    return not any(word in name for word in UNDEFINED) and not name.startswith("masked.")


def cuts(tensors: list[Any]) -> Iterator[tuple[int, int]]:
    """Yield the place of a tensor of two dimensions or more, and a dimension of it that two ranks divide."""
    for place, tensor in enumerate(tensors):
        if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided and tensor.dim() > 1:
            yield from ((place, dim) for dim, size in enumerate(tensor.shape) if size > 1 and size % 2 == 0)


def outcome(call: Callable[[], Any]) -> Any:
    """Return what a call returns, whole, or the error that it raises."""
    torch.manual_seed(0)
    try:
        result = call()
        return [
            leaf.to_replicate().data if isinstance(leaf, ColoTensor) else leaf for leaf in tree_leaves(result)
        ]
    except Exception as error:
        return error


def agree(found: Any, wanted: Any) -> str | None:
    """Return what is wrong with an outcome; None if it is right or refused."""
    if isinstance(found, ValueError) or (isinstance(found, Exception) and isinstance(wanted, Exception)):
        return None
    if isinstance(found, Exception) or isinstance(wanted, Exception):
        return f"{found!r:.150} for {wanted!r:.150}"
    if len(found) != len(wanted):
        return f"{len(found)} results for {len(wanted)}"
    for one, other in zip(found, wanted, strict=True):
        if isinstance(other, torch.Tensor):
            try:
                torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10, equal_nan=True)
            except AssertionError as error:
                return str(error).splitlines()[0] + f" {tuple(one.shape)} for {tuple(other.shape)}"
        elif one != other:
            return f"{one} for {other}"
    return None


def compared(
    function: Callable[..., Any], leaves: list[Any], form: Any, place: int, dim: int, group: ProcessGroup
) -> str | None:
    """Call an operator with whole arguments and with one that is cut; return what is wrong."""
    with torch.no_grad():
        copies = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        cut = list(copies)
        plain = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        rank = group.tp_local_rank()
        spec = ColoTensorSpec(group, ShardSpec([dim], [2]))
        cut[place] = ColoTensor.from_torch_tensor(copies[place].chunk(2, dim)[rank].contiguous(), spec)

    def call(values: list[Any]) -> Any:
        first, args, kwargs = tree_unflatten(values, form)
        return function(first, *args, **kwargs)

    return agree(outcome(lambda: call(cut)), outcome(lambda: call(plain)))


X, Y, Z = (torch.arange(24.0, dtype=torch.float64).view(4, 6).mul(k).sin() for k in (1, 2, 3))
PLACES = torch.tensor([[0, 2, 1, 3, 1, 0]])
# Of each kind some: what follows the cut, reduces along it, orders along it, looks up in it, or has no rule.
OPERATORS: tuple[tuple[Callable[..., Any], Any], ...] = (
    (torch.add, (X, Y)),
    (torch.Tensor.add_, (X, Y)),
    (torch.Tensor.t_, (X,)),
    (torch.where, (X > 0, Y, Z)),
    (torch.Tensor.masked_fill, (X, Y > 0, 2.0)),
    (torch.sum, (X, 1)),
    (torch.var, (X, 0)),
    (torch.norm, (X,)),
    (torch.max, (X, 1)),
    (torch.argmax, (X,)),
    (torch.cumsum, (X, 1)),
    (torch.cumprod, (X, 0)),
    (torch.sort, (X, 1)),
    (torch.topk, (X, 2)),
    (torch.median, (X, 0)),
    (torch.flip, (X, (0, 1))),
    (torch.roll, (X, 1, 1)),
    (torch.tril, (X,)),
    (torch.diagonal, (X,)),
    (torch.cat, ([X, Y], 1)),
    (torch.stack, ([X, Y],)),
    (torch.repeat_interleave, (X, 2, 0)),
    (torch.unbind, (X,)),
    (torch.narrow, (X, 1, 1, 4)),
    (torch.reshape, (X, (3, 8))),
    (torch.gather, (X, 0, PLACES)),
    (torch.index_select, (X, 1, PLACES[0])),
    (torch.scatter_add, (X, 0, PLACES, Y)),
    (torch.matmul, (X, Y.t())),
    (torch.einsum, ("ij,kj->ik", X, Y)),
    (torch.kron, (X, Y)),
    (torch.cdist, (X, Y)),
    (torch.linalg.matrix_norm, (X,)),
    (torch.linalg.pinv, (X,)),
    (F.softmax, (X, 1)),
    (F.log_softmax, (X, 0)),
    (F.layer_norm, (X, (6,))),
    (F.normalize, (X,)),
    (F.pad, (X, (1, 1))),
    (F.conv1d, (X.view(1, 4, 6), Y.view(4, 2, 3).repeat(1, 2, 1))),
    (F.max_pool1d, (X.view(1, 4, 6), 2)),
    (F.cross_entropy, (X, PLACES[0, :4])),
    (F.embedding, (PLACES, X)),
)


@on_ranks(2)
def test_an_operator_of_each_kind_is_that_of_one_process_or_refused() -> None:
    group = ProcessGroup(tp_degree=2)
    wrong, num_cases = [], 0
    for function, (first, *args) in OPERATORS:
        leaves, form = tree_flatten((first, tuple(args), {}))
        for place, dim in cuts(leaves):
            num_cases += 1
            said = compared(function, leaves, form, place, dim, group)
            if said is not None:
                wrong.append(f"{function.__name__}, argument {place} cut at {dim}: {said}")
    assert not wrong, "\n".join(wrong)
    assert num_cases > 2 * len(OPERATORS)


@pytest.mark.long
@on_ranks(2)
def test_an_operator_with_a_cut_argument_is_that_of_one_process_or_refused() -> None:
    """All of torch's database at once: to import it takes as long as to try an eighth of it."""
    from torch.testing._internal.common_methods_invocations import op_db

    warnings.simplefilter("ignore")
    group = ProcessGroup(tp_degree=2)
    wrong, num_cases = [], 0
    for op in op_db:
        if not is_defined(op.name) or torch.float64 not in op.supported_dtypes("cpu"):
            continue
        torch.manual_seed(0)
        samples = itertools.islice(op.sample_inputs("cpu", torch.float64), 40)
        num_left = NUM_SAMPLES
        for sample in samples:
            leaves, form = tree_flatten((sample.input, sample.args, sample.kwargs))
            for place, dim in itertools.islice(cuts(leaves), 2):
                num_left -= 1
                for variant in filter(None, (op.op, op.inplace_variant)):
                    num_cases += 1
                    said = compared(variant, leaves, form, place, dim, group)
                    if said is not None:
                        wrong.append(
                            f"{op.formatted_name} {variant.__name__}, argument {place} cut at {dim}: {said}"
                        )
            if num_left <= 0:
                break
    assert not wrong, "\n".join(wrong[:40])
    assert num_cases > 600
