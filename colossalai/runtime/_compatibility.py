"""Table of methods that cannot be combined, with the reasons: the source of the checks and of the documents.

The other pairs are not listed here but tested: `tests/parity/test_pairs.py` trains with every pair that
is not refused; run it when a method is added.
"""

from collections.abc import Iterable

from colossalai.context import SEQUENCE_ATTENTIONS

METHODS = (
    *("data parallelism", "tensor 1d", "tensor 2d", "tensor 2.5d", "tensor 3d", "tensor dap"),
    *(f"sequence {attention}" for attention in SEQUENCE_ATTENTIONS),
    "experts",
    *("pipeline", "ZeRO 1", "ZeRO 2", "ZeRO 3", "Gemini", "mixed precision", "recompute", "accumulation"),
    "fused loss",
)
"""The methods, in the order of the table."""

REFUSED = {
    frozenset({"pipeline", "ZeRO 2"}): (
        "stage 2 shards the gradients as soon as a backward is done, which a pipeline would do once for "
        "every microbatch: use stage 1 with a pipeline"
    ),
    frozenset({"pipeline", "ZeRO 3"}): (
        "stage 3 gathers the parameters for every forward and backward, which a pipeline would do once for "
        "every microbatch: use stage 1 with a pipeline, or stage 3 without one"
    ),
    **{
        frozenset({f"tensor {mode}", "fused loss"}): (
            "the weight of the head is cut along the features as well, and a chunk of logits is summed over "
            "ranks: use tensor mode 1d, or leave fused_loss out"
        )
        for mode in ("2d", "2.5d", "3d")
    },
    **{
        frozenset({f"tensor {mode}", "experts"}): (
            "the features of a token are cut over ranks as well, and a token travels whole: use tensor mode "
            "1d, whose ranks share the experts, or leave expert parallelism out"
        )
        for mode in ("2d", "2.5d", "3d")
    },
    **{
        frozenset({f"sequence {attention}", "experts"}): (
            "the ranks that share a sequence are not replicas with experts of their own: make these ranks "
            "data-parallel, or leave expert parallelism out"
        )
        for attention in SEQUENCE_ATTENTIONS
    },
    **{
        frozenset({"tensor dap", f"sequence {attention}"}): (
            "no model has both axial layers, whose activations are shared, and layers over shared sequences: "
            "leave one of them out"
        )
        for attention in SEQUENCE_ATTENTIONS
    },
    frozenset({"tensor dap", "experts"}): (
        "the ranks that share activations are not replicas with experts of their own: make these ranks "
        "data-parallel, or leave expert parallelism out"
    ),
    frozenset({"tensor dap", "fused loss"}): (
        "the models with a fused loss are language models, which have no axial layers: leave one of them out"
    ),
}
"""For each refused pair, the reason and a replacement."""


def refuse_pairs(methods: Iterable[str]) -> None:
    """Raise if two of the methods cannot be combined.

    Raises:
        ValueError: Two of the methods exclude each other; the message names the first such pair, with the
            reason.
    """
    chosen = set(methods)
    for pair, reason in REFUSED.items():
        if pair <= chosen:
            first, second = sorted(pair, key=METHODS.index)
            raise ValueError(f"{first} and {second} cannot be combined: {reason}")


def pairs_table() -> list[str]:
    """Return the table of pairs as lines of Markdown; its numbers refer to the reasons after it."""
    reasons = list(dict.fromkeys(REFUSED.values()))
    marks = {pair: f"no ({reasons.index(reason) + 1})" for pair, reason in REFUSED.items()}
    lines = ["| | " + " | ".join(METHODS) + " |", "| --- " * (len(METHODS) + 1) + "|"]
    for row in METHODS:
        lines.append(f"| {row} | " + " | ".join(_mark(row, other, marks) for other in METHODS) + " |")
    return [*lines, "", *(f"{number}. {reason}." for number, reason in enumerate(reasons, start=1))]


def _mark(row: str, column: str, marks: dict[frozenset[str], str]) -> str:
    if are_of_one_kind(row, column):
        return ""
    return marks.get(frozenset({row, column}), "yes")


def are_of_one_kind(first: str, second: str) -> bool:
    """Return whether two methods are alternatives, of which a plan has one at a time."""
    both = {first, second}
    kinds = ("tensor", "sequence", ("ZeRO", "Gemini"))
    return first == second or any(all(method.startswith(kind) for method in both) for kind in kinds)
