"""Settings of a job, its sizes and its stage of ZeRO, and the costs of parameters under a setting.

Bytes of parameters, gradients and optimizer states follow Rajbhandari et al., "ZeRO" (1910.02054), section 3.

[Note: copies of gradients]
torch's DDP copies each gradient into a bucket, and the mean back. On two CPU ranks this is 7 % of a step
(docs/design/launcher_machine.md). Other methods avoid it: their gradients are views of buckets.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from colossalai.auto_parallel._costs import MASTERS, OPTIMIZER_STATES, PRECISIONS, ParamSizes
from colossalai.auto_parallel.machine._machine import MachineProfile, optimizer_time, time_of
from colossalai.auto_parallel.machine._rates import Optimizer
from colossalai.device import MeshSpeed
from colossalai.runtime import refuse_pairs

_MASTER_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The sizes that all layers of a model share.

    Attributes:
        data: Number of data-parallel ranks.
        pipeline: Number of pipeline stages.
        tensor: Number of tensor-parallel ranks.
        zero: Stage of ZeRO, 0 to 3.
        microbatches: Number of microbatches of a rank's batch in the pipeline; 1 without a pipeline.
        expert: Number of data-parallel ranks that share the experts of a model.
    """

    data: int = 1
    pipeline: int = 1
    tensor: int = 1
    zero: int = 0
    microbatches: int = 1
    expert: int = 1

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.data * self.pipeline * self.tensor

    @property
    def share(self) -> float:
        """The fraction of the batch that a rank computes at a time."""
        return 1.0 / (self.data * self.microbatches)

    @property
    def shape(self) -> tuple[int, int, int]:
        """The extents of the mesh, outermost first."""
        return self.data, self.pipeline, self.tensor

    def __str__(self) -> str:
        parts = [f"dp {self.data}", f"tp {self.tensor}", f"pp {self.pipeline}", f"ZeRO {self.zero}"]
        if self.pipeline > 1:
            parts.append(f"{self.microbatches} microbatches")
        if self.expert > 1:
            parts.append(f"ep {self.expert}")
        return ", ".join(parts)


