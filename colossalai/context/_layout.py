"""Layout of the mesh from the `parallel` feature of a config.

Sequence parallelism has its own axis, `sp`: `sequence=dict(size=4, attention="ring")`, with any tensor mode.
`tensor=dict(size=4, mode="sequence")` is another spelling of it, without a tensor mode.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from colossalai.context._check import check_keys, check_mapping, check_positive
from colossalai.context._config import Config, ConfigException
from colossalai.context._group_initializer import ALLOWED_MODES, INITIALIZER_MAPPING
from colossalai.context._parallel_mode import TENSOR_LAYOUTS

_PARALLEL_KEYS = ("data", "pipeline", "sequence", "tensor", "moe")
_TENSOR_KEYS = ("size", "mode", "depth")
_PIPELINE_NAMES = ("schedule", "partition", "loss_reduction")
_SEQUENCE_SPELLING = "sequence"  # as a tensor mode
SEQUENCE_ATTENTIONS = ("ring", "ulysses")
"""The attentions over cut sequences, the default first; in `colossalai.nn.layer.sequence_parallel`."""


@dataclass(frozen=True, kw_only=True)
class LayoutNames:
    """Names of the settings of a layout in error messages: keys of a config, or arguments of a plugin.

    Attributes:
        data: The data-parallel size.
        pipeline: The number of stages.
        sequence: The number of ranks that share a sequence.
        attention: The attention over cut sequences.
        tensor: The tensor-parallel size.
        mode: The tensor mode.
        depth: The depth of the 2.5D layout.
        expert: The expert-parallel size.
        sizes: All sizes, as in "change ...".
    """

    data: str = "parallel.data"
    pipeline: str = "parallel.pipeline"
    sequence: str = "parallel.sequence.size"
    attention: str = "parallel.sequence.attention"
    tensor: str = "parallel.tensor.size"
    mode: str = "parallel.tensor.mode"
    depth: str = "parallel.tensor.depth"
    expert: str = "parallel.moe"
    sizes: str = "a size in `parallel`"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The extents of a job's mesh; a field of a `Plan`.

    Attributes:
        data: Data-parallel size; None: the number of ranks divided by the other sizes.
        pipeline: Number of pipeline stages.
        sequence: Number of ranks that share a sequence.
        attention: One of `SEQUENCE_ATTENTIONS`; None without sequence parallelism.
        tensor: Tensor-parallel size.
        mode: Tensor mode, a key of `TENSOR_LAYOUTS` or of `INITIALIZER_MAPPING`.
        depth: Depth of the 2.5D layout.
        expert: Expert-parallel size, a divisor of the data-parallel size.
        arguments: Keyword arguments for the user's own group initializer.
        plain_layers: Whether layers of `colossalai.nn` are built plain in spite of the tensor mode, since a
            plan cuts them by their names later.
        names: Names of these extents in error messages.
    """

    data: int | None = None
    pipeline: int = 1
    sequence: int = 1
    attention: str | None = None
    tensor: int = 1
    mode: str | None = None
    depth: int = 1
    expert: int = 1
    arguments: Mapping[str, Any] = field(default_factory=dict)
    plain_layers: bool = field(default=False, compare=False)  # the mesh is the same
    names: LayoutNames = field(default=LayoutNames(), compare=False, repr=False)

    @property
    def layout_mode(self) -> str | None:
        """The row of `TENSOR_LAYOUTS` with the tensor axes; None for a user-defined mode."""
        return self.mode if self.mode in TENSOR_LAYOUTS else None

    @property
    def alike_axis(self) -> str | None:
        """The axis of the ranks whose activations agree between layers; None in modes that cut them."""
        return "tp" if self.mode == "1d" else None

    @property
    def dap(self) -> int:
        """Number of ranks that share the activations of axial layers."""
        return self.tensor if self.mode == "dap" else 1

    def tensor_axes(self) -> dict[str, int]:
        """Return the tensor axes with their extents, outermost first."""
        layout = TENSOR_LAYOUTS[self.layout_mode]
        return dict(layout.extents(layout.largest_edge(self.tensor, self.depth), self.depth))

    @property
    def cuts_sequences(self) -> bool:
        """Whether sequences are cut, even over one rank."""
        return self.attention is not None

    def axes_of_tensor(self) -> tuple[str, ...]:
        """Return the axes of `ParallelMode.TENSOR`: the tensor axes, with `sp` if only sequences are cut.

        The documents call "sequence" a tensor mode, with the ranks of TENSOR.
        """
        inner = ("sp",) if self.cuts_sequences and self.mode is None else ()
        return (*inner, *self.tensor_axes())

    def axes(self) -> dict[str, int]:
        """Return all mesh axes and extents, outermost first; `dp` is a view of `edp` and `ep`."""
        assert self.data is not None, "a layout without a data-parallel size is not a mesh"
        return {
            "edp": self.data // self.expert,
            "ep": self.expert,
            "pp": self.pipeline,
            "sp": self.sequence,
            **self.tensor_axes(),
        }

    def over(self, world_size: int) -> "Layout":
        """Return the layout over a number of processes, with its data-parallel size filled in.

        Raises:
            ConfigException: `world_size` is not the product of the sizes, or the expert-parallel size does
                not divide the data-parallel size.
        """
        inner = self.pipeline * self.sequence * self.tensor
        data = max(world_size // inner, 1) if self.data is None else self.data
        if data * inner != world_size:
            sequence = f" x sequence {self.sequence}" if self.cuts_sequences else ""
            tensor = "" if self.cuts_sequences and self.mode is None else f" x tensor {self.tensor}"
            raise ConfigException(
                f"{world_size} processes, but data {data} x pipeline {self.pipeline}{sequence}{tensor} = "
                f"{data * inner}: start {data * inner} processes or change {self.names.sizes}"
            )
        if data % self.expert:
            raise ConfigException(
                f"{self.names.expert} is {self.expert}, which does not divide the data-parallel size {data}"
            )
        return self if data == self.data else replace(self, data=data)

    def written(self) -> dict[str, Any]:
        """Return the layout as the `parallel` feature of a config."""
        tensor: dict[str, Any] = {"size": self.tensor, "mode": self.mode, **self.arguments}
        if self.depth != 1:
            tensor["depth"] = self.depth
        written: dict[str, Any] = {"pipeline": self.pipeline, "tensor": tensor, "moe": self.expert}
        if self.data is not None:
            written["data"] = self.data
        if self.cuts_sequences:
            written["sequence"] = {"size": self.sequence, "attention": self.attention}
        return written


def read_layout(parallel: Any, names: LayoutNames | None = None) -> Layout:
    """Check the `parallel` feature by itself and return its layout.

    Args:
        parallel: The value of the feature: a dict with any of `data`, `pipeline`, `sequence`, `tensor`,
            `moe`, or None.
        names: Names of the extents in error messages. Default: as in a config.

    Raises:
        ConfigException: A key is unknown, a size is not a positive integer or does not fit its mode, or the
            two spellings of sequence parallelism contradict each other.
    """
    parallel = {} if parallel is None else parallel
    names = LayoutNames() if names is None else names
    check_mapping(parallel, "parallel", example="parallel=dict(pipeline=2, tensor=dict(size=4, mode='2d'))")
    check_keys(parallel, _PARALLEL_KEYS, "parallel")
    pipeline = _size(parallel, "pipeline", names.pipeline, options=(*_PIPELINE_NAMES, "batch_dim"))
    _check_pipeline(parallel.get("pipeline"))
    return replace(
        _sequence(parallel.get("sequence"), _tensor(parallel.get("tensor"), names), names),
        data=_size(parallel, "data", names.data) if parallel.get("data") is not None else None,
        pipeline=pipeline,
        expert=_size(parallel, "moe", names.expert),
        names=names,
    )


def with_expert_size(config: Config) -> Config:
    """Return a config with `max_ep_size`, the spelling of later versions, as `parallel=dict(moe=...)`.

    Raises:
        ConfigException: `max_ep_size` is not a positive integer, or `parallel` has another size.
    """
    size, parallel = config.get("max_ep_size"), config.get("parallel")
    parallel = {} if parallel is None else parallel
    if size is None or not isinstance(parallel, Mapping):
        return config
    check_positive(size, "max_ep_size")
    if parallel.get("moe") is not None and _size(parallel, "moe", "parallel.moe") != size:
        raise ConfigException(
            f"max_ep_size is {size}, and parallel.moe {parallel['moe']!r}: both are the number of ranks that "
            "share experts, so leave one of them out"
        )
    return Config({**config, "parallel": {**parallel, "moe": size}})


def _check_pipeline(value: Any) -> None:
    """Check the pipeline options other than the size; the pipeline itself checks the names."""
    for key in _PIPELINE_NAMES if isinstance(value, Mapping) else ():
        if value.get(key) is not None and not isinstance(value[key], str):
            raise ConfigException(
                f"parallel.pipeline.{key} is {value[key]!r}; it must be a name, such as "
                "pipeline=dict(size=2, schedule='1f1b', partition='balanced')"
            )


def _size(parallel: Mapping[str, Any], key: str, name: str, *, options: tuple[str, ...] = ()) -> int:
    """Return a size that is written as an int, as `dict(size=...)`, or not at all (then 1)."""
    value = parallel.get(key)
    if value is None:
        return 1
    if isinstance(value, Mapping):
        check_keys(value, ("size", *options), f"parallel.{key}")
        value = value.get("size", 1)
    return check_positive(value, name)


def _sequence(sequence: Any, layout: Layout, names: LayoutNames) -> Layout:
    """Return the layout with the sequence part; the tensor part can have set it in the other spelling."""
    if sequence is None:
        return layout
    if not isinstance(sequence, Mapping):
        sequence = {"size": check_positive(sequence, "parallel.sequence")}
    check_keys(sequence, ("size", "attention"), "parallel.sequence")
    if layout.layout_mode != layout.mode:
        raise ConfigException(
            f"parallel.sequence is combined with the tensor mode {layout.mode!r} of your own, whose "
            "initializer has no ranks that share sequences: leave one of them out"
        )
    if "size" not in sequence and not layout.cuts_sequences:
        raise ConfigException(f"parallel.sequence is {dict(sequence)}, with no size: add size=...")
    size = check_positive(sequence.get("size", layout.sequence), names.sequence)
    if layout.cuts_sequences and size != layout.sequence:
        raise ConfigException(
            f"{names.sequence} is {size}, and {names.tensor} is {layout.sequence} with {names.mode} "
            "'sequence', which is another spelling of the same: leave one of them out, or choose another "
            f"{names.mode}, such as '1d'"
        )
    attention = sequence.get("attention", SEQUENCE_ATTENTIONS[0])
    if not isinstance(attention, str) or attention not in SEQUENCE_ATTENTIONS:
        raise ConfigException(
            f"{names.attention} is {attention!r}; it must be one of "
            f"{', '.join(map(repr, SEQUENCE_ATTENTIONS))}"
        )
    return replace(layout, sequence=size, attention=attention)


def _tensor(tensor: Any, names: LayoutNames) -> Layout:
    """Return the tensor part as a layout; its other fields have their defaults."""
    if tensor is None:
        return Layout()
    if not isinstance(tensor, Mapping):
        size = check_positive(tensor, "parallel.tensor")
        if size == 1:
            return Layout()
        raise ConfigException(
            f"parallel.tensor is {size}, a size without a mode: write tensor=dict(size={size}, mode='1d')"
        )
    mode = _mode(tensor.get("mode"), names)
    own = mode in INITIALIZER_MAPPING
    if not own:
        check_keys(tensor, _TENSOR_KEYS, "parallel.tensor")
    if "size" not in tensor and mode is not None:
        raise ConfigException(f"parallel.tensor has mode {mode!r} but no size: add size=...")
    size = check_positive(tensor.get("size", 1), names.tensor)
    if mode is None and size > 1:
        raise ConfigException(
            f"{names.tensor} is {size}, without a mode: set {names.mode} to '1d' (or {_known_modes()})"
        )
    if own:
        arguments = {key: value for key, value in tensor.items() if key not in ("size", "mode")}
        return Layout(tensor=size, mode=mode, arguments=arguments)
    depth = _depth(tensor, mode, names)
    if mode == _SEQUENCE_SPELLING:
        return Layout(sequence=size, attention=SEQUENCE_ATTENTIONS[0])
    _check_size(mode, size, depth, names)
    return Layout(tensor=size, mode=mode, depth=depth)


def _depth(tensor: Mapping[str, Any], mode: str | None, names: LayoutNames) -> int:
    """Return the depth."""
    depth = check_positive(tensor["depth"], names.depth) if tensor.get("depth") is not None else 1
    if depth != 1 and mode != "2.5d":
        raise ConfigException(f"{names.depth} is {depth}, but only mode '2.5d' has a depth, not {mode!r}")
    return depth


def _check_size(mode: str | None, size: int, depth: int, names: LayoutNames) -> None:
    """Check that a size fits its mode."""
    layout = TENSOR_LAYOUTS[mode]
    edge = layout.largest_edge(size, depth)
    if edge == 0 or layout.size(edge, depth) != size:
        fitting = [layout.size(q, depth) for q in (edge, edge + 1) if q > 0]
        suffix = f" {depth}*q*q" if mode == "2.5d" else ""
        raise ConfigException(
            f"{names.tensor} is {size}, but mode {mode!r} needs {layout.requirement}{suffix}: "
            f"the nearest that fit: {' and '.join(map(str, fitting))}"
        )


def _mode(mode: object, names: LayoutNames) -> str | None:
    if not isinstance(mode, str | None) or not (mode in ALLOWED_MODES or mode in INITIALIZER_MAPPING):
        raise ConfigException(f"{names.mode} is {mode!r}; it must be one of {_known_modes()}")
    return mode


def _known_modes() -> str:
    return ", ".join(repr(mode) for mode in [*ALLOWED_MODES, *INITIALIZER_MAPPING] if mode is not None)
