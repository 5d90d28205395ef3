"""What the configs of all transformers have to satisfy."""

from collections.abc import Iterable
from typing import Any


def check_shape(config: Any, *, sizes: Iterable[str], rates: Iterable[str]) -> None:
    """Require that the sizes of a config are positive, its rates below 1, and its heads of one size.

    Args:
        config: It has `hidden_size` and `num_attention_heads`.
        sizes: Names of the fields that are sizes.
        rates: Names of the fields that are dropout rates.

    Raises:
        ValueError: They are not.
    """
    for name in sizes:
        if getattr(config, name) < 1:
            raise ValueError(f"{name}={getattr(config, name)}: a positive number is needed")
    if config.hidden_size % config.num_attention_heads != 0:
        raise ValueError(
            f"hidden_size={config.hidden_size} does not divide into {config.num_attention_heads} heads: "
            "choose num_attention_heads that divides hidden_size"
        )
    for name in rates:
        if not 0.0 <= getattr(config, name) < 1.0:
            raise ValueError(
                f"{name}={getattr(config, name)}: a rate from 0 up to, not including, 1 is needed"
            )