def settings_of(
    world_size: int,
    *,
    batch: int,
    num_blocks: int,
    can_pipeline: bool,
    largest_tensor: int,
    num_experts: int = 1,
    has_masters: bool = False,
) -> Iterator[Setting]:
    """Yield all settings of a number of ranks that the runtime supports.

    Args:
        world_size: Number of ranks.
        batch: Samples in the whole batch.
        num_blocks: Number of blocks of the model. Each stage takes at least one.
        can_pipeline: Whether the model can be cut into stages.
        largest_tensor: Largest number of tensor-parallel ranks.
        num_experts: Number that the expert-parallel ranks must divide; 1: no experts to share.
        has_masters: Whether the precision keeps float32 masters, which excludes ZeRO 3.
    """
    num_stages = 3 if has_masters else 4  # of ZeRO, see `colossalai.amp.refuse_misfit`
    for tensor in _divisors(world_size):
        for pipeline in _divisors(world_size // tensor):
            data = world_size // (tensor * pipeline)
            if tensor > largest_tensor or batch % data:
                continue
            if pipeline > 1 and (not can_pipeline or pipeline > num_blocks):
                continue
            for zero in range(num_stages) if data > 1 else (0,):
                for microbatches in _microbatches(batch // data, pipeline):
                    setting = Setting(
                        data=data, pipeline=pipeline, tensor=tensor, zero=zero, microbatches=microbatches
                    )
                    yield from filter(_is_possible, (setting, *_with_experts(setting, num_experts)))


def _with_experts(setting: Setting, num_experts: int) -> Iterator[Setting]:
    """Yield a setting with its experts shared by data-parallel ranks.

    Costs of sharded experts are not known in combination with other cuts, nor under ZeRO 2 and 3.
    """
    if setting.shape == (setting.data, 1, 1) and setting.zero <= 1:
        for expert in _divisors(math.gcd(setting.data, num_experts))[1:]:
            yield replace(setting, expert=expert)


def _microbatches(batch: int, pipeline: int) -> list[int]:
    if pipeline == 1:
        return [1]
    counts = (pipeline << doublings for doublings in range((batch // pipeline).bit_length()))
    return [count for count in counts if batch % count == 0]


def _is_possible(setting: Setting) -> bool:
    """Whether the runtime supports the combination of methods of a setting."""
    methods = {
        "data parallelism": setting.data > 1,
        "tensor 1d": setting.tensor > 1,
        "pipeline": setting.pipeline > 1,
        f"ZeRO {setting.zero}": setting.zero > 0,
        "experts": setting.expert > 1,
    }
    try:
        refuse_pairs(name for name, is_used in methods.items() if is_used)
    except ValueError:
        return False
    return True


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


@dataclass(frozen=True, kw_only=True)
class ParameterCosts:
    """Costs of the parameters of a rank: bytes, and seconds of a step.

    Attributes:
        setting: The sizes.
        machine: Profile of the machine.
        speed: Costs of communication along the axes of the mesh.
        precision: A key of `PRECISIONS`.
        optimizer: A key of `OPTIMIZER_STATES`.
    """

    setting: Setting
    machine: MachineProfile
    speed: MeshSpeed
    precision: str
    optimizer: str

    @property
    def master_ratio(self) -> float:
        """Bytes of a float32 master for each byte of its parameter; 0 without masters."""
        to = PRECISIONS[self.precision]
        return _MASTER_BYTES / to.itemsize if to is not None and self.precision in MASTERS else 0.0

    @property
    def of_experts(self) -> "ParameterCosts":
        """Costs of the expert parameters of a rank, which have fewer replicas."""
        setting = self.setting
        return replace(self, setting=replace(setting, data=setting.data // setting.expert, expert=1))

    def states(self, sizes: ParamSizes) -> dict[str, float]:
        """Return the bytes of each kind of state that a rank holds for some of its parameters."""
        has_masters = self.precision in MASTERS
        of_each = self._optimized_bytes(sizes)
        cut = {stage: self.setting.data if self.setting.zero >= stage else 1 for stage in (1, 2, 3)}
        return {
            "parameters": sizes.bytes / cut[3],
            "gradients": sizes.trained_bytes / cut[2],
            "master weights": of_each / cut[1] if has_masters else 0.0,
            "optimizer states": OPTIMIZER_STATES[self.optimizer] * of_each / cut[1],
        }

    def _optimized_bytes(self, sizes: ParamSizes) -> float:
        """Return the bytes of the tensors that the optimizer updates: float32 masters or parameters."""
        return _MASTER_BYTES * sizes.trained_numel if self.precision in MASTERS else sizes.trained_bytes

    def gradient_seconds(self, sizes: ParamSizes) -> float:
        """Return the seconds of the communication of replicas: gradients, and parameters under ZeRO."""
        trained = sizes.trained_bytes
        gathered = sizes.bytes if self.setting.zero == 3 else trained
        if self.setting.data == 1 or not gathered:
            return 0.0
        if self.setting.zero == 0:
            copies = 0 if self.setting.pipeline > 1 else 2  # see [Note: copies of gradients]
            copied = time_of(
                self.machine, flops=0.0, bytes=2 * trained, kind="elementwise", dtype=torch.float32
            )
            return self.speed.cost("all_reduce", trained, "0") + copies * copied
        gathers = 2 if self.setting.zero == 3 else 1
        averaged = self.speed.cost("reduce_scatter", trained, "0") if trained else 0.0
        return averaged + gathers * self.speed.cost("all_gather", gathered, "0")

    def optimizer_seconds(self, sizes: ParamSizes) -> float:
        """Return the seconds of the optimizer step on a rank."""
        part = self.setting.data if self.setting.zero else 1
        has_masters = self.precision in MASTERS
        of_each = self._optimized_bytes(sizes)
        numbers = 3 + 2 * OPTIMIZER_STATES[self.optimizer]  # parameter read and written, gradient, states
        moved = (numbers * of_each + (sizes.trained_bytes if has_masters else 0.0)) / part
        name: Optimizer = "adamw" if OPTIMIZER_STATES[self.optimizer] == 2 else "sgd"
        return optimizer_time(self.machine, optimizer=name, bytes=moved, num_tensors=sizes.num_trained)

    def seconds_per_byte(self, sizes: ParamSizes) -> float:
        """Return the approximate seconds of a step per byte of trained parameters."""
        if not sizes.trained_bytes:
            return 0.0
        # The number of tensors does not depend on the cuts.
        whole, half = replace(sizes, num_trained=0), replace(sizes / 2, num_trained=0)
        more = self.gradient_seconds(whole) + self.optimizer_seconds(whole)
        more -= self.gradient_seconds(half) + self.optimizer_seconds(half)
        return max(more, 0.0) / half.trained_bytes
