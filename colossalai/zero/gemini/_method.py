"""Gemini, a data-parallel method: ZeRO stage 3 (1910.02054) in chunks of parameters.

Every rank holds a section of each chunk: of the values, of the mean gradient, of the optimizer's states. Per
rank, with Psi parameters on n ranks, bytes p, g and s per element of parameters, gradients and optimizer
states (masters included):

    (p + g + s) Psi / n,  plus at most two gathered chunks and two full gradients of chunks

Under float32 masters means are float32, so g is 4. Of the two gradients one is averaged while the
other is filled; averaging a 16-bit one takes receive buffers of (n-1)/n of its size, and a sum in float32.

Each step sends (n-1)/n of the parameters in the forward and in the backward, and (n-1)/n of the gradients.
"""

import os
import weakref
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, final

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from colossalai.amp import Masters, PrecisionModule
from colossalai.communication import all_reduce_in_place
from colossalai.context import Axis
from colossalai.logging import get_dist_logger
from colossalai.nn.parallel import (
    AppliedDataMethod,
    ArrivingParams,
    DataMethod,
    broadcast_floating_buffers,
    broadcast_from_first,
)
from colossalai.tensor import spec_of
from colossalai.zero._elementwise import is_elementwise, refuse_cut_parameters
from colossalai.zero._layout import FlatBucket
from colossalai.zero._reducer import ShardedReducer
from colossalai.zero._replicas import refuse_own_clipping, refuse_shared
from colossalai.zero._shards import Shards
from colossalai.zero.gemini._cache import ChunkCache
from colossalai.zero.gemini._chunk import LATE, lay_out_chunks, make_chunk
from colossalai.zero.gemini._hooks import ModelHooks, handle_of, is_chunked, refuse_modules
from colossalai.zero.gemini._placement import ChunkPlacement, assumed_state_bytes
from colossalai.zero.gemini._positions import PATIENCE_S
from colossalai.zero.gemini._search import ChunkSizes
from colossalai.zero.gemini._section_weights import deal_out_cut_params, weights_in
from colossalai.zero.gemini._state_dict import load_whole_state, whole_state
from colossalai.zero.gemini._tiers import TierMemory
from colossalai.zero.gemini._timeline import ChunkContents, ChunkTimeline, contents_of
from colossalai.zero.gemini._whole_modules import ModuleChoice, WholeModules, check_choices, find_modules
from colossalai.zero.gemini.planning import PLACEMENT_POLICIES, EvictionPlan, PlacementPolicy, Trace, Tracer


