"""Averages gradients over the data-parallel ranks after the backward, one flat all-reduce for each dtype."""

from collections import defaultdict

import torch
import torch.distributed as dist
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from colossalai.context import ParallelMode, global_context
from colossalai.engine.gradient_handler._base import BaseGradientHandler
from colossalai.registry import GRADIENT_HANDLER


@GRADIENT_HANDLER.register_module
class DataParallelGradientHandler(BaseGradientHandler):
    """Averages all gradients over DATA: as many bytes as an all-reduce of the trainable parameters.

    A parameter that has no gradient on this rank (it was not used here) counts as zero, so that all ranks
    send the same.
    """

    def handle_gradient(self) -> None:
        """Average the gradients in place; nothing with one rank along `dp`."""
        mesh = global_context.mesh
        size = mesh.axis_size("dp")
        if size == 1:
            return
        group = global_context.get_group(ParallelMode.DATA)
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = defaultdict(list)
        for param in self._model.parameters():
            if param.requires_grad:
                param.grad = torch.zeros_like(param) if param.grad is None else param.grad
                by_dtype[param.dtype].append(param.grad)
        for grads in by_dtype.values():
            flat = parameters_to_vector(grads)
            dist.all_reduce(flat, group=group)
            vector_to_parameters(flat.div_(size), grads)
