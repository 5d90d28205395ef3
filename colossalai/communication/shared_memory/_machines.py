"""Groups over several machines: shared memory within each, gloo from machine to machine.

The first rank of each machine is its *leader*. A reduction runs in shared memory up to the leaders, over gloo
between the leaders, and in shared memory back to the ranks; so do a gather and a broadcast. A machine thus
sends and receives as many bytes as a single rank would. Sums are in the order of ranks on a machine, then of
machines by their first ranks; float16 and bfloat16 sums are rounded once on each machine and once at the end.

H machines, n bytes for each rank, k ranks on this machine:

| call | a leader sends | receives |
| --- | --- | --- |
| all-reduce, H = 2 or small | (H-1) n | (H-1) n |
| all-reduce | 2 (H-1)/H n | 2 (H-1)/H n |
| reduce | n; the leader of the root's machine: 0 | 0; the leader of the root's machine: (H-1) n |
| reduce-scatter | n for each rank of other machines | (H-1) k n |
| all-gather | (H-1) k n | n for each rank of other machines |
| broadcast | gloo's tree over leaders | n |

All-to-all, gather, scatter, sums of sparse tensors and all messages use gloo, between any two ranks.
"""

import ctypes
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from colossalai._aliases import SHARED_MEMORY
from colossalai.communication.shared_memory import _collectives as within
from colossalai.communication.shared_memory._calls import AGREED_SIZE, Call, disagreement
from colossalai.communication.shared_memory._group import SharedMemoryGroup
from colossalai.communication.shared_memory._islands import form_island
from colossalai.communication.shared_memory._membership import Membership, bound_of_machine, open_groups
from colossalai.communication.shared_memory._segment import copy_bytes
from colossalai.communication.shared_memory._slots import Slots
from colossalai.communication.shared_memory._tensors import Bytes, bytes_of
from colossalai.communication.shared_memory._watch import WaitOptions
from colossalai.communication.shared_memory._work import SharedWork
from colossalai.logging import get_dist_logger
from colossalai.monitor import CallLog, DisagreementError

_SMALL = 16 << 10  # up to so many bytes, leaders exchange whole tensors, which saves one wait
_PART = 4 << 20  # bytes of a sum that leaders exchange at once; it bounds their receive buffers


def transport_of(group: dist.ProcessGroup | None = None) -> str:
    """Return the transport of a group: "shared memory", "gloo", or both if it has several machines.

    Args:
        group: The process group. Default: the default group.
    """
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, SharedMemoryGroup):
        return "gloo"
    return "shared memory" if group.collectives is within else "shared memory, and gloo between machines"


def is_within_machine(group: dist.ProcessGroup) -> bool:
    """Return whether all ranks of a group communicate through the memory of one machine."""
    return isinstance(group, SharedMemoryGroup) and group.collectives is within


def empty_in_arena(group: dist.ProcessGroup, numel: int, dtype: torch.dtype) -> torch.Tensor | None:
    """Return a flat tensor that all ranks of a group can read in place; None if that is not possible.

    Args:
        group: Any process group.
        numel: Number of elements.
        dtype: Dtype of the elements.
    """
    return group.empty(numel, dtype) if isinstance(group, SharedMemoryGroup) else None


def stamp_next(group: dist.ProcessGroup, stamp: int) -> None:
    """Have the ranks compare a number in the next collective of a group that this thread issues.

    If the numbers differ, the error names the `meeting` in which each rank issues the collective.

    Args:
        group: A process group of this backend.
        stamp: The number, not 0.
    """
    assert isinstance(group, SharedMemoryGroup), "others compare nothing"
    group.stamps[threading.get_ident()] = stamp


