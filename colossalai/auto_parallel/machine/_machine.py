"""Machine profile: the cost of operations of a training step and of the communication between its ranks.

A profile is one frozen value: the rates of a rank's device (`_rates.py`) and the links between ranks. It is
measured on this machine, read from a file, or shipped: measured on a small machine, or compiled from
published figures, so that one computer can plan for many others. `time_of` computes the seconds of an
operation from it.

[Note: levels of links]
Ranks are counted machine by machine. The links of a level apply to groups within a block of `num_ranks`
adjacent ranks; those of the last level to all others. A link is a step of a ring, as in `colossalai.device`
([Note: cost of a ring]), with a line for each operation, so that any number of ranks has a cost. A ring
through several machines crosses between them once for each machine. If a group has g ranks in each machine, g
rings share the crossings, as each rank has its own network interface. So the seconds per byte of the outer
level are divided by g, and are at least those of the inner one. On machines whose ranks share one interface
the same division is right for measured links: they are measured along an axis whose groups have one rank in
each machine, all groups at once.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

import torch
import torch.distributed as dist

from colossalai.auto_parallel.machine._measure import measure_rates
from colossalai.auto_parallel.machine._rates import (
    ByteCurve,
    FlopRate,
    Kind,
    Operations,
    OpRate,
    Optimizer,
    OptimizerRate,
    Rates,
)
from colossalai.cluster import broadcast_value
from colossalai.device import OPERATIONS, AlphaBeta, DeviceMesh, Machine, MeshSpeed

_FORMAT = "colossalai machine profile"
_VERSION = 1
_HALF_OF_FLOAT32 = 0.5  # rate of float64 relative to float32, if it was not measured
_SIXTEEN_BITS = ("bfloat16", "float16")

# Names of torch's operators without their namespace; all other operators are "elementwise".
_OPERATORS: Mapping[Kind, str] = {
    "product": "mm addmm bmm baddbmm addbmm linear matmul mv addmv dot einsum _grouped_mm grouped_mm",
    "convolution": "conv1d conv2d conv3d convolution _convolution conv_transpose1d conv_transpose2d "
    "conv_transpose3d mkldnn_convolution",
    "attention": "scaled_dot_product_attention _scaled_dot_product_flash_attention_for_cpu "
    "_scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention "
    "_scaled_dot_product_cudnn_attention _scaled_dot_product_fused_attention_overrideable",
    "activation": "gelu silu erf exp exp2 expm1 log log1p log2 sigmoid softplus mish hardswish elu selu celu "
    "sin cos pow rsqrt sqrt logit log_sigmoid",
    "tanh": "tanh",
    "dropout": "dropout dropout_ native_dropout feature_dropout alpha_dropout bernoulli bernoulli_ rand "
    "rand_like randn randn_like multinomial normal uniform_ normal_",
    "norm": "layer_norm native_layer_norm group_norm native_group_norm rms_norm _fused_rms_norm "
    "instance_norm mean var std var_mean sum norm linalg_vector_norm amax amin max min argmax argmin "
    "cumsum logsumexp prod any all topk sort",
    "batch_norm": "batch_norm native_batch_norm cudnn_batch_norm miopen_batch_norm _native_batch_norm_legit "
    "_batch_norm_with_update",
    "softmax": "softmax _softmax log_softmax _log_softmax _safe_softmax softmin",
    "loss": "cross_entropy_loss nll_loss nll_loss_forward nll_loss2d_forward nll_loss_nd mse_loss l1_loss "
    "smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div",
    "embedding": "embedding embedding_bag _embedding_bag gather index index_select index_add index_put "
    "scatter scatter_add take_along_dim",
    "pool": "max_pool1d max_pool2d max_pool3d max_pool2d_with_indices max_pool3d_with_indices avg_pool1d "
    "avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d _adaptive_avg_pool2d "
    "adaptive_max_pool2d upsample_nearest2d upsample_bilinear2d",
    "other": "clone contiguous copy_ copy cat stack roll flip repeat repeat_interleave constant_pad_nd pad "
    "im2col col2im unfold_copy tril triu",
    "view": "view _unsafe_view reshape t transpose permute expand expand_as slice select squeeze unsqueeze "
    "unbind split split_with_sizes chunk detach alias as_strided flatten unflatten unfold diagonal narrow "
    "movedim swapaxes numpy_T mT view_as empty empty_like new_empty lift_fresh_copy getitem item sym_size",
}
_KINDS: Mapping[str, Kind] = MappingProxyType(
    {name: kind for kind, names in reversed(tuple(_OPERATORS.items())) for name in names.split()}
)


@dataclass(frozen=True, kw_only=True)
class LinkLevel:
    """The links between nearby ranks; see [Note: levels of links].

    Attributes:
        num_ranks: Number of adjacent ranks in a block of this level. None: any number, for the last level.
        lines: Line of a step of a ring, for each of `colossalai.device.OPERATIONS`.
    """

    num_ranks: int | None
    lines: Mapping[str, AlphaBeta]


@dataclass(frozen=True, kw_only=True)
class MachineProfile:
    """Costs of the operations and the communication of a training step on a machine.

    Attributes:
        name: Name of the profile in plans.
        created: Time of its measurement or compilation, in ISO 8601.
        machine: The measured or described machine.
        rates: Rates of a rank's device.
        links: Levels of links from the nearest to the farthest; empty if one process was measured alone.
        source: Source of each published figure; empty if all were measured.
    """

    name: str
    created: str
    machine: Machine
    rates: Rates
    links: tuple[LinkLevel, ...]
    source: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def is_published(self) -> bool:
        """Whether the figures are published, not measured."""
        return bool(self.source)

    def mesh_speed(self, shape: Sequence[int]) -> MeshSpeed:
        """Return the cost of communication in a grid of any number of ranks, counted row by row.

        Args:
            shape: The extents of the grid, outermost first.

        Raises:
            ValueError: An extent of `shape` is not above 0, or there are several ranks and no links.
        """
        if not shape or min(shape) < 1:
            raise ValueError(f"shape={tuple(shape)}: give at least one extent, all of them above 0")
        num_ranks = math.prod(shape)
        if num_ranks > 1 and not self.links:
            raise ValueError(
                f"the profile {self.name!r} has no links between ranks: one process measured it alone; "
                "call measure_machine in a job, or take a shipped profile"
            )
        zeros = [0.0] * len(shape)
        kinds = MeshSpeed.of_links(shape, zeros, zeros).lines  # by the groups of the grid
        lines = {
            extents: {op: self._line(op, extents) for op in OPERATIONS} if extents else kinds[extents]
            for extents in kinds
        }
        is_this = not self.is_published and num_ranks == len(self.machine.hosts)
        return MeshSpeed(tuple(shape), lines, self.machine if is_this else None)

    def _line(self, op: str, extents: Sequence[tuple[int, int]]) -> AlphaBeta:
        """Return the line of an operation in a kind of groups; see [Note: levels of links]."""
        inner = 0.0  # seconds per byte of the previous level
        found = AlphaBeta(0.0, 0.0)
        for below, level in zip((None, *self.links), self.links, strict=False):
            link = level.lines[op]
            beta = link.beta
            if below is not None:
                assert below.num_ranks is not None, "only the last level has no end"
                beta = max(beta / _num_within(extents, below.num_ranks), inner)
            found, inner = AlphaBeta(link.alpha, beta, link.error), beta
            if level.num_ranks is not None and _lies_within(extents, level.num_ranks):
                break
        steps = _steps(op, math.prod(extent for extent, _ in extents))
        return AlphaBeta(steps.alpha * found.alpha, steps.beta * found.beta, found.error)

    def save(self, path: str | Path) -> None:
        """Write the profile as JSON."""
        Path(path).write_text(self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> "MachineProfile":
        """Read a profile written by `save`.

        Raises:
            ValueError: `path` cannot be read, or is not the file of a profile.
        """
        try:
            text = Path(path).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from error
        return cls.from_json(text, name=str(path))

    def to_json(self) -> str:
        """Return the text that `save` writes. All numbers survive a round trip exactly."""
        content = {"format": _FORMAT, "version": _VERSION, **asdict(self)}
        return json.dumps(content, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, *, name: str = "the text") -> "MachineProfile":
        """Return the profile of a text written by `to_json`.

        Args:
            text: The content.
            name: Name of the file, for messages.

        Raises:
            ValueError: `text` is not a text of `to_json`; the message has the file and the reason.
        """
        try:
            content = json.loads(text)
            if content["format"] != _FORMAT:
                raise ValueError(f"its format is {content['format']!r}, not {_FORMAT!r}")
            if content["version"] != _VERSION:
                raise ValueError(f"it has version {content['version']!r}, and this package reads {_VERSION}")
            return cls(
                name=str(content["name"]),
                created=str(content["created"]),
                machine=_machine_of(content["machine"]),
                rates=_rates_of(content["rates"]),
                links=_links_of(content["links"]),
                source={str(key): str(value) for key, value in content["source"].items()},
            )
        except KeyError as error:
            raise ValueError(f"{name} is not a machine profile: it has no {error}") from error
        except (ValueError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"{name} is not a machine profile: {error}") from error


def shipped_profile(name: str = "cpu-2-cores") -> MachineProfile:
    """Return a profile of the package.

    "cpu-2-cores" was measured with 2 ranks of one thread that communicate through shared memory,
    "cpu-2-cores-gloo" the same over gloo; "a100-80gb" and "h100" are published figures of machines with 8
    such devices.

    Args:
        name: Name of the profile.

    Raises:
        ValueError: `name` is not a shipped profile.
    """
    folder = resources.files("colossalai.auto_parallel.machine") / "profiles"
    names = sorted(
        each.name.removesuffix(".json") for each in folder.iterdir() if each.name.endswith(".json")
    )
    if name not in names:
        raise ValueError(f"there is no shipped profile {name!r}: choose one of {', '.join(names)}")
    return MachineProfile.from_json((folder / f"{name}.json").read_text(), name=f"{name}.json")


def measure_machine(
    *,
    name: str = "measured",
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16),
    seconds: float = 10.0,
    show_progress: bool = True,
) -> MachineProfile:
    """Measure the machine: in a job all its ranks and the links between them, otherwise this process alone.

    In a job every rank calls it, and all get the same result. The ranks should be idle otherwise.

    Args:
        name: Name of the profile.
        dtypes: See `measure_rates`.
        seconds: Time for the rates; see `measure_rates`. The links take a few seconds more.
        show_progress: Whether to draw the progress, if rank 0 has a terminal.

    Raises:
        ValueError: `dtypes` or `seconds` is invalid for `measure_rates`.
    """
    rates = measure_rates(dtypes=dtypes, seconds=seconds, show_progress=show_progress)
    created = datetime.now(UTC).isoformat(timespec="seconds")
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    if num_ranks == 1:
        machine = _machine_alone(rates.device)
        return MachineProfile(name=name, created=created, machine=machine, rates=rates, links=())
    flat = DeviceMesh(torch.arange(num_ranks))
    speed = flat.profile(show_progress=show_progress)
    assert speed.machine is not None, "it was measured"
    per_host = ranks_of_a_host(speed.machine.hosts)
    if per_host < num_ranks:
        speed = DeviceMesh(torch.arange(num_ranks), (num_ranks // per_host, per_host)).profile(
            show_progress=show_progress
        )
    assert speed.machine is not None, "it was measured"
    return MachineProfile(
        name=name,
        created=broadcast_value(created, source=0),
        machine=speed.machine,
        rates=rates,
        links=links_of_speed(speed),
    )


def _machine_alone(device: str) -> Machine:
    import os
    import platform

    return Machine((platform.node(),), (os.cpu_count() or 1,), device, "", torch.__version__)


def ranks_of_a_host(hosts: Sequence[str]) -> int:
    """Return the number of adjacent ranks on each host; all ranks if hosts have unequal numbers."""
    count = hosts.count(hosts[0])
    blocks = [set(hosts[begin : begin + count]) for begin in range(0, len(hosts), count)]
    is_regular = all(len(block) == 1 for block in blocks) and len(hosts) % count == 0
    return count if is_regular else len(hosts)


def links_of_speed(speed: MeshSpeed) -> tuple[LinkLevel, ...]:
    """Return the links of a measured grid: of all ranks, or of (hosts, ranks of a host), innermost first.

    Args:
        speed: A grid of one or two axes.
    """
    levels = []
    for axis in reversed(range(len(speed.shape))):
        num_ranks = speed.shape[axis]
        if num_ranks == 1:
            continue
        lines = {}
        for op in OPERATIONS:
            line, steps = speed.line(op, str(axis)), _steps(op, num_ranks)
            lines[op] = AlphaBeta(line.alpha / steps.alpha, line.beta / steps.beta, line.error)
        levels.append(LinkLevel(num_ranks=num_ranks if axis > 0 else None, lines=lines))
    return tuple(levels)


def _steps(op: str, num_ranks: int) -> AlphaBeta:
    """Return the number of messages of a ring in sequence, and its bytes as a fraction of the total."""
    return MeshSpeed.of_links((num_ranks,), (1.0,), (1.0,)).line(op, "0")


def _lies_within(extents: Sequence[tuple[int, int]], num_ranks: int) -> bool:
    """Whether each group of a kind is within a block of `num_ranks` adjacent ranks."""
    return all(num_ranks % (extent * stride) == 0 for extent, stride in extents)


def _num_within(extents: Sequence[tuple[int, int]], num_ranks: int) -> int:
    """Return the number of ranks of a group in the same block of adjacent ranks, for the worst group."""
    found = 1
    for extent, stride in extents:
        span = extent * stride
        if num_ranks % span == 0:
            found *= extent
        elif span % num_ranks == 0 and num_ranks % stride == 0:
            found *= num_ranks // stride
    return found


def kind_of(target: str) -> Kind:
    """Return the kind of an operation, for `time_of`.

    Args:
        target: Name of torch's operator, such as "aten.addmm.default". Unknown ones count as elementwise.
    """
    base = target.removeprefix("aten::").removeprefix("aten.").partition(".")[0]
    return _KINDS.get(base, "elementwise")


def time_of(
    profile: MachineProfile,
    *,
    flops: float,
    bytes: float,
    kind: Kind,
    dtype: torch.dtype,
    shape: Sequence[int] | None = None,
    is_backward: bool = False,
) -> float:
    """Return the seconds of an operation: the overhead, and the longer of the times of FLOPs and bytes.

        max(flops / rate(shape), seconds(bytes)) + overhead

    A dtype that was not measured uses the rates of another one: float64 multiplies at half the rate of
    float32, a 16-bit dtype as the other 16-bit dtype if that was measured, all others as float32.

    Args:
        profile: The machine.
        flops: Floating point operations of its products; counted only for `FLOP_KINDS`.
        bytes: Bytes that its kernels read and write; see [Note: bytes of an operation].
        kind: Kind of the operation, from `kind_of`.
        dtype: Dtype of its large operands.
        shape: The extents of `FLOP_KINDS` in the forward, also for the backward: (m, k, n) of a product,
            (positions, terms, channels) of a convolution, (queries, keys, head size) of an attention; see
            [Note: rate of a product]. Leading extents count batches. None: all extents are large.
        is_backward: Whether these are the FLOPs and bytes of its whole backward.

    Raises:
        ValueError: `flops` or `bytes` is negative or not finite, `kind` is unknown, the profile has no rates
            for it, or `shape` has fewer than three extents, or an extent below 1.
    """
    if not (0 <= flops < math.inf and 0 <= bytes < math.inf):
        raise ValueError(f"flops={flops}, bytes={bytes}: give finite numbers of 0 or more")
    if kind not in get_args(Kind):
        near = get_close_matches(str(kind), get_args(Kind), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"kind={kind!r}: choose one of {', '.join(get_args(Kind))}{hint}")
    extents = None if shape is None else tuple(shape[-3:])
    if extents is not None and (len(extents) < 3 or min(extents) < 1):
        raise ValueError(f"shape={tuple(shape or ())} of kind {kind!r}: give three extents above 0")
    rate, slower = _rate_of(profile.rates.operations, kind, dtype, "backward" if is_backward else "forward")
    seconds = rate.curve.at(bytes)
    if rate.flops is not None:
        seconds = max(seconds, slower * rate.flops.seconds(flops, extents) / profile.rates.efficiency)
    return rate.overhead + seconds


def optimizer_time(
    profile: MachineProfile, *, optimizer: Optimizer, bytes: float, num_tensors: int = 1
) -> float:
    """Return the seconds of a step of a fused optimizer.

    Args:
        profile: The machine.
        optimizer: "adamw" or "sgd".
        bytes: Bytes of parameters, gradients and states, read and written; see `optimizer_bytes`.
        num_tensors: Number of parameters.

    Raises:
        ValueError: `optimizer` is unknown, or a number is negative.
    """
    rate = profile.rates.optimizers.get(optimizer)
    if rate is None:
        known = ", ".join(profile.rates.optimizers)
        raise ValueError(f"optimizer={optimizer!r}: the profile {profile.name!r} has {known}")
    if not 0 <= bytes < math.inf or num_tensors < 0:
        raise ValueError(f"bytes={bytes}, num_tensors={num_tensors}: give finite numbers of 0 or more")
    return rate.overhead + rate.per_tensor * num_tensors + rate.curve.at(bytes)


def _rate_of(operations: Operations, kind: Kind, dtype: torch.dtype, direction: str) -> tuple[OpRate, float]:
    """Return the rate for a dtype, and the factor by which its FLOPs take longer."""
    measured = operations.get(kind)
    if not measured:
        raise ValueError(f"the profile has no rates of kind {kind!r}")
    name = str(dtype).removeprefix("torch.")
    slower = 1.0
    if name not in measured:
        slower = 1 / _HALF_OF_FLOAT32 if name == "float64" else 1.0
        others = _SIXTEEN_BITS if name in _SIXTEEN_BITS else ()
        name = next((other for other in (*others, "float32") if other in measured), next(iter(measured)))
    return measured[name][direction], slower


def _machine_of(content: Mapping[str, Any]) -> Machine:
    return Machine(
        hosts=tuple(map(str, content["hosts"])),
        cores=tuple(map(int, content["cores"])),
        device=str(content["device"]),
        backend=str(content["backend"]),
        torch=str(content["torch"]),
    )


def _links_of(content: Sequence[Mapping[str, Any]]) -> tuple[LinkLevel, ...]:
    levels = tuple(
        LinkLevel(
            num_ranks=None if each["num_ranks"] is None else int(each["num_ranks"]),
            lines={
                op: AlphaBeta(*(_number(each["lines"][op], key) for key in ("alpha", "beta", "error")))
                for op in OPERATIONS
            },
        )
        for each in content
    )
    if levels and levels[-1].num_ranks is not None:
        raise ValueError("its last level of links does not hold for any number of ranks")
    if any(level.num_ranks is None or level.num_ranks < 1 for level in levels[:-1]):
        raise ValueError("a level of links before the last one holds for no number of ranks")
    return levels


def _rates_of(content: Mapping[str, Any]) -> Rates:
    operations: dict[str, dict[str, dict[str, OpRate]]] = {}
    for kind, by_dtype in content["operations"].items():
        if kind not in get_args(Kind):
            raise ValueError(f"it has rates of a kind {kind!r}")
        operations[kind] = {
            str(dtype): {direction: _op_rate(rates[direction]) for direction in ("forward", "backward")}
            for dtype, rates in by_dtype.items()
        }
    rates = Rates(
        device=str(content["device"]),
        num_threads=int(content["num_threads"]),
        num_ranks=int(content["num_ranks"]),
        operations=operations,
        optimizers={
            str(name): OptimizerRate(
                _number(rate, "overhead"), _number(rate, "per_tensor"), _curve(rate["curve"])
            )
            for name, rate in content["optimizers"].items()
        },
        efficiency=_number(content, "efficiency"),
    )
    if not 0 < rates.efficiency <= 1:
        raise ValueError(f"its efficiency is {rates.efficiency}, not above 0 and at most 1")
    return rates


def _op_rate(content: Mapping[str, Any]) -> OpRate:
    flops = content["flops"]
    if flops is None:
        return OpRate(_number(content, "overhead"), _curve(content["curve"]))
    peak = _number(flops, "peak")
    first, second, third = (_number({"side": side}, "side") for side in flops["sides"])
    if peak == 0:
        raise ValueError("a peak is 0")
    return OpRate(
        _number(content, "overhead"), _curve(content["curve"]), FlopRate(peak, (first, second, third))
    )


def _curve(content: Mapping[str, Any]) -> ByteCurve:
    sizes = tuple(_number({"size": size}, "size") for size in content["sizes"])
    seconds = tuple(_number({"seconds": each}, "seconds") for each in content["seconds"])
    is_ascending = list(sizes) == sorted(set(sizes)) and list(seconds) == sorted(seconds)
    if len(sizes) != len(seconds) or not sizes or sizes[0] <= 0 or not is_ascending:
        raise ValueError(f"a curve has sizes {list(sizes)} and seconds {list(seconds)}: both must ascend")
    return ByteCurve(sizes, seconds)


def _number(content: Mapping[str, Any], key: str) -> float:
    number = float(content[key])
    if not 0 <= number < math.inf:
        raise ValueError(f"{key} is {number}, negative or not finite")
    return number
