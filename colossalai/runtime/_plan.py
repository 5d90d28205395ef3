"""Plan: the mesh, the methods and their options for training a model, from a config or a plugin."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch
from torch import nn

from colossalai.amp import FullPrecision, Precision
from colossalai.communication import broadcast
from colossalai.context import (
    Config,
    ConfigException,
    Layout,
    Mesh,
    check_compile,
    plan_fields,
)
from colossalai.nn.parallel import DataMethod, Replicated
from colossalai.pipeline import PipelineOptions
from colossalai.runtime._compatibility import refuse_pairs
from colossalai.runtime._plan_fields import fields_of_config
from colossalai.runtime.methods import (
    BatchNorms,
    CompiledBlocks,
    ComputePrecision,
    DataParallelism,
    FusedLoss,
    ModelShards,
    MovedParams,
    ParamValues,
    PipelineStages,
    PlanMethod,
    Recomputation,
    TiedWeights,
    UserShards,
    WrappedOptimizers,
)
from colossalai.runtime.recomputation import Segments
from colossalai.shardformer import NamedRules, Rule

_NOT_CHOICES = {"layout", "data", "precision", "cuts", "made_for"}  # `describe` writes these in another form
_OMITTED = {"stage", "bucket_cap_mb"}  # the label has the one, and each plugin its own default of the other


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The mesh, the methods and their options for training a model.

    Attributes:
        layout: The extents of the mesh: data, pipeline, tensor (with its mode: sequences, too) and expert
            parallelism. None: the layout of the launch.
        data: The data-parallel method of the replicas along `dp`.
        precision: The precision of forward and backward.
        recompute: Parts that are checkpointed: True for the model's blocks, or names of sub-modules, or one.
        compile: Whether the model's blocks are compiled, or the options of `torch.compile` for it.
        fused_loss: Whether a language model that is given labels computes its loss in training in chunks,
            without logits.
        accumulation_steps: Number of microbatches in one optimizer step.
        clip_grad_norm: Bound of the gradient norm; 0 for none.
        clip_norm_type: The p of that norm.
        gradient_handlers: One dict for each gradient handler, with its registered `type`.
        pipeline: Options of the stages and their schedule; None: no pipeline.
        cuts: Rules of tensor parallelism for layers, by the names of modules in the whole model; "" is the
            model itself. Layers built for no tensor mode are then plain ones. None: by the classes of the
            modules. An empty mapping: nothing is cut.
        sync_batch_norm: Whether batch norms compute mean and variance over the parts of the batch on all
            replicas; in a pipeline, or with accumulation, of each microbatch. Otherwise over their own
            part.
        made_for: Names and shapes of the parameters of the whole model that the plan was made for; another
            model is refused. None: the plan is for any model.
    """

    layout: Layout | None = None
    data: DataMethod = field(default_factory=Replicated)
    precision: Precision = field(default_factory=FullPrecision)
    recompute: bool | str | Sequence[str] | Segments = False
    compile: bool | Mapping[str, Any] = False
    fused_loss: bool = False
    accumulation_steps: int = 1
    clip_grad_norm: float = 0.0
    clip_norm_type: float = 2.0
    gradient_handlers: tuple[Mapping[str, Any], ...] = ()
    pipeline: PipelineOptions | None = None
    cuts: Mapping[str, Rule] | None = None
    sync_batch_norm: bool = False
    made_for: Mapping[str, tuple[int, ...]] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        check_compile(self.compile)
        refuse_pairs(self.method_names)
        if self.cuts is not None:
            object.__setattr__(self, "cuts", NamedRules(self.cuts))
        self._check_layers()
        if self.compile is not False and not self.data.allows_compile:
            raise ValueError(
                f"compile and {self.data.name_in_pairs} cannot be combined: a compiled forward hides the "
                "order of uses of parameters: leave compile out, or use ZeRO 2 or FSDP"
            )
        if self.data.in_pipeline not in (None, self.pipeline is not None):
            has = "has one" if self.pipeline is not None else "has none"
            where = "in a pipeline" if self.data.in_pipeline else "without a pipeline"
            raise ValueError(
                f"data={type(self.data).__name__} synchronizes gradients only {where}, and the plan {has}: "
                "Bucketed() is for pipelines, Replicated() for plans without one"
            )

    def __str__(self) -> str:
        """Return the choices that differ from the defaults, for readers; `repr` has all of them."""
        return self.describe("the model's own precision")

    def describe(self, own_precision: str) -> str:
        """Return the extents of the mesh, the methods, and the choices that differ from the defaults.

        Args:
            own_precision: The name of the model's own precision.
        """
        choices = _choices(self, {each.name for each in fields(self)} - _NOT_CHOICES)
        cuts = [] if self.cuts is None else [f"cuts={len(self.cuts)} modules by name"]
        extents = [] if self.layout in (None, Layout(), Layout(data=1)) else [_extents(self.layout)]
        data = _with_choices(self.data.label, self.data)
        precision = _with_choices(self.precision.label or own_precision, self.precision)
        return ", ".join([*extents, data, precision, *choices, *cuts])

    def resolve(self, model: nn.Module, mesh: Mesh, device: torch.device) -> "Plan":
        """Return the plan with choices that depend on the devices resolved; collective if there is one.

        Args:
            model: The model.
            mesh: The ranks of the job, which all get the choice of rank 0.
            device: The device of this rank.
        """

        def agree(verdict: bool) -> bool:
            # One byte from rank 0 to all ranks: processors, and versions of torch, can differ.
            sent = torch.tensor([verdict], dtype=torch.uint8, device=device)
            return bool(broadcast(sent, 0, mesh.axis(tuple(mesh.axes))))

        precision = self.precision.resolve(model, device, agree)
        return self if precision is self.precision else replace(self, precision=precision)

    def _replacing_methods(self) -> tuple[str, ...]:
        """Return the methods that replace parameters, which functions of the user read."""
        replacing = {
            "a pipeline": self.pipeline is not None,
            "`cuts` of layers": bool(self.cuts),
            "ZeRO stage 3 by FSDP": self.data.shards_parameters,
            "compile": self.compile is not False,
        }
        return tuple(method for method, is_used in replacing.items() if is_used)

    def _check_layers(self) -> None:
        """Refuse cuts without ranks to share them, and batch norms of parts that a tensor mode cuts again."""
        layout = self.layout or Layout()
        if self.cuts and (layout.tensor == 1 or layout.alike_axis is None):
            raise ValueError(
                f"cuts names {len(self.cuts)} modules for tensor-parallel ranks to share, and the layout has "
                f"tensor={layout.tensor}, mode={layout.mode!r}: give it tensor=2 or more with mode='1d', or "
                "leave cuts out"
            )
        if self.sync_batch_norm and layout.tensor > 1 and layout.alike_axis is None:
            raise ValueError(
                f"sync_batch_norm goes with tensor mode '1d' or none: mode {layout.mode!r} cuts activations "
                "of a replica again, within the model"
            )

    def methods(self) -> tuple[PlanMethod, ...]:
        """Return the methods in the order in which `assemble` applies them."""
        pipeline, is_in_stages = self.pipeline, self.pipeline is not None
        methods = (
            # First: a rank shards, moves and compiles only its own stages.
            pipeline is not None and PipelineStages(pipeline, self.precision, self.fused_loss),
            UserShards(self._replacing_methods()),
            ModelShards(self.cuts, pipeline),
            BatchNorms(self.sync_batch_norm, bool(self.recompute), is_in_stages),
            # On a lazy model only this rank's shards get memory.
            ParamValues(self.precision, self.data),
            # Before parameters are cast: stages hold equal values of the weights that they share.
            pipeline is not None and TiedWeights(pipeline),
            MovedParams(self.data),
            # Recomputation runs compiled forwards, and a graph has no checkpoint in it.
            self.compile is not False and CompiledBlocks(self.compile, pipeline),
            bool(self.recompute) and Recomputation(self.recompute, is_in_stages),
            self.fused_loss and FusedLoss(),
            # The data method wraps the precision: it reduces the gradients of the stored parameters.
            not is_in_stages and ComputePrecision(self.precision),
            DataParallelism(self.data),
            # Last: optimizers update the masters and shards of all other methods.
            WrappedOptimizers(self.precision, self.clip_grad_norm, self.clip_norm_type),
        )
        return tuple(method for method in methods if method)

    @property
    def method_names(self) -> list[str]:
        """The names of the methods, in the words and the order of the table of pairs."""
        layout = self.layout or Layout()
        used = {
            "data parallelism": layout.data not in (None, 1),
            f"tensor {layout.mode}": layout.tensor > 1,
            f"sequence {layout.attention}": layout.sequence > 1,
            "experts": layout.expert > 1,
            "pipeline": self.pipeline is not None or layout.pipeline > 1,
            self.data.name_in_pairs: self.data.name_in_pairs is not None,
            "mixed precision": not isinstance(self.precision, FullPrecision),
            "recompute": self.recompute not in (False, (), []),
            "accumulation": self.accumulation_steps > 1,
            "fused loss": self.fused_loss,
        }
        return [name for name, is_used in used.items() if is_used and name is not None]

    @staticmethod
    def from_config(
        config: Config, *, pipeline: PipelineOptions | None = None, auto: "Plan | None" = None
    ) -> "Plan":
        """Return the plan of a config.

        Args:
            config: The config, checked or not.
            pipeline: Options of the pipeline, for a caller that replaces those of the config.
            auto: The plan of Colossal-Auto that `auto` in the config contains; the config adds features that
                the plan leaves open.

        Raises:
            ConfigException: A feature has a wrong value, or two features exclude each other.
        """
        try:
            if auto is None:
                return Plan(**fields_of_config(config, pipeline))
            if pipeline is not None:
                raise ConfigException(
                    "the schedule that initialize is given, and `auto` of the config, both determine the run "
                    "of a pipeline: leave one of them out"
                )
            return replace(auto, **plan_fields(config))
        except ValueError as error:
            raise error if isinstance(error, ConfigException) else ConfigException(str(error)) from error


