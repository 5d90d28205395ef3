"""Search for the cuts of a model: modules with rules, single layers, followers, and layers tied together."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import nn

from colossalai.auto_parallel.cuts._followers import find_followers, with_followers
from colossalai.auto_parallel.cuts._layers import single_site
from colossalai.auto_parallel.cuts._regions import (
    handed_parts,
    is_region,
    ruled_site,
    rules_of_model,
    with_neighbours,
)
from colossalai.auto_parallel.cuts._strategies import CUT_OF_FIELD, Site, Strategies
from colossalai.auto_parallel.trace._trace import ModelTrace
from colossalai.shardformer import Rule


def find_strategies(
    trace: ModelTrace, model: nn.Module, num_ranks: int, *, rules: Mapping[str, Rule] | None = None
) -> Strategies:
    """Return the sites of a model and their strategies.

    Args:
        trace: Its trace.
        model: The model. It can be on the meta device.
        num_ranks: Number of ranks that share its layers; with 1 nothing is cut.
        rules: Rules by the names of modules. Default: see `rules_of_model`.
    """
    if num_ranks == 1:
        return Strategies(num_ranks=1, sites=(), followers=(), ties=())
    parts: set[str] = set()
    sites = [
        site
        for name, rule in (rules_of_model(model) if rules is None else rules).items()
        if (site := ruled_site(trace, model, name, rule, num_ranks, parts)) is not None
    ]
    sites = with_neighbours(trace, sites)
    taken = {name for site in sites for name in site.operations}
    taken |= {each.name for site in sites if is_region(site.rule) for each in trace.by_module(site.name)}
    sites += [
        site
        for operation in trace.operations
        if operation.name not in taken
        and (site := single_site(trace, model, operation, num_ranks)) is not None
    ]
    # Sites that lack a neighbor are dropped before the tensors between sites are found.
    num_sites = -1
    while num_sites != len(sites):
        num_sites = len(sites)
        sites = with_neighbours(trace, _without_half_tied(trace, model, sites))
    followers, of_tensor = find_followers(trace, {site.operations[0] for site in sites if site.rule is None})
    sites = [site if site.rule is not None else with_followers(trace, site, of_tensor) for site in sites]
    sites.sort(key=lambda site: trace.places[site.operations[0]])
    ties = dict.fromkeys([*_ties(trace, sites), *handed_parts(trace, sites)])
    return Strategies(num_ranks=num_ranks, sites=tuple(sites), followers=followers, ties=tuple(ties))


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
    """Return the sites without the strategies that cut a parameter with users outside of the sites.

    The head of masked language models of BERT has its bias twice: `decoder.bias` is `predictions.bias`. A
    model can also use the weight of a layer directly: in a head `linear(x, self.embedding.weight)`, or in a
    penalty in its loss.
    """
    names = {name for site in sites for name in site.layers}
    names |= {  # rules also cut layers without operations in the trace, such as T5's `shared`
        f"{site.name}.{key}".removeprefix(".")
        for site in sites
        if site.rule is not None
        for field in CUT_OF_FIELD
        for key in getattr(site.rule, field)
    }
    layers = {model.get_submodule(name) for name in names}
    layers |= {model.get_submodule(site.name) for site in sites if site.rule is not None}
    loose = {  # storages of parameters of modules outside of all sites
        trace.storage_of(tensor)
        for tensor, full in trace.params.items()
        if model.get_submodule(full.rpartition(".")[0].removesuffix(".base_layer")) not in layers
    }
    own = {name for site in sites for name in site.operations}
    own |= {each.name for site in sites for layer in site.layers for each in trace.by_module(layer)}
    loose |= {  # and storages of parameters that other operations use
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
        # With a cut over input features, each rank has the whole bias.
        ways = [
            each
            for each in site.strategies
            if not half or not each.is_cut or (half == {"bias"} and each.cut == "input")
        ]
        if len(ways) > 1 or len(site.strategies) == 1:
            found.append(replace(site, strategies=tuple(ways)))
    return found
