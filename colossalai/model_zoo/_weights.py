"""Initial values of a model's parameters, of which ranks can have slices: random, or from other weights."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from colossalai.tensor import spec_of


@torch.no_grad()
def draw_parameters(model: nn.Module, draw_weight: Callable[[str, Tensor], object]) -> None:
    """Set all biases to 0, the weights of norms to 1, and draw the others, in the order of the model.

    Every rank draws the whole parameter and keeps its slice, so that they agree.

    Args:
        model: Its norms are attributes whose names end in `norm`.
        draw_weight: Called with the name of a parameter and an empty whole one, which it fills in place.
    """
    for name, param in model.named_parameters():
        owner, _, kind = name.rpartition(".")
        if kind == "bias":
            nn.init.zeros_(param)
        elif owner.endswith("norm"):
            nn.init.ones_(param)
        else:
            spec = spec_of(param)
            whole = param if spec is None else param.new_empty(spec.whole_shape)
            draw_weight(name, whole)
            if spec is not None:
                param.copy_(spec.slice_of(whole))


@torch.no_grad()
def load_parameters(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Fill all parameters of a model; a rank takes its slices.

    Args:
        model: The model; it has no buffers.
        weights: The whole parameters by their names in the model.

    Raises:
        ValueError: The names or a shape are not those of the model.
    """
    params = dict(model.named_parameters())
    if params.keys() != weights.keys():
        raise ValueError(
            f"the weights do not fit {type(model).__name__}: without a value "
            f"{sorted(params.keys() - weights.keys())}, unknown {sorted(weights.keys() - params.keys())}"
        )
    for name, param in params.items():
        spec = spec_of(param)
        shape = tuple(param.shape) if spec is None else spec.whole_shape
        if tuple(weights[name].shape) != shape:
            raise ValueError(f"{name} has shape {shape}, its value {tuple(weights[name].shape)}")
        param.copy_(weights[name] if spec is None else spec.slice_of(weights[name]))


def require_settings(config: Any, supported: Mapping[str, Any]) -> None:
    """Require settings of a Hugging Face config that the models here have built in.

    Args:
        config: The config.
        supported: The one value of each setting that can be imported. A setting that the config does not have
            is taken to have it.

    Raises:
        ValueError: A setting of `config` has another value than the one in `supported`.
    """
    for name, value in supported.items():
        found = getattr(config, name, value)
        if found != value:
            raise ValueError(
                f"{type(config).__name__}.{name} is {found!r}; only models with {value!r} can be imported"
            )


def gelu_of(activation: Any) -> str:
    """Return the GELU of a Hugging Face config, by torch's name.

    Raises:
        ValueError: `activation` is not a GELU.
    """
    names = {"gelu": "none", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}
    if activation not in names:
        raise ValueError(
            f"the activation is {activation!r}; only models with one of {[*names]} can be imported"
        )
    return names[activation]
