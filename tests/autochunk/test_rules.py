"""Rules of AutoChunk against the operations: a part of the result from the parts of the inputs."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from colossalai.autochunk._calls import changed_arguments, has_effects, input_nodes
from colossalai.autochunk._rules import ChunkCut, input_cuts, needs_length, sized_call

pytestmark = pytest.mark.unit
aten = torch.ops.aten


def random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


X, W, B = random(2, 6, 4), random(8, 4), random(8)
HEADS = random(2, 3, 6, 4)
IMAGE = random(2, 4, 6, 6)
SMALL = torch.randint(0, 9, (2, 6))

# Operator, arguments, and the dimensions of the result that are independent.
CALLS: list[tuple[Any, Sequence[Any], dict[str, Any], set[int]]] = [
    (aten.relu.default, [X], {}, {0, 1, 2}),
    (aten.add.Tensor, [X, random(6, 1)], {}, {0, 1, 2}),
    (aten.mul.Tensor, [X, random(4)], {}, {0, 1, 2}),
    (aten.where.self, [random(6, 4) > 0, X, random(2, 1, 4)], {}, {0, 1, 2}),
    (aten.masked_fill.Scalar, [X, random(2, 6, 1) > 0, -1.0], {}, {0, 1, 2}),
    (aten.to.dtype, [X, torch.float32], {}, {0, 1, 2}),
    (aten.contiguous.default, [X], {}, {0, 1, 2}),
    (aten.dropout.default, [X, 0.5, False], {}, {0, 1, 2}),
    (aten.zeros_like.default, [X], {}, {0, 1, 2}),
    (aten.linear.default, [X, W, B], {}, {0, 1, 2}),
    (aten.linear.default, [X, W], {}, {0, 1, 2}),
    (aten.matmul.default, [HEADS, HEADS.transpose(2, 3)], {}, {0, 1, 2, 3}),
    (aten.matmul.default, [HEADS, random(4, 5)], {}, {0, 1, 2, 3}),
    (aten.matmul.default, [random(3, 5, 6), HEADS], {}, {0, 1, 2, 3}),
    (aten.matmul.default, [X, random(4)], {}, set()),
    (aten.bmm.default, [X, X.transpose(1, 2)], {}, {0, 1, 2}),
    (aten.addmm.default, [B, random(6, 4), W.T], {}, {0, 1}),
    (aten.addmm.default, [random(6, 1), random(6, 4), W.T], {"beta": 2}, {0, 1}),
    (aten.baddbmm.default, [random(2, 6, 6), X, X.transpose(1, 2)], {}, {0, 1, 2}),
    (aten.einsum.default, ["bic,bjc->bij", [X, X]], {}, {0, 1, 2}),
    (aten.einsum.default, ["bic,cd->dbi", [X, random(4, 5)]], {}, {0, 1, 2}),
    (aten.einsum.default, ["...ic,cd->...id", [X, random(4, 5)]], {}, {0, 1, 2}),
    (aten.einsum.default, ["...ic,...jc->...ij", [HEADS, random(1, 3, 5, 4)]], {}, {0, 1, 2, 3}),
    (aten.einsum.default, ["bij,bjk->bik", [X, random(1, 4, 5)]], {}, {0, 1, 2}),
    (aten.where.ScalarOther, [random(6, 4) > 0, X, 0.0], {}, {0, 1, 2}),
    (aten.linear.default, [X, W, random(1)], {}, {0, 1, 2}),
    (aten.linear.default, [X, random(4)], {}, set()),
    (aten.movedim.int, [HEADS, 1, -1], {}, {0, 1, 2, 3}),
    (aten.movedim.intlist, [HEADS, [3, 0], [0, 2]], {}, {0, 1, 2, 3}),
    (aten.mT.default, [HEADS], {}, {0, 1, 2, 3}),
    (aten.cat.default, [[X, random(0)], 1], {}, {0, 2}),
    (aten.view.dtype, [X, torch.int64], {}, set()),
    (aten.scaled_dot_product_attention.default, [HEADS, HEADS[:1], HEADS[0]], {}, {0, 1, 2, 3}),
    (aten.einsum.default, ["ii->i", [random(6, 6)]], {}, set()),
    (aten.scaled_dot_product_attention.default, [HEADS, HEADS, HEADS], {}, {0, 1, 2, 3}),
    (aten.scaled_dot_product_attention.default, [HEADS, HEADS, HEADS, random(6, 6)], {}, {0, 1, 2, 3}),
    (aten.scaled_dot_product_attention.default, [HEADS] * 3, {"attn_mask": random(2, 1, 1, 6)}, {0, 1, 2, 3}),
    (aten.scaled_dot_product_attention.default, [HEADS] * 3, {"is_causal": True}, {0, 1, 3}),
    (
        aten.scaled_dot_product_attention.default,
        [random(2, 6, 6, 4), HEADS, HEADS],
        {"enable_gqa": True},
        {0, 2, 3},
    ),
    (aten.conv2d.default, [IMAGE, random(5, 4, 3, 3), random(5)], {}, {0, 1}),
    (aten.conv2d.default, [IMAGE, random(4, 1, 3, 3), None, [1, 1], [1, 1], [1, 1], 4], {}, {0}),
    (aten.embedding.default, [W, SMALL.clamp(max=7)], {}, {0, 1, 2}),
    (aten.softmax.int, [X, -1], {}, {0, 1}),
    (aten.softmax.int, [X, 1], {}, {0, 2}),
    (aten.log_softmax.int, [X, 0], {}, {1, 2}),
    (aten.cumsum.default, [X, 1], {}, {0, 2}),
    (aten.flip.default, [X, [0, 1]], {}, {2}),
    (aten.topk.default, [X, 2], {}, {0, 1}),
    (aten.index_select.default, [X, 1, torch.tensor([3, 0])], {}, {0, 2}),
    (aten.layer_norm.default, [X, [4], B[:4], B[:4]], {}, {0, 1}),
    (aten.layer_norm.default, [X, [6, 4]], {}, {0}),
    (aten.rms_norm.default, [X, [4], B[:4]], {}, {0, 1}),
    (aten.group_norm.default, [IMAGE, 2, B[:4], B[:4]], {}, {0}),
    (
        aten.batch_norm.default,
        [IMAGE, B[:4], B[:4], B[:4], B[:4].abs(), False, 0.1, 1e-5, False],
        {},
        {0, 1, 2, 3},
    ),
    (aten.tril.default, [HEADS], {}, {0, 1}),
    (aten.one_hot.default, [SMALL, 9], {}, {0, 1}),
    (aten.sum.dim_IntList, [X, [1]], {}, {0, 1}),
    (aten.mean.dim, [X, [-1], True], {}, {0, 1}),
    (aten.sum.default, [X], {}, set()),
    (aten.amax.default, [X, [0, 2]], {}, {0}),
    (aten.max.dim, [X, 1], {}, {0, 1}),
    (aten.maximum.default, [X, random(4)], {}, {0, 1, 2}),
    (aten.max.other, [X, random(4)], {}, {0, 1, 2}),
    (aten.argmax.default, [X, 1, True], {}, {0, 2}),
    (aten.var.correction, [X, [2]], {"correction": 1}, {0, 1}),
    (aten.linalg_vector_norm.default, [X, 2, [1]], {}, {0, 1}),
    (aten.max_pool2d.default, [IMAGE, [2, 2]], {}, {0, 1}),
    (aten.upsample_nearest2d.vec, [IMAGE, [12, 12], None], {}, {0, 1}),
    (aten.view.default, [X, [12, 4]], {}, {1}),  # rows of 2 x 6: a chunk cannot be half a sample
    (aten.view.default, [random(1, 6, 4), [6, 4]], {}, {0, 1}),
    (aten.view.default, [X, [2, 6, 2, 2]], {}, {0, 1, 2}),
    (aten.reshape.default, [X.transpose(1, 2), [2, 4, 6]], {}, {0, 1, 2}),
    (aten.flatten.using_ints, [X, 1], {}, {0}),
    (aten.unflatten.int, [X, 2, [2, 2]], {}, {0, 1, 2}),
    (aten.unsqueeze.default, [X, 1], {}, {0, 2, 3}),
    (aten.squeeze.dim, [random(2, 1, 6), 1], {}, {0, 1}),
    (aten.squeeze.default, [random(2, 1, 6)], {}, {0, 1}),
    (aten.transpose.int, [X, -1, 0], {}, {0, 1, 2}),
    (aten.permute.default, [X, [2, 0, -2]], {}, {0, 1, 2}),
    (aten.t.default, [W], {}, {0, 1}),
    (aten.expand.default, [random(1, 6, 1), [2, -1, 4]], {}, {0, 1, 2}),
    (aten.expand.default, [random(6, 1), [2, 6, 4]], {}, {0, 1, 2}),
    (aten.slice.Tensor, [X, 1, 2, 5], {}, {0, 2}),
    (aten.slice.Tensor, [X, 1, 0, 2**63 - 1], {}, {0, 1, 2}),
    (aten.select.int, [X, 1, -1], {}, {0, 1}),
    (aten.split.Tensor, [X, 2, -1], {}, {0, 1}),
    (aten.split_with_sizes.default, [X, [4, 2], 1], {}, {0, 2}),
    (aten.chunk.default, [X, 2, 1], {}, {0, 2}),
    (aten.unbind.int, [X, 1], {}, {0, 1}),
    (aten.cat.default, [[X, random(2, 3, 4)], 1], {}, {0, 2}),
    (aten.stack.default, [[X, X], 1], {}, {0, 2, 3}),
    (aten.pad.default, [X, [1, 1]], {}, {0, 1}),
    (aten.constant_pad_nd.default, [X, [0, 0, 2, 0]], {}, {0}),
    (aten.zeros.default, [[2, 6]], {}, {0, 1}),
    (aten.full.default, [[2, 6], 3.0], {}, {0, 1}),
    (aten.new_ones.default, [X, [2, 6]], {}, {0, 1}),
]


def graph_of(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[fx.Node, list[Tensor]]:
    """Return the node of a call in a graph, and the tensors of its inputs."""
    graph, tensors = fx.Graph(), []

    def placed(value: Any) -> Any:
        if isinstance(value, Tensor):
            node = graph.placeholder(f"x{len(tensors)}")
            node.meta["val"] = value
            tensors.append(value)
            return node
        return [placed(each) for each in value] if isinstance(value, list) else value

    node = graph.call_function(
        target, tuple(map(placed, args)), {name: placed(each) for name, each in kwargs.items()}
    )
    node.meta["val"] = target(*args, **kwargs)
    return node, tensors


def part_of(tensor: Tensor, cut: ChunkCut | None, start: int, length: int) -> Tensor:
    return tensor if cut is None else tensor.narrow(cut.dim, start * cut.scale, length * cut.scale)


def run_part(node: fx.Node, cut: ChunkCut, start: int, length: int) -> Any:
    """Run the call of a chunk as the rewritten graph does."""
    cuts = input_cuts(node, cut)
    assert cuts is not None
    parts = [
        part_of(source.meta["val"], each, start, length)
        for source, each in zip(input_nodes(node), cuts, strict=True)
    ]
    graph = fx.Graph()
    places = iter([graph.placeholder(f"x{number}") for number in range(len(parts))])
    chunk_length = graph.placeholder("length") if needs_length(node) else None
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda _: next(places))
    target, args = sized_call(node, tuple(args), cut, cuts, chunk_length)
    graph.output(graph.call_function(target, args, kwargs))
    return fx.GraphModule({}, graph)(*parts, *([length] if chunk_length is not None else []))


@pytest.mark.parametrize(
    ("target", "args", "kwargs", "dims"),
    CALLS,
    ids=[f"{number}-{call[0]}" for number, call in enumerate(CALLS)],
)
def test_parts(
    target: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], dims: set[int]
) -> None:
    """For every dimension with a rule, parts of one and of two elements are those of the whole result."""
    node, _ = graph_of(target, args, kwargs)
    whole = node.meta["val"]
    results = list(whole) if isinstance(whole, tuple | list) else [whole]
    found = {
        dim for dim in range(results[0].ndim) if results[0].shape[dim] > 1 and input_cuts(node, ChunkCut(dim))
    }
    if target in (aten.zeros.default, aten.full.default):
        found = {dim for dim in range(results[0].ndim) if input_cuts(node, ChunkCut(dim)) is not None}
    assert found == dims
    for dim in dims:
        extent = results[0].shape[dim]
        for length in {1, max(1, extent // 2)}:
            for start in range(0, extent - length + 1, length):
                part = run_part(node, ChunkCut(dim), start, length)
                parts = part if isinstance(part, tuple | list) else [part]
                for mine, result in zip(parts, results, strict=True):
                    expected = result.narrow(dim, start, length)
                    assert mine.shape == expected.shape
                    torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-12)


def test_scaled_parts() -> None:
    """Chunks of samples are blocks of rows after the samples are merged with their positions."""
    node, _ = graph_of(aten.view.default, [X, [12, 4]], {})
    assert input_cuts(node, ChunkCut(0, 6)) == [ChunkCut(0, 1)]
    assert input_cuts(node, ChunkCut(0, 12)) == [ChunkCut(0, 2)]
    assert input_cuts(node, ChunkCut(0, 3)) is None
    torch.testing.assert_close(run_part(node, ChunkCut(0, 6), 1, 1), X.view(12, 4)[6:])
    split, _ = graph_of(aten.view.default, [random(12, 4), [2, 6, 4]], {})
    assert input_cuts(split, ChunkCut(0)) == [ChunkCut(0, 6)]
    heads, _ = graph_of(aten.linear.default, [X, W, B], {})
    assert input_cuts(heads, ChunkCut(2, 4)) == [None, ChunkCut(0, 4), ChunkCut(0, 4)]


def test_operations_that_keep_their_place() -> None:
    """Random operations, those that change their arguments, and collectives are not moved."""
    mask = torch.ones(3, dtype=torch.float64)
    keep: list[tuple[Any, list[Any], dict[str, Any]]] = [
        (aten.dropout.default, [X, 0.5, True], {}),
        (aten.scaled_dot_product_attention.default, [HEADS, HEADS, HEADS], {"dropout_p": 0.1}),
        (aten.rand.default, [[3]], {}),
        (torch.utils._pytree.tree_leaves, [mask], {}),  # not an operator of torch
        (aten.add_.Tensor, [mask.clone(), 1.0], {}),
        (aten.batch_norm.default, [X, None, None, random(6), random(6), True, 0.1, 1e-5, False], {}),
    ]
    for target, args, kwargs in keep:
        assert has_effects(graph_of(target, args, kwargs)[0]), target
    assert changed_arguments(graph_of(aten.relu.default, [X], {})[0]) == []
    node, _ = graph_of(aten.add_.Tensor, [mask.clone(), 1.0], {})
    assert changed_arguments(node) == [node.args[0]]
    free: list[tuple[Any, list[Any], dict[str, Any]]] = [
        (aten.dropout.default, [X, 0.5, False], {}),
        (aten.dropout.default, [X, 0.0, True], {}),
        (aten.scaled_dot_product_attention.default, [HEADS, HEADS, HEADS], {}),
        (aten.batch_norm.default, [X, None, None, random(6), random(6).abs(), False, 0.1, 1e-5, False], {}),
        (aten.relu.default, [X], {}),
    ]
    for target, args, kwargs in free:
        assert not has_effects(graph_of(target, args, kwargs)[0]), target


def test_batch_statistics_mix_samples() -> None:
    """Without running statistics, a batch norm of training has no effect, and is not independent."""
    node, _ = graph_of(aten.batch_norm.default, [X, None, None, None, None, True, 0.1, 1e-5, False], {})
    assert not has_effects(node)
    assert input_cuts(node, ChunkCut(0)) is None
    assert input_cuts(node, ChunkCut(1)) is not None
