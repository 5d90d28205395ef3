"""The suite by oneDNN: `TESTS_MATMUL=onednn pytest ...` has its float32 products of any size from there.

In pytest's own process and in the ranks of `run_ranks`, launched or not. The rule is off, as the products of
tests are small; operands that are torch's for another reason (their strides, a bias, a type) stay torch's.
"""

from __future__ import annotations

import os

from colossalai.kernel import Profile, _products, _rule, onednn_products


def force_products() -> None:
    """Replace the kernels for as long as this process lives, if the environment asks for it."""
    if os.environ.get("TESTS_MATMUL") == "onednn":
        _products.LEAST_MULTIPLICATIONS = 1
        _products._MOST_SIDES = 1 << 20
        _rule._LEAST_SIDE = 2
        block = onednn_products(Profile(call_us=0.0, turn_ns=0.0))
        block.__enter__()
        _kept.append(block)


_kept: list[object] = []
