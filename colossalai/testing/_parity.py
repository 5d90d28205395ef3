"""Parity check: a parallel method trains a model exactly as one process does.

The skeleton is the same for every method. A model is built in float64 from a seed; its deep copy, the twin,
is trained by a plain loop on the global batch. The method trains the model, each rank on its slice of that
batch. After every step the loss, each gradient and each updated parameter must agree to 1e-10: in float64
only a different order of summation stays within this tolerance.
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from colossalai.cluster import gather_values

Batch = tuple[Tensor, ...]

_WRAPPERS = ("module", "_orig_mod", "_checkpoint_wrapped_module")


@dataclass(frozen=True, kw_only=True)
class ParityCase:
    """A training run to reproduce.

    Attributes:
        build_model: Function that returns the model; it is called with a seeded random state, and its result
            is converted to `dtype`.
        build_optimizer: Function that returns the twin's optimizer of the given parameters.
        compute_loss: Function that returns the mean loss of the twin over a batch; the first rank calls it.
        batches: One global batch per step: tuples of tensors whose dim 0 is the batch; floating-point tensors
            are converted to `dtype`.
        max_norm: Maximum gradient norm. Gradients are clipped before the update, and compared after clipping.
            Default: no clipping.
        seed: Seed of the model.
        dtype: Dtype of parameters and inputs.
        device: Device of the twin.
        tolerance: Maximum difference, absolute for values below 1, relative above. Another dtype needs
            another tolerance; document its reason where it is set.
    """

    build_model: Callable[[], nn.Module]
    build_optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
    compute_loss: Callable[[nn.Module, Batch], Tensor]
    batches: Sequence[Batch]
    max_norm: float | None = None
    seed: int = 1024
    dtype: torch.dtype = torch.float64
    device: str | torch.device = "cpu"
    tolerance: float = 1e-10


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model under a parallel method, as the parity check sees it.

    Attributes:
        step: Function that trains on this rank's slice of a batch (forward, backward, update) and returns the
            mean loss over the slice, or None on a rank without the loss. Ranks with a loss must have equally
            large parts of the batch. The gradients must be available to `gradients` afterwards.
        gradients: Function that returns the full, averaged gradients by the twin's parameter names. A rank
            can return a subset; all ranks together must return all. Called by all ranks at the same time.
        parameters: Function that returns the updated parameters in the same way.
    """

    step: Callable[[Batch], Tensor | float | None]
    gradients: Callable[[], Mapping[str, Tensor]]
    parameters: Callable[[], Mapping[str, Tensor]]


def check_parity(
    case: ParityCase,
    apply: Callable[[nn.Module], Subject],
    *,
    slice_index: int | None = None,
    num_slices: int | None = None,
) -> list[float]:
    """Train a model under a method and its twin in this process, and assert that they agree after every step.

    Every rank of the default process group calls this; the first rank trains the twin, and all ranks compare
    with it. Without a process group it checks a method on one process.

    Args:
        case: The training run.
        apply: Function that applies the method to a model; the model has the same values on every rank.
        slice_index: Index of this rank's slice of each batch: its data-parallel rank. Default: its global
            rank.
        num_slices: Number of slices of equal size: the data-parallel size. Default: the world size.

    Returns:
        The loss of every step under the method, over the global batch.

    Raises:
        AssertionError: A loss, a gradient or a parameter differs from the twin's; the message has the step,
            the tensor and the difference.
        ValueError: A batch cannot be split into `num_slices` equal slices.
    """
    num_slices = _world_size() if num_slices is None else num_slices
    slice_index = (dist.get_rank() if dist.is_initialized() else 0) if slice_index is None else slice_index
    model = _build(case)
    twin = _Twin(case, model)
    subject = apply(model)
    losses = []
    for index, raw_batch in enumerate(case.batches):
        batch = _convert(raw_batch, case)
        loss = _mean_over_ranks(subject.step(_slice(batch, slice_index, num_slices)), case.device)
        twin_loss, gradients, parameters = twin.train(batch)
        where = f"step {index}"
        _compare(f"{where}: the loss", torch.tensor(loss, dtype=torch.float64), twin_loss, case.tolerance)
        _compare_all(f"{where}: the gradient", subject.gradients(), gradients, case.tolerance)
        _compare_all(f"{where}: the parameter", subject.parameters(), parameters, case.tolerance)
        losses.append(loss)
    return losses


def full_gradients(module: nn.Module) -> dict[str, Tensor]:
    """Return the full gradients of a module by parameter name; sharded ones (`DTensor`) are gathered.

    Names are the names in the bare model, without the prefixes of DDP, `torch.compile` and checkpoint
    wrappers. Parameters without a gradient are omitted. Collective for a sharded module.
    """
    return {
        _bare_name(name): _full(param.grad)
        for name, param in module.named_parameters()
        if param.grad is not None
    }


def full_parameters(module: nn.Module) -> dict[str, Tensor]:
    """Return the full parameters of a module by name; see `full_gradients`."""
    return {_bare_name(name): _full(param) for name, param in module.named_parameters()}


def _build(case: ParityCase) -> nn.Module:
    with torch.random.fork_rng(devices=[]):  # the model is built on the CPU for every device
        torch.manual_seed(case.seed)
        model = case.build_model()
    return model.to(device=case.device, dtype=case.dtype)