@dataclass(frozen=True, kw_only=True)
class Gemini(DataMethod):
    """Every rank holds a section of each chunk of parameters; a chunk is gathered where it is used.

    Attributes:
        sizes: The sizes of chunks that are tried.
        filters_outliers: Whether parameters that are outliers in size have chunks of their own.
        placement_policy: Tiers of sections and optimizer states; one of the names in `PLACEMENT_POLICIES`.
        memory_budget: Limit in bytes of all memory on the compute device. None: no bound.
        host_budget: Limit in bytes of model data in host memory. None: no bound.
        warmup_ratio: Fraction of the budget for model data in the first iteration.
        gpu_margin_mem_ratio: Fraction of the remaining device memory for optimizer states.
        offload_dir: Folder of the disk tier.
        pin_memory: Whether sections in host memory are pinned; no effect without an accelerator.
        whole_modules: Names or classes of modules that all ranks gather at their entry, so that the ranks
            can differ inside.
        is_strict: Whether parameters sharded by tensor parallelism are refused.
        keeps_grads: Whether the gradients of several backwards add up whole, and are averaged in the last
            one, as with stage 1: in a pipeline, whose microbatches leave no time to average each.
        patience: Seconds before a waiting gather requests the positions of all ranks.
        broadcast_buffers: Give all replicas the floating buffers of the first one before each step.
    """

    sizes: ChunkSizes = field(default_factory=ChunkSizes.in_mb)
    filters_outliers: bool = True
    placement_policy: str = "cpu"
    memory_budget: int | None = None
    host_budget: int | None = None
    warmup_ratio: float = 0.3
    gpu_margin_mem_ratio: float = 0.0
    offload_dir: str | os.PathLike[str] | None = None
    pin_memory: bool = False
    whole_modules: tuple[ModuleChoice, ...] = ()
    is_strict: bool = False
    keeps_grads: bool = False
    patience: float = PATIENCE_S
    broadcast_buffers: bool = True

    def __post_init__(self) -> None:
        if self.placement_policy not in PLACEMENT_POLICIES:
            raise ValueError(
                f"placement_policy is {self.placement_policy!r}; it must be one of {list(PLACEMENT_POLICIES)}"
            )
        check_choices(self.whole_modules)
        if self.whole_modules and self.keeps_grads:
            raise ValueError(
                "whole_modules and a pipeline cannot be combined: a stage has names of its own, and some "
                "schedules run its backward in two parts, between which a module is not held; leave one out"
            )
        if self.keeps_grads and (self.memory_budget is not None or self.offload_dir is not None):
            raise ValueError(
                "memory_budget or offload_dir in a pipeline: whole gradients add up over its microbatches, "
                "and have no room in a budget; leave both out"
            )
        self.policy()

    def policy(self) -> PlacementPolicy:
        """Return the policy with its numbers.

        Raises:
            ValueError: A budget is negative, a ratio not within 0 and 1, or "const" has no budget.
        """
        return PlacementPolicy(
            self.placement_policy,
            memory_budget=self.memory_budget,
            host_budget=self.host_budget,
            warmup_ratio=self.warmup_ratio,
            gpu_margin_mem_ratio=self.gpu_margin_mem_ratio,
        )

    allows_compile: ClassVar[bool] = False
    takes_runs: ClassVar[bool] = True

    @property
    def name_in_pairs(self) -> str:
        """See the base class."""
        return "Gemini"

    @property
    def cuts_gradients(self) -> bool:
        """See the base class."""
        return not self.keeps_grads

    def allows_float32_grads(self, replicas: Axis) -> bool:
        """See the base class: gradients have the size of parameters in the budget."""
        return False

    def check(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        *,
        blocks: list[nn.Module],
        replicas: Axis,
    ) -> None:
        """See the base class."""
        for name, param in module.named_parameters():
            if is_chunked(param):
                raise ValueError(f"{name} lies in a chunk already: pass a model that no door has had")
            if self.is_strict and (spec := spec_of(param)) is not None and spec.axes:
                raise ValueError(
                    f"strict_ddp_mode=True, and {name} is cut over {' x '.join(spec.axes)}: leave it out, or "
                    "take a model that no mode cuts"
                )
        refuse_modules(module)
        find_modules(module, self.whole_modules)
        self.policy().check(self._tier_memory(torch.accelerator.current_accelerator()).bounds)
        for optimizer in optimizers:
            self.check_optimizer(optimizer, replicas)

    def check_optimizer(self, optimizer: Optimizer, replicas: Axis) -> None:
        """Refuse an optimizer that cannot have sections, or whose states two mechanisms would put on disk.

        Raises:
            ValueError: `optimizer` clips by a norm of its own or treats all parameters as one vector, or its
                states go to disk by itself, and to another tier by an option here.
        """
        refuse_cut_parameters(optimizer)
        if replicas.size > 1:
            is_elementwise(optimizer)  # which refuses some
            refuse_own_clipping(optimizer)
        if not getattr(optimizer, "offloads_states", False):
            return
        name = type(optimizer).__name__
        if self.offload_dir is not None:
            raise ValueError(
                f"{name} has nvme_offload_fraction, and offload_dir is {os.fspath(self.offload_dir)!r}: both "
                "put states on disk. Leave out the first, and what does not fit into memory_budget goes to "
                "disk, or the second, and that fraction of the states does"
            )
        if self.gpu_margin_mem_ratio and torch.accelerator.is_available():
            raise ValueError(
                f"{name} has nvme_offload_fraction, and gpu_margin_mem_ratio is {self.gpu_margin_mem_ratio}: "
                "states are on disk, or on the device; leave one out"
            )

    def apply(
        self, module: nn.Module, *, blocks: list[nn.Module], replicas: Axis, arriving: ArrivingParams
    ) -> AppliedDataMethod:
        """See the base class; the parameters of `module` are the same objects, without memory."""
        device = arriving.device
        if self.pin_memory and device.type == "cpu":
            get_dist_logger().log_once("pin_memory has no effect: there is no accelerator", ranks=[0])
        if self.gpu_margin_mem_ratio:
            _warn_of_margin(device)
        arriving.buffers()
        broadcast_from_first(module.buffers(), replicas)  # parameters follow, chunk by chunk
        return AppliedChunks(module, self, replicas, self._tier_memory(device), arriving)

    def _tier_memory(self, device: torch.device | None) -> TierMemory:
        return TierMemory(
            device or torch.device("cpu"), offload_dir=self.offload_dir, pin_memory=self.pin_memory
        )


