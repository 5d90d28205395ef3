"""Table of the precisions that each plugin and mode supports, derived from the checks of the code."""

from collections.abc import Mapping

from colossalai.amp import Precision, refuse_misfit
from colossalai.booster.mixed_precision._mixed_precision import (
    MixedPrecision,
    apex_mixed_precision,
    mixed_precision_factory,
)
from colossalai.context import SEQUENCE_ATTENTIONS
from colossalai.nn.parallel import Bucketed, DataMethod, FullySharded, Replicated
from colossalai.zero import ZeroReplicas

PRECISIONS: Mapping[str, MixedPrecision] = {
    **{name: mixed_precision_factory(name) for name in ("fp32", "bf16", "bf16_master", "fp16", "fp16_naive")},
    **{f"fp16_apex {level}": apex_mixed_precision()(level) for level in ("O0", "O1", "O2", "O3")},
}
"""The rows."""

METHODS: Mapping[str, DataMethod] = {
    "TorchDDPPlugin": Replicated(),
    "LowLevelZeroPlugin 1": ZeroReplicas(stage=1),
    "LowLevelZeroPlugin 2": ZeroReplicas(stage=2),
    "TorchFSDPPlugin": FullySharded(),
    **{f"tensor {mode}": Replicated() for mode in ("1d", "2d", "2.5d", "3d", "dap")},
    **{f"sequence {attention}": Replicated() for attention in SEQUENCE_ATTENTIONS},
    "pipeline": Bucketed(),
}
"""The columns, with their data methods; the modes are those of HybridParallelPlugin."""


def precision_table() -> list[str]:
    """Return the table as lines of Markdown; its numbers refer to the reasons after it."""
    lines = ["| | " + " | ".join(METHODS) + " |", "| --- " * (len(METHODS) + 1) + "|"]
    reasons: list[str] = []
    for name, choice in PRECISIONS.items():
        marks = [_mark(choice.precision(), method, reasons) for method in METHODS.values()]
        lines.append(f"| {name} | " + " | ".join(marks) + " |")
    return [*lines, "", *(f"{number}. {reason}." for number, reason in enumerate(reasons, start=1))]


def _mark(precision: Precision, method: DataMethod, reasons: list[str]) -> str:
    try:
        refuse_misfit(precision, shards_parameters=method.shards_parameters)
    except ValueError as error:
        if str(error) not in reasons:
            reasons.append(str(error))
        return f"no ({reasons.index(str(error)) + 1})"
    return "yes"