def make_group(options: Any, backend_options: Any = None) -> Any:
    """Make a process group for torch; collective over its ranks.

    Args:
        options: Options of torch: store, rank, size, name and time limit.
        backend_options: The `pg_options` of the caller; without effect unless they are `WaitOptions`.

    Returns:
        A group over shared memory, with gloo between machines; a gloo group if no two ranks share memory. A
        warning has the reason if ranks on the same machine do not.
    """
    rank, num_ranks, timeout = options.group_rank, options.group_size, options.timeout
    if not isinstance(timeout, timedelta):
        timeout = timedelta(seconds=timeout)
    store = dist.PrefixStore(SHARED_MEMORY, options.store)
    island = form_island(
        store,
        rank,
        num_ranks,
        timeout=timeout,
        budget=open_groups.budget(num_ranks),
        arenas=open_groups.arenas,
        arena_size=bound_of_machine() // 2,
    )
    all_ranks = None
    if len(island.machines) > 1 or island.segment is None:
        all_ranks = _gloo("gloo", options.store, rank, num_ranks, timeout)
    if island.segment is None:
        if island.reason:
            get_dist_logger().log_once(
                f"the ranks of this machine talk over gloo, not through its memory: {island.reason}",
                level="WARNING",
            )
        return all_ranks
    ranks = list(options.global_ranks_in_group) or list(range(num_ranks))
    record = CallLog(str(options.group_id))

    def where() -> str:
        return record.where(ranks)

    membership = Membership(
        island,
        ranks=[ranks[index] for index in island.ranks],
        where=where,
        timeout=timeout.total_seconds(),
        options=backend_options if isinstance(backend_options, WaitOptions) else WaitOptions(),
    )
    across: AcrossMachines | None = None
    if all_ranks is not None:
        leaders = None
        if island.index == 0:
            place = island.machines.index(island.ranks)
            leaders = _gloo("leaders", options.store, place, len(island.machines), timeout)
        across = AcrossMachines(
            all_ranks,
            leaders,
            machines=island.machines,
            rank=rank,
            ranks=ranks,
            where=where,
            timeout=membership.slots.timeout,
        )
    return SharedMemoryGroup(
        membership,
        rank=rank,
        ranks=ranks,
        collectives=across or within,
        messages=across or membership.messages,
        store=options.store,
        timeout=timeout,
        record=record,
    )


