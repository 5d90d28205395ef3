"""The choice of a job: the library that multiplies on its ranks, agreed on during the rendezvous.

Two libraries round differently, so ranks that must hold the same weights use the same one: every rank sends
the facts that a measurement depends on, rank 0 measures and decides for all.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from colossalai.kernel._installation import onednn_products, why_unavailable
from colossalai.kernel._probe import processor_and_version
from colossalai.kernel._profile_cache import measured_profile
from colossalai.kernel._rule import Profile
from colossalai.logging import get_dist_logger

LEAST_SPEEDUP = 1.15
"""Least speedup for which "auto" selects oneDNN: smaller differences can be the noise of a busy machine."""


@dataclass(frozen=True)
class Facts:
    """Facts that a rank sends to rank 0.

    Attributes:
        option: Its option: "auto", "torch" or "onednn".
        place: Its processor and its version of torch.
        problem: Reason why oneDNN's products are unavailable there; empty if they are available.
    """

    option: str
    place: str
    problem: str = ""


@dataclass(frozen=True)
class Choice:
    """Decision of rank 0 for all ranks.

    Attributes:
        profile: Profile by which oneDNN gets its part of the products. None: all are torch's.
        line: Line for the log; may be empty.
        error: Reason why the job cannot start; empty if it can.
    """

    profile: Profile | None = None
    line: str = ""
    error: str = ""


def facts_of_this_process(option: str, device: torch.device) -> Facts:
    """Return the facts of this rank, without a measurement."""
    return Facts(option, processor_and_version(), why_unavailable(device) or "")


def decide(ranks: Sequence[Facts], measure: Callable[[], Profile] = measured_profile) -> Choice:
    """Return the choice for some ranks, by the option of the first one.

    Args:
        ranks: Facts of each rank.
        measure: Measures both libraries on this machine; called only if the choice depends on it.
    """
    option = ranks[0].option
    if others := sorted({facts.option for facts in ranks} - {option}):
        names = ", ".join(map(repr, others))
        return Choice(error=f"matmul is {option!r} on rank 0 and {names} elsewhere: give all ranks the same")
    if option == "torch":
        return Choice()
    alike = len({facts.place for facts in ranks}) == 1
    problem = next((f"rank {rank}: {facts.problem}" for rank, facts in enumerate(ranks) if facts.problem), "")
    if option == "auto":
        if problem or not alike:
            return Choice()
        profile = measure()
        if profile.speedup < LEAST_SPEEDUP:
            return Choice()
        return Choice(
            profile,
            f"float32 products of matrices by oneDNN, {profile.speedup:.2f} times as fast here as torch's "
            "own (matmul='torch' keeps to those)",
        )
    if problem:
        return Choice(
            error=f"matmul is 'onednn', and oneDNN cannot multiply here ({problem}): leave it at 'auto', "
            "which takes it where it can be had and is faster"
        )
    if not alike:
        return Choice(
            Profile(),
            "matmul is 'onednn' on ranks with different processors or versions of torch: their results "
            "differ in the last bits",
        )
    return Choice(Profile(), "float32 products of matrices by oneDNN, as matmul='onednn' asks")


def auto_product(measure: Callable[[], Profile] = measured_profile) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the product of large float32 matrices in a job of one rank whose `matmul` is "auto"."""
    choice = decide([facts_of_this_process("auto", torch.device("cpu"))], measure)
    return torch.mm if choice.profile is None else _by_onednn


def _by_onednn(a: Tensor, b: Tensor) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], "")
    return product


@contextmanager
def matmul_of_job(
    option: str | None, store: dist.Store, *, rank: int, world_size: int, device: torch.device, verbose: bool
) -> Iterator[None]:
    """Multiply by the library that the ranks of a job agree on, until the context exits.

    Args:
        option: The key `matmul` of the config. None: "auto".
        store: The store of the rendezvous. Every rank writes to it, and all wait for rank 0.
        rank: Global rank of this process.
        world_size: Number of ranks.
        device: Device of this rank.
        verbose: Whether rank 0 logs the choice.

    Raises:
        ValueError: `option` is "onednn" and oneDNN is unavailable, or the ranks have different options.
    """
    facts = facts_of_this_process(option or "auto", device)
    choice = _agreed(facts, store, rank=rank, world_size=world_size)
    if choice.error:
        raise ValueError(choice.error)
    if choice.line and verbose:
        get_dist_logger().info(choice.line, ranks=[0])
    if choice.profile is None:
        yield
        return
    with onednn_products(choice.profile):
        yield


def _agreed(facts: Facts, store: dist.Store, *, rank: int, world_size: int) -> Choice:
    """Return rank 0's choice; the other ranks block until it is written."""
    if world_size == 1:
        return decide([facts])
    store.set(f"matmul/{rank}", json.dumps(asdict(facts)))
    if rank == 0:
        keys = [f"matmul/{other}" for other in range(world_size)]
        store.wait(keys)
        choice = decide([Facts(**json.loads(text)) for text in store.multi_get(keys)])
        store.set("matmul", json.dumps(asdict(choice)))
        return choice
    content = json.loads(store.get("matmul"))  # waits until rank 0 has written it
    profile = content.pop("profile")
    return Choice(None if profile is None else Profile(**profile), **content)
