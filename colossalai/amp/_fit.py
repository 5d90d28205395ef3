"""Which precision goes with which way to hold the parameters."""

from colossalai.amp._precision import Precision


def refuse_misfit(precision: Precision, *, shards_parameters: bool) -> None:
    """Raise if a precision does not go with sharded parameters.

    Args:
        precision: The precision.
        shards_parameters: Whether a rank holds slices of the parameters only.

    Raises:
        ValueError: It does not.
    """
    if shards_parameters and precision.has_masters:
        raise ValueError(
            "float32 masters of the weights and sharded parameters cannot be combined: each rank's slice is "
            "its master already; use the precision 'fp16' or 'bf16', or keep the parameters whole"
        )
