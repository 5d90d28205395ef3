"""Adagrad with one sum for each row of a parameter, for tables of embeddings."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from colossalai.nn.optimizer._stepping import SteppingOptimizer, check_not_negative
from colossalai.registry import OPTIMIZERS


@OPTIMIZERS.register_module
class RowWiseAdagrad(SteppingOptimizer):
    """Adagrad (Duchi et al., JMLR 12, 2011) with a step size that the elements of a row share.

    For the gradient g of a row of w: `sum += mean(g * g)`, `w -= lr * g / (sqrt(sum) + eps)`. A table of n
    rows has n sums and not n times its width. Gradients can be sparse; rows without a gradient stay as they
    are.

    Args:
        params: Parameters, or groups of them, of two dimensions or more.
        lr: Learning rate.
        eps: Added to the root of the sum.
        initial_accumulator_value: Value that the sums begin with.

    Raises:
        ValueError: `lr`, `eps` or `initial_accumulator_value` is negative, or a parameter has less than two
            dimensions.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-2,
        eps: float = 1e-10,
        *,
        initial_accumulator_value: float = 0.0,
    ) -> None:
        options = {"lr": lr, "eps": eps, "initial_accumulator_value": initial_accumulator_value}
        check_not_negative(**options)
        super().__init__(params, options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters.

        Raises:
            ValueError: A parameter has less than two dimensions.
        """
        super().add_param_group(param_group)
        for param in self.param_groups[-1]["params"]:
            if param.dim() < 2:
                raise ValueError(
                    f"a parameter has the shape {tuple(param.shape)}, and RowWiseAdagrad is for parameters "
                    "of two dimensions or more: give the others to torch.optim.Adagrad"
                )

    def _update_all(self) -> None:
        """See the base class."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group)

    def _update(self, param: Tensor, group: dict[str, Any]) -> None:
        """Update the rows of a parameter that have a gradient."""
        state, grad = self.state[param], param.grad
        assert grad is not None
        start, dims = group["initial_accumulator_value"], list(range(1, param.dim()))
        dtype = torch.promote_types(param.dtype, torch.float32)
        if not grad.is_sparse:  # operators of DTensors, too
            squares = grad.to(dtype).square().mean(dims, keepdim=True)
            if not state:
                state["sum"] = torch.full_like(squares, start)
            sums = state["sum"].add_(squares)
            param.sub_((group["lr"] * grad / (sums.sqrt() + group["eps"])).to(param.dtype))
            return
        if not state:
            shape = (len(param), *(1 for _ in dims))
            state["sum"] = torch.full(shape, start, dtype=dtype, device=param.device)
        grad = grad.coalesce()
        rows, values = grad.indices()[0], grad.values()
        sums = state["sum"][rows] + values.to(dtype).square().mean(dims, keepdim=True)
        state["sum"][rows] = sums
        param[rows] -= (group["lr"] * values / (sums.sqrt() + group["eps"])).to(param.dtype)
