"""The precision method: a module whose forward runs in a precision."""

from typing import Any

from torch import nn

from colossalai.amp._precision import FullPrecision, Precision


class PrecisionModule(nn.Module):
    """A module whose forward runs in the context of a precision, which converts input and output.

    Args:
        module: The module.
        precision: The precision.
        device_type: Type of the device that the module is on.
    """

    def __init__(self, module: nn.Module, precision: Precision, device_type: str) -> None:
        super().__init__()
        self.module = module
        self.precision = precision
        self.device_type = device_type

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        with self.precision.forward_context(self.device_type):
            args, kwargs = self.precision.convert_input((args, kwargs))
            output = self.module(*args, **kwargs)
        return self.precision.convert_output(output)


def apply_precision(module: nn.Module, precision: Precision, device_type: str) -> nn.Module:
    """Return a module that computes as `module` does, in a precision; `module` itself in full precision."""
    return module if isinstance(precision, FullPrecision) else PrecisionModule(module, precision, device_type)
