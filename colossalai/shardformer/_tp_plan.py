"""Translation of the `tp_plan` of a model of transformers to rules for its modules.

Such a plan has a style of cut for each layer by name, `layers.*.mlp.up_proj: colwise`. A rule covers all
layers of one module, so the entries are grouped by the module of the layers.

[Note: counts of heads under a plan]
A plan contains layers, and no attributes that count heads or features. transformers runs such forwards with
the slices of a rank and the attributes of the whole, so they have to take the number of heads from the
shapes: `view(..., -1, head_dim)`. We do not change the attributes either. If the forward of a module with cut
heads still reads a count of them, the plan is refused, since the result could have the right shape and wrong
values: such a class needs a rule, with `counts`.
"""

import inspect
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Set

from torch import nn

from colossalai.pipeline import is_elsewhere
from colossalai.shardformer._adapters import without_adapter
from colossalai.shardformer._registry import parts_of
from colossalai.shardformer.policies import Rule

LINEAR_STYLES: Mapping[str, str] = {
    "colwise": "columns",
    "packed_colwise": "columns",
    "rowwise": "rows",
    "packed_rowwise": "rows",
    "colwise_gather_output": "heads",
    "colwise_rep": "heads",
    "rowwise_split_input": "splits",
    "rowwise_rep": "splits",
}
"""The styles of linear layers, and the equivalent field of a `Rule`."""

STYLES: Mapping[str, str] = {
    **LINEAR_STYLES,
    "embedding_rowwise": "embeddings",
    "replicated_with_grad_allreduce": "head_norms",
    "replicate": "",
}
"""All styles that are translated; an empty field has no effect."""

_COUNTS = frozenset(
    ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_key_value_heads", "num_kv_heads")
)


def rules_of_plans(model: nn.Module, *, ruled: Set[nn.Module]) -> list[tuple[str, nn.Module, Rule]]:
    """Return the modules whose layers a plan cuts, by name, with a rule for each.

    Args:
        model: The model, or a stage of it.
        ruled: Modules that have a rule already, for which the plan does not count.

    Raises:
        ValueError: `model` has a plan with entries that cannot be translated; all of them are named.
    """
    found: list[tuple[str, nn.Module, Rule]] = []
    covered: set[nn.Module] = set()
    for name, part in parts_of(model):
        if part not in covered and (plan := _plan_of(part)):
            covered.update(part.modules())  # the plan of a model has the entries of those in it
            rules = _rules_of_plan(part, plan, ruled)
            found += [(".".join(filter(None, (name, owner))), module, rule) for owner, module, rule in rules]
    return found


def planned_head(model: nn.Module) -> str | None:
    """Return the name of the head of a causal language model whose plan cuts it along the vocabulary."""
    style = _plan_of(model).get("lm_head")
    return "lm_head" if LINEAR_STYLES.get(style or "") == "heads" else None


def _plan_of(module: nn.Module) -> Mapping[str, str]:
    # A wrapper of a model, such as peft's, may forward attributes: the plan has the names of the inner model.
    has_own = hasattr(type(module), "tp_plan") or "tp_plan" in vars(module)
    plan = getattr(module, "tp_plan", None) if has_own else None
    return plan if isinstance(plan, Mapping) else {}


def _rules_of_plan(
    model: nn.Module, plan: Mapping[str, str], ruled: Set[nn.Module]
) -> list[tuple[str, nn.Module, Rule]]:
    modules = dict(model.named_modules())
    refused: dict[str, str] = {}
    fields: defaultdict[str, defaultdict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, entry, style in _entries(model, plan):
        owner, _, child = name.rpartition(".")
        if modules.get(owner, model) in ruled or is_elsewhere(modules.get(name, model)):
            continue
        if reason := _reason_against(modules.get(name), style):
            refused[entry] = f"{style!r} {reason}"
        elif field := STYLES[style]:
            fields[owner][field].append(child)
            if style.startswith("packed"):
                fields[owner]["packed"].append(child)
    _add_tied_embeddings(modules, fields)
    rules = [(owner, modules[owner], _rule(owner, modules[owner], found)) for owner, found in fields.items()]
    for owner, module, rule in rules:
        if rule.columns and (read := _counts_read(module)):
            refused[_entry_of(owner)] = f"the forward of {type(module).__name__} reads {', '.join(read)}"
    if refused:
        listed = "; ".join(f"{entry}: {reason}" for entry, reason in refused.items())
        raise ValueError(
            f"tensor parallelism of {type(model).__name__} by its tp_plan: {len(refused)} of its entries "
            f"cannot be translated: {listed}. Give the classes of these modules rules (register_rule of "
            "colossalai.shardformer), or leave tensor parallelism out; styles that are translated: "
            f"{', '.join(STYLES)}"
        )
    return rules


def _entries(model: nn.Module, plan: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yield the matches of a plan in a model: the name of a module or parameter, of its entry, and the style.

    Experts are for expert parallelism, and are whole on every rank here: they give the same everywhere.
    """
    names = [name for name, _ in model.named_modules()] + [name for name, _ in model.named_parameters()]
    for name in names:
        entry = _entry_of(name)
        if entry in plan and "experts" not in entry.split("."):
            yield name, entry, plan[entry]


def _entry_of(name: str) -> str:
    """Return the name of a layer in a plan, where numbers of layers are stars."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _reason_against(layer: nn.Module | None, style: str) -> str:
    """Return why the entry of a layer cannot be translated; empty where it can."""
    if style not in STYLES:
        return "is no style that is known"
    if layer is None:
        return "of a parameter, not of a layer"
    layer = without_adapter(layer)
    if style in LINEAR_STYLES and not (isinstance(layer, nn.Linear) or type(layer).__name__ == "Conv1D"):
        return f"of a {type(layer).__name__}, which is no torch.nn.Linear"
    if STYLES[style] == "embeddings" and not isinstance(layer, nn.Embedding):
        return f"of a {type(layer).__name__}, which is no torch.nn.Embedding"
    return ""


def _add_tied_embeddings(
    modules: Mapping[str, nn.Module], fields: defaultdict[str, defaultdict[str, list[str]]]
) -> None:
    """Cut the embeddings that share the weight of a cut head, if the plan lacks them."""
    heads = [
        modules[f"{owner}.{child}" if owner else child]
        for owner in fields
        for child in fields[owner]["heads"]
    ]
    weights = {head.weight for head in heads}
    for name, module in modules.items():
        owner, _, child = name.rpartition(".")
        is_tied = isinstance(module, nn.Embedding) and module.weight in weights
        if is_tied and child not in fields[owner]["embeddings"]:
            fields[owner]["embeddings"].append(child)


def _rule(owner: str, module: nn.Module, found: Mapping[str, list[str]]) -> Rule:
    is_attention = bool(found.get("columns")) and "att" in owner.rpartition(".")[2]
    config = getattr(module, "config", None)
    # If layers differ, the config of the model raises for the differing counts; the features are checked.
    varying = getattr(config, "per_layer_attributes", None) or ()
    names = ("num_attention_heads", "num_key_value_heads") if is_attention else ()
    counts = [name for name in names if name not in varying]
    return Rule(
        **{field: tuple(children) for field, children in found.items()},  # type: ignore[arg-type]
        divisible=tuple(name for name in counts if isinstance(getattr(config, name, None), int)),
        draws=bool(found.get("columns") and found.get("rows")),
        attentions=is_attention,
    )


def _counts_read(module: nn.Module) -> list[str]:
    """Return the counts of heads in the forward of a module. See [Note: counts of heads under a plan]."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return sorted(_COUNTS.intersection(code.co_names)) if code is not None else []
