"""Sharding of the layers of a model over the tensor-parallel ranks, in place.

The rules are those of the classes of its modules; for classes without one, the model's own `tp_plan`. Or they
are the rules of a plan for its modules by name, and no others.

Parameters keep their identity with smaller contents, so an optimizer that refers to them does not change;
each has a spec of the whole, so neither do gradients, norms, ZeRO and checkpoints. A checkpoint has the names
and shapes of the model on one process.
"""

import inspect
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from colossalai.context import Mesh
from colossalai.nn.layer import ParallelEmbedding
from colossalai.nn.layer.tensor_parallel import COLUMN, ROW, Cut, LinearScheme
from colossalai.pipeline import is_elsewhere
from colossalai.shardformer._adapters import (
    cut_with_adapter,
    factors_to_cut,
    is_adapter,
    reason_against_adapter,
    without_adapter,
)
from colossalai.shardformer._channels import (
    CONVOLUTIONS,
    cut_channel_norm,
    cut_convolution,
    extents_of_norm,
    reason_against_convolution,
    reason_against_norm,
)
from colossalai.shardformer._inside import refuse_uncovered
from colossalai.shardformer._layers import (
    AXIS,
    AttentionRequest,
    AttentionRequestHook,
    DrawsApart,
    DrawsTogether,
    GathersHeads,
    HeadShard,
    InnerRowShard,
    LinearShard,
    SplitRowShard,
    SumsGradients,
    TakesOwnHeads,
    VocabularyShard,
    cut_param,
    draw_together_behind,
    keep_specs,
    put_before,
    put_behind,
    take_hooks,
)
from colossalai.shardformer._named_rules import (
    FoundRules,
    cut_places,
    head_params_of,
    refuse_half_tied,
    rules_by_name,
)
from colossalai.shardformer._registry import parts_of, rule_of
from colossalai.shardformer._tp_plan import rules_of_plans
from colossalai.shardformer.policies import Rule
from colossalai.tensor import SpecKeeper

_LINEAR_KINDS: Mapping[str, tuple[LinearScheme, type[LinearShard]]] = {
    "columns": (COLUMN, LinearShard),
    "rows": (ROW, LinearShard),
    "inner_rows": (ROW, InnerRowShard),
    "heads": (COLUMN, HeadShard),
    "splits": (ROW, SplitRowShard),
}
"""Replacement of a linear layer, by the field of a `Rule` that contains it."""


def shard_model(model: nn.Module, mesh: Mesh, cuts: Mapping[str, Rule] | None = None) -> int:
    """Cut the layers of all modules that have a rule, or that the model's plan names, over the axis `tp`.

    All ranks hold the same values before. No communication.

    Args:
        model: The model, or a stage of it; it is changed in place.
        mesh: The ranks.
        cuts: Rules by the names of modules, used instead of all others; "" is the model itself. For a stage:
            rules of its modules, by their names in the whole model.

    Returns:
        The number of modules that were shared out; 0 where no class has a rule and the model has no plan.

    Raises:
        ValueError: `mesh` has a number of ranks that does not divide the heads or the features of a module,
            or `model` has a layer that cannot be cut, or a plan that cannot be translated, or `cuts` has an
            unknown name, or one of two layers that share a parameter. Nothing has been changed then.
    """
    found = check_shards(model, mesh.axis_size(AXIS), cuts)
    for _, module, rule in found:
        _share_out(module, rule, mesh)
    _leave_fast_path(model)
    if any(rule.attentions for *_, rule in found):
        _gather_attentions(model, {module: rule for _, module, rule in found if rule.attentions}, mesh)
    return len(found)


def check_shards(model: nn.Module, num_ranks: int, cuts: Mapping[str, Rule] | None = None) -> FoundRules:
    """Return the modules that `shard_model` would cut, by name, with their rules; nothing is changed.

    Args:
        model: The model. It can be on the meta device.
        num_ranks: Number of ranks that share its layers.
        cuts: As in `shard_model`.

    Raises:
        ValueError: `model` cannot be shared by so many; see `shard_model`.
    """
    found = _found_rules(model) if cuts is None else rules_by_name(model, cuts)
    ruled = {module: rule for _, module, rule in found}
    for name, module, rule in found:
        check_rule(name, module, rule, num_ranks, ruled=ruled)
    if cuts is not None:
        refuse_half_tied(model, found)
    return found


