"""Every operator of torch's own database, with one argument cut over two ranks, is that of one process."""

import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

import colossalai
from colossalai.core import global_context as gpc
from colossalai.tensor import ColoTensor, ColoTensorSpec, ProcessGroup, ShardSpec
from tests.ranks import run_ranks
from tests.tiers import further

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


def wrong_operators(shares: list[int]) -> tuple[list[str], int]:
    """Return what is wrong with some eighths of the operators, and how many cases there were."""
    from torch.testing._internal.common_methods_invocations import op_db

    colossalai.launch_from_torch({}, verbose=False)
    warnings.simplefilter("ignore")
    group = ProcessGroup(tp_degree=2)
    wrong, num_cases = [], 0
    for op in (op for place, op in enumerate(op_db) if place % 8 in shares):
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
    gpc.destroy()
    return wrong, num_cases


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


@pytest.mark.parametrize("shares", [[0], further([1, 2, 3]), further([4, 5, 6, 7])])
def test_an_operator_with_a_cut_argument_is_that_of_one_process_or_refused(shares: list[int]) -> None:
    for wrong, num_cases in run_ranks(wrong_operators, 2, shares):
        assert not wrong, "\n".join(wrong[:40])
        assert num_cases > 75 * len(shares)
