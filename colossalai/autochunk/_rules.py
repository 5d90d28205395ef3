"""Rules of AutoChunk: how a cut of an operation's result cuts the operation's inputs.

A rule receives a call and the cut of its result, and returns the cut of each of its input tensors, in the
order of `input_nodes`; None stands for an input that every chunk needs whole. It returns None instead of a
list if the dimension is not independent, as the normalized dimension of a softmax. An operation without a
rule is not an error: chunks need its result whole.
"""

import math
import operator
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from colossalai.autochunk._calls import argument, input_nodes, operator_name, shape_of


@dataclass(frozen=True)
class ChunkCut:
    """The part of a tensor that belongs to a chunk.

    Attributes:
        dim: The dimension that is cut.
        scale: Elements along `dim` for each element of the chunk dimension. It is above 1 where a reshape has
            merged the chunk dimension with a following one.
    """

    dim: int
    scale: int = 1


ChunkCuts = Sequence[ChunkCut | None] | None
Rule = Callable[[fx.Node, ChunkCut], ChunkCuts]


def input_cuts(node: fx.Node, cut: ChunkCut) -> ChunkCuts:
    """Return the cuts of the inputs of a call whose result has a cut; None if there are none."""
    if node.op != "call_function":
        return None
    if node.target is torch.ops.aten.view.dtype:  # the same bytes as other elements
        return None
    rule = _RULES.get(operator_name(node))
    if rule is None and torch.Tag.pointwise in getattr(node.target, "tags", ()):
        rule = _pointwise
    return rule(node, cut) if rule is not None else None


def sized_call(
    node: fx.Node,
    args: tuple[Any, ...],
    cut: ChunkCut,
    cuts: Sequence[ChunkCut | None],
    length: fx.Node | None,
) -> tuple[Any, tuple[Any, ...]]:
    """Return target and arguments of a call for one chunk, with the sizes of the chunk.

    Args:
        node: The call in the whole graph.
        args: Its arguments, with nodes of the chunk's graph.
        cut: The cut of its result.
        cuts: Those of its inputs.
        length: Node of the number of elements in the chunk; see `needs_length`.
    """
    name = operator_name(node)
    sizes: list[Any] = list(shape_of(node))
    if name in _RESHAPES:  # a slice is seldom contiguous: reshape where the model has a view
        sizes[cut.dim] = -1
        return torch.ops.aten.reshape.default, (args[0], sizes)
    if needs_length(node) and not (name == "aten::expand" and cuts[0] is not None):
        assert length is not None
        sizes[cut.dim] = length
        if cut.scale > 1:
            sizes[cut.dim] = length.graph.call_function(operator.mul, (length, cut.scale))
        position = _SIZES[name]
        return node.target, (*args[:position], sizes, *args[position + 1 :])
    if name == "aten::expand":
        sizes[cut.dim] = -1
        return node.target, (args[0], sizes)
    return node.target, args


def needs_length(node: fx.Node) -> bool:
    """Return whether the arguments of a call for one chunk can contain the length of the chunk."""
    return operator_name(node) in _SIZES


def _normal(dim: int, ndim: int) -> int:
    return dim + ndim if dim < 0 else dim


def _dims(value: Any, ndim: int) -> list[int]:
    """Return an argument `dim` as a list of dimensions; all of them if it is missing or empty."""
    if value is None or value == []:
        return list(range(ndim))
    return [_normal(each, ndim) for each in (value if isinstance(value, Sequence) else [value])]


def _broadcast(node: fx.Node, cut: ChunkCut, of: fx.Node) -> ChunkCut | None:
    """Return the cut of an input that is broadcast to the shape of the result."""
    shape = shape_of(of)
    dim = cut.dim - (len(shape_of(node)) - len(shape))
    return None if dim < 0 or shape[dim] == 1 else replace(cut, dim=dim)


def _pointwise(node: fx.Node, cut: ChunkCut) -> ChunkCuts:
    return [_broadcast(node, cut, each) for each in input_nodes(node)]


