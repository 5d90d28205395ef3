"""Compilation: the forward of every block of a model by `torch.compile`, in place.

[Note: extent of compilation]
The forward of a block is compiled, not its call. So hooks run as they do without: the user's, and those
in which FSDP gathers the block's parameters. Recomputation wraps the compiled forward and runs it a second
time; a precision and `DistributedDataParallel` wrap the whole model. No module is wrapped, so all names stay,
for example in a state dict or a report of the watchdog. Blocks of one class share the code compiled for the
first of them. A collective inside a block, or a part of it that is recomputed, ends a graph and runs
uncompiled; the next graph begins after it.
"""

import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from inspect import signature
from os import environ
from typing import Any

import torch
from torch import nn

from colossalai.logging import get_dist_logger
from colossalai.pipeline import Op, PipelineOptions
from colossalai.runtime.methods._assembly import Assembly, PlanMethod

_COMPILERS = ("torch._dynamo", "torch._inductor", "torch._functorch")  # modules of compilers' errors


class CompiledForward:
    """The forward of a module, compiled at its first call; a copy of the module gets its own.

    Args:
        forward: The bound method, or its replacement.
        options: Options of `torch.compile`.
        name: Name of the module in errors.

    Raises:
        ValueError: `options` are not accepted by `torch.compile`.
    """

    def __init__(self, forward: Callable[..., Any], options: Mapping[str, Any], name: str) -> None:
        self._forward = forward
        self._options = dict(options)
        self._name = name
        try:
            self._compiled = torch.compile(forward, **options)
        except Exception as error:
            raise ValueError(f"compile: torch.compile refuses its options: {_first_line(error)}") from error

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it.

        Raises:
            RuntimeError: `torch.compile` cannot compile the module.
        """
        try:
            return self._compiled(*args, **kwargs)
        except Exception as error:
            if not any(base.__module__.startswith(_COMPILERS) for base in type(error).__mro__):
                raise
            # The error itself contains pages of generated code.
            reason = _first_line(getattr(error, "inner_exception", None) or error)
            raise RuntimeError(
                f"torch.compile cannot compile {self._name} ({reason}): leave compile out, or try "
                "compile=dict(backend='aot_eager'), which generates no code; TORCH_LOGS=+dynamo shows more"
            ) from None

    def __reduce__(self) -> tuple[Any, ...]:
        return CompiledForward, (self._forward, self._options, self._name)


@dataclass(frozen=True)
class CompiledBlocks(PlanMethod):
    """Compiled forwards of the blocks of a model; of the model itself, if it has none.

    Applied before methods wrap the forward of blocks. In tensor modes that cut activations, and with cut
    sequences, nothing is compiled, which is logged once.

    Args:
        options: Options of `torch.compile`; True for its defaults.
        pipeline: Options of the pipeline, if the model becomes stages.
    """

    options: bool | Mapping[str, Any]
    pipeline: PipelineOptions | None = None

    def validate(self, job: Assembly) -> None:
        """Check the schedule, the options and the compiler.

        Raises:
            ValueError: `torch.compile` refuses the options or lacks a compiler, or the schedule of the
                pipeline splits a backward.
        """
        if self.pipeline is not None:
            _refuse_split_backward(self.pipeline, job.mesh.axis_size("pp"))
        if not self._has_effect(job):
            return
        options = self._torch_options()
        CompiledForward(job.model.forward, options, "")  # nothing is compiled before a call
        if options.get("backend") in (None, "inductor"):
            _need_compiler(job.device)

    def apply(self, job: Assembly) -> None:
        """Compile the forwards, in place."""
        # See [Note: extent of compilation].
        if not self._has_effect(job):
            get_dist_logger().log_once(
                "compile has no effect in this tensor mode: its layers communicate in the middle of a graph, "
                "and are compiled in mode '1d' only",
                ranks=[0],
            )
            return
        module, options = job.model, self._torch_options()
        names = {part: name for name, part in module.named_modules()}
        parts = job.blocks or (list(module) if isinstance(module, nn.ModuleList) else [module])
        if "recompile_limit" in signature(torch.compile).parameters:
            # A graph for each block (if it writes to a cache under its index), and one more for other shapes.
            options.setdefault("recompile_limit", 8 + 2 * len(parts))
        for part in parts:
            name = f"{names[part]!r}, a {type(part).__name__}" if names[part] else type(part).__name__
            part.forward = CompiledForward(part.forward, options, name)

    def _torch_options(self) -> dict[str, Any]:
        return dict(self.options) if isinstance(self.options, Mapping) else {}

    def _has_effect(self, job: Assembly) -> bool:
        mesh = job.mesh
        num_sharing = mesh.world_size // (mesh.axis_size("dp") * mesh.axes.get("pp", 1))
        return num_sharing == 1 or (job.tensor_axis is not None and mesh.axes.get("sp", 1) == 1)


def refuse_compiled(module: nn.Module) -> None:
    """Raise if a module is a result of `torch.compile`, which gives it another name.

    Raises:
        ValueError: `module`, or a module in it, is a result of `torch.compile`.
    """
    for name, _ in module.named_modules():
        *around, last = name.split(".")
        if last == "_orig_mod":
            what = f"the model's {'.'.join(around)}" if around else "the model"
            raise ValueError(
                f"{what} is a result of torch.compile(...), under which all names have a prefix: pass the "
                "module itself, and compile=True to Booster or in the config; or compile in place, by "
                "module.compile()"
            )


def _refuse_split_backward(pipeline: PipelineOptions, num_stages: int) -> None:
    schedule = pipeline.make_schedule(num_stages)
    if any(action.op is Op.WEIGHT_GRAD for actions in schedule.actions for action in actions):
        raise ValueError(
            f"compile and the schedule {schedule.name!r} cannot be combined: a compiled block computes the "
            "gradients of its input and of its weights at once, and the schedule splits them to fill its "
            "bubbles: use '1f1b' or 'interleaved', or leave compile out"
        )


def _need_compiler(device: torch.device) -> None:
    """Raise if the backend that generates code has no compiler."""
    instead = "install it, or pass compile=dict(backend='aot_eager'), which generates no code"
    if device.type != "cpu":
        if find_spec("triton") is None:
            raise ValueError(f"compile needs the package triton on {device.type}: {instead}")
        return
    compiler = environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler) is None:
        raise ValueError(
            f"compile needs a C++ compiler on the CPU, and {compiler!r} (CXX, or the default) is not there: "
            f"{instead}"
        )


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].rstrip(':')}" if lines else type(error).__name__