class AcrossMachines:
    """The collectives and messages of one rank in a group whose ranks run on several machines.

    The collectives have the arguments and meanings of those in `_collectives.py`; `slots` are those of this
    rank's machine.

    Args:
        all_ranks: Gloo group of all ranks.
        leaders: Gloo group of the first ranks of the machines, in their order; None on the other ranks.
        machines: Group ranks of each machine, in the order of the first ones.
        rank: Rank of this process in the group.
        ranks: Global ranks of the group.
        where: Returns the name of the group for messages.
        timeout: Returns the present time limit in seconds.
    """

    def __init__(
        self,
        all_ranks: dist.ProcessGroup,
        leaders: dist.ProcessGroup | None,
        *,
        machines: Sequence[Sequence[int]],
        rank: int,
        ranks: Sequence[int],
        where: Callable[[], str],
        timeout: Callable[[], float],
    ) -> None:
        self._all_ranks = all_ranks
        self._leaders = leaders
        self._machines = machines
        self._own_machine = next(place for place, those in enumerate(machines) if rank in those)
        self._other_machines = [place for place in range(len(machines)) if place != self._own_machine]
        self._num_ranks = len(ranks)
        self._ranks = ranks
        self._where = where
        self._timeout = timeout

    # Through memory to the leader, over gloo to the other leaders, back through memory.

    def barrier(self, slots: Slots, call: Call) -> None:
        """Wait until all ranks have entered the barrier."""
        # All ranks here have entered; then all machines; the broadcast releases the ranks here.
        within.barrier(slots, call)
        self._meet_leaders(call)
        within.broadcast(slots, call._replace(island_root=0), 0, 0)

    def all_reduce(self, slots: Slots, call: Call, tensor: torch.Tensor) -> None:
        """Replace a flat contiguous tensor by the reduction over all ranks."""
        wide, call = _to_reduce(tensor, call), call._replace(island_root=0)
        # Joined by the ranks here: the leader (index 0) has their sum.
        within.reduce(slots, call, wide)
        if self._meet_leaders(call):
            self._reduce_at_leaders(wide, call.reduction)
        # Joined by the ranks here, which wait for their leader.
        within.broadcast(slots, call, *bytes_of(wide))
        if wide is not tensor:
            tensor.copy_(wide)

    def reduce(self, slots: Slots, call: Call, tensor: torch.Tensor) -> None:
        """Replace a flat contiguous tensor by the reduction over all ranks, on the root only."""
        place, _ = self._find(call.root)
        wide, call = _to_reduce(tensor, call), call._replace(island_root=0)
        total = wide.clone()  # the tensors of the other ranks are not modified
        within.reduce(slots, call, total)
        if self._meet_leaders(call):
            if self._own_machine == place:
                self._add_from_leaders(total, call.reduction)
            else:
                # Sends the sum of this machine to the leader of the root's machine.
                self._exchange({place: total}, {})
        if self._own_machine == place:
            # Joined by the ranks of the root's machine only; the others return.
            within.broadcast(slots, call, *bytes_of(total))
            if self._machines[place][slots.rank] == call.root:
                tensor.copy_(total)

    def reduce_scatter(self, slots: Slots, call: Call, output: torch.Tensor, source: torch.Tensor) -> None:
        """Reduce a flat tensor of one section per rank over all ranks; each rank gets its own section."""
        wide, call = _to_reduce(source, call), call._replace(island_root=0)
        total = wide.clone() if wide is source else wide
        within.reduce(slots, call, total)
        sections = total.view(self._num_ranks, -1)
        mine = sections[list(self._machines[self._own_machine])]  # (ranks here, n)
        if self._meet_leaders(call):
            blocks = {place: sections[list(self._machines[place])] for place in self._other_machines}
            found = {place: torch.empty_like(mine) for place in self._other_machines}
            # Joined by all leaders: each sends the sections of every other machine to its leader.
            self._exchange(blocks, found)
            self._combine(mine, found, call.reduction)
        own = output if wide is source else wide.new_empty(output.shape)
        first, size = mine.data_ptr(), own.nbytes
        parts = [first + index * size for index in range(slots.num_ranks)]
        # Joined by the ranks here; the leader has the sections.
        within.scatter(slots, call, own.data_ptr(), parts, size)
        if own is not output:
            output.copy_(own)

    def all_gather(
        self, slots: Slots, call: Call, targets: Sequence[int], source: int, num_bytes: int
    ) -> None:
        """Copy bytes of each rank to all ranks."""
        here = [targets[rank] for rank in self._machines[self._own_machine]]
        # Joined by the ranks here, so every rank has the bytes of its machine.
        within.all_gather(slots, call, here, source, num_bytes)
        call = call._replace(island_root=0)
        blocks = {
            place: _block([targets[rank] for rank in self._machines[place]], num_bytes)
            for place in self._other_machines
        }
        if self._meet_leaders(call):
            own = _block(here, num_bytes)
            for index, address in enumerate(here):
                copy_bytes(own.data_ptr() + index * num_bytes, address, num_bytes)
            # Joined by all leaders: the bytes of a machine are sent once to every other machine.
            self._exchange(dict.fromkeys(self._other_machines, own), blocks)
        for place, block in blocks.items():
            # Joined by the ranks here, in the order of machines on all of them.
            within.broadcast(slots, call, *bytes_of(block))
            for index, rank in enumerate(self._machines[place]):
                copy_bytes(targets[rank], block.data_ptr() + index * num_bytes, num_bytes)

    def broadcast(self, slots: Slots, call: Call, address: int, num_bytes: int) -> None:
        """Replace bytes by the root's bytes."""
        place, index = self._find(call.root)
        if self._own_machine == place:
            within.broadcast(slots, call._replace(island_root=index), address, num_bytes)
        if self._meet_leaders(call):
            assert self._leaders is not None
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor = place, 0
            if num_bytes:
                # Joined by all leaders; the root's leader has the bytes from the first broadcast.
                self._leaders.broadcast([_bytes_at(address, num_bytes)], options).wait()
        if self._own_machine != place:
            within.broadcast(slots, call._replace(island_root=0), address, num_bytes)

    # Over gloo, after the ranks of a machine have agreed on the call.

    def all_to_all(
        self, slots: Slots, call: Call, targets: Sequence[Bytes], sources: Sequence[Bytes]
    ) -> None:
        """Send each rank a message of any size."""
        within.barrier(slots, call)
        outputs = [_bytes_at(*target) for target in targets]
        inputs = torch.cat([_bytes_at(*source) for source in sources])
        found = inputs.new_empty(sum(part.numel() for part in outputs))
        sizes = [part.numel() for part in outputs]
        self._all_ranks.alltoall_base(found, inputs, sizes, [size for _, size in sources]).wait()
        for output, part in zip(outputs, found.split(sizes), strict=True):
            output.copy_(part)

    def gather(self, slots: Slots, call: Call, targets: Sequence[int], source: int, num_bytes: int) -> None:
        """Copy bytes of each rank to the root. `targets` has an address per rank there, else is empty."""
        within.barrier(slots, call)
        options = dist.GatherOptions()
        options.rootRank = call.root
        outputs = [[_bytes_at(target, num_bytes) for target in targets]] if targets else []
        if num_bytes:
            self._all_ranks.gather(outputs, [_bytes_at(source, num_bytes)], options).wait()

    def scatter(self, slots: Slots, call: Call, target: int, sources: Sequence[int], num_bytes: int) -> None:
        """Copy bytes from the root to each rank. `sources` has an address per rank there, else is empty."""
        within.barrier(slots, call)
        options = dist.ScatterOptions()
        options.rootRank = call.root
        inputs = [[_bytes_at(source, num_bytes) for source in sources]] if sources else []
        if num_bytes:
            self._all_ranks.scatter([_bytes_at(target, num_bytes)], inputs, options).wait()

    def all_reduce_sparse(self, slots: Slots, call: Call, tensor: torch.Tensor) -> None:
        """Replace a sparse tensor by the sum over all ranks, in gloo's order."""
        within.barrier(slots, call)
        self._all_ranks.allreduce([tensor]).wait()
        if call.reduction == "AVG":
            tensor.copy_(tensor / self._num_ranks)

    # Messages.

    def send(self, data: torch.Tensor, target: int, tag: int, describe: Callable[[], str]) -> dist.Work:
        """Start to send a contiguous tensor to a rank."""
        return self._all_ranks.send([data], target, tag)

    def receive(
        self,
        data: torch.Tensor,
        source: int | None,
        tag: int,
        describe: Callable[[], str],
        then: Callable[[], object] | None = None,
    ) -> dist.Work:
        """Start to receive a contiguous tensor from a rank, or from any; `then` is called on arrival."""
        if source is None:
            work = self._all_ranks.recv_anysource([data], tag)
        else:
            work = self._all_ranks.recv([data], source, tag)
        return work if then is None else _ReceivingWork(work, data, then)

    # Leaders.

    def _find(self, rank: int) -> tuple[int, int]:
        """Return the machine of a rank of the group, and its index there."""
        place = next(place for place, ranks in enumerate(self._machines) if rank in ranks)
        return place, list(self._machines[place]).index(rank)

    def _meet_leaders(self, call: Call) -> bool:
        """Return whether this rank is a leader; leaders first check that all machines issue the same call.

        Raises:
            DisagreementError: The ranks of another machine issue another call.
            DistBackendError: The leader of another machine does not issue a call in time.
        """
        if self._leaders is None:
            return False
        # Leaders exchange headers before any data: in a mismatched call, a leader would receive foreign data.
        header = call.packed()
        own = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        received = {place: torch.empty_like(own) for place in self._other_machines}
        try:
            self._exchange(dict.fromkeys(self._other_machines, own), received)
        except RuntimeError as error:
            if "timed out" not in str(error).lower():
                raise
            late = [self._ranks[self._machines[place][0]] for place in self._other_machines]
            raise dist.DistBackendError(
                f"not all of the other machines, whose first ranks are {late}, have come to "
                f"{call.described(self._where())} within {self._timeout():g} s"
            ) from error
        headers = {
            self._own_machine: header,
            **{place: bytes(found.tolist()) for place, found in received.items()},
        }
        by_rank = {self._ranks[self._machines[place][0]]: text for place, text in sorted(headers.items())}
        if any(text[:AGREED_SIZE] != header[:AGREED_SIZE] for text in by_rank.values()):
            raise DisagreementError(disagreement(self._where(), by_rank))
        return True

    def _exchange(self, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor]) -> None:
        """Send tensors to other leaders and receive theirs, all at once; empty tensors are not sent."""
        assert self._leaders is not None
        works = [
            self._leaders.send([tensor.contiguous()], place, 0)
            for place, tensor in sends.items()
            if tensor.numel()
        ]
        works += [
            self._leaders.recv([tensor], place, 0) for place, tensor in receives.items() if tensor.numel()
        ]
        limit = timedelta(seconds=self._timeout())
        for work in works:
            # All are posted before the first wait, so no pair of leaders waits for one another.
            work.wait(limit)

    def _reduce_at_leaders(self, tensor: torch.Tensor, reduction: str) -> None:
        """Replace a flat tensor of every leader by the reduction over them."""
        step = max(1, _PART // tensor.element_size())
        for part in tensor.split(step):
            if len(self._machines) == 2 or part.nbytes <= _SMALL:
                self._add_from_leaders(part, reduction, sends=True)
                continue
            sections = list(part.tensor_split(len(self._machines)))
            mine = sections[self._own_machine]
            found = {place: torch.empty_like(mine) for place in self._other_machines}
            self._exchange({place: sections[place] for place in self._other_machines}, found)
            self._combine(mine, found, reduction)
            # The sends of these sections are complete since the last exchange, so they can be overwritten.
            self._exchange(
                dict.fromkeys(self._other_machines, mine),
                {place: sections[place] for place in self._other_machines},
            )

    def _add_from_leaders(self, tensor: torch.Tensor, reduction: str, *, sends: bool = False) -> None:
        """Reduce the tensors of all leaders into this leader's flat tensor."""
        found = {place: torch.empty_like(tensor) for place in self._other_machines}
        self._exchange(dict.fromkeys(self._other_machines, tensor) if sends else {}, found)
        self._combine(tensor, found, reduction)

    def _combine(self, own: torch.Tensor, found: Mapping[int, torch.Tensor], reduction: str) -> None:
        """Reduce the tensors of all leaders, in the order of machines, into this leader's tensor."""
        terms = [found.get(place, own) for place in range(len(self._machines))]
        total = own if self._own_machine == 0 else torch.empty_like(own)
        within.combine(total, terms, "SUM" if reduction == "AVG" else reduction)
        if reduction == "AVG":
            total.div_(self._num_ranks)
        if total is not own:
            own.copy_(total)


class _ReceivingWork(SharedWork):
    """A receive over gloo with a callback.

    Args:
        work: Work of gloo.
        tensor: Tensor of the message.
        then: Called after the arrival of the message.
    """

    def __init__(self, work: dist.Work, tensor: torch.Tensor, then: Callable[[], object]) -> None:
        super().__init__([tensor])
        self._work = work
        self._then = then

    def is_completed(self) -> bool:
        """Whether the receive has ended, with or without an error."""
        if not self._is_done and self._work.is_completed():
            self._finish_waiting(None)
        return self._is_done

    def source_rank(self) -> int:
        """Return the group rank of the sender."""
        return self._work._source_rank()

    _source_rank = source_rank

    def _finish_waiting(self, timeout: float | None) -> None:
        if timeout is None:
            self._work.wait()
        else:
            self._work.wait(timedelta(seconds=timeout))
        self._then()
        self.finish()


def _gloo(name: str, store: dist.Store, rank: int, num_ranks: int, timeout: timedelta) -> dist.ProcessGroup:
    group = dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, num_ranks, timeout)
    return cast("dist.ProcessGroup", group)  # a subclass at run time, not in the stubs


def _to_reduce(tensor: torch.Tensor, call: Call) -> torch.Tensor:
    """Return the tensor to reduce: in float32 for the mean of halves, whose sum could overflow."""
    return tensor.float() if call.reduction == "AVG" and tensor.dtype in within.HALVES else tensor


def _bytes_at(address: int, num_bytes: int) -> torch.Tensor:
    """Return bytes of this process as a flat tensor; the caller keeps them alive."""
    if not num_bytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer((ctypes.c_char * num_bytes).from_address(address), dtype=torch.uint8)


def _block(addresses: Sequence[int], size: int) -> torch.Tensor:
    """Return a buffer for pieces of one size: their target memory if it is contiguous, else a new one."""
    if all(address == addresses[0] + index * size for index, address in enumerate(addresses)):
        return _bytes_at(addresses[0], size * len(addresses))
    return torch.empty(size * len(addresses), dtype=torch.uint8)
