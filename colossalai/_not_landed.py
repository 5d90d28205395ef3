"""Documented names that do not exist yet: one table, with a replacement for each.

Imports such as `from colossalai.tensor import ColoTensor` reach the import finder (`_aliases.py`), attributes
such as `colossalai.nn.MoeLoss` the package's `__getattr__`: both raise an error from this table.
A name that is implemented is removed here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Feature:
    """A documented feature that does not exist yet.

    Attributes:
        title: Title of the feature.
        instead: Replacement until then.
        modules: Modules of it, none of which exists.
        names: Names of it in existing modules, separated by spaces.
    """

    title: str
    instead: str
    modules: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.title} has not landed; {self.instead}"


FEATURES: tuple[Feature, ...] = (
    Feature(
        title="The base class of optimizers in wrappers",
        instead="take the optimizer that Booster.boost or colossalai.initialize returns, an OptimizerWrapper "
        "of colossalai.interface",
        names={"colossalai.nn.optimizer": "ColossalaiOptimizer"},
    ),
    Feature(
        title="Data parallelism as a wrapper for a process group",
        instead="take Booster(plugin=TorchDDPPlugin())",
        names={"colossalai.nn.parallel": "ColoDDP", "colossalai.nn.parallel.data_parallel": "ColoDDP"},
    ),
    Feature(
        title="A memory tracer of its own",
        instead="leave it out: Gemini records the first iteration, and record_timeline of "
        "colossalai.zero.gemini returns the record",
        modules=("colossalai.zero.gemini.memory_tracer",),
    ),
    Feature(
        title="This spelling of lazy initialization",
        instead="take LazyInitContext of colossalai.lazy",
        modules=("colossalai.zero.lazy_init_context",),
    ),
    Feature(
        title="The profiler of latency and bandwidth",
        instead="call profile() of a colossalai.device.DeviceMesh, which measures both along each axis",
        names={"colossalai.device": "AlphaBetaProfiler"},
    ),
    Feature(
        title="The enumeration of collectives of a conversion",
        instead="read the moves that ShapeConsistencyManager.shape_consistency returns",
        names={"colossalai.tensor.shape_consistency": "CollectiveCommPattern"},
    ),
    Feature(
        title="The older module of checkpoints",
        instead="take colossalai.checkpoint_io, or save_checkpoint and load_checkpoint of colossalai.utils",
        modules=("colossalai.utils.checkpoint_io",),
    ),
    Feature(
        title="The applier of kernels to lists of tensors",
        instead="take FusedAdam, FusedSGD or FusedLAMB of colossalai.nn.optimizer, and clip_grad_norm_fp32",
        names={"colossalai.utils": "multi_tensor_applier"},
    ),
    Feature(
        title="Mixed precision in 8 bits (fp8)",
        instead="take 'bf16', or 'bf16_master' to hold the model in 16 bits",
        names={"colossalai.booster.mixed_precision": "FP8MixedPrecision"},
    ),
)
"""All documented features that are missing."""


def _sentences() -> dict[str, str]:
    found = {}
    for feature in FEATURES:
        names = [f"{module}.{name}" for module, names in feature.names.items() for name in names.split()]
        for name in (*feature.modules, *names):
            found[name] = f"{name} is not there yet. {feature}"
    return found


NOT_LANDED: Mapping[str, str] = _sentences()
"""From the full name of a module, or of a name in a module, to its error message."""

FP8 = FEATURES[-1]
"""The feature behind `mixed_precision="fp8"`."""


def refuse_name(package: str, name: str) -> None:
    """Raise the error of a package's `__getattr__` (PEP 562) for a name that it lacks.

    Args:
        package: The package's `__name__`.
        name: Name of the attribute.

    Raises:
        AttributeError: `package` has no attribute `name` (raised on every call); for a documented name that
            does not exist yet, the message has a replacement.
    """
    plain = f"module {package!r} has no attribute {name!r}"
    raise AttributeError(NOT_LANDED.get(f"{package}.{name}", plain), name=name)
