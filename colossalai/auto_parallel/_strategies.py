"""Strategies: how each layer of a model may be cut over tensor-parallel ranks, and which tensors follow.

A *site* is what is cut as one: a linear layer, a convolution, a batch norm, an embedding, or all layers that
a rule of `shardformer` shares out together, such as an attention with its heads. Each of its strategies says
which field of a `Rule` carries it out, what its ranks communicate, and whether its input and its output are
whole or parts of the features.

[Note: tensors that follow]
Ranks can convert a layout only where a layer begins or ends: between two layers the user's own code runs. So
the tensors between them are *followers*: those that elementwise operations connect have one layout, whole or
cut. They can be cut if every operation that touches them computes each feature by itself. A softmax, a
reshape, a residual sum with something whole, or being returned by the model makes all of them whole.

[Note: parts in a rule]
Of a module with a rule, ranks share what computes on parts: from the outputs of its column layers on, up to
its row layers, whose sums are whole. What comes before and behind is done by each rank, such as the dropout,
the residual sum and the norm of `BertOutput`. A part can leave the module: the rules of `BertIntermediate`
and `BertOutput` only fit together. So the site that makes a part and the site that takes it are both cut or
neither, and where the other one is missing, a site is left to its single layers.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import nn

from colossalai.auto_parallel.trace._trace import ModelTrace, Operation
from colossalai.model_zoo import SelfAttention
from colossalai.shardformer import Rule, check_rule, check_shards, rule_by_name

CUTS = ("whole", "output", "input", "vocab", "channel", "expert")
"""How a layer can be cut: not at all, by output or input features or channels, by the vocabulary, by the
channels of a norm, by experts."""

CUT_OF_FIELD: Mapping[str, str] = {
    "columns": "output",
    "heads": "output",
    "feature_embeddings": "output",
    "rows": "input",
    "splits": "input",
    "embeddings": "vocab",
    "channel_norms": "channel",
    "experts": "expert",
}
"""By the field of a `Rule` that names a layer, how the layer is cut."""

_CONVOLUTION = ("conv1d", "conv2d", "conv3d")
# Operations that compute each feature by itself; in place they end with "_".
_POOLING = frozenset(f"{kind}_pool{dims}d" for kind in ("max", "avg", "adaptive_avg") for dims in (1, 2, 3))
_ELEMENTWISE = _POOLING | {
    *("relu", "relu6", "gelu", "silu", "tanh", "sigmoid", "elu", "leaky_relu", "hardtanh", "hardswish"),
    *("softplus", "mish", "exp", "neg", "abs", "pow", "clone", "detach", "contiguous", "to", "_to_copy"),
    *("type_as", "add", "sub", "mul", "div"),
}


# Fields of a `Rule` whose layers give whole outputs, by a collective; those of all others give parts.
_GIVE_WHOLE = ("rows", "splits", "embeddings", "heads")

_ATTENTION_OF_ZOO = Rule(columns=("qkv",), rows=("projection",), draws=True)


@dataclass(frozen=True)
class CutTransfer:
    """A collective along the tensor axis.

    Attributes:
        op: One of `colossalai.device.OPERATIONS`.
        tensor: The tensor of the trace whose bytes it has, as of one rank's share of the batch.
    """

    op: str
    tensor: str


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """A way to cut a site.

    Attributes:
        cut: One of `CUTS`; of a rule with several layers, that of the first.
        field: The field of a `Rule` that names the layer; None where nothing is cut, or the site has a rule.
        takes_part: Whether its input is a part of the features.
        gives_part: Whether its output is.
        forward: What the ranks exchange in the forward.
        backward: What they exchange in the backward.
    """

    cut: str = "whole"
    field: str | None = None
    takes_part: bool = False
    gives_part: bool = False
    forward: tuple[CutTransfer, ...] = ()
    backward: tuple[CutTransfer, ...] = ()

    @property
    def is_cut(self) -> bool:
        """Whether the ranks share it."""
        return self.cut != "whole"


WHOLE = Strategy()


@dataclass(frozen=True, kw_only=True)
class Site:
    """What is cut as one.

    Attributes:
        name: The full name of the layer, or of the module that has the rule.
        layers: The full names of the layers that are cut, with how they are then.
        operations: Names of its operations in the trace, whose work the ranks share.
        params: Names of the parameter tensors of which each rank has its part.
        strategies: `WHOLE`, then the others.
        takes: The number of the followers that are its input; None: its input is whole.
        gives: The same of its output.
        rule: The rule that carries out its cut; None for a single layer.
        results: Tensors of its operations that stay whole when it is cut.
    """

    name: str
    layers: Mapping[str, str]
    operations: tuple[str, ...]
    params: tuple[str, ...]
    strategies: tuple[Strategy, ...]
    takes: int | None = None
    gives: int | None = None
    rule: Rule | None = None
    results: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Followers:
    """Tensors between sites that are all whole or all cut; see [Note: tensors that follow].

    Attributes:
        tensors: Their names.
        operations: The operations between them.
    """

    tensors: tuple[str, ...]
    operations: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Strategies:
    """All that can be chosen for a number of tensor-parallel ranks.

    Attributes:
        num_ranks: Their number.
        sites: In the order in which they run.
        followers: Those that may be cut.
        ties: Pairs of sites, by number, that share a parameter, or of which one hands a part to the other:
            both are cut, or neither.
    """

    num_ranks: int
    sites: tuple[Site, ...]
    followers: tuple[Followers, ...]
    ties: tuple[tuple[int, int], ...]

    @cached_property
    def site_of(self) -> Mapping[str, int]:
        """By the name of an operation the number of the site that it belongs to; the innermost."""
        found: dict[str, int] = {}
        sizes: dict[str, float] = {}
        for number, site in enumerate(self.sites):
            for name in site.operations:
                if len(site.operations) < sizes.get(name, math.inf):
                    found[name], sizes[name] = number, len(site.operations)
        return found

    @cached_property
    def followers_of(self) -> Mapping[str, int]:
        """By the name of an operation the number of the followers that it is between."""
        return {name: number for number, each in enumerate(self.followers) for name in each.operations}

    @cached_property
    def followers_by_tensor(self) -> Mapping[str, int]:
        """By the name of a tensor the number of the followers that it is among."""
        return {name: number for number, each in enumerate(self.followers) for name in each.tensors}


def find_strategies(
    trace: ModelTrace, model: nn.Module, num_ranks: int, *, rules: Mapping[str, Rule] | None = None
) -> Strategies:
    """Return what can be cut of a model, and how.

    Args:
        trace: Its trace.
        model: The model; one without memory will do.
        num_ranks: Ranks that share its layers; with 1 nothing is cut.
        rules: Rules by the names of modules, beside those of classes; see `rules_of_model`.
    """
    if num_ranks == 1:
        return Strategies(num_ranks=1, sites=(), followers=(), ties=())
    parts: set[str] = set()
    sites = [
        site
        for name, rule in (rules_of_model(model) if rules is None else rules).items()
        if (site := _ruled_site(trace, model, name, rule, num_ranks, parts)) is not None
    ]
    sites = _with_neighbours(trace, sites)
    taken = {name for site in sites for name in site.operations}
    taken |= {each.name for site in sites if _is_region(site.rule) for each in trace.by_module(site.name)}
    sites += [
        site
        for operation in trace.operations
        if operation.name not in taken
        and (site := _single_site(trace, model, operation, num_ranks)) is not None
    ]
    # Before the tensors between sites are found: they are cut by a site at each end.
    num_sites = -1
    while num_sites != len(sites):
        num_sites = len(sites)
        sites = _with_neighbours(trace, _without_half_tied(trace, model, sites))
    followers, of_tensor = _find_followers(trace, {site.operations[0] for site in sites if site.rule is None})
    sites = [site if site.rule is not None else _with_followers(trace, site, of_tensor) for site in sites]
    sites.sort(key=lambda site: trace.places[site.operations[0]])
    ties = dict.fromkeys([*_ties(trace, sites), *_handed_parts(trace, sites)])
    return Strategies(num_ranks=num_ranks, sites=tuple(sites), followers=followers, ties=tuple(ties))


def rules_of_model(model: nn.Module) -> dict[str, Rule]:
    """Return the rules of a model's modules by name: of their classes, or of the model's own `tp_plan`.

    Attentions of this package's model zoo cut themselves where they are built in a tensor mode, and have a
    rule here where they were built of plain layers.
    """
    found = {
        name: _ATTENTION_OF_ZOO
        for name, part in model.named_modules()
        if isinstance(part, SelfAttention) and isinstance(part.qkv, nn.Linear)
    }
    for name, module, rule in check_shards(model, 1):
        # Experts are cut by expert parallelism, and tensor parallelism by a plan leaves them whole.
        if not rule.experts:
            found[name] = rule_by_name(rule, module)
    return found


def _ruled_site(
    trace: ModelTrace, model: nn.Module, name: str, rule: Rule, num_ranks: int, parts: set[str]
) -> Site | None:
    """Return the site of a module with a rule; None if it is not in the trace, or the ranks cannot share.

    Args:
        trace: The trace.
        model: The model.
        name: The full name of the module.
        rule: Its rule.
        num_ranks: The ranks.
        parts: Tensors of which modules before it make parts; its own are added.
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
            moved_forward, moved_backward = _transfers(trace, operations[0], operations[-1], field)
            forward += moved_forward
            backward += [each for each in moved_backward if each not in backward]
    if not own:
        return None
    first = CUT_OF_FIELD[fields[0]]
    strategy = Strategy(cut=first, forward=tuple(forward), backward=tuple(backward))
    cut_params = [
        tensor
        for tensor, full in trace.params.items()
        # Of an adapted layer the two thin factors are not counted.
        if full.rpartition(".")[0].removesuffix(".base_layer") in layers
        or full in {f"{name}.{key}" for key in rule.head_params}
    ]
    operations = tuple(own)
    if _is_region(rule):
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


