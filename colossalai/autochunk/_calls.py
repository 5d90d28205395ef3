"""Calls of a graph: shapes of their results, effects, and arguments that they change."""

import operator
from typing import Any

import torch
from torch import fx

_POSSIBLE_VIEWS = (
    *("aten::contiguous", "aten::to", "aten::reshape", "aten::reshape_as", "aten::ravel", "aten::flatten"),
    *("aten::unflatten", "aten::view", "aten::_unsafe_view", "aten::resolve_conj", "aten::resolve_neg"),
    *("aten::squeeze", "aten::unsqueeze", "aten::type_as"),
)
_NORMS = ("aten::layer_norm", "aten::rms_norm", "aten::group_norm")


def input_nodes(node: fx.Node) -> list[fx.Node]:
    """Return the nodes among the arguments of a call, in order, repeated ones as often as they occur."""
    found: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), found.append)
    return found


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """Return the shape of a node's value; of the first tensor if it has several, () for other values."""
    value = node.meta.get("val")
    if isinstance(value, tuple | list):
        value = next((each for each in value if isinstance(each, torch.Tensor)), None)
    return tuple(map(int, value.shape)) if isinstance(value, torch.Tensor) else ()


def argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    """Return an argument of a call by its position or name in the schema."""
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, default)


def operator_name(node: fx.Node) -> str:
    """Return the name of the operator of a call without its overload, such as "aten::linear"."""
    if node.target is operator.getitem:
        return "getitem"
    schema = getattr(node.target, "_schema", None)
    return schema.name if schema is not None else str(node.target)


def is_random(node: fx.Node) -> bool:
    """Return whether a call draws random numbers, for which the order of calls matters."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    name = operator_name(node)
    if name in ("aten::dropout", "aten::feature_dropout", "aten::alpha_dropout"):
        return bool(argument(node, 2, "train")) and float(argument(node, 1, "p")) > 0
    if name == "aten::scaled_dot_product_attention":
        return float(argument(node, 4, "dropout_p", 0.0)) > 0
    return True


def is_cheap(node: fx.Node) -> bool:
    """Return whether a call takes about the time of reading its inputs, and has no effects."""
    is_pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    return (is_pointwise or operator_name(node) in _NORMS) and not has_effects(node)


def has_effects(node: fx.Node) -> bool:
    """Return whether a call does more than to compute its result, and so keeps its place in the order."""
    if node.target is operator.getitem:
        return False
    if not isinstance(node.target, torch._ops.OpOverload):
        return True  # higher-order operators: blocks under `no_grad`, branches
    if operator_name(node) in ("aten::batch_norm", "aten::instance_norm"):  # running statistics
        return argument(node, 3, "running_mean") is not None and bool(node.args[5])
    is_collective = "c10d" in operator_name(node)  # in the same order on all ranks
    schema = node.target._schema
    return is_collective or is_random(node) or schema.is_mutable or not schema.returns


def _is_operator(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) or node.target is operator.getitem


def _contains_write(graph: fx.Graph) -> bool:
    calls = [node for node in graph.nodes if node.op == "call_function"]
    return any(not _is_operator(each) or changed_arguments(each) for each in calls)


def can_be_view(node: fx.Node) -> bool:
    """Return whether the result of a call is a view or a new tensor, depending on strides."""
    return operator_name(node) in _POSSIBLE_VIEWS


def changed_arguments(node: fx.Node) -> list[fx.Node]:
    """Return the arguments that a call writes into; all arguments of a block that contains a write."""
    if node.op == "call_function" and not _is_operator(node):
        blocks = [each.meta.get("val") for each in node.all_input_nodes]
        graphs = [each.graph for each in blocks if isinstance(each, fx.GraphModule)]
        return node.all_input_nodes if not graphs or any(map(_contains_write, graphs)) else []
    schema = getattr(node.target, "_schema", None)
    found: list[fx.Node] = []
    for position, each in enumerate(schema.arguments if schema is not None else ()):
        if each.alias_info is not None and each.alias_info.is_write:
            fx.node.map_arg(argument(node, position, each.name), found.append)
    return found
