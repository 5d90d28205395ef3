"""Documented names that have not landed: one table, which says what to use instead.

`from colossalai.tensor import ColoTensor` and `import colossalai.chat` ask the import finder (`_aliases.py`),
`colossalai.nn.MoeLoss` asks `__getattr__` of the package: both answer with a sentence of this table. Whatever
lands loses its place here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Feature:
    """Something that the documents describe and that is not there yet.

    Attributes:
        title: What it is.
        instead: What to use until then.
        modules: Modules of it, none of which exists.
        names: Names of it in modules that do exist, separated by spaces.
    """

    title: str
    instead: str
    modules: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.title} has not landed; {self.instead}"


FEATURES: tuple[Feature, ...] = (
    Feature(
        title="Mixed precision in 8 bits (fp8)",
        instead="take 'bf16', or 'bf16_master' to hold the model in 16 bits",
        names={"colossalai.booster.mixed_precision": "FP8MixedPrecision"},
    ),
)
"""Everything of the documents that is missing."""


def _sentences() -> dict[str, str]:
    found = {}
    for feature in FEATURES:
        names = [f"{module}.{name}" for module, names in feature.names.items() for name in names.split()]
        for name in (*feature.modules, *names):
            found[name] = f"{name} is not there yet. {feature}"
    return found


NOT_LANDED: Mapping[str, str] = _sentences()
"""From the full name of a module, or of something in a module, to what is to be said of it."""

FP8 = FEATURES[-1]
"""What `mixed_precision="fp8"` asks for."""


def refuse_name(package: str, name: str) -> None:
    """Refuse a name that a package does not have: what its `__getattr__` (PEP 562) does.

    Args:
        package: The package's `__name__`.
        name: What is asked for.

    Raises:
        AttributeError: `package` has no attribute `name` (raised on every call); the message says what to use
            instead of a name that has not landed.
    """
    plain = f"module {package!r} has no attribute {name!r}"
    raise AttributeError(NOT_LANDED.get(f"{package}.{name}", plain), name=name)