def _is_region(rule: Rule | None) -> bool:
    """Whether ranks share more of a module with a rule than the layers that it names."""
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
        operations: Those of the module, in order.
        own: Those of the layers that its rule names.
        gives_whole: Names of those of them whose outputs are whole.
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
    """Yield each site that gives a part to another module, or takes one of it, and the number of the other.

    The other one is None where it is not among the sites.
    """
    site_of = {name: number for number, site in enumerate(sites) for name in site.operations}
    for number, site in enumerate(sites):
        if not _is_region(site.rule):
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


def _with_neighbours(trace: ModelTrace, sites: list[Site]) -> list[Site]:
    """Return the sites without those that lack the one that makes or takes their parts."""
    while lonely := {number for number, other in _parts_across(trace, sites) if other is None}:
        sites = [site for number, site in enumerate(sites) if number not in lonely]
    return sites


def _handed_parts(trace: ModelTrace, sites: Sequence[Site]) -> list[tuple[int, int]]:
    """Return the pairs of sites of which one hands a part to the other."""
    return [
        (min(number, other), max(number, other))
        for number, other in _parts_across(trace, sites)
        if other is not None and other != number
    ]


def _single_site(trace: ModelTrace, model: nn.Module, operation: Operation, num_ranks: int) -> Site | None:
    """Return the site of a layer of torch that no rule shares out; None where it can only be whole."""
    module = model.get_submodule(operation.module) if operation.module else None
    if module is None or len(trace.by_module(operation.module)) > _most_operations(module):
        return None  # it is called several times, or does more than its layer
    fields = _fields_of(module, _base_name(operation), num_ranks)
    strategies = [_strategy(trace, operation, field) for field in fields]
    if not strategies:
        return None
    return Site(
        name=operation.module,
        layers={operation.module: strategies[0].cut},
        operations=(operation.name,),
        params=tuple(name for name in operation.inputs if name in trace.params),
        strategies=(WHOLE, *strategies),
    )


