"""Parameters inside a cut region that no rule covers.

[Note: what is inside a cut region]
Between the column and the row layers of a module a rank computes with its own heads or features. A parameter
that is whole there finds the terms of these features only, another gradient on every rank, so that the ranks
drift apart without an error; one with an entry for each head does not fit to a rank's heads at all. The order
of a module's layers is that of its forward, which a rule does not have. So every parameter of a module that
owns both column and row layers, and of its children, has to be covered: by being one of the layers that the
rule names, by a rule of its own module, or by `outside`, which lists what acts on whole activations.
"""

from collections.abc import Iterator, Set

from torch import nn

from colossalai.pipeline import is_elsewhere
from colossalai.shardformer._registry import parts_of, rule_of
from colossalai.shardformer.policies import Rule
from colossalai.tensor import spec_of

EVERYTHING = "*"
"""In `Rule.outside`: all layers and parameters that no other field names."""


def refuse_uncovered(name: str, module: nn.Module, rule: Rule, ruled: Set[nn.Module] = frozenset()) -> None:
    """Refuse a rule that leaves out parameters between the column and the row layers of a module.

    See [Note: what is inside a cut region].

    Args:
        name: The module's name, for the message.
        module: The module that has the rule.
        rule: The rule.
        ruled: Modules with a rule of their own, next to those whose classes have one.

    Raises:
        ValueError: `module` has such parameters; the message has the names of all.
    """
    found = list(_uncovered(module, rule, ruled))
    if found:
        kind = type(module).__name__
        raise ValueError(
            f"{kind} {name!r} cannot be cut by {', '.join(rule.columns)} (columns) and "
            f"{', '.join((*rule.rows, *rule.inner_rows))} (rows): no rule covers its parameters "
            f"{', '.join(found)}. Between these layers each tensor-parallel rank has its own heads or "
            "features, so whole parameters would receive another gradient on every rank. Give its class a "
            "rule (register_rule of colossalai.shardformer), or change that of Plan.cuts: it names the "
            "layer in `head_norms` where its gradients are to be summed (a norm of single heads), the "
            "parameter in `head_params` where it has an entry for each head and is to be cut, or the layer "
            "or parameter in `outside` where it acts before the column layers or behind the row layers"
        )


def _uncovered(module: nn.Module, rule: Rule, ruled: Set[nn.Module]) -> Iterator[str]:
    """Yield the names, within a module, of the parameters inside of its cut region that are not covered."""
    if EVERYTHING in rule.outside or not (_has_any(module, rule.columns) and _has_any(module, rule.rows)):
        return
    layers = {
        *(*rule.columns, *rule.rows, *rule.inner_rows, *rule.splits, *rule.heads, *rule.embeddings),
        *(*rule.feature_embeddings, *rule.channel_norms, *rule.head_norms, *rule.outside),
    }
    params = {*rule.head_params, *rule.experts, *rule.outside}
    for name, part in parts_of(module):
        # Parts are in the order of the tree: what is inside of a covered one has its name before its own.
        if name and (_has_rule(part, ruled) or name.rpartition(".")[0] in layers):
            layers.add(name)
        if name in layers:
            continue
        for key, param in part._parameters.items():
            full = f"{name}.{key}" if name else key
            if param is not None and full not in params and spec_of(param) is None:
                yield full


def _has_rule(part: nn.Module, ruled: Set[nn.Module]) -> bool:
    """Return whether a module is a region of its own, which takes whole activations, cut or not."""
    rule = rule_of(part)
    return part in ruled or (rule is not None and rule.cuts)


def _has_any(module: nn.Module, names: tuple[str, ...]) -> bool:
    layers = [getattr(module, name, None) for name in names]
    return any(isinstance(each, nn.Module) and not is_elsewhere(each) for each in layers)