def _first_input(node: fx.Node, cut: ChunkCut) -> ChunkCuts:
    """The first input is cut like the result, the others are whole."""
    return [cut, *[None] * (len(input_nodes(node)) - 1)]


def _along(position: int, name: str = "dim") -> Rule:
    """Return the rule of an operation that mixes the dimensions of one argument, and keeps the shape."""

    def rule(node: fx.Node, cut: ChunkCut) -> ChunkCuts:
        mixed = _dims(argument(node, position, name, -1), len(shape_of(node)))
        return None if cut.dim in mixed else _first_input(node, cut)

    return rule


def _reduction(position: int = 1) -> Rule:
    """Return the rule of an operation that removes dimensions, or keeps them with extent 1."""

    def rule(node: fx.Node, cut: ChunkCut) -> ChunkCuts:
        if len(input_nodes(node)) > 1:  # `max` and `min` of two tensors
            return _pointwise(node, cut)
        ndim = len(shape_of(input_nodes(node)[0]))
        reduced = _dims(argument(node, position, "dim"), ndim)
        if len(shape_of(node)) == ndim:
            return None if cut.dim in reduced else _first_input(node, cut)
        kept = [dim for dim in range(ndim) if dim not in reduced]
        return _first_input(node, replace(cut, dim=kept[cut.dim]))

    return rule


def _leading(num_mixed: int) -> Rule:
    """Return the rule of an operation that mixes the last dimensions."""

    def rule(node: fx.Node, cut: ChunkCut) -> ChunkCuts:
        return _first_input(node, cut) if cut.dim < len(shape_of(node)) - num_mixed else None

    return rule


def _batch_only(node: fx.Node, cut: ChunkCut) -> ChunkCuts:
    return _first_input(node, cut) if cut.dim == 0 else None


def _layer_norm(node: fx.Node, cut: ChunkCut) -> ChunkCuts:
    return _leading(len(node.args[1]))(node, cut)  # type: ignore[arg-type]  # the normalized shape


def _batch_norm(node: fx.Node, cut: ChunkCut) -> ChunkCuts:
    num_others = len(input_nodes(node)) - 1
    if cut.dim == 1:
        return [cut, *[ChunkCut(0, cut.scale)] * num_others]
    is_training = bool(node.args[5])  # statistics of the batch
    return None if is_training else [cut, *[None] * num_others]


def _linear(node: fx.Node, cut: ChunkCut) -> ChunkCuts:
    _, weight, *bias = input_nodes(node)
    biases = [_broadcast(node, cut, each) for each in bias]
    if len(shape_of(weight)) < 2:
        return None
    if cut.dim == len(shape_of(node)) - 1:
        return [None, ChunkCut(0, cut.scale), *biases]
    return [cut, None, *biases]


def _matmul(node: fx.Node, cut: ChunkCut) -> ChunkCuts:
    first, second = input_nodes(node)
    ndim = len(shape_of(node))
    if min(len(shape_of(first)), len(shape_of(second))) < 2:
        return None
    if cut.dim == ndim - 1:
        return [None, replace(cut, dim=len(shape_of(second)) - 1)]
    if cut.dim == ndim - 2:
        return [replace(cut, dim=len(shape_of(first)) - 2), None]
    return [_broadcast(node, cut, first), _broadcast(node, cut, second)]


def _add_product(node: fx.Node, cut: ChunkCut) -> ChunkCuts:
    """`addmm` and `baddbmm`: a summand, then the factors."""
    summand, first, second = input_nodes(node)
    ndim = len(shape_of(node))
    factors: list[ChunkCut | None] = [cut, cut]
    if cut.dim == ndim - 1:
        factors = [None, replace(cut, dim=len(shape_of(second)) - 1)]
    elif cut.dim == ndim - 2:
        factors = [replace(cut, dim=len(shape_of(first)) - 2), None]
    return [_broadcast(node, cut, summand), *factors]