def _fields_of(module: nn.Module, kind: str, num_ranks: int) -> list[str]:
    """Return the fields of a `Rule` that may name a layer of torch, for a number of ranks."""
    if kind == "linear" and isinstance(module, nn.Linear):
        taken, made = module.in_features, module.out_features
    elif kind in _CONVOLUTION and isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        if module.groups > 1:
            return []
        taken, made = module.in_channels, module.out_channels
    elif kind == "embedding" and type(module) is nn.Embedding:
        is_plain = module.max_norm is None and not module.sparse and not module.scale_grad_by_freq
        return ["embeddings"] if is_plain and module.num_embeddings >= num_ranks else []
    elif kind == "batch_norm" and isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
        return ["channel_norms"] if module.num_features % num_ranks == 0 else []
    else:
        return []
    # A head is padded to any number of outputs.
    can_gather = made % num_ranks == 0 or (kind == "linear" and made >= num_ranks)
    of_output = (["heads"] if can_gather else []) + (["columns"] if made % num_ranks == 0 else [])
    return of_output + (["splits", "rows"] if taken % num_ranks == 0 else [])


def _most_operations(module: nn.Module) -> int:
    """A batch norm counts its batches beside its own operation."""
    return 2 if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d) else 1


def _strategy(trace: ModelTrace, operation: Operation, field: str) -> Strategy:
    forward, backward = _transfers(trace, operation, operation, field)
    return Strategy(
        cut=CUT_OF_FIELD[field],
        field=field,
        takes_part=field in ("rows", "channel_norms"),
        gives_part=field in ("columns", "channel_norms"),
        forward=tuple(forward),
        backward=tuple(backward),
    )


