"""Layers that follow the tensor mode of the current context, and are plain torch layers without one."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from colossalai.nn.layer.tensor_parallel import Cut, ParallelDropout, _named, entry_of, launched_job
from colossalai.tensor import set_built_for

VOCAB_PARALLEL_LIMIT = 2048
"""Vocabularies above this size are cut by default."""

_CURRENT = "the current one"
_SUFFIXES: Mapping[str, str] = {"1d": "1D", "2d": "2D", "2.5d": "2p5D", "3d": "3D"}


def Linear(
    in_features: int,
    out_features: int,
    bias: bool = True,
    dtype: torch.dtype | None = None,
    *,
    input_cut: Cut | None = None,
    after: nn.Module | None = None,
    **options: Any,
) -> nn.Module:
    """Return the linear layer of the current mode; see `ModeLinear`."""
    if _is_plain(input_cut, after, by="Linear") and not options:
        return _plain(nn.Linear(in_features, out_features, bias, dtype=dtype))
    return _layer("Linear")(
        in_features, out_features, bias, dtype, input_cut=input_cut, after=after, **options
    )


def LayerNorm(
    normalized_shape: int,
    eps: float = 1e-5,
    *,
    input_cut: Cut | None = None,
    after: nn.Module | None = None,
    **options: Any,
) -> nn.Module:
    """Return the layer normalization of the current mode; see `ModeLayerNorm`."""
    if _is_plain(input_cut, after, by="LayerNorm"):
        return _plain(nn.LayerNorm(normalized_shape, eps, **options))
    return _layer("LayerNorm")(normalized_shape, eps, input_cut=input_cut, after=after, **options)


def Dropout(
    p: float = 0.5, inplace: bool = False, *, input_cut: Cut | None = None, after: nn.Module | None = None
) -> nn.Module:
    """Return the dropout of the current mode; see `ParallelDropout`.

    Args:
        p: Probability of a zero.
        inplace: Whether to change the input.
        input_cut: Cut of the input; default: the output cut of the previous layer.
        after: The layer to whose output it is applied, instead of `input_cut`.
    """
    if _is_plain(input_cut, after, by="Dropout"):
        return _plain(nn.Dropout(p, inplace))
    entry = entry_of(launched_job().mode, "Dropout", input_cut=input_cut, after=after)
    return ParallelDropout(p, inplace, cut=entry.cut)


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
        return _plain(nn.Embedding(num_embeddings, embedding_dim, *args, **options))
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


def _plain(layer: nn.Module) -> nn.Module:
    """Let a layer of torch remember that nothing was cut when it was built; see `set_built_for`."""
    return set_built_for(layer, mode=launched_job().mode)


def _is_plain(input_cut: Cut | None, after: nn.Module | None, *, by: str) -> bool:
    """Return whether nothing is cut; the user's `input_cut` or `after` must then agree."""
    if _suffix() is not None:
        return False
    if entry_of(None, by, input_cut=input_cut, after=after).cut != Cut():
        raise ValueError(f"{by} got input_cut={input_cut}, and there is no tensor mode that cuts anything")
    return True


def _suffix() -> str | None:
    """Return how the classes of the current mode are named; None where nothing is cut."""
    return _SUFFIXES.get(launched_job().mode or "")


def _layer(kind: str, mode: str | None = _CURRENT) -> type[nn.Module]:
    suffix = _suffix() if mode == _CURRENT else _SUFFIXES.get(mode or "")
    name = f"{kind}{suffix}" if suffix else f"Vanilla{kind.removeprefix('VocabParallel')}"
    layer: type[nn.Module] = getattr(_named, name)
    return layer