def params_to_cut(model: nn.Module, cuts: Mapping[str, Rule] | None = None) -> dict[nn.Parameter, str]:
    """Return the parameters that `shard_model` would cut, with their names; nothing is changed.

    Args:
        model: The model.
        cuts: As in `shard_model`; names that the model lacks are left out.
    """
    if cuts is not None:
        own = {name for name, _ in model.named_modules()}
        cuts = {name: rule for name, rule in cuts.items() if name in own}
    chosen: set[nn.Parameter | None] = set()
    for _, module, rule in _found_rules(model) if cuts is None else rules_by_name(model, cuts):
        chosen.update(owner._parameters[key] for (owner, key), _ in cut_places(module, rule))
        for field, (scheme, _) in _LINEAR_KINDS.items():
            for _, layer in _layers(module, getattr(rule, field)):
                chosen.update(factors_to_cut(layer, cuts_outputs=bool(scheme.w_out)))
    return {param: name for name, param in model.named_parameters() if param in chosen}


def can_shard(model: nn.Module) -> bool:
    """Return whether some module of a model has a rule that cuts layers, or the model a plan of its own."""
    return bool(_found_rules(model))


def _found_rules(model: nn.Module) -> FoundRules:
    """Return the modules to be shared out, by name, with their rules; the plan is for those without one."""
    by_class = [(name, part, rule) for name, part in parts_of(model) if (rule := rule_of(part)) and rule.cuts]
    return by_class + rules_of_plans(model, ruled={part for _, part, _ in by_class})


def _share_out(module: nn.Module, rule: Rule, mesh: Mesh) -> None:
    for field, (scheme, kind) in _LINEAR_KINDS.items():
        for name, layer in _layers(module, getattr(rule, field)):
            num_parts = _num_parts(module, rule, field, name)
            cut = partial(_linear, scheme=scheme, mesh=mesh, num_parts=num_parts, kind=kind)
            if isinstance(layer, CONVOLUTIONS):
                cut_convolution(layer, field, mesh, num_parts=num_parts)
            elif is_adapter(layer):
                cut_with_adapter(layer, cut)
            else:
                setattr(module, name, cut(layer))
    for name, norm in _layers(module, rule.channel_norms):
        cut_channel_norm(norm, mesh, num_parts=2 if name in rule.packed else 1)
    for name, layer in _layers(module, rule.embeddings):
        setattr(module, name, _embedding(layer, mesh))
    for name, layer in _layers(module, rule.feature_embeddings):
        setattr(module, name, _feature_embedding(layer, mesh))
    _adapt(module, rule, mesh)


