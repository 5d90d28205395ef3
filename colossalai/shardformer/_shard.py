"""Share out the layers of a model over the tensor-parallel ranks, in place.

The rules are those of the classes of its modules; where a class has none, the model's own `tp_plan`.

Parameters stay the same objects with less in them, so an optimizer that holds them needs not to know; each
carries a spec of the whole, so gradients, norms, ZeRO and checkpoints need not either. A checkpoint has the
names and the shapes that the model has on one process.
"""

from typing import Any

from torch import nn

from colossalai.context import Mesh
from colossalai.nn.layer import ParallelEmbedding
from colossalai.nn.layer.tensor_parallel import COLUMN, ROW, Cut, LinearScheme
from colossalai.pipeline import is_elsewhere
from colossalai.shardformer._layers import (
    AXIS,
    Asked,
    DrawsApart,
    DrawsTogether,
    GathersHeads,
    HeadShard,
    LinearShard,
    NotesQuestion,
    SplitRowShard,
    SumsGradients,
    VocabularyShard,
    class_of,
    cut_param,
    draw_together,
    keep_specs,
    put_before,
)
from colossalai.shardformer._registry import parts_of, rule_of
from colossalai.shardformer._tp_plan import rules_of_plans
from colossalai.shardformer.policies import Rule
from colossalai.tensor import SpecKeeper


def shard_model(model: nn.Module, mesh: Mesh) -> int:
    """Cut the layers of all modules that have a rule, or that the model's plan names, over the axis `tp`.

    All ranks hold the same values before. No communication.

    Args:
        model: The model, or a stage of it; it is changed in place.
        mesh: The ranks.

    Returns:
        The number of modules that were shared out; 0 where no class has a rule and the model has no plan.

    Raises:
        ValueError: `mesh` has a number of ranks that does not divide the heads or the features of a module,
            or `model` has a layer that cannot be cut, or a plan that cannot be translated. Nothing has been
            changed then.
    """
    found = _found_rules(model)
    for name, module, rule in found:
        _check(name, module, rule, mesh.axis_size(AXIS))
    for _, module, rule in found:
        _share_out(module, rule, mesh)
    if any(rule.attentions for *_, rule in found):
        _gather_attentions(model, {module: rule for _, module, rule in found if rule.attentions}, mesh)
    return len(found)


def can_shard(model: nn.Module) -> bool:
    """Return whether some module of a model has a rule that cuts layers, or the model a plan of its own."""
    return bool(_found_rules(model))


def _found_rules(model: nn.Module) -> list[tuple[str, nn.Module, Rule]]:
    """Return the modules to be shared out, by name, with their rules; the plan is for those without one."""
    by_class = [(name, part, rule) for name, part in parts_of(model) if (rule := rule_of(part)) and rule.cuts]
    return by_class + rules_of_plans(model, ruled={part for _, part, _ in by_class})


def _share_out(module: nn.Module, rule: Rule, mesh: Mesh) -> None:
    for name, layer in _layers(module, rule.columns):
        num_parts = _num_parts(module, rule, name)
        setattr(module, name, _linear(layer, COLUMN, mesh, num_parts=num_parts))
    for name, layer in _layers(module, rule.rows):
        setattr(module, name, _linear(layer, ROW, mesh, num_parts=2 if name in rule.packed else 1))
    for name, layer in _layers(module, rule.heads):
        setattr(module, name, _linear(layer, COLUMN, mesh, kind=HeadShard))
    for name, layer in _layers(module, rule.splits):
        setattr(module, name, _linear(layer, ROW, mesh, kind=SplitRowShard))
    for name, layer in _layers(module, rule.embeddings):
        setattr(module, name, _embedding(layer, mesh))
    for name, layer in _layers(module, rule.feature_embeddings):
        setattr(module, name, _feature_embedding(layer, mesh))
    _adapt(module, rule, mesh)