class _Twin:
    """The twin, which the first rank trains; the results are broadcast to all ranks.

    Args:
        case: The training run.
        model: The original model; used on every rank for names and shapes.
    """

    def __init__(self, case: ParityCase, model: nn.Module) -> None:
        self._case = case
        self._shapes = {name: param.shape for name, param in model.named_parameters()}
        self._module: nn.Module | None = None
        if not dist.is_initialized() or dist.get_rank() == 0:
            self._module = copy.deepcopy(model)
            self._optimizer = case.build_optimizer(self._module.parameters())

    def train(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """Train on a global batch; return the loss, the gradients and the updated parameters; collective."""
        sizes = [shape.numel() for shape in self._shapes.values()]
        if self._module is not None:
            with torch.random.fork_rng(devices=[]):  # the other ranks draw no random numbers
                told = self._step(batch)
        else:
            told = torch.empty(1 + len(sizes) + 2 * sum(sizes), dtype=torch.float64, device=self._case.device)
        if dist.is_initialized():
            dist.broadcast(told, 0)
        loss, has_gradient, values = told.split([1, len(sizes), 2 * sum(sizes)])
        parts = values.split(sizes * 2)
        gradients, parameters = (
            {
                _bare_name(name): part.view(self._shapes[name])
                for name, part in zip(self._shapes, half, strict=True)
            }
            for half in (parts[: len(sizes)], parts[len(sizes) :])
        )
        kept = zip(gradients, has_gradient.tolist(), strict=True)
        return loss[0], {name: gradients[name] for name, has_one in kept if has_one}, parameters

    def _step(self, batch: Batch) -> Tensor:
        """Return loss, mask of parameters with gradients, gradients and parameters, concatenated."""
        assert self._module is not None, "the first rank has it"
        params = list(self._module.parameters())
        self._optimizer.zero_grad()
        loss = self._case.compute_loss(self._module, batch)
        loss.backward()
        if self._case.max_norm is not None:
            nn.utils.clip_grad_norm_(params, self._case.max_norm)
        self._optimizer.step()
        has_gradient = torch.tensor([param.grad is not None for param in params], device=loss.device)
        gradients = [torch.zeros_like(param) if param.grad is None else param.grad for param in params]
        found = (loss, has_gradient, *gradients, *params)
        return torch.cat([each.detach().to(torch.float64).flatten() for each in found])


def _convert(batch: Batch, case: ParityCase) -> Batch:
    return tuple(
        tensor.to(case.device, case.dtype if tensor.is_floating_point() else tensor.dtype) for tensor in batch
    )


def _slice(batch: Batch, index: int, num_slices: int) -> Batch:
    sizes = {tensor.shape[0] for tensor in batch}
    if len(sizes) != 1 or sizes.pop() % num_slices:
        shapes = [tuple(tensor.shape) for tensor in batch]
        raise ValueError(
            f"a batch of shapes {shapes} cannot be cut into {num_slices} equal slices along dim 0"
        )
    return tuple(tensor.chunk(num_slices)[index] for tensor in batch)


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _mean_over_ranks(loss: Tensor | float | None, device: str | torch.device) -> float:
    """Average the losses of the ranks that have one; all ranks join the all-reduce."""
    known = [] if loss is None else [float(loss.detach() if isinstance(loss, Tensor) else loss)]
    total = torch.tensor([sum(known), len(known)], dtype=torch.float64, device=device)
    if dist.is_initialized():
        dist.all_reduce(total)
    if total[1] == 0:
        raise AssertionError("no rank has the loss: Subject.step must return it on at least one")
    return (total[0] / total[1]).item()


def _compare_all(
    what: str, actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float
) -> None:
    """Compare this rank's tensors by name, and check that all ranks together hold all tensors."""
    held = [sorted(actual)]
    if dist.is_initialized():
        held = gather_values(sorted(actual))
    everywhere = {name for names in held for name in names}
    if everywhere != set(expected):
        raise AssertionError(
            f"{what}s: missing on all ranks {sorted(set(expected) - everywhere)}, "
            f"unknown to the twin {sorted(everywhere - set(expected))}"
        )
    for name, value in actual.items():
        _compare(f"{what} of {name}", value, expected[name], tolerance)


def _compare(what: str, actual: Tensor, expected: Tensor, tolerance: float) -> None:
    if actual.shape != expected.shape:
        raise AssertionError(f"{what} has shape {tuple(actual.shape)}, the twin's {tuple(expected.shape)}")
    actual, expected = actual.detach().cpu().double(), expected.detach().cpu().double()
    error = (actual - expected).abs() / expected.abs().clamp(min=1.0)
    wrong = ~(error <= tolerance)  # unlike error > tolerance, this is also true for NaN
    if wrong.any():
        raise AssertionError(
            f"{what} differs by {error.max().item():.3g} (allowed {tolerance:g}), "
            f"at {int(wrong.sum())} of {error.numel()} places"
        )


def _bare_name(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _full(tensor: Tensor) -> Tensor:
    """Return a copy of the full tensor, which later steps do not change."""
    from torch.distributed.tensor import DTensor

    if isinstance(tensor, DTensor):
        reachable: Tensor = tensor
        if tensor.device.type != "cpu":
            backend = tensor.device_mesh.get_group(0)._get_backend(tensor.device).name()
            # With gloo, torch 2.11 treats accelerator memory as host memory, and the process crashes.
            reachable = tensor.cpu() if backend == "gloo" else tensor
        assert isinstance(reachable, DTensor), "only its memory is somewhere else"
        tensor = reachable.full_tensor()
    return tensor.detach().clone()
