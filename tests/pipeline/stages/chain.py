"""A cut model run by hand: its stages one after the other in one process, next to the whole model."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from colossalai.pipeline.stages._split_model import cut_model
from colossalai.pipeline.stages._stage import tied_parameters
from tests.pipeline.stages.models import Case


def cut_all(case: Case, num_stages: int, **options: Any) -> list[nn.Module]:
    """Return all stages, each cut out of a model of its own as on a rank of its own."""
    return [cut_model(case.build(), num_stages, [index], **options) for index in range(num_stages)]


def run_chain(stages: list[nn.Module], case: Case) -> torch.Tensor:
    """Return the output of the last stage after a backward from it, through detached messages."""
    inputs, outputs = [], []
    received: Any = None
    for stage in stages:
        inputs.append(_tensors(received))
        returned = stage(received, case.data())
        outputs.append(_tensors(returned))
        received = tree_map(_leaf, returned)
    result = case.output(returned)
    torch.autograd.backward(result, loss_grad(result))
    for sent, taken in reversed(list(zip(outputs[:-1], inputs[1:], strict=True))):
        pairs = [(o, i.grad) for o, i in zip(sent, taken, strict=True) if i.grad is not None]
        torch.autograd.backward(*zip(*pairs, strict=True))
    return result.detach()


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _leaf(value: Any) -> Any:
    return value.detach().requires_grad_(value.is_floating_point()) if torch.is_tensor(value) else value


def loss_grad(result: torch.Tensor) -> torch.Tensor:
    return torch.randn(result.shape, generator=torch.Generator().manual_seed(9), dtype=result.dtype)


def sum_ties(stages: list[nn.Module]) -> None:
    """Sum the gradients of shared parameters, as the step of a pipeline does."""
    shared = [dict_of(stage) for stage in stages]
    for names in {names for found in shared for names in found}:
        params = list(dict.fromkeys(found[names] for found in shared if names in found))
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
        for param in params:
            param.grad = sum(grads)


def dict_of(stage: nn.Module) -> dict[Any, nn.Parameter]:
    found = tied_parameters(stage)
    names = [tie.names for tie in sorted(stage.ties, key=lambda tie: tie.names)]
    return {key: param for key, (param, _) in zip(names, found, strict=True)}


def check_cut(case: Case, num_stages: int, **options: Any) -> list[nn.Module]:
    """Check a cut model, see `check_stages`; return the stages."""
    return check_stages(case, partial(cut_all, case, num_stages, **options))


def check_stages(case: Case, make_stages: Callable[[], list[nn.Module]]) -> list[nn.Module]:
    """Check outputs, gradients and names of stages against the whole model; return the stages."""
    whole = case.build()
    expected = case.output(whole(**case.data()))
    expected.backward(loss_grad(expected))
    stages = make_stages()
    result = run_chain(stages, case)
    torch.testing.assert_close(result, expected.detach(), rtol=1e-10, atol=1e-10)
    sum_ties(stages)
    names = dict(whole.named_parameters(remove_duplicate=False))
    seen = set()
    for stage in stages:
        for name, param in stage.named_parameters(remove_duplicate=False):
            seen.add(name)
            assert not param.is_meta
            wanted = names[name].grad
            if wanted is None:
                assert param.grad is None or not param.grad.any(), name
            else:
                torch.testing.assert_close(param.grad, wanted, rtol=1e-9, atol=1e-10, msg=f"{name}")
    assert seen == set(names)
    return stages