def _attention(node: fx.Node, cut: ChunkCut) -> ChunkCuts:
    """`scaled_dot_product_attention`: batch, heads, queries, and features of the values."""
    query, key, value, *mask = input_nodes(node)
    ndim = len(shape_of(node))
    masks = [_broadcast(node, cut, each) for each in mask]
    if cut.dim == ndim - 1:
        return [None, None, replace(cut, dim=len(shape_of(value)) - 1), *[None] * len(mask)]
    if cut.dim == ndim - 2:
        is_causal = argument(node, 5, "is_causal", False)
        return None if is_causal else [replace(cut, dim=len(shape_of(query)) - 2), None, None, *masks]
    if cut.dim == ndim - 3 and argument(node, 7, "enable_gqa", False):
        return None  # heads of queries share those of keys
    return [*(_broadcast(node, cut, each) for each in (query, key, value)), *masks]


def _convolution(node: fx.Node, cut: ChunkCut) -> ChunkCuts:
    """The batch, or the channels of the result; the neighbours of a position are in other chunks."""
    image, weight, *bias = input_nodes(node)
    if len(shape_of(image)) != len(shape_of(weight)) or cut.dim > 1:
        return None
    if cut.dim == 0:
        return [cut, None, *[None] * len(bias)]
    is_general = operator_name(node) == "aten::convolution"
    if is_general and node.args[6]:  # transposed
        return None
    groups = argument(node, 8 if is_general else 6, "groups", 1)
    return [None, *[ChunkCut(0, cut.scale)] * (1 + len(bias))] if groups == 1 else None


def _planes(node: fx.Node, cut: ChunkCut) -> ChunkCuts:
    """Pooling and interpolation: batch and channels."""
    return _first_input(node, cut) if cut.dim < 2 and len(shape_of(node)) == 4 else None


def _embedding(node: fx.Node, cut: ChunkCut) -> ChunkCuts:
    last = len(shape_of(node)) - 1
    return [ChunkCut(1, cut.scale), None] if cut.dim == last else [None, cut]


