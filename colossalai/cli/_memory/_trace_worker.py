"""Worker of `colossalai memory --trace`: every rank trains two iterations of a model under Gemini.

    python -m colossalai.cli._memory._trace_worker SETTINGS FOUND_FILE

Rank 0 writes the timeline, or the error of Gemini, for the parent process.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from colossalai.cli._memory._shape import ModelShape, build_model, shape_of
from colossalai.cli._memory._trace import TraceSettings
from colossalai.context import global_context, launch_from_torch
from colossalai.logging import get_dist_logger
from colossalai.nn.optimizer import HybridAdam
from colossalai.runtime import Plan, assemble
from colossalai.zero.gemini import GeminiOptions, SmallBudgetError, record_timeline

_NUM_ITERATIONS = 2


def main(settings_text: str, found_file: str) -> None:
    """Train, and write the timeline on rank 0."""
    get_dist_logger().set_level("WARNING")
    launch_from_torch({}, verbose=False)
    try:
        found = measure(TraceSettings(**json.loads(settings_text)))
    except SmallBudgetError as error:  # raised on all ranks
        found = {"needed": error.needed}
    except ValueError as error:
        found = {"refused": str(error)}
    if global_context.get_global_rank() == 0:
        Path(found_file).write_text(json.dumps(found))
    global_context.destroy()


def measure(settings: TraceSettings) -> dict[str, Any]:
    """Return the iterations of a model as a dict for JSON.

    Raises:
        ValueError: Gemini refuses an option, or the budget is too small.
    """
    torch.manual_seed(0)
    shape = shape_of(settings.model)
    options = GeminiOptions(
        placement_policy=settings.placement_policy,
        precision=settings.precision,
        initial_scale=1.0 if settings.precision == "fp16" else GeminiOptions.initial_scale,
        memory_budget=settings.memory_budget,
        offload_dir=settings.offload_dir,
        min_chunk_size_mb=settings.min_chunk_size_mb,
        search_range_mb=settings.min_chunk_size_mb,
        hidden_dim=shape.hidden,
    )
    plan = Plan(data=options.method(), precision=options.make_precision(), recompute=settings.recompute)
    model = build_model(settings.model, num_blocks=settings.num_blocks, attention=settings.attention)
    model.train()
    inputs = _inputs(shape, model, settings)
    made = HybridAdam(model.parameters(), lr=1e-4)
    wrapped, optimizer = assemble(plan, model, made, mesh=global_context.mesh, device=global_context.device)
    assert optimizer is not None
    with record_timeline(wrapped) as iterations:
        for _ in range(_NUM_ITERATIONS):
            optimizer.zero_grad()
            optimizer.backward(_loss(wrapped(inputs), shape.num_outputs))
            optimizer.step()
    chunks = {moment.chunk for moment in iterations[-1].moments} - {None}
    return {
        "num_chunks": len(chunks),
        "iterations": [iteration.as_dict() for iteration in iterations],
    }


def _inputs(shape: ModelShape, model: nn.Module, settings: TraceSettings) -> Tensor:
    """Return random tokens, or images."""
    device = global_context.device
    if not shape.has_fixed_length:
        return torch.randint(shape.num_outputs, (settings.batch, settings.seq), device=device)
    config: Any = model.config
    return torch.randn(
        settings.batch, config.num_channels, config.image_size, config.image_size, device=device
    )


def _loss(output: Any, num_outputs: int) -> Tensor:
    """Return the cross entropy with random labels, or the mean of squares of outputs without logits."""
    while not isinstance(output, Tensor):
        output = next(iter(output.values())) if isinstance(output, Mapping) else output[0]
    logits = output.float()
    if logits.size(-1) != num_outputs:
        return logits.square().mean()
    labels = torch.randint(num_outputs, logits.shape[:-1], device=logits.device)
    return nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())


if __name__ == "__main__":
    main(*sys.argv[1:])