def _extents(layout: Layout) -> str:
    """Return "tp 2 x pp 2 x dp 1"; parts of one rank are left out, except `dp`, the last."""
    mode = "" if layout.mode in (None, "1d") else f" ({layout.mode})"
    experts = f" (ep {layout.expert})" if layout.expert > 1 else ""
    parts = [
        (f"tp {layout.tensor}{mode}", layout.tensor > 1),
        (f"sp {layout.sequence} ({layout.attention})", layout.sequence > 1),
        (f"pp {layout.pipeline}", layout.pipeline > 1),
        (f"dp {layout.data}{experts}", layout.data is not None),
    ]
    return " x ".join(part for part, is_shown in parts if is_shown)


def _with_choices(label: str, option: Any) -> str:
    """Return a label, with the fields of an option that differ from their defaults."""
    if not is_dataclass(option):  # a user's precision
        return label
    choices = _choices(option, {each.name for each in fields(option) if each.init and each.repr} - _OMITTED)
    return f"{label} ({', '.join(choices)})" if choices else label


def _brief(option: Any) -> str:
    """Return the class of an option, with the fields that differ from their defaults."""
    choices = _choices(option, {each.name for each in fields(option) if each.init and each.repr})
    return f"{type(option).__name__}({', '.join(choices)})" if choices else type(option).__name__


def _choices(options: Any, names: Collection[str]) -> list[str]:
    chosen = [
        (each.name, getattr(options, each.name))
        for each in fields(options)
        if each.name in names and getattr(options, each.name) != _default(each)
    ]
    return [f"{name}={_brief(value) if is_dataclass(value) else repr(value)}" for name, value in chosen]


def _default(option: Field[Any]) -> Any:
    return option.default if option.default_factory is MISSING else option.default_factory()