def _transfers(
    trace: ModelTrace, first: Operation, last: Operation, field: str
) -> tuple[list[CutTransfer], list[CutTransfer]]:
    """Return what the ranks of a layer exchange, forward and backward, if a field of a rule names it."""
    taken = next((name for name in first.inputs if name not in trace.params), None)
    made = last.outputs[0] if last.outputs else None
    has_grad = taken is not None and trace.tensors[taken].dtype.is_floating_point
    forward: list[CutTransfer] = []
    backward: list[CutTransfer] = []
    if made is not None and field in ("rows", "splits", "embeddings"):
        forward.append(CutTransfer("all_reduce", made))
    if made is not None and field == "heads":
        forward.append(CutTransfer("all_gather", made))
    if taken is not None and has_grad and taken not in trace.inputs:
        if field in ("columns", "heads"):
            backward.append(CutTransfer("all_reduce", taken))
        if field == "splits":
            backward.append(CutTransfer("all_gather", taken))
    return forward, backward


class _Sets:
    """Disjoint sets of names."""

    def __init__(self) -> None:
        self._above: dict[str, str] = {}

    def find(self, name: str) -> str:
        """Return the name that stands for the set that a name is in."""
        above = self._above.setdefault(name, name)
        while above != self._above[above]:
            above = self._above[above]
        self._above[name] = above
        return above

    def join(self, names: Iterable[str]) -> None:
        """Make one set of those that some names are in."""
        found = [self.find(name) for name in names]
        for each in found[1:]:
            self._above[self.find(each)] = self.find(found[0])


# See [Note: tensors that follow].
def _find_followers(trace: ModelTrace, ends: set[str]) -> tuple[tuple[Followers, ...], Mapping[str, int]]:
    """Return the sets of tensors that may be cut, and by the name of a tensor the number of its set.

    Args:
        trace: The trace.
        ends: Names of the operations of sites, at which sets begin and end.
    """
    sets = _Sets()
    inside: dict[str, list[str]] = {}
    whole: set[str] = {*trace.outputs, *trace.inputs}
    at_sites: set[str] = set()  # the others, such as a count of batches, are cut by nothing
    for operation in trace.operations:
        if operation.name in ends:
            at_sites |= {*operation.inputs, *operation.outputs}
            continue
        tensors = [name for name in (*operation.inputs, *operation.outputs) if name not in trace.buffers]
        if not tensors:
            continue
        if _passes(trace, operation):
            sets.join(tensors)
            inside.setdefault(tensors[0], []).append(operation.name)
        else:
            whole.update(tensors)
    kept: dict[str, int] = {}
    groups: list[list[str]] = []
    whole.update(name for name in trace.tensors if name not in trace.producers)
    closed = {sets.find(name) for name in whole}
    open_sets = {sets.find(name) for name in at_sites} - closed
    for name in trace.tensors:
        if name in trace.params or name in trace.buffers or (root := sets.find(name)) not in open_sets:
            continue
        if root not in kept:
            kept[root] = len(groups)
            groups.append([])
        groups[kept[root]].append(name)
    operations: list[list[str]] = [[] for _ in groups]
    for name, names in inside.items():
        if (number := kept.get(sets.find(name))) is not None:
            operations[number] += names
    followers = tuple(
        Followers(tensors=tuple(tensors), operations=tuple(own))
        for tensors, own in zip(groups, operations, strict=True)
    )
    return followers, {name: number for number, each in enumerate(followers) for name in each.tensors}


