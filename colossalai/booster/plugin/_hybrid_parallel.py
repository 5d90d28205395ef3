"""Plugin of data, tensor, sequence, expert and pipeline parallelism."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colossalai.amp import FullPrecision, Precision
from colossalai.booster.mixed_precision import MixedPrecision, mixed_precision_factory
from colossalai.booster.plugin._plugin import Plugin
from colossalai.context import Layout, LayoutNames, names_arguments, read_layout
from colossalai.logging import get_dist_logger
from colossalai.pipeline import BatchDim, PipelineOptions, Schedule
from colossalai.runtime import Plan, data_method, refuse_pairs

_NAMES = LayoutNames(
    pipeline="pp_size",
    sequence="sp_size",
    attention="sequence_attention",
    tensor="tp_size",
    mode="tp_mode",
    depth="tp_depth",
    expert="ep_size",
    sizes="tp_size, sp_size or pp_size",
)


@dataclass(frozen=True, kw_only=True)
class HybridOptions:
    """The options of `HybridParallelPlugin`, checked together."""

    tp_size: int
    tp_mode: str
    tp_depth: int
    sp_size: int
    sequence_attention: str | None
    pp_size: int
    ep_size: int
    zero_stage: int
    num_microbatches: int | None
    schedule: str | Path | Schedule | None
    num_model_chunks: int | None
    partition: str
    batch_dim: BatchDim | None
    loss_reduction: str | None
    precision: MixedPrecision | None
    max_norm: float
    recompute: bool | str | Sequence[str]

    def __post_init__(self) -> None:
        if self.zero_stage not in (0, 1, 2, 3):
            raise ValueError(f"zero_stage is {self.zero_stage!r}; it must be 0, 1, 2 or 3")
        methods = ["pipeline"] if self.layout.pipeline > 1 else []  # raises if sizes are not numbers
        refuse_pairs([*methods, *([f"ZeRO {self.zero_stage}"] if self.zero_stage else [])])
        if self.sequence_attention is not None and self.sp_size == 1:
            raise ValueError(
                f"sequence_attention is {self.sequence_attention!r}, but no ranks share a sequence: pass "
                "sp_size, too"
            )
        if self.max_norm < 0:
            raise ValueError(f"max_norm is {self.max_norm}; it must be above 0, or 0 for no clipping")
        if self.pp_size > 1 and self.num_microbatches is None:
            raise ValueError(
                "a pipeline cuts every batch into microbatches: pass num_microbatches (four times pp_size, "
                f"{4 * self.pp_size}, keeps most of the ranks busy)"
            )
        if self.pp_size == 1:
            given = {
                "num_microbatches": self.num_microbatches,
                "schedule": self.schedule,
                "num_model_chunks": self.num_model_chunks,
                "batch_dim": self.batch_dim,
                "loss_reduction": self.loss_reduction,
            }
            useless = [name for name, value in given.items() if value is not None]
            if useless:
                raise ValueError(f"{', '.join(useless)} needs a pipeline: pass pp_size, too")

    @property
    def layout(self) -> Layout:
        """The extents of the mesh without the data-parallel size, which follows from the number of ranks."""
        tensor = {"size": self.tp_size, "mode": self.tp_mode if self.tp_size != 1 else None}
        if self.tp_mode == "2.5d" or self.tp_depth != 1:
            tensor["depth"] = self.tp_depth
        parallel: dict[str, Any] = {"pipeline": self.pp_size, "tensor": tensor}
        if self.sp_size != 1:
            named = {} if self.sequence_attention is None else {"attention": self.sequence_attention}
            parallel["sequence"] = {"size": self.sp_size, **named}
        if self.ep_size != 1:
            parallel["moe"] = self.ep_size
        return read_layout(parallel, _NAMES)

    def pipeline_options(self) -> PipelineOptions | None:
        """Return the options of the pipeline, or None."""
        if self.num_microbatches is None:
            return None
        return PipelineOptions(
            num_microbatches=self.num_microbatches,
            schedule=self.schedule,
            num_chunks=self.num_model_chunks,
            partition=self.partition,
            batch_dim=self.batch_dim,
            loss_reduction=self.loss_reduction,
        )


class HybridParallelPlugin(Plugin):
    """Cuts a model by layers (pipeline) and by tensors, and the batch over the remaining ranks.

    The mesh is laid out when the plugin is given to a Booster, or by `plugin.configure()`. Do one of them
    before the model is built: layers of `colossalai.nn` use the tensor mode in force then. Models
    of transformers that have a `tp_plan`, or rules in `colossalai.shardformer`, are cut by `Booster.boost`
    (tp_mode "1d"). With a pipeline any model with a stack of blocks is cut by `Booster.boost`; a stage that
    `colossalai.builder` or `colossalai.pipeline` made is not cut again.

    Args:
        tp_size: Number of ranks that share a layer.
        tp_mode: Tensor mode: "1d", "2d", "2.5d", "3d"; or "dap", in which the ranks share the activations of
            axial layers.
        tp_depth: Depth of mode "2.5d".
        sp_size: Number of ranks that share a sequence, with any `tp_mode`.
        sequence_attention: Attention over cut sequences: "ring" (default) or "ulysses", which needs a
            multiple of `sp_size` heads on each tensor-parallel rank.
        pp_size: Number of pipeline ranks.
        ep_size: Number of data-parallel ranks that share the experts of a model, with a part on each:
            experts of models of transformers (Mixtral, Qwen3-MoE, DeepSeek-V3, gpt-oss and others) and of
            `colossalai.nn.layer.moe`. It divides the data-parallel size.
        zero_stage: 0; 1 shards the optimizer's states over the data-parallel ranks, 2 (without a pipeline)
            their gradients, too, and 3 (the same) the parameters.
        num_microbatches: Number of microbatches of a batch; needed with a pipeline.
        schedule: "1f1b" (default), "gpipe", "interleaved", "zb-h1", "zb-v", the path of a CSV file of
            actions, or a `colossalai.pipeline.Schedule`.
        num_model_chunks: Number of stages on a rank, for "interleaved".
        partition: "balanced" cuts blocks by their parameters, "uniform" by their number.
        batch_dim: The dimension of the samples in all tensors of a batch and in the output; or a mapping from
            names of inputs to it, such as `{"class_weights": None}` for an input that every microbatch gets
            whole. See `colossalai.pipeline.PipelineOptions`. Default: dim 0 of every tensor.
        loss_reduction: Reduction of the criterion: the "mean" or the "sum" over the samples. Default: the
            criterion's attribute `reduction`, else the mean.
        precision: "fp16", "bf16", "fp16_naive", "fp32", "auto" or an object with options; as Booster's
            `mixed_precision`.
        max_norm: Bound of the gradient norm over all ranks in `optimizer.step()`; 0 for no clipping.
        recompute: Checkpoint activations: True for the model's blocks, names of sub-modules, or one name.
        sequence_parallel: Older spelling: the `tp_size` ranks share the sequence and not the layers, which
            is `sp_size` instead of `tp_size`.

    Raises:
        ValueError: An option is unknown or out of range, lacks another one that it needs, or contradicts
            another one.
    """

    @names_arguments
    def __init__(  # noqa: PLR0913 - one argument for each documented choice
        self,
        *,
        tp_size: int = 1,
        tp_mode: str = "1d",
        tp_depth: int = 1,
        sp_size: int = 1,
        sequence_attention: str | None = None,
        pp_size: int = 1,
        ep_size: int = 1,
        zero_stage: int = 0,
        num_microbatches: int | None = None,
        schedule: str | Path | Schedule | None = None,
        num_model_chunks: int | None = None,
        partition: str = "balanced",
        batch_dim: BatchDim | None = None,
        loss_reduction: str | None = None,
        precision: MixedPrecision | str | None = None,
        max_norm: float = 0.0,
        recompute: bool | str | Sequence[str] = False,
        sequence_parallel: bool = False,
    ) -> None:
        if sequence_parallel:
            if tp_mode not in ("1d", "sequence") or tp_size == 1:
                raise ValueError(
                    "sequence_parallel=True lets tp_size ranks share the sequence: tp_size is "
                    f"{tp_size}, which must be at least 2, and tp_mode {tp_mode!r} must be left out"
                )
            if sp_size != 1:
                raise ValueError(
                    f"sp_size is {sp_size}, and sequence_parallel=True lets the {tp_size} ranks of tp_size "
                    "share the sequence: leave sequence_parallel out"
                )
            get_dist_logger().log_once(
                f"sequence_parallel=True is an older word: write sp_size={tp_size} in the place of "
                f"tp_size={tp_size}, sequence_parallel=True",
                ranks=[0],
            )
            tp_size, tp_mode, sp_size = 1, "1d", tp_size
        self.options = HybridOptions(
            tp_size=tp_size,
            tp_mode=tp_mode,
            tp_depth=tp_depth,
            sp_size=sp_size,
            sequence_attention=sequence_attention,
            pp_size=pp_size,
            ep_size=ep_size,
            zero_stage=zero_stage,
            num_microbatches=num_microbatches,
            schedule=schedule,
            num_model_chunks=num_model_chunks,
            partition=partition,
            batch_dim=batch_dim,
            loss_reduction=loss_reduction,
            precision=mixed_precision_factory(precision) if isinstance(precision, str) else precision,
            max_norm=max_norm,
            recompute=recompute,
        )
        self.plan(FullPrecision())  # so that its errors are raised here

    def plan(self, precision: Precision) -> Plan:
        """See the base class.

        Raises:
            ValueError: `precision` was given both to the plugin and to Booster.
        """
        options = self.options
        if options.precision is not None:
            if not isinstance(precision, FullPrecision):
                raise ValueError("precision is given twice: to HybridParallelPlugin and to Booster")
            precision = options.precision.precision()
        pipeline = options.pipeline_options()
        return Plan(
            layout=options.layout,
            data=data_method(options.zero_stage, in_pipeline=pipeline is not None),
            precision=precision,
            recompute=options.recompute,
            clip_grad_norm=options.max_norm,
            pipeline=pipeline,
        )
