"""Installed kernels: which of torch's CPU operators are replaced in this process, and from when to when.

[Note: one installation]
torch keeps the kernels of an operator on a stack, and a kernel that was fetched from there is "invalidated"
when it is taken away. So there is one installation for a process, counted: torch's own kernels are fetched
once, before the first, and the last end takes ours away, in whatever order the ends come.

[Note: ends beside threads]
The dispatcher's table is not guarded against a thread that reads it, without Python's lock, at the moment of
a change. So the last end at first only has our kernels pass everything on to torch's; they leave the table if
no other thread of Python is alive, else at the next end that finds none.
"""

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from colossalai.kernel._products import REPLACED, Products
from colossalai.kernel._rule import Profile

_OWN_THREADS = "colossalai-"  # the names of our own begin so; none of them multiplies matrices


@dataclass
class Installation:
    """What this process keeps of its replaced kernels.

    Attributes:
        count: How many have begun and not ended.
        suspended: How many blocks want torch's kernels meanwhile.
        products: The kernels, with torch's own; made when they are first wanted.
        library: Holds ours in the dispatcher's table; None while they are not there.
    """

    count: int = 0
    suspended: int = 0
    products: Products | None = None
    library: torch.library.Library | None = None
    lock: threading.RLock = field(default_factory=threading.RLock)


installation = Installation()
"""The installation of this process."""


def is_installed() -> bool:
    """Return whether kernels of ours are in the dispatcher's table; they may pass everything on."""
    return installation.library is not None


def why_unavailable(device: torch.device | None = None) -> str | None:
    """Return why oneDNN's products cannot be had here, as a sentence; None where they can.

    Args:
        device: Where a model is to compute; default: the CPU.
    """
    if device is not None and device.type != "cpu":
        return f"its products are for the CPU, and this job computes on {device.type}"
    if not torch.backends.mkldnn.is_available():
        return "this torch was built without oneDNN"
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise") or not hasattr(torch.library, "get_kernel"):
        return f"torch {torch.__version__} does not give access to oneDNN's products"
    return None


@contextmanager
def onednn_products(profile: Profile | None = None) -> Iterator[None]:
    """Let oneDNN multiply float32 matrices on CPU within the block, where their sizes make it the faster one.

    For all threads. Blocks may overlap and end in any order; after the last, everything is torch's. What a
    launched job does follows from the key `matmul` of its config instead.

    Args:
        profile: How fast both libraries are, `measured_profile()` for one of this processor; default: that of
            a processor on which oneDNN is twice as fast. Blocks that overlap have that of the first.

    Raises:
        ValueError: The installed torch was built without oneDNN, or gives no access to it.
    """
    why = why_unavailable()
    if why is not None:
        raise ValueError(f"oneDNN cannot multiply here: {why}")
    _change(count=1, profile=profile)
    try:
        yield
    finally:
        _change(count=-1)


@contextmanager
def torch_products() -> Iterator[None]:
    """Let torch's own kernels multiply within the block, in all threads, whatever a job has chosen."""
    _change(suspended=1)
    try:
        yield
    finally:
        _change(suspended=-1)


def _change(*, count: int = 0, suspended: int = 0, profile: Profile | None = None) -> None:
    """Begin or end a use or a suspension, and let the dispatcher's table follow."""
    with installation.lock:
        installation.count += count
        installation.suspended += suspended
        wanted = installation.count > 0 and not installation.suspended
        if installation.products is None:
            if not installation.count:
                return
            installation.products = Products(_torch_kernels())  # see [Note: one installation]
        products = installation.products
        if count == installation.count == 1:
            products.profile = profile or Profile()
            products.sides.clear()
        products.is_active = wanted
        if wanted and installation.library is None:
            installation.library = _replace(products)
        elif not wanted and installation.library is not None and _is_alone():
            installation.library._destroy()
            installation.library = None


def _torch_kernels() -> dict[str, Callable[..., Any]]:
    """Return torch's own kernels, to be called with the set of dispatch keys first."""
    return {name: torch.library.get_kernel(f"aten::{name}", "CPU").call_boxed for name in REPLACED}


def _replace(products: Products) -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL")
    was_always = torch.is_warn_always_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "overriding a previously registered kernel": that is the purpose
        torch.set_warn_always(
            True
        )  # else this would be torch's one warning, and a user's own replacement silent
        try:
            for name, kernel in products.kernels().items():
                library.impl(name, kernel, "CPU", with_keyset=True)
        finally:
            torch.set_warn_always(was_always)
    return library


def _is_alone() -> bool:
    """Return whether no other thread can be multiplying; see [Note: ends beside threads]."""
    me = threading.current_thread()
    others = (thread for thread in threading.enumerate() if thread is not me)
    return all(thread.name.startswith(_OWN_THREADS) for thread in others)
