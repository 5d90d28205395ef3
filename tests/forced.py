"""The suite by another choice than the machine's own, in pytest's process and in the ranks of `run_ranks`.

`TESTS_MATMUL=onednn pytest ...` has float32 products of any size from there. The rule is off, as the products
of tests are small; operands that are torch's for another reason (strides, a bias, a type) stay torch's.

`TESTS_BACKEND=gloo pytest ...` has jobs that leave the backend open communicate by it.
"""

from __future__ import annotations

import os

import torch

from colossalai.context import _launch
from colossalai.kernel import Profile, _products, _rule, onednn_products


def force_choices() -> None:
    """Choose what the environment says, for as long as this process lives."""
    if os.environ.get("TESTS_MATMUL") == "onednn":
        _products.LEAST_MULTIPLICATIONS = 1
        _products._MOST_SIDES = 1 << 20
        _rule._LEAST_SIDE = 2
        block = onednn_products(Profile(call_us=0.0, turn_ns=0.0))
        block.__enter__()
        _kept.append(block)
    if forced := os.environ.get("TESTS_BACKEND"):
        choose = _launch.chosen_backend

        def chosen(requested: str, device: torch.device) -> str:
            return forced if requested in ("nccl", "auto") else choose(requested, device)

        _launch.chosen_backend = chosen


_kept: list[object] = []
