"""Changes of a model in memory between two steps: its owner may train, replace, cast or move its parts."""

from torch import Tensor, nn


class ModelWatch:
    """Detects changes of the values of a model, and rejects states in which it cannot be served.

    Args:
        model: The model, in the state of its caches' allocation.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        first = next(iter((*model.parameters(), *model.buffers())))
        self._dtype, self._device = first.dtype, first.device
        self._watch_parts()

    def _watch_parts(self) -> None:
        parts = list(self._model.modules())
        self._children = [part._modules for part in parts if part._modules]
        self._structure = self._find_structure()
        self._parameters = [part._parameters for part in parts if part._parameters]
        # Non-persistent buffers, such as rotary frequencies, are written by the forward of some models.
        self._buffers = [
            (part._buffers, name)
            for part in parts
            for name in part._buffers
            if name not in part._non_persistent_buffers_set
        ]
        self._dropping = [(part, found) for part in parts if (found := _dropout_of(part)) is not None]

    def _find_structure(self) -> list[int]:
        return [id(child) for children in self._children for child in children.values()]

    def stamp(self) -> int:
        """Return a number that changes when a value changes in place or is replaced by another tensor."""
        if self._find_structure() != self._structure:
            self._watch_parts()
        held: list[Tensor] = [
            value for values in self._parameters for value in values.values() if value is not None
        ]
        held += [value for values, name in self._buffers if (value := values.get(name)) is not None]
        versions = [0 if value.is_inference() else value._version for value in held]
        return hash((*self._structure, *map(id, held), *versions))

    def refuse_unservable(self) -> None:
        """Check that the model's owner has left it in a state in which it can be served.

        Raises:
            ValueError: The model is no longer of the dtype or on the device of its caches, or draws dropout
                masks.
        """
        for part, found in self._dropping:
            if part.training:
                raise ValueError(
                    f"{type(part).__name__} is in training mode and has {found}: answers would be random; "
                    "call its eval() before it answers"
                )
        value = next(self._model.parameters(), None)
        if value is not None and (value.dtype, value.device) != (self._dtype, self._device):
            raise ValueError(
                f"the model in memory is now {value.dtype} on {value.device}, and was {self._dtype} on "
                f"{self._device} when its cache was made: make a new LLM of it"
            )


def _dropout_of(part: nn.Module) -> str | None:
    """Return the dropout setting of a part, as text; None for none."""
    if isinstance(part, nn.modules.dropout._DropoutNd):
        return f"p={part.p}" if part.p > 0 else None
    named = ((name, value) for name, value in vars(part).items() if "drop" in name)
    return next((f"{name}={value}" for name, value in named if isinstance(value, float) and value > 0), None)