def _reshape(node: fx.Node, cut: ChunkCut) -> ChunkCuts:
    """Follow a dimension by the number of elements before it: slices are the same range of elements."""
    before, after = shape_of(input_nodes(node)[0]), shape_of(node)
    if 0 in after:
        return None
    extent = after[cut.dim]
    outer = math.prod(after[: cut.dim])
    for dim, other in enumerate(before):
        if other > 1 and math.prod(before[:dim]) == outer:
            if other % extent == 0:
                return [ChunkCut(dim, cut.scale * (other // extent))]
            inner = extent // other
            if extent % other == 0 and cut.scale % inner == 0:
                return [ChunkCut(dim, cut.scale // inner)]
            return None
    return None


def _transpose(node: fx.Node, cut: ChunkCut) -> ChunkCuts:
    ndim = len(shape_of(node))
    first, second = (_normal(each, ndim) for each in node.args[1:3])  # type: ignore[arg-type]  # integers
    return [replace(cut, dim={first: second, second: first}.get(cut.dim, cut.dim))]


def _swap_last(node: fx.Node, cut: ChunkCut) -> ChunkCuts:
    ndim = len(shape_of(node))
    return [replace(cut, dim={ndim - 1: ndim - 2, ndim - 2: ndim - 1}.get(cut.dim, cut.dim))]


def _movedim(node: fx.Node, cut: ChunkCut) -> ChunkCuts:
    ndim = len(shape_of(node))
    sources, targets = _dims(node.args[1], ndim), _dims(node.args[2], ndim)
    others = iter(dim for dim in range(ndim) if dim not in sources)
    order = [sources[targets.index(dim)] if dim in targets else next(others) for dim in range(ndim)]
    return [replace(cut, dim=order[cut.dim])]


def _t(node: fx.Node, cut: ChunkCut) -> ChunkCuts:
    return [replace(cut, dim=len(shape_of(node)) - 1 - cut.dim)]


def _permute(node: fx.Node, cut: ChunkCut) -> ChunkCuts:
    dims = _dims(node.args[1], len(shape_of(node)))
    return [replace(cut, dim=dims[cut.dim])]


def _expand(node: fx.Node, cut: ChunkCut) -> ChunkCuts:
    return [_broadcast(node, cut, input_nodes(node)[0])]


def _slice(node: fx.Node, cut: ChunkCut) -> ChunkCuts:
    dim = _normal(argument(node, 1, "dim", 0), len(shape_of(node)))
    is_whole = shape_of(node) == shape_of(input_nodes(node)[0])
    return [cut] if cut.dim != dim or is_whole else None


def _select(node: fx.Node, cut: ChunkCut) -> ChunkCuts:
    dim = _normal(argument(node, 1, "dim", 0), len(shape_of(node)) + 1)
    return [replace(cut, dim=cut.dim + (cut.dim >= dim))]


def _split(position: int) -> Rule:
    """Return the rule of an operation that returns pieces along the dimension of one argument."""

    def rule(node: fx.Node, cut: ChunkCut) -> ChunkCuts:
        dim = _normal(argument(node, position, "dim", 0), len(shape_of(node)))
        return None if cut.dim == dim else [cut]

    return rule


def _unbind(node: fx.Node, cut: ChunkCut) -> ChunkCuts:
    dim = _normal(argument(node, 1, "dim", 0), len(shape_of(node)) + 1)
    return [replace(cut, dim=cut.dim + (cut.dim >= dim))]


def _cat(node: fx.Node, cut: ChunkCut) -> ChunkCuts:
    dim = _normal(argument(node, 1, "dim", 0), len(shape_of(node)))
    if cut.dim == dim:
        return None
    # An empty tensor of one dimension can be among others.
    return [None if shape_of(each) == (0,) else cut for each in input_nodes(node)]


def _stack(node: fx.Node, cut: ChunkCut) -> ChunkCuts:
    dim = _normal(argument(node, 1, "dim", 0), len(shape_of(node)))
    if cut.dim == dim:
        return None
    return [replace(cut, dim=cut.dim - (cut.dim > dim))] * len(input_nodes(node))


def _pad(node: fx.Node, cut: ChunkCut) -> ChunkCuts:
    return _leading(len(node.args[1]) // 2)(node, cut)  # type: ignore[arg-type]  # two numbers per dimension


def _einsum(node: fx.Node, cut: ChunkCut) -> ChunkCuts:
    equation = str(node.args[0]).replace(" ", "")
    if "->" not in equation:
        return None
    terms, _, result = _spelled_out(equation, node).partition("->")
    label = result[cut.dim]
    if any(term.count(label) > 1 for term in terms.split(",")):
        return None  # a diagonal
    cuts: list[ChunkCut | None] = []
    for term, source in zip(terms.split(","), input_nodes(node), strict=True):
        is_cut = label in term and shape_of(source)[term.index(label)] > 1  # 1: broadcast
        cuts.append(ChunkCut(term.index(label), cut.scale) if is_cut else None)
    return cuts


def _spelled_out(equation: str, node: fx.Node) -> str:
    """Return an equation with letters instead of the ellipses, which are aligned at their ends."""
    free = [letter for letter in string.ascii_letters if letter not in equation]
    terms, _, result = equation.partition("->")
    spelled = []
    for term, source in zip([*terms.split(","), result], [*input_nodes(node), node], strict=True):
        num_dims = len(shape_of(source)) - len(term.replace("...", ""))
        spelled.append(term.replace("...", "".join(free[:num_dims][::-1])))
    return f"{','.join(spelled[:-1])}->{spelled[-1]}"


def _factory(node: fx.Node, cut: ChunkCut) -> ChunkCuts:
    """A new tensor of given sizes, the same everywhere."""
    return [None] * len(input_nodes(node))


_RESHAPES = (
    *("aten::view", "aten::reshape", "aten::_unsafe_view", "aten::flatten", "aten::unflatten"),
    *("aten::squeeze", "aten::unsqueeze"),
)
_FACTORIES = {
    **dict.fromkeys(("aten::zeros", "aten::ones", "aten::full"), 0),
    **dict.fromkeys(("aten::new_zeros", "aten::new_ones", "aten::new_full"), 1),
}
_SIZES = {**_FACTORIES, "aten::expand": 1}
"""Position of the sizes among the arguments."""

_RULES: Mapping[str, Rule] = {
    "getitem": _first_input,
    # Elementwise operations without torch's tag for them.
    **dict.fromkeys(("aten::to", "aten::_to_copy", "aten::contiguous", "aten::alias"), _first_input),
    **dict.fromkeys(("aten::detach", "aten::lift_fresh_copy", "aten::type_as"), _first_input),
    **dict.fromkeys(("aten::dropout", "aten::feature_dropout", "aten::alpha_dropout"), _first_input),
    **dict.fromkeys(("aten::zeros_like", "aten::ones_like", "aten::full_like"), _first_input),
    **dict.fromkeys(("aten::__and__", "aten::__or__", "aten::__xor__", "aten::where"), _pointwise),
    "aten::copy_": _pointwise,
    # Products.
    "aten::linear": _linear,
    **dict.fromkeys(("aten::matmul", "aten::mm", "aten::bmm"), _matmul),
    **dict.fromkeys(("aten::addmm", "aten::baddbmm"), _add_product),
    "aten::einsum": _einsum,
    "aten::scaled_dot_product_attention": _attention,
    **dict.fromkeys(("aten::conv1d", "aten::conv2d", "aten::conv3d", "aten::convolution"), _convolution),
    "aten::embedding": _embedding,
    # Normalizations and other operations along a dimension.
    **dict.fromkeys(
        ("aten::softmax", "aten::log_softmax", "aten::_softmax", "aten::_log_softmax"), _along(1)
    ),
    **dict.fromkeys(("aten::cumsum", "aten::cumprod", "aten::glu", "aten::index_select"), _along(1)),
    "aten::flip": _along(1, "dims"),
    "aten::topk": _along(2),
    **dict.fromkeys(("aten::layer_norm", "aten::rms_norm"), _layer_norm),
    "aten::group_norm": _batch_only,
    "aten::instance_norm": _batch_only,
    "aten::batch_norm": _batch_norm,
    **dict.fromkeys(("aten::tril", "aten::triu"), _leading(2)),
    "aten::one_hot": _leading(1),
    # Reductions.
    **dict.fromkeys(("aten::sum", "aten::mean", "aten::amax", "aten::amin", "aten::logsumexp"), _reduction()),
    **dict.fromkeys(("aten::max", "aten::min", "aten::argmax", "aten::argmin", "aten::prod"), _reduction()),
    **dict.fromkeys(("aten::var", "aten::std", "aten::any", "aten::all", "aten::var_mean"), _reduction()),
    "aten::linalg_vector_norm": _reduction(2),
    # Planes of images.
    **dict.fromkeys(("aten::max_pool2d", "aten::avg_pool2d", "aten::adaptive_avg_pool2d"), _planes),
    **dict.fromkeys(("aten::upsample_nearest2d", "aten::upsample_bilinear2d"), _planes),
    # Shapes.
    **dict.fromkeys(_RESHAPES, _reshape),
    **dict.fromkeys(_FACTORIES, _factory),
    "aten::transpose": _transpose,
    **dict.fromkeys(("aten::t", "aten::numpy_T"), _t),
    **dict.fromkeys(("aten::mT", "aten::adjoint"), _swap_last),
    "aten::movedim": _movedim,
    "aten::permute": _permute,
    "aten::expand": _expand,
    "aten::slice": _slice,
    "aten::select": _select,
    **dict.fromkeys(("aten::split", "aten::split_with_sizes", "aten::chunk"), _split(2)),
    "aten::unbind": _unbind,
    "aten::cat": _cat,
    "aten::stack": _stack,
    **dict.fromkeys(("aten::pad", "aten::constant_pad_nd"), _pad),
}
"""Rule of each operator; one with torch's tag `pointwise` needs no row."""
