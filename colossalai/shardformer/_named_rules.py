"""Sharding rules by the names of modules: the cuts of a plan that was made for one model.

A rule of a class applies to every model with such modules, and tolerates missing layers. Rules by name are
for one model, so all of their layers have to exist.
"""

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from torch import nn

from colossalai.pipeline import is_elsewhere
from colossalai.shardformer._adapters import without_adapter
from colossalai.shardformer._inside import EVERYTHING
from colossalai.shardformer._registry import parts_of, rule_of
from colossalai.shardformer._tp_plan import planned_head
from colossalai.shardformer.policies import Rule

FoundRules = list[tuple[str, nn.Module, Rule]]

_LAYERS = (
    *("columns", "rows", "inner_rows", "heads", "splits"),
    *("channel_norms", "embeddings", "feature_embeddings"),
)


class NamedRules(Mapping[str, Rule]):
    """Rules by the names of modules, as a value: it cannot be changed, and can be compared and hashed.

    Args:
        rules: The rules; "" is the name of the model itself.

    Raises:
        ValueError: `rules` is not a mapping from names to rules.
    """

    def __init__(self, rules: Mapping[str, Rule]) -> None:
        if not isinstance(rules, Mapping):
            raise ValueError(f"cuts is a {type(rules).__name__}; it must map names of modules to rules")
        for name, rule in rules.items():
            if not isinstance(name, str) or not isinstance(rule, Rule):
                raise ValueError(
                    f"cuts has {name!r}: {rule!r:.80}; it must map names of modules to rules, as in "
                    "{'blocks.0.mlp': colossalai.shardformer.Rule(columns=('up',), rows=('down',))}"
                )
        self._rules = dict(rules)

    def __getitem__(self, name: str) -> Rule:
        return self._rules[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rules)

    def __len__(self) -> int:
        return len(self._rules)

    def __hash__(self) -> int:
        return hash(frozenset(self._rules.items()))

    def __repr__(self) -> str:
        return f"NamedRules({self._rules!r})"


def rules_by_name(model: nn.Module, cuts: Mapping[str, Rule]) -> FoundRules:
    """Return the modules that are named, in the order of the model, with their rules.

    Args:
        model: The model; or a stage of it, which has all that is named.
        cuts: The rules by name.

    Raises:
        ValueError: `cuts` has an unknown name, or a rule for layers that its module lacks.
    """
    parts: dict[str, list[nn.Module]] = {}  # a rank with several stages has the model itself in each
    for name, part in parts_of(model):
        parts.setdefault(name, []).append(part)
    refuse_unknown_names(cuts, parts)
    for name, rule in cuts.items():
        _check_rule(name, parts[name], rule)
    chosen = {name: rule for name, rule in cuts.items() if rule.cuts}
    return [(name, part, chosen[name]) for name in parts if name in chosen for part in parts[name]]


def refuse_unknown_names(cuts: Collection[str], known: Collection[str]) -> None:
    """Refuse names that no module has.

    Raises:
        ValueError: `cuts` has a name that is not `known`; the message has those near to it.
    """
    for name in cuts:
        if name not in known:
            near = get_close_matches(name, known, n=3) or [each for each in known if each][:8]
            raise ValueError(
                f"cuts names {name!r}, which is not a module of this model: names are those of "
                f"model.named_modules(), such as {', '.join(map(repr, near))}"
            )


def refuse_half_tied(model: nn.Module, found: FoundRules) -> None:
    """Refuse a parameter that two layers share, and that the rules cut in one of them, or in two ways.

    Raises:
        ValueError: `found` has such a parameter; the message names both layers.
    """
    names = {part: name for name, part in parts_of(model)}
    places: dict[tuple[nn.Module, str], int] = {}
    for _, module, rule in found:
        places.update(cut_places(module, rule))
    dim_of: dict[nn.Parameter, tuple[str, int]] = {}
    for (part, key), dim in places.items():
        param = part._parameters[key]
        assert param is not None, "what is cut is there"
        dim_of.setdefault(param, (_full_name(names.get(part, ""), key), dim))
    for part, name in names.items():
        for key, held in part._parameters.items():
            if held is None or held not in dim_of:
                continue
            where, dim = dim_of[held]
            if places.get((part, key)) != dim:
                raise ValueError(
                    f"cuts takes a part of {where} along dimension {dim}, which is also "
                    f"{_full_name(name, key)}, and that is not cut so: cut both alike (`embeddings` of the "
                    "one, `heads` of the other), or neither"
                )


def _check_rule(name: str, parts: list[nn.Module], rule: Rule) -> None:
    """Refuse a rule that names something that is not there, or that would have no effect."""
    where = f"cuts[{name!r}], of a {type(parts[-1]).__name__},"
    for fields, what, is_there in _NAMED:
        for field in fields:
            named = getattr(rule, field) or ()
            for key in (named,) if isinstance(named, str) else named:
                if not any(is_there(part, key) for part in parts):
                    children = [child for part in parts for child, _ in part.named_children()]
                    raise ValueError(
                        f"{where} names {key!r} in {field}, {what} that it lacks; its layers are "
                        f"{', '.join(map(repr, children)) or 'none'}"
                    )
    _refuse_without_effect(where, parts, rule)


