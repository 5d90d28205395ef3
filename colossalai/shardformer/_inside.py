"""Parameters inside a cut region that no rule covers.

[Note: parameters inside a cut region]
Between the column and the row layers of a module a rank computes with its own heads or features. A parameter
that is whole there gets the gradient terms of these features only, different ones on every rank, so that the
ranks diverge without an error; a parameter with an entry for each head does not even fit a rank's heads. A
rule does not have the order of a module's layers, which its forward defines. So if a module has both layers
that output parts of the features (columns, embeddings cut along features) and layers that sum them (rows),
every parameter of it and of its children has to be covered: as one of the layers in the rule, by a rule of
its own module, or by `outside`, the list of layers on whole activations. One of the two kinds can be in the
rule of a child. A row layer inside a region (`inner_rows`) is both.

A child with a rule that cuts linear layers, embeddings or experts is a separate region. A rule that only sums
gradients, or cuts parameters and norms, is for a part of the surrounding region, and covers only its own
layers.
"""

from collections.abc import Iterator, Mapping

from torch import nn

from colossalai.pipeline import is_elsewhere
from colossalai.shardformer._layers import AXIS
from colossalai.shardformer._registry import parts_of, rule_of
from colossalai.shardformer.policies import Rule
from colossalai.tensor import spec_of

EVERYTHING = "*"
"""In `Rule.outside`: all layers and parameters outside of the other fields."""


_OPENERS = ("columns", "feature_embeddings", "inner_rows")
_CLOSERS = ("rows", "inner_rows")
_OWN_REGION = (*_OPENERS, *_CLOSERS, "splits", "heads", "embeddings", "experts")
_LAYERS = (*_OWN_REGION, "channel_norms", "head_norms", "outside")


def refuse_uncovered(
    name: str, module: nn.Module, rule: Rule, ruled: Mapping[nn.Module, Rule] | None = None
) -> None:
    """Refuse a rule that leaves out parameters between the column and the row layers of a module.

    See [Note: parameters inside a cut region].

    Args:
        name: The module's name, for the message.
        module: The module that has the rule.
        rule: The rule.
        ruled: Rules of modules by name, next to those of classes.

    Raises:
        ValueError: `module` has such parameters; the message has the names of all.
    """
    own = {**(ruled or {}), module: rule}
    if EVERYTHING in rule.outside or not _present(module, _named(rule, (*_OPENERS, *_CLOSERS))):
        return
    opens, closes = (_layers_of(module, fields, own) for fields in (_OPENERS, _CLOSERS))
    if not (opens and closes):
        return
    found = list(_uncovered(module, own))
    if found:
        kind = type(module).__name__
        raise ValueError(
            f"{kind} {name!r} cannot be cut by {', '.join(opens)} (columns) and "
            f"{', '.join(closes)} (rows): no rule covers its parameters "
            f"{', '.join(found)}. Between these layers each tensor-parallel rank has its own heads or "
            "features, so whole parameters would receive another gradient on every rank. Give its class a "
            "rule (register_rule of colossalai.shardformer), or change that of Plan.cuts: it names the "
            "layer in `head_norms` where its gradients are to be summed (a norm of single heads), the "
            "parameter in `head_params` where it has an entry for each head and is to be cut, or the layer "
            "or parameter in `outside` where it acts before the column layers or behind the row layers"
        )


def _uncovered(module: nn.Module, ruled: Mapping[nn.Module, Rule]) -> Iterator[str]:
    """Yield the names, within a module, of the parameters inside of its cut region that are not covered."""
    layers: set[str] = set()
    params: set[str] = set()
    for name, part in parts_of(module):
        # Parts are in the order of the tree: the name of a covered part precedes the names inside of it.
        rule = ruled.get(part)
        region = rule_of(part) if rule is None else rule  # cut or not
        if name and (name.rpartition(".")[0] in layers or (region and _named(region, _OWN_REGION))):
            layers.add(name)
        if name in layers:
            continue
        if rule is not None:
            prefix = f"{name}." if name else ""
            layers.update(prefix + each for each in _named(rule, _LAYERS))
            params.update(prefix + each for each in (*rule.head_params, *rule.outside))
        for key, param in part._parameters.items():
            full = f"{name}.{key}" if name else key
            if param is not None and full not in params and not _is_cut(param):
                yield full


def _layers_of(module: nn.Module, fields: tuple[str, ...], ruled: Mapping[nn.Module, Rule]) -> list[str]:
    """Return the layers in some fields of a module's rule, or otherwise of rules of its children.

    A child that has, in total, layers of both kinds is not counted: its regions begin and end in it.
    """
    own = _present(module, _named(ruled[module], fields))
    if own:
        return own
    found: list[str] = []
    for child, each in module.named_children():
        named: list[str] = []
        kinds: set[bool] = set()
        for name, part in parts_of(each):
            if (rule := ruled.get(part)) is not None:
                there = _present(part, _named(rule, fields))
                named += [".".join(filter(None, (child, name, layer))) for layer in there]
                others = _CLOSERS if fields is _OPENERS else _OPENERS
                kinds.update([True] * bool(there) + [False] * bool(_present(part, _named(rule, others))))
        if kinds == {True}:
            found += named
    return found


def _named(rule: Rule, fields: tuple[str, ...]) -> list[str]:
    return [name for field in fields for name in getattr(rule, field)]


def _present(module: nn.Module, names: list[str]) -> list[str]:
    """Return the names under which a module has a layer, here and not on another stage."""
    layers = [(name, getattr(module, name, None)) for name in dict.fromkeys(names)]
    return [name for name, each in layers if isinstance(each, nn.Module) and not is_elsewhere(each)]


def _is_cut(param: nn.Parameter) -> bool:
    """Return whether a parameter is cut over the tensor-parallel ranks already."""
    spec = spec_of(param)
    return spec is not None and AXIS in spec.axes