def _adapt(module: nn.Module, rule: Rule, mesh: Mesh) -> None:
    """Adapt the uncut parts of a module to its layers: counts, random masks, norms of single heads."""
    if rule.head_inputs:
        names = list(inspect.signature(module.forward).parameters)
        places = {name: names.index(name) for name in rule.head_inputs}
        takes = TakesOwnHeads(places, int(getattr(module, rule.counts[0])), mesh)
        module.register_forward_pre_hook(takes, with_kwargs=True)
    for name in rule.counts:
        setattr(module, name, getattr(module, name) // mesh.axis_size(AXIS))
    for part in _owners_of_params(norm for _, norm in _layers(module, rule.head_norms)):
        keep_specs(part, mesh, SumsGradients)
    for _, dropout in _layers(module, rule.whole_dropouts):
        put_before(DrawsTogether, dropout)
    for owner, key in head_params_of(module, rule):
        param = owner.get_parameter(key)
        cut_param(param, ((AXIS,), *[()] * (param.dim() - 1)), mesh, parts=(1,) * param.dim())
    for owner in dict.fromkeys(owner for owner, _ in head_params_of(module, rule)):
        keep_specs(owner, mesh, SpecKeeper)
    if rule.draws:
        put_before(DrawsApart, module)
        for _, layer in _layers(module, rule.rows):
            layer.register_forward_hook(draw_together_behind)


def _owners_of_params(layers: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules in layers that own parameters, each once."""
    parts = dict.fromkeys(part for layer in layers for part in layer.modules())
    return [part for part in parts if any(param is not None for param in part._parameters.values())]


def _gather_attentions(model: nn.Module, attentions: dict[nn.Module, Rule], mesh: Mesh) -> None:
    """Gather the weights of attentions over all heads, in forwards that return them."""
    asked = AttentionRequest()
    for module, rule in attentions.items():
        # Before existing hooks: transformers registers its own once a forward has returned the weights.
        module.register_forward_hook(GathersHeads(asked, mesh, rule.attentions_at), prepend=True)
    models = [part for _, part in parts_of(model) if hasattr(part, "config") and part not in attentions]
    for number, part in enumerate(models):
        part.register_forward_pre_hook(
            AttentionRequestHook(asked, is_outermost=number == 0), with_kwargs=True
        )


def _leave_fast_path(model: nn.Module) -> None:
    """Let encoder layers of torch call their linear layers in evaluation, too, where ranks share these.

    Their fast path hands all weights to one kernel, which would take slices for the whole. It is left where
    the activation is neither relu nor gelu, and then an encoder must not make nested tensors for it.
    """
    cut = {
        layer
        for layer in model.modules()
        if isinstance(layer, nn.TransformerEncoderLayer)
        and any(isinstance(part, LinearShard) for part in layer.children())
    }
    for layer in cut:
        layer.activation_relu_or_gelu = 0
    for encoder in model.modules():
        if isinstance(encoder, nn.TransformerEncoder) and not cut.isdisjoint(encoder.layers):
            encoder.use_nested_tensor = False


def _linear(
    layer: nn.Module,
    *,
    scheme: LinearScheme,
    mesh: Mesh,
    num_parts: int,
    kind: type[LinearShard],
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
    shard = kind(weight, bias, scheme=scheme, mesh=mesh, out_first=out_first)
    take_hooks(shard, layer)
    return shard


def _num_parts(module: nn.Module, rule: Rule, field: str, name: str) -> int:
    """Return of how many parts the features of a layer consist that are cut."""
    if rule.part is None or field != "columns":
        return 2 if name in rule.packed and field in ("columns", "rows") else 1
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
        take_hooks(shard, layer)
        return shard
    # It does more than look up, and keeps doing it: see `VocabularyShard`.
    vars(layer).update(vars(shard) | vars(layer))
    put_behind(VocabularyShard, layer)
    return layer


def _feature_embedding(layer: nn.Embedding, mesh: Mesh) -> ParallelEmbedding:
    weight = layer.get_parameter("weight")
    cut_param(weight, ((), (AXIS,)), mesh, parts=(1, 1))
    sizes = (layer.num_embeddings, layer.embedding_dim, layer.padding_idx)
    shard = ParallelEmbedding(*sizes, cut=Cut(features=(AXIS,)), mesh=mesh, weight=weight)
    take_hooks(shard, layer)
    return shard


def check_rule(
    name: str, module: nn.Module, rule: Rule, num_ranks: int, *, ruled: Mapping[nn.Module, Rule] | None = None
) -> None:
    """Check that a module can be sharded; layers that share a parameter are not checked.

    Args:
        name: The module's name, for the message.
        module: The module with the rule.
        rule: The rule.
        num_ranks: Ranks that are to share its layers.
        ruled: Rules of modules by name, next to those of classes.

    Raises:
        ValueError: `module` has a layer that cannot be cut by `rule`, or that so many ranks do not divide, or
            parameters inside the cut region that `rule` does not cover.
    """
    what = f"{type(module).__name__} {name!r} cannot be shared by {num_ranks} tensor-parallel ranks"
    kinds = {
        _reason_against: (*rule.columns, *rule.rows, *rule.inner_rows, *rule.splits, *rule.heads),
        reason_against_norm: rule.channel_norms,
        _reason_against_embedding: (*rule.embeddings, *rule.feature_embeddings),
    }
    for find_reason, names in kinds.items():
        for key in _present(module, names):
            layer = getattr(module, key)
            if reason := _reason_if_computed(layer) or find_reason(layer):
                raise ValueError(f"{what}: its {key} {reason}")
    for key in _present(module, rule.columns) if rule.part else ():
        features, part = _features(getattr(module, key))[1], int(getattr(module, rule.part or ""))
        if features % part:
            raise ValueError(
                f"{what}: the {features} output features of its {key} are not a whole number of parts of "
                f"{rule.part}={part}; parts of several sizes, as of a query wider than key and value, cannot "
                "be cut: name the layer in `heads` of the Rule, and the row layer behind it in `splits`"
            )
    _check_unset(what, module, rule)
    if num_ranks > 1:  # one has all heads
        refuse_uncovered(name, module, rule, ruled)
    for key, number in _numbers(module, rule).items():
        if number % num_ranks:
            raise ValueError(
                f"{what}: its {key} is {number}, which they do not divide; choose a tensor size that does"
            )


def _reason_if_computed(layer: Any) -> str:
    """Return the reason why a layer cannot be cut if its weight or bias is computed; empty otherwise."""
    layer = without_adapter(layer)
    for key in ("weight", "bias"):
        if isinstance(getattr(layer, key, None), Tensor) and layer._parameters.get(key) is None:
            return (
                f"computes its {key} from other parameters, as weight_norm and other parametrizations "
                "do, and only parameters can be cut: remove them (remove_parametrizations of "
                "torch.nn.utils.parametrize, remove_weight_norm), or leave tensor parallelism out"
            )
    return ""


def _reason_against(layer: nn.Module) -> str:
    """Return why a layer cannot be cut along its features; empty where it can."""
    if reason := reason_against_adapter(layer):
        return reason
    layer = without_adapter(layer)
    if isinstance(layer, CONVOLUTIONS):
        return reason_against_convolution(layer)
    if isinstance(layer, nn.Linear) or type(layer).__name__ == "Conv1D":
        return _reason_against_linear(layer)
    return (
        f"is a {type(layer).__module__}.{type(layer).__qualname__}, and only torch.nn.Linear, Conv1d to "
        "Conv3d, and Conv1D of transformers can be cut, and these with LoRA of peft: pass the model as it is "
        "built there"
    )


def _reason_against_linear(layer: nn.Module) -> str:
    """Return the reason why a cut linear layer would lose functionality; empty if it would not."""
    kind = f"{type(layer).__module__}.{type(layer).__qualname__}"
    if isinstance(layer, nn.Linear) and type(layer).forward is not nn.Linear.forward:
        return (
            f"is a {kind}, a linear layer with a forward of its own, which a cut layer does not run: take a "
            "torch.nn.Linear, or leave this layer out of the rule"
        )
    if more := sorted(key for key in layer._parameters if key not in ("weight", "bias")):
        return f"is a {kind} that has {', '.join(more)} beside weight and bias: leave it out of the rule"
    return ""


def _reason_against_embedding(layer: Any) -> str:
    """Return why an embedding cannot be cut; empty where it can."""
    if reason := reason_against_adapter(layer):
        return reason
    if not isinstance(layer, nn.Embedding) or layer.max_norm or layer.scale_grad_by_freq or layer.sparse:
        return (
            f"is {layer}, and only a torch.nn.Embedding without max_norm, scale_grad_by_freq and sparse can "
            "be cut"
        )
    return ""


def _check_unset(what: str, module: nn.Module, rule: Rule) -> None:
    for key in rule.unset:
        if getattr(module, key):
            raise ValueError(
                f"{what}: its {key} is {getattr(module, key)!r}, with which its forward multiplies with the "
                f"weights of its layers by itself: set {key} of the config to False"
            )


def _numbers(module: nn.Module, rule: Rule) -> dict[str, int]:
    """Return the numbers that the ranks have to divide, by their names in the model."""
    numbers = {key: int(getattr(module, key)) for key in rule.counts}
    numbers |= {f"config.{key}": int(getattr(module.config, key)) for key in rule.divisible}
    for key in _present(module, rule.columns):
        numbers[f"number of output features of {key}"] = _features(getattr(module, key))[1]
    for key in _present(module, (*rule.rows, *rule.inner_rows, *rule.splits)):
        numbers[f"number of input features of {key}"] = _features(getattr(module, key))[0]
    for key in _present(module, rule.inner_rows):
        numbers[f"number of outputs of {key}"] = _features(getattr(module, key))[1]
    for owner, key in head_params_of(module, rule):
        numbers[f"number of entries of {key}"] = owner.get_parameter(key).shape[0]
    for key in _present(module, rule.channel_norms):
        halves, of_half = (2, " of each half") if key in rule.packed else (1, "")
        for extent, number in extents_of_norm(getattr(module, key)).items():
            numbers[f"number of {extent}{of_half} of {key}"] = number // halves
    for key in _present(module, tuple(key for key in rule.packed if key not in rule.channel_norms)):
        features = _features(getattr(module, key))[1 if key in rule.columns else 0]
        numbers[f"number of features of each half of {key}"] = features // 2
    for key in _present(module, rule.feature_embeddings):
        numbers[f"number of features of {key}"] = getattr(module, key).embedding_dim
    return numbers


def _features(layer: nn.Module) -> tuple[int, int]:
    """Return the numbers of input and of output features of a linear layer, or channels of a convolution."""
    layer = without_adapter(layer)
    rows, columns, *_ = layer.get_parameter("weight").shape
    return (columns, rows) if isinstance(layer, (nn.Linear, *CONVOLUTIONS)) else (rows, columns)


def _present(module: nn.Module, names: tuple[str, ...]) -> list[str]:
    """Return those of the names under which a module has a layer, here and not on another stage."""
    return [name for name, _ in _layers(module, names)]


def _layers(module: nn.Module, names: tuple[str, ...]) -> list[tuple[str, Any]]:
    """Return the layers that a module has under some names, here and not on another stage."""
    layers = [(name, getattr(module, name, None)) for name in names]
    return [(name, each) for name, each in layers if isinstance(each, nn.Module) and not is_elsewhere(each)]