def _has_layer(part: nn.Module, key: str) -> bool:
    return isinstance(getattr(part, key, None), nn.Module)


def _has_param(part: nn.Module, key: str) -> bool:
    return next(head_params_of(part, Rule(head_params=(key,))), None) is not None


def _has_part(part: nn.Module, key: str) -> bool:
    return key == EVERYTHING or key in dict(part.named_modules()) or _has_param(part, key)


def _has_setting(part: nn.Module, key: str) -> bool:
    return hasattr(getattr(part, "config", None), key)


def _has_argument(part: nn.Module, key: str) -> bool:
    return key in inspect.signature(part.forward).parameters


# Fields of a rule, the kind of their names, and the check that a module has them.
_NAMED: tuple[tuple[tuple[str, ...], str, Callable[[nn.Module, str], bool]], ...] = (
    ((*_LAYERS, "head_norms", "whole_dropouts"), "a layer", _has_layer),
    (("head_params",), "a parameter", _has_param),
    (("outside",), "a layer or parameter", _has_part),
    (("counts", "part", "unset"), "an attribute", hasattr),
    (("divisible",), "an attribute of its config", _has_setting),
    (("head_inputs",), "an argument of its forward", _has_argument),
)


def rule_by_name(rule: Rule, module: nn.Module) -> Rule:
    """Return the rule of a module's class as a rule by name, without the layers that this module lacks."""
    found: dict[str, Any] = {}
    for fields, _, is_there in _NAMED:
        for field in fields:
            named = getattr(rule, field)
            if isinstance(named, tuple):
                found[field] = tuple(key for key in named if is_there(module, key))
            elif named is not None and not is_there(module, named):
                found[field] = None
    own = replace(rule, **found)
    there = {*own.columns, *own.rows, *own.channel_norms}
    return replace(own, packed=tuple(key for key in own.packed if key in there))


def _refuse_without_effect(where: str, parts: list[nn.Module], rule: Rule) -> None:
    cut = [key for field in _LAYERS for key in getattr(rule, field)]
    if twice := [key for key in cut if cut.count(key) > 1]:
        raise ValueError(f"{where} names {twice[0]!r} twice: a layer is cut in one way")
    packable = (*rule.columns, *rule.rows, *rule.channel_norms)
    if stray := [key for key in rule.packed if key not in packable]:
        raise ValueError(f"{where} names {stray[0]!r} in packed, and not in columns, rows or channel_norms")
    if rule.head_inputs and not rule.counts:
        raise ValueError(f"{where} has head_inputs, and no `counts`, the first of which counts the heads")
    if rule.experts:
        raise ValueError(
            f"{where} names experts, which expert parallelism finds by their class and cuts where it is on "
            "(`expert` of the layout): leave them out"
        )
    heads = {planned_head(part) if (own := rule_of(part)) is None else own.loss_head for part in parts}
    if rule.loss_head is not None and rule.loss_head not in heads:
        raise ValueError(
            f"{where} has loss_head={rule.loss_head!r}, which fused_loss reads from the rule of a class: "
            "leave it out, and give the class a rule by register_rule"
        )


def head_params_of(module: nn.Module, rule: Rule) -> Iterator[tuple[nn.Module, str]]:
    """Yield the `head_params` that a module has here, each by the module that owns it and its name there."""
    for name in rule.head_params:
        path, _, key = name.rpartition(".")
        owner: Any = module
        for child in filter(None, path.split(".")):
            owner = getattr(owner, child, None)
        if isinstance(owner, nn.Module) and owner._parameters.get(key) is not None:
            yield owner, key


def cut_places(module: nn.Module, rule: Rule) -> Iterator[tuple[tuple[nn.Module, str], int]]:
    """Yield the cuts of a rule: the module that has a parameter, its name there, and the dimension."""
    for owner, key in head_params_of(module, rule):
        yield (owner, key), 0
    for field in _LAYERS:
        for key in getattr(rule, field):
            layer = without_adapter(getattr(module, key, None))
            if isinstance(layer, nn.Module) and not is_elsewhere(layer):
                for name, dim in _cut_dims(layer, field):
                    if layer._parameters.get(name) is not None:
                        yield (layer, name), dim


def _cut_dims(layer: nn.Module, field: str) -> Iterator[tuple[str, int]]:
    """Yield the names of the parameters of a layer that are cut, each with the dimension."""
    is_transposed = type(layer).__name__ == "Conv1D"  # of transformers: its weight is (in, out)
    by_input = field in ("rows", "inner_rows", "splits", "feature_embeddings")
    yield "weight", int(by_input != is_transposed)
    if not by_input:
        yield "bias", 0


def _full_name(module: str, param: str) -> str:
    return f"{module}.{param}" if module else param
