"""Installed kernels: the replacement of torch's CPU operators in this process, and its lifetime.

[Note: one installation]
torch keeps the kernels of an operator on a stack, and a kernel that was fetched from there is "invalidated"
when it is removed. So a process has one reference-counted installation: torch's own kernels are fetched once,
before the first, and the last end removes ours, in any order of the ends.

[Note: ends with other threads]
The dispatcher's table is not protected against a change while a thread reads it without Python's lock. So the
last end at first only makes our kernels pass all calls on to torch's; they leave the table if no other thread
of Python is alive, otherwise at the next end without one.
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

_OWN_THREADS = "colossalai-"  # prefix of the names of our threads; none of them multiplies matrices


@dataclass
class Installation:
    """State of the replaced kernels of this process.

    Attributes:
        count: Number of active installations.
        suspended: Number of active blocks that require torch's kernels.
        products: The kernels, with torch's own; created on first use.
        library: Registration of our kernels in the dispatcher's table. None: they are not registered.
    """

    count: int = 0
    suspended: int = 0
    products: Products | None = None
    library: torch.library.Library | None = None
    lock: threading.RLock = field(default_factory=threading.RLock)


installation = Installation()
"""The installation of this process."""


def is_installed() -> bool:
    """Return whether our kernels are in the dispatcher's table; they may pass all calls on."""
    return installation.library is not None


def why_unavailable(device: torch.device | None = None) -> str | None:
    """Return the reason why oneDNN's products are unavailable, as a sentence; None if they are available.

    Args:
        device: Device of the model. Default: the CPU.
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
    """Multiply large float32 matrices on CPU by oneDNN within the block, for sizes where it is faster.

    This applies to all threads. Blocks can overlap and end in any order; after the last, all products are
    torch's. In a launched job, use the key `matmul` of its config instead.

    Args:
        profile: Speed of both libraries, from `measured_profile()` for this processor. Default: a processor
            on which oneDNN is twice as fast. Overlapping blocks use the profile of the first.

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
    """Multiply by torch's own kernels within the block, in all threads, overriding the choice of a job."""
    _change(suspended=1)
    try:
        yield
    finally:
        _change(suspended=-1)


def _change(*, count: int = 0, suspended: int = 0, profile: Profile | None = None) -> None:
    """Begin or end a use or a suspension, and update the dispatcher's table."""
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
    """Return torch's own kernels, which take the set of dispatch keys as first argument."""
    return {name: torch.library.get_kernel(f"aten::{name}", "CPU").call_boxed for name in REPLACED}


def _replace(products: Products) -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL")
    was_always = torch.is_warn_always_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "overriding a previously registered kernel": that is the purpose
        torch.set_warn_always(
            True
        )  # otherwise this would consume torch's only warning, and a user's own replacement would be silent
        try:
            for name, kernel in products.kernels().items():
                library.impl(name, kernel, "CPU", with_keyset=True)
        finally:
            torch.set_warn_always(was_always)
    return library


def _is_alone() -> bool:
    """Return whether no other thread can be multiplying; see [Note: ends with other threads]."""
    me = threading.current_thread()
    others = (thread for thread in threading.enumerate() if thread is not me)
    return all(thread.name.startswith(_OWN_THREADS) for thread in others)
