"""Collection of auxiliary losses: the outputs of each forward of an applied model lead to its losses.

A wrapper gets a collector once a layer that adds losses exists in the process, and a pipeline gets one if a
stage has such a layer. Models of a process without such layers run without a collector.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from colossalai.cluster import gather_values
from colossalai.context import MOE_CONTEXT, Axis
from colossalai.tensor import nested_tensors


class AddsLosses(nn.Module):
    """A layer whose forward adds losses: `moe_env.add_loss(loss, layer=self)`, a mean over the rank's batch.

    The base class of `MoeLayer` and of a layer of your own; `MoeLoss` adds the losses to the task's.
    Wrapped models, and all stages of a pipeline, collect losses if a layer of this class is in them.
    """

    def __init__(self) -> None:
        super().__init__()
        MOE_CONTEXT.expect_losses(AddsLosses)


class LossCollector:
    """Collects the auxiliary losses of the forwards of a model.

    Args:
        model: The model that was wrapped, or the stages of a pipeline on this rank.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._has_layers = MOE_CONTEXT.has_layers(model)

    def run_forward(self, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a forward; its outputs lead to its losses, and those of the forwards that made its inputs."""
        if torch.compiler.is_compiling() and not self._has_layers:
            return forward(*args, **kwargs)  # torch.compile cannot trace the rest
        with MOE_CONTEXT.forward_of(self._model, nested_tensors((args, kwargs))) as losses:
            output = forward(*args, **kwargs)
        MOE_CONTEXT.assign(losses, nested_tensors(output))
        return output

    def run(self, forward: Callable[[], Any], carried: Tensor | None) -> tuple[Any, Tensor]:
        """Run the forward of a stage: see `LossCollection` of `colossalai.pipeline`."""
        with MOE_CONTEXT.forward_of(self._model) as losses:
            if carried is not None:
                MOE_CONTEXT.add_loss(carried)
            output = forward()
        MOE_CONTEXT.assign(losses, nested_tensors(output))
        return output, torch.as_tensor(losses.total())


def collect_losses(
    wrapper: nn.Module, raw: nn.Module, set_collector: Callable[[Any, LossCollector], None]
) -> None:
    """Install a collector in a wrapper once a layer that adds losses exists: now, or when the first is built.

    A dense model gets one, too: its outputs must not lead to the losses of another model.

    Args:
        wrapper: The wrapper.
        raw: The model in it.
        set_collector: Called with the wrapper and its collector; without a reference to the wrapper.
    """
    _announce_layers(raw)
    MOE_CONTEXT.when_expected(wrapper, lambda wrapper: set_collector(wrapper, LossCollector(raw)))


def collector_of_stages(model: nn.Module, stages: Axis) -> LossCollector | None:
    """Return the collector of a pipeline, None if no stage has a layer that adds losses.

    Collective over `stages`, which gather one flag each.

    Args:
        model: The stages of this rank.
        stages: The ranks of the pipeline.
    """
    _announce_layers(model)
    # A stage without such layers passes the losses of earlier ones on, so all stages decide alike.
    return LossCollector(model) if any(gather_values(MOE_CONTEXT.has_layers(model), stages.group)) else None


def _announce_layers(model: nn.Module) -> None:
    """Announce layers whose constructor did not run in this process, such as those of an unpickled model."""
    if any(isinstance(part, AddsLosses) for part in model.modules()):
        MOE_CONTEXT.expect_losses(AddsLosses)
