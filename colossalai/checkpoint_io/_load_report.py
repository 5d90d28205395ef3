"""What a checkpoint holds against what is wanted: nothing missing, nothing left over, all shapes right."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

_SHOWN = 8


@dataclass(frozen=True)
class LoadReport:
    """What did not fit when a checkpoint was loaded.

    Attributes:
        missing: Names that the model has and the checkpoint lacks; they keep their values.
        unexpected: Names that the checkpoint has and the model lacks; they are left out.
        mismatched: Names, each with the reason (shapes, dtypes), that do not fit. Those of another shape keep
            their values, those of another dtype are converted.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()

    @property
    def is_clean(self) -> bool:
        """Whether everything fitted."""
        return not (self.missing or self.unexpected or self.mismatched)

    def describe(self) -> str:
        """Return one line per kind of misfit."""
        kinds = {
            "missing in the checkpoint": self.missing,
            "unexpected in the checkpoint": self.unexpected,
            "of another shape or dtype": self.mismatched,
        }
        return "\n".join(
            f"{len(names)} {kind}: {listed(names, shown=50)}" for kind, names in kinds.items() if names
        )


def listed(names: Iterable[str], *, shown: int = _SHOWN) -> str:
    """Return names as a text that stays readable when there are thousands."""
    names = list(names)
    rest = f" and {len(names) - shown} more" if len(names) > shown else ""
    return (", ".join(names[:shown]) or "nothing") + rest


def common_prefix(stored: Collection[str], wanted: Collection[str]) -> str:
    """Return the prefix that all stored names have and the wanted ones lack, "" if they differ otherwise.

    Checkpoints are saved with a `prefix`, or out of a wrapper that adds one ("module.", "_orig_mod."). The
    names are only read with it removed if that makes the two sets the same, so nothing is guessed.
    """
    if not stored or set(stored) == set(wanted) or len(stored) != len(wanted):
        return ""
    # All n names are longer by the same text.
    extra, rest = divmod(sum(map(len, stored)) - sum(map(len, wanted)), len(stored))
    prefix = next(iter(stored))[: max(extra, 0)]
    return prefix if not rest and {prefix + name for name in wanted} == set(stored) else ""