def _adapt(module: nn.Module, rule: Rule, mesh: Mesh) -> None:
    """Let what is not cut in a module go with its layers: counts, random masks, norms of single heads."""
    for name in rule.counts:
        setattr(module, name, getattr(module, name) // mesh.axis_size(AXIS))
    for _, norm in _layers(module, rule.head_norms):
        keep_specs(norm, mesh, SumsGradients)
    for _, dropout in _layers(module, rule.whole_dropouts):
        dropout.__class__ = put_before(DrawsTogether, dropout)
    for name in rule.head_params:
        param = module.get_parameter(name)
        cut_param(param, ((AXIS,), *[()] * (param.dim() - 1)), mesh, parts=(1,) * param.dim())
    if rule.head_params:
        keep_specs(module, mesh, SpecKeeper)
    if rule.draws:
        module.__class__ = put_before(DrawsApart, module)
        for _, layer in _layers(module, rule.rows):
            layer.register_forward_hook(draw_together)


def _gather_attentions(model: nn.Module, attentions: dict[nn.Module, Rule], mesh: Mesh) -> None:
    """Let the weights of attentions be those of all heads in forwards that are asked for them."""
    asked = Asked()
    for module, rule in attentions.items():
        module.register_forward_hook(GathersHeads(asked, mesh, rule.attentions_at))
    models = [part for _, part in parts_of(model) if hasattr(part, "config") and part not in attentions]
    for number, part in enumerate(models):
        part.register_forward_pre_hook(NotesQuestion(asked, is_outermost=number == 0), with_kwargs=True)


def _linear(
    layer: nn.Module,
    scheme: LinearScheme,
    mesh: Mesh,
    *,
    num_parts: int = 1,
    kind: type[LinearShard] = LinearShard,
) -> LinearShard:
    weight = layer.get_parameter("weight")
    bias = None if layer.bias is None else layer.get_parameter("bias")
    out_first = isinstance(layer, nn.Linear)
    dims = (scheme.w_in, scheme.w_out)
    parts = (1, num_parts) if scheme.w_out else (num_parts, 1)
    if out_first:
        dims, parts = dims[::-1], parts[::-1]
    cut_param(weight, dims, mesh, parts=parts)
    if bias is not None and scheme.w_out:
        cut_param(bias, (scheme.w_out,), mesh, parts=(num_parts,))
    return kind(weight, bias, scheme=scheme, mesh=mesh, out_first=out_first)


def _num_parts(module: nn.Module, rule: Rule, name: str) -> int:
    """Return of how many parts the output features of a column layer consist."""
    if rule.part is None:
        return 2 if name in rule.packed else 1
    return _features(getattr(module, name))[1] // int(getattr(module, rule.part))


def _embedding(layer: nn.Embedding, mesh: Mesh) -> nn.Module:
    weight = layer.get_parameter("weight")
    cut_param(weight, ((AXIS,), ()), mesh, parts=(1, 1))
    shard = ParallelEmbedding(
        layer.num_embeddings,
        layer.embedding_dim,
        layer.padding_idx,
        cut=Cut(),
        vocab_axes=(AXIS,),
        mesh=mesh,
        weight=weight,
    )
    if type(layer).forward is nn.Embedding.forward:
        return shard
    # It does more than look up, and keeps doing it: see `VocabularyShard`.
    vars(layer).update(vars(shard) | vars(layer))
    looked_up: nn.Module = layer
    kind = type(layer)
    looked_up.__class__ = class_of(kind.__name__, kind.__module__, (kind, VocabularyShard))
    return looked_up


def _feature_embedding(layer: nn.Embedding, mesh: Mesh) -> ParallelEmbedding:
    weight = layer.get_parameter("weight")
    cut_param(weight, ((), (AXIS,)), mesh, parts=(1, 1))
    sizes = (layer.num_embeddings, layer.embedding_dim, layer.padding_idx)
    return ParallelEmbedding(*sizes, cut=Cut(features=(AXIS,)), mesh=mesh, weight=weight)


def _check(name: str, module: nn.Module, rule: Rule, num_ranks: int) -> None:
    """Refuse what cannot be shared out, before anything is changed."""
    what = f"{type(module).__name__} {name!r} cannot be shared by {num_ranks} tensor-parallel ranks"
    for key in _present(module, (*rule.columns, *rule.rows, *rule.splits, *rule.heads)):
        layer = getattr(module, key)
        if not isinstance(layer, nn.Linear) and type(layer).__name__ != "Conv1D":
            raise ValueError(
                f"{what}: its {key} is a {type(layer).__module__}.{type(layer).__qualname__}, and only "
                "torch.nn.Linear and Conv1D of transformers can be cut: pass the model as it is built there "
                "(adapters such as LoRA: merge them, or leave tensor parallelism out)"
            )
    for key in _present(module, (*rule.embeddings, *rule.feature_embeddings)):
        layer = getattr(module, key)
        if not isinstance(layer, nn.Embedding) or layer.max_norm or layer.scale_grad_by_freq or layer.sparse:
            raise ValueError(
                f"{what}: its {key} is {layer}, and only a torch.nn.Embedding without max_norm, "
                "scale_grad_by_freq and sparse can be cut"
            )
    for key in _present(module, rule.columns) if rule.part else ():
        features, part = _features(getattr(module, key))[1], int(getattr(module, rule.part or ""))
        if features % part:
            raise ValueError(
                f"{what}: the {features} output features of its {key} are no whole number of parts of "
                f"{rule.part}={part}; parts of several sizes, as of a query wider than key and value, cannot "
                "be cut: name the layer in `heads` of the Rule, and the row layer behind it in `splits`"
            )
    for key, number in _numbers(module, rule).items():
        if number % num_ranks:
            raise ValueError(
                f"{what}: its {key} is {number}, which they do not divide; choose a tensor size that does"
            )


def _numbers(module: nn.Module, rule: Rule) -> dict[str, int]:
    """Return what the ranks have to divide, by the names that a user knows."""
    numbers = {key: int(getattr(module, key)) for key in rule.counts}
    numbers |= {f"config.{key}": int(getattr(module.config, key)) for key in rule.divisible}
    for key in _present(module, rule.columns):
        numbers[f"number of output features of {key}"] = _features(getattr(module, key))[1]
    for key in _present(module, (*rule.rows, *rule.splits)):
        numbers[f"number of input features of {key}"] = _features(getattr(module, key))[0]
    for key in _present(module, rule.packed):
        features = _features(getattr(module, key))[1 if key in rule.columns else 0]
        numbers[f"number of features of each half of {key}"] = features // 2
    for key in _present(module, rule.feature_embeddings):
        numbers[f"number of features of {key}"] = getattr(module, key).embedding_dim
    return numbers


def _features(layer: nn.Module) -> tuple[int, int]:
    """Return the numbers of input and of output features of a linear layer."""
    rows, columns = layer.get_parameter("weight").shape
    return (columns, rows) if isinstance(layer, nn.Linear) else (rows, columns)


def _present(module: nn.Module, names: tuple[str, ...]) -> list[str]:
    """Return those of the names under which a module has a layer, here and not on another stage."""
    return [name for name, _ in _layers(module, names)]


def _layers(module: nn.Module, names: tuple[str, ...]) -> list[tuple[str, Any]]:
    """Return the layers that a module has under some names, here and not on another stage."""
    layers = [(name, getattr(module, name, None)) for name in names]
    return [(name, each) for name, each in layers if isinstance(each, nn.Module) and not is_elsewhere(each)]
