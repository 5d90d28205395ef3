"""Layers that follow the tensor mode of the current context, and are plain torch layers without one."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from colossalai.context import global_context
from colossalai.nn.layer import _named
from colossalai.nn.layer._dropout import ParallelDropout
from colossalai.nn.layer._flow import current_cut

VOCAB_PARALLEL_LIMIT = 2048
"""Vocabularies above this size are cut, unless the caller says otherwise."""

_CURRENT = "the current one"
_SUFFIXES: Mapping[str, str] = {"1d": "1D", "2d": "2D", "2.5d": "2p5D", "3d": "3D"}


def Linear(in_features: int, out_features: int, bias: bool = True, **options: Any) -> nn.Module:
    """Return the linear layer of the current mode; see `ModeLinear`."""
    if _suffix() is None and not (options.keys() - {"dtype"}):
        return nn.Linear(in_features, out_features, bias, **options)
    return _layer("Linear")(in_features, out_features, bias, **options)


def LayerNorm(normalized_shape: int, eps: float = 1e-5, **options: Any) -> nn.Module:
    """Return the layer normalization of the current mode; see `ParallelLayerNorm`."""
    return (
        nn.LayerNorm(normalized_shape, eps, **options)
        if _suffix() is None
        else _layer("LayerNorm")(normalized_shape, eps, **options)
    )


def Dropout(p: float = 0.5, inplace: bool = False) -> nn.Module:
    """Return the dropout of the current mode; see `ParallelDropout`."""
    if _suffix() is None:
        return nn.Dropout(p, inplace)
    return ParallelDropout(p, inplace, cut=current_cut(global_context.tensor_mode))


def Embedding(
    num_embeddings: int,
    embedding_dim: int,
    *args: Any,
    vocab_parallel_limit: int = VOCAB_PARALLEL_LIMIT,
    **options: Any,
) -> nn.Module:
    """Return the embedding of the current mode; its vocabulary is cut above `vocab_parallel_limit`.

    See `ModeEmbedding`.
    """
    if _suffix() is None and "weight_initializer" not in options:
        return nn.Embedding(num_embeddings, embedding_dim, *args, **options)
    kind = "VocabParallelEmbedding" if num_embeddings > vocab_parallel_limit else "Embedding"
    return _layer(kind)(num_embeddings, embedding_dim, *args, **options)


def PatchEmbedding(*args: Any, **options: Any) -> nn.Module:
    """Return the patch embedding of the current mode; see `ParallelPatchEmbedding`."""
    return _layer("PatchEmbedding")(*args, **options)


def Classifier(
    in_features: int,
    num_classes: int,
    *args: Any,
    vocab_parallel_limit: int = VOCAB_PARALLEL_LIMIT,
    **options: Any,
) -> nn.Module:
    """Return the classifier of the current mode; its classes are cut above `vocab_parallel_limit`.

    See `ModeClassifier`.
    """
    kind = "VocabParallelClassifier" if num_classes > vocab_parallel_limit else "Classifier"
    return _layer(kind)(in_features, num_classes, *args, **options)


def next_linear(in_features: int, out_features: int, bias: bool = True, *, mode: str | None) -> nn.Module:
    """Return the linear layer of a mode that follows the layer built before, a parallel one in every mode."""
    return _layer("Linear", mode)(in_features, out_features, bias)


def _suffix() -> str | None:
    """Return how the classes of the current mode are named; None where nothing is cut."""
    return _SUFFIXES.get(global_context.tensor_mode or "")


def _layer(kind: str, mode: str | None = _CURRENT) -> type[nn.Module]:
    suffix = _suffix() if mode == _CURRENT else _SUFFIXES.get(mode or "")
    name = f"{kind}{suffix}" if suffix else f"Vanilla{kind.removeprefix('VocabParallel')}"
    layer: type[nn.Module] = getattr(_named, name)
    return layer
