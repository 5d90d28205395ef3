"""Share out the layers of a model over the tensor-parallel ranks, in place.

Parameters stay the same objects with less in them, so an optimizer that holds them needs not to know; each
carries a spec of the whole, so gradients, norms, ZeRO and checkpoints need not either. A checkpoint has the
names and the shapes that the model has on one process.
"""

from collections.abc import Iterator
from functools import cache

import torch
from torch import nn

from colossalai.context import Mesh
from colossalai.nn.layer import ParallelEmbedding
from colossalai.nn.layer.tensor_parallel import COLUMN, ROW, Cut, LinearScheme
from colossalai.pipeline import ModelStage, is_elsewhere
from colossalai.shardformer._layers import (
    AXIS,
    Asked,
    DrawsApart,
    DrawsTogether,
    GathersHeads,
    HeadShard,
    LinearShard,
    NotesQuestion,
)
from colossalai.shardformer._registry import rule_of
from colossalai.shardformer.policies import Rule
from colossalai.tensor import PaddedSpec, ShardingSpec, pad_to, padded_size, set_spec, spec_of


def shard_model(model: nn.Module, mesh: Mesh) -> int:
    """Cut the layers of all modules that have a rule, over the axis `tp`.

    All ranks hold the same values before. No communication.

    Args:
        model: The model, or a stage of it; it is changed in place.
        mesh: The ranks.

    Returns:
        The number of modules that were shared out; 0 where no class has a rule.

    Raises:
        ValueError: The ranks do not divide the heads or the features of a module, or one of its layers is
            none that can be cut. Nothing has been changed then.
    """
    found = [(name, part, rule) for name, part in parts_of(model) if (rule := rule_of(part)) and rule.cuts]
    for name, module, rule in found:
        _check(name, module, rule, mesh.axis_size(AXIS))
    for _, module, rule in found:
        _share_out(module, rule, mesh)
    if any(rule.attentions for *_, rule in found):
        _gather_attentions(model, [module for _, module, rule in found if rule.attentions], mesh)
    return len(found)


def can_shard(model: nn.Module) -> bool:
    """Return whether some module of a model has a rule that cuts layers."""
    return any((rule := rule_of(part)) and rule.cuts for _, part in parts_of(model))


