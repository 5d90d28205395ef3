"""Modules of a model by name, those of a stage of a pipeline by their names in the whole model."""

from collections.abc import Iterator

from torch import nn

from colossalai.pipeline import ModelStage, is_elsewhere


def parts_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of a model by their names; for a stage of a pipeline, the model that it is of."""
    for name, part in model.named_modules():
        if not is_elsewhere(part):
            yield name, part.model if isinstance(part, ModelStage) else part
