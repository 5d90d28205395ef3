"""The global context of a job: its config, its mesh, and its groups by parallel mode.

There is one, `global_context`. Entry points and users read it; lower floors take meshes and options as
arguments.
"""

import math
from collections.abc import Hashable
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from colossalai.context._config import Config, load_config, with_overrides
from colossalai.context._features import FEATURE_KEYS, JobPlan, auto_plan_of, check_config
from colossalai.context._group_initializer import OwnGroup, own_groups
from colossalai.context._layout import Layout, with_expert_size
from colossalai.context._mesh import Axis, Mesh, make_group
from colossalai.context._parallel_mode import ParallelMode, mode_axes
from colossalai.context._random import reset_seeds
from colossalai.context._supervision import leave_store, let_gloo_threads_rest, prepare_end, stop_watching

Kept = TypeVar("Kept")


class ParallelContext:
    """The job of this process: config, mesh and groups; set by launch, reset by `destroy`."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._config = Config()
        self._layout = Layout(data=1)
        self._auto_plan: JobPlan | None = None
        self._mesh: Mesh | None = None
        self._device = torch.device("cpu")
        self._axes: dict[Hashable, tuple[str, ...]] = {}
        self._own_groups: dict[Hashable, OwnGroup] = {}
        self._cpu_groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._kept: dict[type, object] = {}

    @property
    def is_launched(self) -> bool:
        """Whether there is a mesh."""
        return self._mesh is not None

    @property
    def mesh(self) -> Mesh:
        """The mesh of the job.

        Raises:
            RuntimeError: The job has not been launched.
        """
        if self._mesh is None:
            raise RuntimeError(
                "nothing has been launched: call colossalai.launch(...), or launch_from_torch, _slurm or "
                "_openmpi, first"
            )
        return self._mesh

    @property
    def layout(self) -> Layout:
        """The extents of the mesh: one rank before a launch."""
        return self._layout

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self._device

    @property
    def config(self) -> Config:
        """The config that the job was launched with."""
        return self._config

    @property
    def auto_plan(self) -> JobPlan | None:
        """The Colossal-Auto plan of `auto` in the config, as read at the launch."""
        return self._auto_plan

    def load_config(self, config: Any, **arguments: Any) -> None:
        """Set the config from a path, a dict or None, unchecked.

        Args:
            config: The config.
            **arguments: Keys that override the config; None leaves a key unchanged. The overrides of the
                environment take precedence over both.
        """
        given = {key: value for key, value in arguments.items() if value is not None}
        read = with_overrides(Config({**load_config(config), **given}), FEATURE_KEYS)
        self._config = with_expert_size(read)

    def init_parallel_groups(
        self,
        *,
        rank: int,
        world_size: int,
        device: torch.device | None = None,
        plain_layers: bool = False,
    ) -> None:
        """Check the loaded config and lay the mesh over the ranks, without process groups.

        Args:
            rank: Global rank of this process.
            world_size: Number of processes.
            device: The device of this rank. Default: the present one.
            plain_layers: See `Layout`; a plan in `auto` has its own setting.

        Raises:
            ConfigException: A feature of the config is invalid, or its sizes do not fit the number of
                processes.
        """
        layout = replace(check_config(self._config, world_size), plain_layers=plain_layers)
        auto_plan = auto_plan_of(self._config)
        if auto_plan is not None:
            layout = auto_plan.layout_over(world_size)
        mesh = Mesh(
            layout.axes(),
            rank=rank,
            device_type=(device or self._device).type,
            views={"dp": ("edp", "ep")},
        )
        self._axes = mode_axes(
            layout.layout_mode, layout.axes_of_tensor(), cuts_sequences=layout.cuts_sequences
        )
        self._layout, self._mesh, self._device = layout, mesh, device or self._device
        self._auto_plan = auto_plan
        self._kept = {}

    def init_own_groups(self) -> None:
        """Get the groups of a user-defined mode from its initializer, which may make them itself.

        It is called on all ranks, after they have met.

        Raises:
            ConfigException: The initializer does not take the arguments of the mode, or its groups are not a
                partition of the ranks.
        """
        layout = self._layout
        if layout.mode is None or layout.layout_mode is not None:
            return
        self._own_groups = own_groups(
            layout.mode,
            arguments=layout.arguments,
            rank=self.mesh.rank,
            world_size=self.mesh.world_size,
            config=self._config,
            data_parallel_size=self.data_parallel_size,
            pipeline_parallel_size=layout.pipeline,
            tensor_parallel_size=layout.tensor,
        )
        for own in self._own_groups.values():
            if own.group is not None:
                self.mesh.adopt_group(own.ranks, own.group)
            if own.cpu_group is not None:
                self._cpu_groups[own.ranks] = own.cpu_group

    @property
    def tensor_axes(self) -> tuple[str, ...]:
        """The names of the tensor axes of the mesh, outermost first."""
        return tuple(self._layout.tensor_axes())

    @property
    def tensor_mode(self) -> str | None:
        """The tensor mode of the job ("1d", "2d", ...), None without one.

        None, too, if the ranks share only sequences, in either spelling.
        """
        return self._layout.mode

    @property
    def sequence_attention(self) -> str | None:
        """The attention over cut sequences ("ring", "ulysses"), None if none are cut.

        `colossalai.nn.layer.sequence_parallel.ATTENTIONS` has it under this name.
        """
        return self._layout.attention

    @property
    def sequence_parallel_size(self) -> int:
        """Number of ranks that share a sequence."""
        return self._layout.sequence

    @property
    def data_parallel_size(self) -> int:
        """Number of data-parallel replicas."""
        return self._layout.data or 1

    @property
    def pipeline_parallel_size(self) -> int:
        """Number of pipeline stages."""
        return self._layout.pipeline

    @property
    def tensor_parallel_size(self) -> int:
        """Number of ranks that share a layer; if they share only sequences, the number of these."""
        return math.prod(self.mesh.axes[name] for name in self._layout.axes_of_tensor())

    def is_initialized(self, mode: Hashable) -> bool:
        """Return whether the job has groups for this mode."""
        return mode in self._axes or mode in self._own_groups

    def get_global_rank(self) -> int:
        """Return the rank of this process among all."""
        return self.mesh.rank

    def get_ranks_in_group(self, mode: Hashable) -> list[int]:
        """Return the global ranks of this rank's group in a mode.

        Raises:
            ValueError: The job has no such mode.
        """
        mesh = self.mesh
        if mode in self._own_groups:
            return list(self._own_groups[mode].ranks)
        if mode not in self._axes:
            known = [str(known) for known in [*self._axes, *self._own_groups]]
            raise ValueError(
                f"{mode} is not part of this job (tensor mode {self.tensor_mode!r}); it has {known}; "
                "with a plugin, Booster(plugin=...) or plugin.configure() lays out its sizes"
            )
        return mesh.ranks(self._axes[mode])

    def axis(self, mode: Hashable) -> Axis:
        """Return the axis of a mode's groups, as seen from this rank.

        Raises:
            ValueError: The job has no such mode.
        """
        name = mode.value if isinstance(mode, ParallelMode) else str(mode)
        return Axis(name, tuple(self.get_ranks_in_group(mode)), self.mesh)

    def get_local_rank(self, mode: Hashable) -> int:
        """Return this rank's position in its group of a mode."""
        return self.get_ranks_in_group(mode).index(self.mesh.rank)

    def get_world_size(self, mode: Hashable) -> int:
        """Return the number of ranks in this rank's group of a mode."""
        return len(self.get_ranks_in_group(mode))

    def get_group(self, mode: Hashable) -> dist.ProcessGroup:
        """Return the process group of a mode; it is made at the first call, by its members."""
        return self.mesh.group_of(self.get_ranks_in_group(mode))

    def get_cpu_group(self, mode: Hashable) -> dist.ProcessGroup:
        """Return a group of the same ranks for tensors in host memory."""
        group = self.get_group(mode)
        if dist.get_backend_config(group).startswith(("cpu:gloo", "cpu:shared_memory")):
            return group
        ranks = tuple(self.get_ranks_in_group(mode))
        if ranks not in self._cpu_groups:
            self._cpu_groups[ranks] = make_group(ranks, purpose="cpu", backend="gloo")
        return self._cpu_groups[ranks]

    def is_first_rank(self, mode: Hashable) -> bool:
        """Whether this rank is the first of its group."""
        return self.get_local_rank(mode) == 0

    def is_last_rank(self, mode: Hashable) -> bool:
        """Whether this rank is the last of its group."""
        return self.get_local_rank(mode) == self.get_world_size(mode) - 1

    def is_pipeline_first_stage(self) -> bool:
        """Whether this rank holds the first pipeline stage."""
        return self.is_first_rank(ParallelMode.PIPELINE)

    def is_pipeline_last_stage(self) -> bool:
        """Whether this rank holds the last pipeline stage."""
        return self.is_last_rank(ParallelMode.PIPELINE)

    def get_next_global_rank(self, mode: Hashable) -> int:
        """Return the global rank after this one in its group, the first after the last."""
        ranks = self.get_ranks_in_group(mode)
        return ranks[(ranks.index(self.mesh.rank) + 1) % len(ranks)]

    def get_prev_global_rank(self, mode: Hashable) -> int:
        """Return the global rank before this one in its group, the last before the first."""
        ranks = self.get_ranks_in_group(mode)
        return ranks[ranks.index(self.mesh.rank) - 1]

    def of_layout(self, kind: type[Kept]) -> Kept:
        """Return the object of a class that belongs to this layout; another layout has another one.

        Args:
            kind: The class; an object is made, without arguments, at the first call.
        """
        if kind not in self._kept:
            self._kept[kind] = kind()
        return cast(Kept, self._kept[kind])

    def destroy(self) -> None:
        """End the job here: destroy all groups, drop config and mesh; the process can launch again.

        It waits for a checkpoint that is being saved in the background. A rank 0 that serves the store of the
        job waits for the other ranks, up to the `timeout` of the launch.

        Raises:
            Exception: Work in the background failed; the groups are destroyed all the same.
        """
        try:
            prepare_end()
        finally:
            stop_watching()  # before this rank has left: its watchdog writes to the store a last time
            # Rank 0 keeps its groups for peers that are about to end, and its store for the others.
            keep_store = leave_store()
            if self.is_launched:
                self.mesh.forget_groups()
            if dist.is_initialized():
                let_gloo_threads_rest()  # a group is freed under Python's lock: [Note: gloo threads at exit]
                dist.destroy_process_group()
            reset_seeds()
            self._reset()
            keep_store()


global_context = ParallelContext()
"""The context of this process."""


def get_current_device() -> torch.device:
    """Return the device of this rank; before launch the current accelerator, else the CPU."""
    if global_context.is_launched:
        return global_context.device
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or not torch.accelerator.is_available():
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())
