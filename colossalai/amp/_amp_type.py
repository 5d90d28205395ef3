"""The mixed-precision modes of a config, and the conversion of single components outside the doors."""

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from colossalai.amp._model import PrecisionModule
from colossalai.amp._optimizer import OptimizerWrapper
from colossalai.amp._precision import BF16Autocast, FP16Autocast, NaiveFP16, Precision


class AMP_TYPE(Enum):
    """Mixed-precision modes: `fp16=dict(mode=AMP_TYPE.TORCH)`."""

    TORCH = "torch"
    BF16 = "bf16"
    NAIVE = "naive"
    APEX = "apex"


_PRECISIONS: Mapping[AMP_TYPE, Callable[..., Precision]] = {
    AMP_TYPE.TORCH: FP16Autocast,
    AMP_TYPE.BF16: BF16Autocast,
    AMP_TYPE.NAIVE: NaiveFP16,
}


def precision_of(mode: AMP_TYPE | str, options: Mapping[str, Any] | None = None) -> Precision:
    """Return the precision of a mode with its options.

    Raises:
        ValueError: There is no such mode, it has not landed yet, or an option does not fit.
    """
    amp_type = AMP_TYPE(mode)
    if amp_type not in _PRECISIONS:
        raise ValueError(
            f"AMP_TYPE.{amp_type.name} is not there yet: use AMP_TYPE.TORCH or AMP_TYPE.NAIVE (float16) "
            "or AMP_TYPE.BF16 (bfloat16)"
        )
    try:
        return _PRECISIONS[amp_type](**(options or {}))
    except TypeError as error:
        raise ValueError(
            f"the options {dict(options or {})} do not fit AMP_TYPE.{amp_type.name}: {error}"
        ) from error


def convert_to_amp(
    model: nn.Module,
    optimizer: Optimizer,
    criterion: Callable[..., torch.Tensor],
    mode: AMP_TYPE = AMP_TYPE.TORCH,
    amp_config: Mapping[str, Any] | None = None,
) -> tuple[nn.Module, OptimizerWrapper, Callable[..., torch.Tensor]]:
    """Give a model, an optimizer and a criterion mixed precision without `colossalai.initialize`.

    Call `optimizer.backward(loss)` in place of `loss.backward()`. The criterion stays as it is: the model's
    output comes back as float32. All ranks of the default process group, if there is one, decide together on
    overflow.

    Args:
        model: The model; its parameters stay in their dtype, except under AMP_TYPE.NAIVE.
        optimizer: Its optimizer.
        criterion: The loss function.
        mode: The mixed-precision mode.
        amp_config: Options of the mode, as in `fp16=dict(mode=..., ...)` of a config.

    Raises:
        ValueError: The mode has not landed yet, or an option does not fit.
    """
    precision = precision_of(mode, amp_config)
    names = {param: name for name, param in model.named_parameters()}
    # Not float32: the caller may still wrap the model in DistributedDataParallel.
    masters = precision.convert_model(model, float32_grads=False).stand_in(optimizer)
    device = next((param.device for param in model.parameters()), torch.device("cpu"))
    wrapped = OptimizerWrapper(
        optimizer,
        scaler=precision.make_scaler(),
        group=dist.group.WORLD if dist.is_initialized() else None,
        param_names=names,
        masters=masters,
        before_step=precision.before_step,
    )
    return PrecisionModule(model, precision, device.type), wrapped, criterion
