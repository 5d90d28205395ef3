"""Adam with torch's states, float32 masters of half weights, and states on disk."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from colossalai.logging import get_dist_logger
from colossalai.nn.optimizer._adam_kernel import (
    HALF_DTYPES,
    AdamOptions,
    Slot,
    adam_step,
    flat,
    is_dense,
    laid_out_as,
    local,
    mixed_adam_step,
)
from colossalai.nn.optimizer._disk import DiskOffload, DiskOptions
from colossalai.nn.optimizer._disk_layout import MASTER, DiskBlock, DiskPiece
from colossalai.nn.optimizer._stepping import SteppingOptimizer, check_decay_rates, check_not_negative

# Further options in the groups of torch's Adam: with them a state dict loads into either.
_FIXED = {
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": True,
}


@dataclass(frozen=True)
class _Interrupted:
    """A step that an error on disk has stopped: a step with the same gradients goes on where it was."""

    grads: list[Tensor]
    versions: list[int]
    done: set[DiskBlock]

    def is_of(self, grads: list[Tensor]) -> bool:
        return len(grads) == len(self.grads) and all(
            mine is theirs and mine._version == version
            for mine, theirs, version in zip(grads, self.grads, self.versions, strict=True)
        )


class Adam(SteppingOptimizer):
    """Abstract base of HybridAdam, CPUAdam and FusedAdam.

    The states are those of `torch.optim.AdamW` under the same keys ("step", "exp_avg", "exp_avg_sq"); a
    float16 or bfloat16 parameter has float32 ones and a float32 copy of itself, "master". The master is
    updated; elements that were written into the parameter since the last step are copied into it first.

    A step raises an OSError if the disk failed: the message has the path, the bytes needed and free. States
    that could not be written stay in memory. Call `step` again when the cause is removed, with the same
    gradients: parameters that were updated already are skipped.
    """

    elementwise = True
    """The update of an element needs that element alone: slices may be updated one by one."""

    keeps_masters = True
    """Half parameters may be given as they are, with half gradients: the optimizer keeps the float32 ones."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor,
        *,
        bias_correction: bool,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        decoupled_weight_decay: bool,
        offload: DiskOffload,
    ) -> None:
        check_not_negative(lr=float(lr), eps=eps, weight_decay=weight_decay)
        check_decay_rates(beta1=betas[0], beta2=betas[1])
        options = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "decoupled_weight_decay": decoupled_weight_decay,
            **_FIXED,
        }
        self._offload = offload
        self._versions: dict[Tensor, int] = {}  # of half parameters, after the last step
        self._interrupted: _Interrupted | None = None
        super().__init__(params, options)

    @property
    def offloads_states(self) -> bool:
        """Whether the optimizer itself keeps some of its states on disk (`nvme_offload_fraction`)."""
        return self._offload.is_used

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_offload": self._offload}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        vars(self).setdefault("_versions", {})  # a copy has none
        vars(self).setdefault("_interrupted", None)
        for group in self.param_groups:  # one of torch's Adam lacks some
            for key, value in self.defaults.items():
                group.setdefault(key, value)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters.

        Raises:
            ValueError: A parameter is not of a floating dtype.
        """
        super().add_param_group(param_group)
        for param in self.param_groups[-1]["params"]:
            if not param.is_floating_point():
                self.param_groups.pop()
                raise ValueError(
                    f"a parameter of shape {tuple(param.shape)} is {param.dtype}; give floating ones only"
                )

    def _update_all(self) -> None:
        lists = []
        for params, group in self._lists():
            if group["amsgrad"]:
                raise ValueError("amsgrad=True is not supported; use torch.optim.AdamW(amsgrad=True)")
            lists.append((params, AdamOptions.of_group(group)))
        self._offload.plan([param for params, _ in lists for param in params])
        on_disk = {
            param: options for params, options in lists for param in params if self._offload.holds(param)
        }
        if on_disk:
            self._update_on_disk(on_disk)
        for params, options in lists:
            self._update_in_memory([param for param in params if param not in on_disk], options)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as torch numbers it; states on disk are tensors that read the files.

        Raises:
            OSError: A file on disk is smaller than it was.
        """
        self._offload.check()
        return super().state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class or of torch's Adam and AdamW; states go to disk at once.

        Raises:
            OSError: States could not be written to disk; they were loaded and stay in memory.
        """
        super().load_state_dict(state_dict)
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for number, param in zip(numbers, params, strict=True):
            if param.dtype in HALF_DTYPES:  # torch has rounded the states to the dtype of the parameter
                self._load_exactly(param, state_dict["state"].get(number, {}))
        self._interrupted = None
        self._versions.clear()
        self._offload.plan([param for param in params if self.state.get(param)])
        for _ in self._offload.visit(self.state, [], done=set()):
            pass
        for param in params:
            if param in self.state and not self._offload.holds(param):
                # Loaded states may be views of another optimizer's files.
                self.state[param] = {
                    key: value.clone() if isinstance(value, Tensor) else value
                    for key, value in self.state[param].items()
                }

    def _load_exactly(self, param: Tensor, loaded: Mapping[str, Any]) -> None:
        for key in {"exp_avg", "exp_avg_sq", MASTER} & loaded.keys():
            self.state[param][key] = loaded[key].to(param.device, torch.float32)

    def _update_in_memory(self, params: list[Tensor], options: AdamOptions) -> None:
        """Update parameters of one device and dtype."""
        if not params:
            return
        slots = [self._slot(param) for param in params]
        torch._foreach_add_([slot.step for slot in slots], 1)
        if params[0].dtype in HALF_DTYPES:
            mixed_adam_step(slots, options)
            self._versions.update({param: local(param)._version for param in params})
        else:
            adam_step(slots, options)

    def _slot(self, param: Tensor) -> Slot:
        """Return the local tensors of a parameter and its states, all with the same memory layout."""
        held = local(param)
        state = self.state[param]
        self._ensure_step(param)
        is_half = param.dtype in HALF_DTYPES
        dtype = torch.float32 if is_half else param.dtype
        for key in ("exp_avg", "exp_avg_sq"):
            if key not in state:
                state[key] = torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
        if is_half and MASTER not in state:
            state[MASTER] = param.detach().to(dtype)
        like = held if is_dense(held) else local(state["exp_avg"])
        for key in ("exp_avg", "exp_avg_sq", MASTER):
            if key in state and state[key] is local(state[key]):
                state[key] = laid_out_as(state[key], like)
        if is_half and self._is_overwritten(param):
            _follow(local(state[MASTER]), held)
        return Slot(
            param=held.detach(),
            grad=_grad_of(param, like),
            exp_avg=local(state["exp_avg"]),
            exp_avg_sq=local(state["exp_avg_sq"]),
            step=state["step"],
            master=local(state[MASTER]) if is_half else None,
        )

    def _ensure_step(self, param: Tensor) -> None:
        """Give a parameter the number of its steps, where the fused kernel of its device wants it."""
        state = self.state[param]
        step = state.get("step", 0)
        if not isinstance(step, Tensor) or step.device != param.device:
            state["step"] = torch.as_tensor(step, dtype=torch.float32, device=param.device).clone()

    def _update_on_disk(self, options_of: Mapping[Tensor, AdamOptions]) -> None:
        grads = [param.grad for param in options_of if param.grad is not None]
        interrupted = self._interrupted
        done = interrupted.done if interrupted is not None and interrupted.is_of(grads) else set()
        self._interrupted = _Interrupted(grads, [grad._version for grad in grads], done)
        for param in options_of:
            self._ensure_step(param)
        flat_grads = {param: flat(_grad_of(param, local(param))) for param in options_of}
        steps = {param: self.state[param]["step"] + 1 for param in options_of}
        overwritten = {param for param in options_of if self._is_overwritten(param)}
        num_left = {param: self._offload.num_left(param, done) for param in options_of}
        for pieces in self._offload.visit(self.state, options_of, done=done):
            by_kind: dict[tuple[AdamOptions, torch.dtype], list[Slot]] = {}
            for piece, values in pieces:
                param = piece.param
                slot = _slot_of_piece(piece, values, flat_grads[param], steps[param])
                if slot.master is not None and param in overwritten:
                    _follow(slot.master, slot.param)
                by_kind.setdefault((options_of[param], param.dtype), []).append(slot)
            for (options, dtype), slots in by_kind.items():
                (mixed_adam_step if dtype in HALF_DTYPES else adam_step)(slots, options)
            for piece, _ in pieces:
                num_left[piece.param] -= 1
                if num_left[piece.param] == 0:
                    self.state[piece.param]["step"] = steps[piece.param]
        self._versions.update({param: local(param)._version for param in options_of})
        self._interrupted = None

    def _is_overwritten(self, param: Tensor) -> bool:
        """Return whether someone has written into a parameter since its last step, or may have."""
        return local(param)._version != self._versions.get(param)


def disk_offload(fraction: float, folder: str | Path | None, options: DiskOptions) -> DiskOffload:
    """Return the offload for the arguments of an optimizer.

    Raises:
        ValueError: `fraction` is not in [0, 1].
        OSError: The folder cannot be made.
    """
    if folder is not None and fraction == 0:
        get_dist_logger().log_once(
            "nvme_offload_dir has no effect with nvme_offload_fraction=0.0: all states stay in memory",
            level="warning",
        )
    return DiskOffload(fraction, folder, options)


def _slot_of_piece(piece: DiskPiece, values: Mapping[str, Tensor], grad: Tensor, step: Tensor) -> Slot:
    return Slot(
        param=flat(local(piece.param).detach())[piece.start : piece.stop],
        grad=grad[piece.start : piece.stop],
        exp_avg=values["exp_avg"],
        exp_avg_sq=values["exp_avg_sq"],
        step=step,
        master=values.get(MASTER),
    )


def _grad_of(param: Tensor, like: Tensor) -> Tensor:
    assert param.grad is not None
    # Torch's fused kernels ignore strides: a gradient with another layout would be mixed up.
    return laid_out_as(local(param.grad).to(param.dtype), like)


def _follow(master: Tensor, weights: Tensor) -> None:
    """Let a master take the elements of the weights that are no longer its own, rounded."""
    master.copy_(torch.where(weights == master.to(weights.dtype), master, weights.to(master.dtype)))
