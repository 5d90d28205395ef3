"""A model in a tensor mode, through the engine, as a subject of the parity check."""

import torch
from torch import nn

import colossalai
from colossalai.tensor import spec_of
from colossalai.testing import Subject

MODES = {
    "1d": {"size": 2, "mode": "1d"},
    "1d-4": {"size": 4, "mode": "1d"},
    "2d": {"size": 4, "mode": "2d"},
    "2.5d": {"size": 8, "mode": "2.5d", "depth": 2},
    "3d": {"size": 8, "mode": "3d"},
}


def whole(param, tensor):
    """Return the whole of a parameter, or of its gradient, of which a rank holds a slice."""
    spec = spec_of(param)
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return tensor.detach().clone() if spec is None else spec.whole(tensor.detach()).clone()


def through_engine(case, build_model, build_criterion, twin, *, clip_value=None):
    """Build the model anew in the job's mode; its start must be the twin's, and then it is trained.

    Args:
        case: The training run.
        build_model: Called with the twin; returns the model.
        build_criterion: Returns the loss function of this mode, once the model is built.
        twin: What one process trains.
        clip_value: Bound of every element of the gradients; None for none.
    """
    torch.manual_seed(case.seed)
    torch.set_default_dtype(case.dtype)
    model: nn.Module = build_model(twin)
    for name, param in model.named_parameters():
        assert torch.equal(whole(param, param), twin.get_parameter(name)), name
    optimizer = case.build_optimizer(model.parameters())
    engine, *_ = colossalai.initialize(model, optimizer, build_criterion(), verbose=False)

    def step(batch):
        inputs, labels = batch
        total = 0.0
        num_microbatches = engine.accumulation_steps
        for part, label in zip(inputs.chunk(num_microbatches), labels.chunk(num_microbatches), strict=True):
            engine.zero_grad()
            loss = engine.criterion(engine(part), label)
            engine.backward(loss)
            if clip_value is not None:
                engine.optimizer.clip_grad_by_value(clip_value)
            engine.step()
            total += loss.item() / num_microbatches
        return total

    return Subject(
        step=step,
        gradients=lambda: {name: whole(p, p.grad) for name, p in model.named_parameters()},
        parameters=lambda: {name: whole(p, p) for name, p in model.named_parameters()},
    )