@final
class AppliedChunks(AppliedDataMethod):
    """A module whose parameters are in chunks.

    Args:
        module: The module itself.
        options: The options.
        replicas: The replicas.
        tiers: The memory tiers of this rank.
        arriving: The parameters.
    """

    shards_gradients: ClassVar[bool] = True

    def __init__(
        self,
        module: nn.Module,
        options: Gemini,
        replicas: Axis,
        tiers: TierMemory,
        arriving: ArrivingParams,
    ) -> None:
        super().__init__(module)
        self._options = options
        self._replicas = replicas
        names = {param: name for name, param in module.named_parameters()}
        parts = list(module) if isinstance(module, nn.ModuleList) else [module]
        layouts = lay_out_chunks(
            list(names),
            parts,
            arriving,
            replicas,
            sizes=options.sizes,
            filters_outliers=options.filters_outliers,
        )
        dtypes = {layout: kind.dtype for layout, kind in layouts.items()}
        self._placement = ChunkPlacement(dtypes, options.policy(), tiers, replicas)
        self.cache = ChunkCache(
            most_bytes=self._placement.chunk_budget, is_strict=options.memory_budget is not None
        )
        # Weakly: parameters lead to the cache, and hooks on nodes of the graph, which the garbage collector
        # does not see, lead to parameters.
        self.cache.find_owner = weakref.ref(self)
        self.hooks = ModelHooks(self.cache)
        if self._placement.is_bounded:
            tiers.map_large_blocks()
        for number, layout in enumerate(layouts):
            chunk = make_chunk(number, layout, names, arriving, replicas, tiers)
            self.hooks.add(chunk, names)
            self.cache.add(chunk, *self._placement.homes_of(number))
            if self._placement.is_bounded:
                tiers.give_back_freed()  # the freed memory of its parameters
        arriving.end()
        self.cache.start_gathers(patience=options.patience)
        if self._placement.is_bounded:
            self.cache.start_planning()
        self._chunk_of = {chunk.layout: chunk for chunk in self.cache.chunks}
        trained = {layout: kind.part for layout, kind in layouts.items() if kind.is_trained}

        def of_part(number: int) -> list[FlatBucket]:
            return [layout for layout, part in trained.items() if part == number][::-1]

        self._reducer = ShardedReducer(
            [of_part(number) for number in range(len(parts))],
            of_part(LATE),
            replicas,
            stage=1 if options.keeps_grads else 2,
            overlap=True,
            dtype=None,
            on_full=lambda layout: self.cache.end_backward_of(self._chunk_of[layout]),
            keep=None if options.keeps_grads else self._keep_mean,
            max_in_flight=1,  # while one more chunk accumulates gradients
        )
        raw = module.module if isinstance(module, PrecisionModule) else module
        WholeModules(find_modules(raw, options.whole_modules), self.hooks, self._reducer)
        for part in module.modules():
            if next(part.parameters(), None) is None:
                continue  # it uses none, and a step has many such calls
            part.register_forward_pre_hook(self.hooks.enter, prepend=True, with_kwargs=True)
            part.register_forward_hook(self.hooks.leave, always_call=True)
        self._shards: dict[Optimizer, Shards] = {}
        self._held: dict[Optimizer, set[nn.Parameter]] = {}
        self._have_stepped: set[Optimizer] = set()
        self._mean_dtypes: dict[FlatBucket, torch.dtype] = {}  # in which the optimizer takes gradients
        self._trace: Trace | None = None  # that was recorded, until it is planned from

    def set_state_margin(self, ratio: float) -> None:
        """Give states a fraction of the remaining device memory, from the next plan on.

        Raises:
            ValueError: An optimizer keeps its states on disk itself.
        """
        options = replace(self._options, gpu_margin_mem_ratio=ratio)
        for optimizer in self._shards:
            options.check_optimizer(optimizer, self._replicas)
        _warn_of_margin(self.cache.chunks[0].device)
        self._placement.set_state_margin(ratio)

    def set_sync(self, enabled: bool, *, part: int | None = None) -> None:
        """See the base class; in a pipeline every backward averages, as whole gradients have no room."""
        self._reducer.set_sync(enabled, part=part)

    def finish(self) -> None:
        """Wait until all gradients are averaged."""
        self._reducer.finish()

    def optimizer_params(
        self, optimizer: Optimizer, masters: Masters, *, late: Collection[nn.Parameter] = ()
    ) -> Shards:
        """See the base class; the optimizer gets the sections, or whole parameters if it needs those.

        `masters` are none: those of parameters that came in runs lie in the chunks.

        Raises:
            ValueError: `optimizer` has a parameter that another one has, or is refused by itself.
        """
        self._options.check_optimizer(optimizer, self._replicas)
        held = {param for group in optimizer.param_groups for param in group["params"]}
        refuse_shared(held & self._held_besides(optimizer))
        for layout, chunk in self._chunk_of.items():
            if chunk.master is not None and held.intersection(layout.params):
                self._mean_dtypes[layout] = chunk.master.dtype
        owners = {} if is_elementwise(optimizer) else deal_out_cut_params(list(self._chunk_of), held)
        is_first = not self._held
        self._held[optimizer] = held
        with torch.no_grad():
            self._shards[optimizer] = shards = Shards(
                optimizer,
                self._reducer,
                self._replicas,
                offload=False,
                reducers=[self._reducer],
                before_step=self._end_iteration if is_first else self._give_buffers,
                after_step=partial(self._end_step, optimizer),
                weights_of=lambda layout: weights_in(
                    self._chunk_of[layout],
                    self.cache,
                    held,
                    owners=owners,
                    keeps_shapes=not is_elementwise(optimizer),
                ),
                others=partial(self._held_besides, optimizer),
            )
        return shards

    def _held_besides(self, optimizer: Optimizer) -> set[nn.Parameter]:
        """Return the parameters that other optimizers of the model have."""
        return set().union(*(held for other, held in self._held.items() if other is not optimizer))

    def gathered(self, params: Collection[nn.Parameter] | None = None) -> AbstractContextManager[None]:
        """See the base class; parameters that share a chunk with one of `params` are gathered as well."""
        if params is None:
            return self.cache.gathered()
        wanted = {handle_of(param).chunk for param in params}
        return self.cache.gathered([chunk for chunk in self.cache.chunks if chunk in wanted])

    def state_dict(self, raw: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """See the base class: whole values in host memory, chunk by chunk; with `keep_vars` parameters."""
        return whole_state(self.cache, raw, *args, **kwargs)

    def load_state_dict(
        self, raw: nn.Module, content: Mapping[str, Any], *, strict: bool = True, assign: bool = False
    ) -> Any:
        """See the base class; nothing is gathered, as each rank copies into its own sections."""
        if assign:
            raise ValueError(
                "assign=True puts new parameters into the model, and those it has lie in chunks: leave it out"
            )
        return load_whole_state(self.cache, raw, content, strict=strict)

    @property
    def memory_budget(self) -> int | None:
        """Bytes of the compute tier for all memory; None: no bound."""
        return self._placement.memory_budget

    def contents(self) -> list[ChunkContents]:
        """Return the bytes of each chunk on this rank."""
        return contents_of(self.cache.chunks, self._reducer, self._shards)

    def set_timeline(self, timeline: ChunkTimeline | None) -> None:
        """Begin to record a timeline, or end it."""
        self.cache.set_timeline(timeline)
        tracer = self.cache.tracer
        # Without a plan, chunks that have no memory of their own are not fetched in a backward.
        self._reducer.on_grad = None if tracer is None or tracer.plans else self._record_grad

    def _record_grad(self, layout: FlatBucket) -> None:
        chunk, tracer = self._chunk_of[layout], self.cache.tracer
        if tracer is not None and not chunk.is_apart:
            tracer.use(chunk.number, (), is_backward=True)

    def _keep_mean(self, layout: FlatBucket, mean: torch.Tensor) -> torch.Tensor:
        dtype = self._mean_dtypes.get(layout, layout.grad_dtype)
        return self.cache.keep_mean(self._chunk_of[layout], mean.to(dtype))

    def _end_iteration(self) -> None:
        """End the iteration, whose gradients are complete; take its trace, if it was recorded."""
        if (tracer := self.cache.tracer) is not None:
            self._trace = tracer.end_iteration() or self._trace
            if tracer.plans:
                self.cache.chunks[0].tiers.give_back_freed()
        self._give_buffers()

    def _end_step(self, optimizer: Optimizer) -> None:
        """Plan from the iteration that was recorded, once a step has been made; collective then."""
        self._have_stepped.add(optimizer)
        if (tracer := self.cache.tracer) is None:
            return
        if optimizer is next(iter(self._shards), optimizer):  # the first one, whose step ends an iteration
            tracer.end_step(self.cache.present_bytes)
            self._plan_for_larger(tracer)
        if self._trace is not None:
            # Steps that were skipped can have had larger batches than the iteration that was recorded.
            trace, self._trace = tracer.trace or self._trace, None
            self._follow(self._plan_from(trace))

    def _plan_for_larger(self, tracer: Tracer) -> None:
        """Plan anew if the iteration took more memory on any rank than was planned for; collective."""
        if self._trace is not None or tracer.trace is None:  # alike on all ranks
            return
        # One byte, MAX over the replicas: all of them plan again, or none does.
        has_grown = torch.tensor(tracer.has_grown, dtype=torch.uint8, device=self.cache.chunks[0].device)
        if not all_reduce_in_place(has_grown, self._replicas, dist.ReduceOp.MAX).item():
            return
        tracer.has_grown = False
        try:
            plan = self._plan_from(tracer.trace)
        except ValueError as error:
            get_dist_logger().warning(
                f"a batch larger than those before took more than memory_budget: {error}. Training goes on "
                "as it was planned for smaller ones",
                ranks=[0],
            )
        else:
            self._follow(plan)

    def _plan_from(self, trace: Trace) -> EvictionPlan:
        names = [chunk.names for chunk in self.cache.chunks]
        return self._placement.plan(trace, self._state_bytes(), names=names)

    def _follow(self, plan: EvictionPlan) -> None:
        for number, chunk in enumerate(self.cache.chunks):
            self.cache.place(chunk, *self._placement.homes_of(number))
        for other, shards in self._shards.items():
            shards.settle(other)
        self.cache.follow(plan, most_bytes=self._placement.chunk_budget)

    def _state_bytes(self) -> dict[FlatBucket, float]:
        """Return for each trained chunk the bytes of states for an element of this rank's section."""
        total: dict[FlatBucket, tuple[int, float, int]] = {}
        for optimizer, shards in self._shards.items():
            for layout, (numel, at_home, elsewhere) in shards.state_bytes(optimizer).items():
                assumed = (
                    0 if optimizer in self._have_stepped else assumed_state_bytes(layout.params[0].dtype)
                )
                before = total.get(layout, (0, 0.0, 0))
                total[layout] = (
                    before[0] + numel,
                    before[1] + at_home + numel * assumed,
                    before[2] + elsewhere,
                )
        return {
            layout: at_home / max(numel, 1) + elsewhere / layout.section_sizes[layout.axis.rank]
            for layout, (numel, at_home, elsewhere) in total.items()
        }

    def _give_buffers(self) -> None:
        if self._options.broadcast_buffers and self._replicas.size > 1:
            broadcast_floating_buffers(self.module, self._replicas)  # from the first replica to all


def _warn_of_margin(device: torch.device) -> None:
    if device.type == "cpu":
        get_dist_logger().log_once(
            "gpu_margin_mem_ratio has no effect: there is no accelerator, and states have all that is free",
            ranks=[0],
        )