def _share_out(module: nn.Module, rule: Rule, mesh: Mesh) -> None:
    for name in _present(module, rule.columns):
        part = None if rule.part is None else int(getattr(module, rule.part))
        setattr(module, name, _linear(getattr(module, name), COLUMN, mesh, part=part))
    for name in _present(module, rule.rows):
        setattr(module, name, _linear(getattr(module, name), ROW, mesh))
    for name in _present(module, rule.embeddings):
        setattr(module, name, _embedding(getattr(module, name), mesh))
    for name in _present(module, rule.heads):
        setattr(module, name, _linear(getattr(module, name), COLUMN, mesh, kind=HeadShard))
    for name in rule.counts:
        setattr(module, name, getattr(module, name) // mesh.axis_size(AXIS))
    if rule.draws:
        module.__class__ = _put_before(DrawsApart, module)
    for name in _present(module, rule.whole_dropouts):
        dropout = getattr(module, name)
        dropout.__class__ = _put_before(DrawsTogether, dropout)


def _gather_attentions(model: nn.Module, attentions: list[nn.Module], mesh: Mesh) -> None:
    """Let the weights of attentions be those of all heads in forwards that are asked for them."""
    asked = Asked()
    for module in attentions:
        module.register_forward_hook(GathersHeads(asked, mesh))
    models = [part for _, part in parts_of(model) if hasattr(part, "config") and part not in attentions]
    for number, part in enumerate(models):
        part.register_forward_pre_hook(NotesQuestion(asked, is_outermost=number == 0), with_kwargs=True)


def _linear(
    layer: nn.Module,
    scheme: LinearScheme,
    mesh: Mesh,
    *,
    part: int | None = None,
    kind: type[LinearShard] = LinearShard,
) -> LinearShard:
    weight = layer.get_parameter("weight")
    bias = None if layer.bias is None else layer.get_parameter("bias")
    out_first = isinstance(layer, nn.Linear)
    num_parts = 1 if part is None else weight.shape[0 if out_first else 1] // part
    dims, parts = (scheme.w_in, scheme.w_out), (1, num_parts)
    if out_first:
        dims, parts = dims[::-1], parts[::-1]
    _cut(weight, dims, mesh, parts=parts)
    if bias is not None and scheme.w_out:
        _cut(bias, (scheme.w_out,), mesh, parts=(num_parts,))
    return kind(weight, bias, scheme=scheme, mesh=mesh, out_first=out_first)


def _embedding(layer: nn.Embedding, mesh: Mesh) -> ParallelEmbedding:
    weight = layer.get_parameter("weight")
    _cut(weight, ((AXIS,), ()), mesh, parts=(1, 1))
    return ParallelEmbedding(
        layer.num_embeddings,
        layer.embedding_dim,
        layer.padding_idx,
        cut=Cut(),
        vocab_axes=(AXIS,),
        mesh=mesh,
        weight=weight,
    )


def _cut(
    param: nn.Parameter,
    dims: tuple[tuple[str, ...], ...],
    mesh: Mesh,
    *,
    parts: tuple[int, ...],
) -> None:
    """Let a parameter keep this rank's slice, if it is not cut by now, as one that two layers share is.

    A vocabulary that the ranks do not divide is padded; what has other dimensions has been checked.
    """
    if spec_of(param) is not None:
        return
    whole = tuple(param.shape)
    fused = parts if max(parts) > 1 else None
    ranks = [mesh.axis_size(axes) if axes else 1 for axes in dims]
    shape = tuple(padded_size(size, num) for size, num in zip(whole, ranks, strict=True))
    spec = (
        ShardingSpec(whole, dims, mesh, parts=fused)
        if shape == whole
        else PaddedSpec(shape, dims, mesh, parts=fused, unpadded=whole)
    )
    with torch.no_grad():
        param.data = spec.cut(pad_to(param.data, shape))
    set_spec(param, spec)


def _check(name: str, module: nn.Module, rule: Rule, num_ranks: int) -> None:
    """Refuse what cannot be shared out, before anything is changed."""
    what = f"{type(module).__name__} {name!r} cannot be shared by {num_ranks} tensor-parallel ranks"
    for key in _present(module, (*rule.columns, *rule.rows, *rule.heads)):
        layer = getattr(module, key)
        if not isinstance(layer, nn.Linear) and type(layer).__name__ != "Conv1D":
            raise ValueError(
                f"{what}: its {key} is a {type(layer).__module__}.{type(layer).__qualname__}, and only "
                "torch.nn.Linear and Conv1D of transformers can be cut: pass the model as it is built there "
                "(adapters such as LoRA: merge them, or leave tensor parallelism out)"
            )
    for key in _present(module, rule.embeddings):
        layer = getattr(module, key)
        if not isinstance(layer, nn.Embedding) or layer.max_norm or layer.scale_grad_by_freq or layer.sparse:
            raise ValueError(
                f"{what}: its {key} is {layer}, and only a torch.nn.Embedding without max_norm, "
                "scale_grad_by_freq and sparse can be cut"
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
    for key in _present(module, rule.rows):
        numbers[f"number of input features of {key}"] = _features(getattr(module, key))[0]
    return numbers


def _features(layer: nn.Module) -> tuple[int, int]:
    """Return the numbers of input and of output features of a linear layer."""
    rows, columns = layer.get_parameter("weight").shape
    return (columns, rows) if isinstance(layer, nn.Linear) else (rows, columns)


def parts_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of a model by their names; for a stage of a pipeline, the model that it is of."""
    for name, part in model.named_modules():
        if not is_elsewhere(part):
            yield name, part.model if isinstance(part, ModelStage) else part


def _present(module: nn.Module, names: tuple[str, ...]) -> list[str]:
    """Return those of the names under which a module has a layer, here and not on another stage."""
    layers = {name: getattr(module, name, None) for name in names}
    return [
        name for name, layer in layers.items() if isinstance(layer, nn.Module) and not is_elsewhere(layer)
    ]


def _put_before(first: type[nn.Module], module: nn.Module) -> type[nn.Module]:
    """Return a class whose `forward` is that of the first one around that of the class of a module."""
    return _class_of((first, type(module)))


@cache  # layers of one class stay of one class
def _class_of(bases: tuple[type, type]) -> type[nn.Module]:
    return type(bases[-1].__name__, bases, {"__module__": bases[-1].__module__})