def _passes(trace: ModelTrace, operation: Operation) -> bool:
    """Whether each feature of the results depends on the same feature of the operands alone."""
    kind = _base_name(operation)
    # Ranks that drop parts of the features would have to draw apart; only what drops nothing passes.
    drops = operation.argument("train", True) and operation.argument("p", 1.0) > 0
    is_known = kind in _ELEMENTWISE or (kind == "dropout" and not drops)
    if not is_known or any(name in trace.params for name in operation.inputs):
        return False
    shapes = {trace.tensors[name].shape for name in (*operation.inputs, *operation.outputs)}
    return len(shapes) == 1 or (kind in _POOLING and len({len(shape) for shape in shapes}) == 1)


def _with_followers(trace: ModelTrace, site: Site, of_tensor: Mapping[str, int]) -> Site:
    """Return a site with the numbers of its followers, and without the strategies that lack them."""
    operation = trace.operations[trace.places[site.operations[0]]]
    taken = next((name for name in operation.inputs if name not in trace.params), None)
    takes = None if taken is None else of_tensor.get(taken)
    gives = of_tensor.get(operation.outputs[0])
    strategies = tuple(
        each
        for each in site.strategies
        if not (each.takes_part and takes is None) and not (each.gives_part and gives is None)
    )
    return Site(
        name=site.name,
        layers=site.layers,
        operations=site.operations,
        params=site.params,
        strategies=strategies,
        takes=takes,
        gives=gives,
    )


def _ties(trace: ModelTrace, sites: list[Site]) -> tuple[tuple[int, int], ...]:
    """Return the pairs of sites that share a parameter."""
    holder: dict[str, int] = {}
    pairs: list[tuple[int, int]] = []
    for number, site in enumerate(sites):
        for name in site.params:
            first = holder.setdefault(trace.storage_of(name), number)
            if first != number and (first, number) not in pairs:
                pairs.append((first, number))
    return tuple(pairs)


def _without_half_tied(trace: ModelTrace, model: nn.Module, sites: Sequence[Site]) -> list[Site]:
    """Return the sites without the ways that cut a parameter which is used outside of the sites as well.

    The head of masked language models of BERT has its bias twice: `decoder.bias` is `predictions.bias`. A
    model can also take the weight of a layer itself: a head that is `linear(x, self.embedding.weight)`, or a
    penalty on a weight in its loss.
    """
    names = {name for site in sites for name in site.layers}
    names |= {  # rules cut layers that no operation is from as well, such as T5's `shared`
        f"{site.name}.{key}".removeprefix(".")
        for site in sites
        if site.rule is not None
        for field in CUT_OF_FIELD
        for key in getattr(site.rule, field)
    }
    layers = {model.get_submodule(name) for name in names}
    layers |= {model.get_submodule(site.name) for site in sites if site.rule is not None}
    loose = {  # storages of parameters that a module which is in no site has
        trace.storage_of(tensor)
        for tensor, full in trace.params.items()
        if model.get_submodule(full.rpartition(".")[0].removesuffix(".base_layer")) not in layers
    }
    own = {name for site in sites for name in site.operations}
    own |= {each.name for site in sites for layer in site.layers for each in trace.by_module(layer)}
    loose |= {  # and those that other operations take
        trace.storage_of(tensor)
        for operation in trace.operations
        if operation.name not in own
        for tensor in operation.inputs
        if tensor in trace.params
    }
    found = []
    for site in sites:
        half = {
            trace.params[name].rpartition(".")[2] for name in site.params if trace.storage_of(name) in loose
        }
        # Layers that share their input features have the whole bias.
        ways = [
            each
            for each in site.strategies
            if not half or not each.is_cut or (half == {"bias"} and each.cut == "input")
        ]
        if len(ways) > 1 or len(site.strategies) == 1:
            found.append(replace(site, strategies=tuple(ways)))
    return found


def _base_name(operation: Operation) -> str:
    """Return the name of the operator alone: "relu" of "aten.relu_.default"."""
    return operation.target.removeprefix("aten.").partition(".")[0].rstrip("_")


def tied_alike(first: Strategy, second: Strategy) -> bool:
    """Whether two sites that share a parameter may have these strategies: both cut it by rows, or neither."""
    by_rows = {"embeddings", "heads", None}
    if first.is_cut != second.is_cut:
        return False
    return not first.is_cut or {first.field, second.field} <= by_rows
