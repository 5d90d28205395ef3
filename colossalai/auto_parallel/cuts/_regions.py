"""Modules that a rule of `shardformer` cuts as a whole, such as an attention with its heads.

[Note: parts in a rule]
In a module with a rule, ranks share the operations on parts: from the outputs of its column layers up to its
row layers, whose sums are whole. Operations before and after run on each rank, such as the dropout, the
residual sum and the norm of `BertOutput`. A part can leave the module: the rules of `BertIntermediate` and
`BertOutput` only work together. So the site that makes a part and the site that takes it are both cut or both
whole. A site without its counterpart is left to its single layers.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from torch import nn

from colossalai.auto_parallel.cuts._layers import transfers
from colossalai.auto_parallel.cuts._strategies import CUT_OF_FIELD, WHOLE, CutTransfer, Site, Strategy
from colossalai.auto_parallel.trace._trace import ModelTrace, Operation
from colossalai.model_zoo import SelfAttention
from colossalai.shardformer import Rule, check_rule, check_shards, rule_by_name

# Fields of a `Rule` whose layers have whole outputs, by a collective; layers of all others output parts.
_GIVE_WHOLE = ("rows", "splits", "embeddings", "heads")

_ATTENTION_OF_ZOO = Rule(columns=("qkv",), rows=("projection",), draws=True)


def rules_of_model(model: nn.Module) -> dict[str, Rule]:
    """Return the rules of a model's modules by name: from their classes, or from the model's own `tp_plan`.

    Attentions of this package's model zoo cut themselves if they are built in a tensor mode, and have a rule
    here if they were built of plain layers.
    """
    found = {
        name: _ATTENTION_OF_ZOO
        for name, part in model.named_modules()
        if isinstance(part, SelfAttention) and isinstance(part.qkv, nn.Linear)
    }
    for name, module, rule in check_shards(model, 1):
        # Experts are cut by expert parallelism; tensor parallelism of a plan leaves them whole.
        if not rule.experts:
            found[name] = rule_by_name(rule, module)
    return found


def ruled_site(
    trace: ModelTrace, model: nn.Module, name: str, rule: Rule, num_ranks: int, parts: set[str]
) -> Site | None:
    """Return the site of a module with a rule; None if it is not in the trace, or cannot be shared.

    Args:
        trace: The trace.
        model: The model.
        name: The full name of the module.
        rule: Its rule.
        num_ranks: Number of ranks.
        parts: Tensors that earlier modules output as parts; those of this module are added.
    """
    part: Any = model.get_submodule(name)
    try:
        check_rule(name, part, rule, num_ranks)
    except ValueError:
        return None  # the ranks do not divide its heads or features
    if rule is _ATTENTION_OF_ZOO and part.qkv.out_features // (3 * part.head_size) % num_ranks:
        return None
    fields = [field for field in CUT_OF_FIELD if getattr(rule, field)]
    forward: list[CutTransfer] = []
    backward: list[CutTransfer] = []
    layers: dict[str, str] = {}
    own: list[Operation] = []
    gives_whole: set[str] = set()
    for field in fields:
        for key in getattr(rule, field):
            full = f"{name}.{key}" if name else key
            operations = trace.by_module(full)
            if not operations:
                continue
            layers[full] = CUT_OF_FIELD[field]
            own += operations
            gives_whole.update(each.name for each in operations if field in _GIVE_WHOLE)
            moved_forward, moved_backward = transfers(trace, operations[0], operations[-1], field)
            forward += moved_forward
            backward += [each for each in moved_backward if each not in backward]
    if not own:
        return None
    first = CUT_OF_FIELD[fields[0]]
    strategy = Strategy(cut=first, forward=tuple(forward), backward=tuple(backward))
    # The two low-rank factors of an adapted layer are not counted.
    owners = {*layers, *(f"{layer}.base_layer" for layer in layers)}
    of_heads = {f"{name}.{key}" for key in rule.head_params}
    cut_params = [
        tensor
        for owner in sorted(owners | {full.rpartition(".")[0] for full in of_heads})
        for tensor in trace.params_of.get(owner, ())
        if owner in owners or trace.params[tensor] in of_heads
    ]
    operations = tuple(own)
    if is_region(rule):
        parts.update(cut_params)
        operations = _on_parts(trace.by_module(name), own, gives_whole, parts)
    return Site(
        name=name,
        layers=layers,
        operations=tuple(sorted((each.name for each in operations), key=trace.places.__getitem__)),
        params=tuple(cut_params),
        strategies=(WHOLE, strategy),
        rule=rule,
        results=frozenset(transfer.tensor for transfer in forward),
    )


def is_region(rule: Rule | None) -> bool:
    """Whether ranks share more of a module with a rule than the layers in the rule."""
    return rule is not None and bool(rule.columns or rule.rows or rule.counts)


# See [Note: parts in a rule].
def _on_parts(
    operations: Sequence[Operation],
    own: Sequence[Operation],
    gives_whole: Collection[str],
    parts: set[str],
) -> tuple[Operation, ...]:
    """Return the operations of a module that ranks share.

    Args:
        operations: The operations of the module, in order.
        own: The operations of the layers in its rule.
        gives_whole: Names of the operations in `own` whose outputs are whole.
        parts: Tensors of which each rank has its part; those that are made here are added.
    """
    layers, found = {each.name for each in own}, []
    for each in operations:
        if each.name in layers or not parts.isdisjoint(each.inputs):
            found.append(each)
            if each.name not in gives_whole:
                parts.update(each.outputs)
    return tuple(found)


def _parts_across(trace: ModelTrace, sites: Sequence[Site]) -> Iterator[tuple[int, int | None]]:
    """Yield each site that passes a part to another module, or takes one from it, and the other's number.

    The number is None if the other one is not among the sites.
    """
    site_of = {name: number for number, site in enumerate(sites) for name in site.operations}
    for number, site in enumerate(sites):
        if not is_region(site.rule):
            continue
        inside = set(site.operations)
        for operation in (trace.operations[trace.places[name]] for name in site.operations):
            for name in set(operation.outputs) - site.results:
                for user in trace.consumers[name]:
                    if user.name not in inside:
                        yield number, site_of.get(user.name)
            if site.layers.get(operation.module) != "input":
                continue
            taken = next((name for name in operation.inputs if name not in trace.params), None)
            producer = None if taken is None else trace.producers.get(taken)
            if producer is None or producer.name not in inside:
                yield number, None if producer is None else site_of.get(producer.name)


def with_neighbours(trace: ModelTrace, sites: list[Site]) -> list[Site]:
    """Return the sites without those whose parts are made or used outside of the sites."""
    while lonely := {number for number, other in _parts_across(trace, sites) if other is None}:
        sites = [site for number, site in enumerate(sites) if number not in lonely]
    return sites


def handed_parts(trace: ModelTrace, sites: Sequence[Site]) -> list[tuple[int, int]]:
    """Return the pairs of sites where one passes a part to the other."""
    return [
        (min(number, other), max(number, other))
        for number, other in _parts_across(trace, sites)
        if other is not None and other != number
    ]
