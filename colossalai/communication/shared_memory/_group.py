"""Process group over shared memory: torch's interface of a group in Python."""

import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from operator import index
from typing import Any

import torch
import torch.distributed as dist

from colossalai._aliases import SHARED_MEMORY
from colossalai.communication.shared_memory._calls import REDUCTIONS, Call
from colossalai.communication.shared_memory._collectives import check_reduction
from colossalai.communication.shared_memory._membership import Membership
from colossalai.communication.shared_memory._tensors import (
    Bytes,
    StagedTensors,
    bytes_of,
    check_dtypes,
    check_list,
    check_lists_of_root,
    check_one,
    check_pairs,
    check_share,
    check_sparse,
    flat,
    split_rows,
    without_dispatch_modes,
)
from colossalai.communication.shared_memory._work import EndedWork
from colossalai.monitor import CallLog, current_meeting

_MOST_TAG = 2**31 - 1  # as of torch's own groups
_REDUCTION_NAMES = {getattr(dist.ReduceOp.RedOpType, name): name for name in REDUCTIONS if name}


class SharedMemoryGroup(dist.ProcessGroup):
    """A process group of ranks that share a machine, or several.

    Args:
        membership: This rank's share of the memory of its machine.
        rank: Rank of this process in the group.
        ranks: Global ranks of the group.
        collectives: The module `_collectives`, or an object with the same functions.
        messages: A `Messages`, or an object with its `send` and `receive`.
        store: Store of the group.
        timeout: Time limit of the waits for other ranks.
        record: Log of its collectives for the watchdog.

    Attributes:
        collectives: See above.
        stamps: By thread, the stamp of its next collective; see `stamp_next`.
    """

    def __init__(
        self,
        membership: Membership,
        *,
        rank: int,
        ranks: Sequence[int],
        collectives: Any,
        messages: Any,
        store: dist.Store,
        timeout: timedelta,
        record: CallLog,
    ) -> None:
        super().__init__(rank, len(ranks))  # type: ignore[call-arg]
        self.collectives = collectives
        self._messages = messages
        self._membership = membership
        self._ranks = tuple(ranks)
        self._rank, self._num_ranks = (
            rank,
            len(ranks),
        )  # torch's `rank()` and `size()` look for overrides first
        self._slots = membership.slots
        self._store = store
        self._timeout = timeout
        self._name = self._description = ""
        self._record = record
        self.stamps: dict[int, int] = {}
        self._closing = weakref.finalize(self, membership.close)
        self._closing.atexit = False  # `OpenGroups` closes it at exit

    # Identity of the group.

    def getBackendName(self) -> str:
        """Return the name of the backend."""
        return SHARED_MEMORY

    def getGroupName(self) -> str:
        """Return the name of the group."""
        return self._name

    def getGroupDesc(self) -> str:
        """Return torch's description of the group."""
        return self._description

    def setGroupName(self, name: str) -> None:
        """Set the name of the group."""
        self._name = name

    def setGroupDesc(self, description: str) -> None:
        """Set torch's description of the group."""
        self._description = description

    _set_group_name = setGroupName
    _set_group_desc = setGroupDesc
    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def get_group_store(self) -> dist.Store:
        """Return the store of the group."""
        return self._store

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Return a flat tensor that the other ranks can read in place; None if there is no room for it."""
        return self._membership.empty(numel, dtype)

    def shutdown(self) -> None:
        """End the group in this process."""
        self._closing()

    abort = shutdown

    # Collectives. Their arguments are checked before any data is sent.

    def barrier(self, opts: Any = None) -> dist.Work:
        """Wait for all ranks."""
        return self._issue("barrier", lambda call: self.collectives.barrier(self._slots, call), opts)

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        """Replace the single tensor of a list by its reduction over the ranks."""
        check_one("all_reduce", tensors, "all_reduce_coalesced")
        return self._all_reduce(tensors, opts)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        """Replace tensors by their reductions over the ranks."""
        return self._all_reduce(tensors, opts)

    def reduce(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        """Reduce the single tensor of a list over the ranks, on the root."""
        check_one("reduce", tensors)
        reduction, root, staged = _reduction(opts), self._root("reduce", opts), StagedTensors()
        part = flat(staged.in_out(_reducible(tensors[0], reduction)))

        def run(call: Call) -> None:
            self.collectives.reduce(self._slots, _of(call, part, reduction=reduction, root=root), part)
            staged.copy_back()

        return self._issue("reduce", run, opts, tensors)

    def reduce_scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None
    ) -> dist.Work:
        """Reduce a list of tensors over the ranks; each rank gets the tensor of its index."""
        check_pairs("reduce_scatter", outputs, inputs)
        for output, listed in zip(outputs, inputs, strict=True):
            check_list("reduce_scatter", listed, output, self._num_ranks)
        joined = [torch.cat([part.reshape(-1) for part in listed]) for listed in inputs]
        return self._scatter_sums(outputs, joined, opts)

    def reduce_scatter_single(
        self, output: torch.Tensor, source: torch.Tensor, opts: Any = None
    ) -> dist.Work:
        """Reduce a tensor over the ranks; each rank gets its own section."""
        return self._scatter_sums([output], [source], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        """Reduce tensors over the ranks; each rank gets its own section of every tensor."""
        return self._scatter_sums(outputs, inputs, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        """Gather the tensors of all ranks in lists, one list per tensor."""
        check_pairs("all_gather", outputs, inputs)
        return self._gather_lists("all_gather", outputs, inputs, opts)

    def allgather_coalesced(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        """Gather the tensors of all ranks in lists, one list per rank.

        Raises:
            ValueError: `outputs` are not one list for each rank, or a list lacks an output for an input.
        """
        name = "all_gather_coalesced"
        if len(outputs) != self._num_ranks:
            raise ValueError(f"{name}: {len(outputs)} lists of outputs for {self._num_ranks} ranks")
        if any(len(listed) != len(inputs) for listed in outputs):
            raise ValueError(
                f"{name}: lists of {[len(listed) for listed in outputs]} outputs for {len(inputs)} inputs"
            )
        by_tensor = [[listed[place] for listed in outputs] for place in range(len(inputs))]
        return self._gather_lists(name, by_tensor, inputs, opts)

    def all_gather_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> dist.Work:
        """Gather the tensors of all ranks in one tensor."""
        return self._gather_singles([output], [source], opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        """Gather several tensors of all ranks, each in one tensor."""
        return self._gather_singles(outputs, inputs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def alltoall(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        """Send a tensor to each rank, and receive one from each.

        Raises:
            ValueError: A list has more or fewer tensors than there are ranks, the dtypes differ, or this
                rank's message to itself has another size than its output.
        """
        for name, listed in (("output", outputs), ("input", inputs)):
            if len(listed) != self._num_ranks:
                raise ValueError(f"all_to_all has {len(listed)} {name} tensors for {self._num_ranks} ranks")
        check_dtypes("all_to_all", *outputs, *inputs)
        staged = StagedTensors()
        given = [staged.source(tensor) for tensor in inputs]
        targets = [bytes_of(target) for target in staged.targets(outputs, given)]
        return self._exchange(
            "all_to_all", targets, list(map(bytes_of, given)), inputs[0].dtype, staged, opts, outputs
        )

    def all_to_all_single(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        opts: Any = None,
    ) -> dist.Work:
        """Send rows of a tensor to each rank, and receive rows from each.

        Args:
            output: Tensor for the received rows, in the order of their source ranks.
            source: Rows to send, in the order of their target ranks.
            output_sizes: Number of rows from each rank; empty: the same number from each.
            input_sizes: Number of rows for each rank; empty: the same number for each.
            opts: Options of torch.

        Raises:
            ValueError: Sizes do not fit a tensor, the dtypes differ, or this rank's message to itself has
                another size than its output.
        """
        check_dtypes("all_to_all_single", output, source)
        staged = StagedTensors()
        target = staged.target(output)
        given = staged.separate_source(source, target)
        targets = split_rows("output", target, output_sizes, self._num_ranks)
        sources = split_rows("input", given, input_sizes, self._num_ranks)
        return self._exchange("all_to_all_single", targets, sources, source.dtype, staged, opts, [output])

    alltoall_base = all_to_all_single

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        """Replace the single tensor of a list by the root's tensor."""
        check_one("broadcast", tensors)
        root, staged = self._root("broadcast", opts), StagedTensors()
        part = staged.in_out(tensors[0])

        def run(call: Call) -> None:
            self.collectives.broadcast(self._slots, _of(call, part, root=root), *bytes_of(part))
            staged.copy_back()

        return self._issue("broadcast", run, opts, staged=staged, tensors=tensors)

    def gather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        """Gather the tensors of all ranks on the root."""
        check_one("gather", inputs)
        root, staged = self._root("gather", opts), StagedTensors()
        check_lists_of_root("gather", outputs, self._rank == root)
        source, targets = staged.source(inputs[0]), []
        if self._rank == root:
            check_list("gather", outputs[0], inputs[0], self._num_ranks)
            targets = self._targets(staged, outputs[0], source)

        def run(call: Call) -> None:
            self.collectives.gather(self._slots, _of(call, source, root=root), targets, *bytes_of(source))
            staged.copy_back()

        return self._issue("gather", run, opts, staged=staged, tensors=outputs[0] if outputs else [])

    def scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None
    ) -> dist.Work:
        """Send each rank a tensor of the root."""
        check_one("scatter", outputs)
        root, staged = self._root("scatter", opts), StagedTensors()
        check_lists_of_root("scatter", inputs, self._rank == root)
        given: list[torch.Tensor] = []
        if self._rank == root:
            check_list("scatter", inputs[0], outputs[0], self._num_ranks)
            given = [staged.source(tensor) for tensor in inputs[0]]
        sources = [source.data_ptr() for source in given]
        is_own = root == self._rank and outputs[0].data_ptr() == sources[root]
        [target] = staged.targets(outputs, () if is_own else given)

        def run(call: Call) -> None:
            address, num_bytes = bytes_of(target)
            self.collectives.scatter(self._slots, _of(call, target, root=root), address, sources, num_bytes)
            staged.copy_back()

        return self._issue("scatter", run, opts, staged=staged, tensors=outputs)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks with a separate time limit; the error names the missing ranks.

        Args:
            timeout: Time limit. Default: the group's time limit.
            wait_all_ranks: Accepted for torch's signature: the error always names all missing ranks.

        Raises:
            DistBackendError: A rank has not entered the barrier in time.
        """
        with self._slots.limited(timeout):
            self.barrier(_Blocking()).wait()

    # Messages.

    def send(self, tensors: list[torch.Tensor], target: int, tag: int = 0) -> dist.Work:
        """Start to send the single tensor of a list to a rank.

        Raises:
            ValueError: `target` is this rank, or not one of the group; `tag` is negative or too large.
        """
        self._check_process()
        check_one("send", tensors)
        target, tag = self._peer("send: the destination", target), _tag("send", tag)

        def describe() -> str:
            return f"a message to rank {self._ranks[target]} {self._membership.watch.where()}"

        def send() -> dist.Work:
            work: dist.Work = self._messages.send(StagedTensors().source(tensors[0]), target, tag, describe)
            return work

        return without_dispatch_modes(send)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int = 0) -> dist.Work:
        """Start to receive the single tensor of a list from a rank.

        Raises:
            ValueError: `source` is this rank, or not one of the group; `tag` is negative or too large.
        """
        return self._receive(tensors, self._peer("recv: the source", source), tag)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> dist.Work:
        """Start to receive the single tensor of a list from any rank.

        Raises:
            ValueError: The group has no other rank; `tag` is negative or too large.
        """
        if self._num_ranks == 1:
            raise ValueError("recv: this rank is the only one of its group, and none can send to it")
        return self._receive(tensors, None, tag)

    # Inside.

    def _root(self, operation: str, opts: Any) -> int:
        root: int = opts.rootRank
        self._check_rank(f"{operation}: the root", root)
        return root

    def _peer(self, role: str, rank: int) -> int:
        rank = index(rank)
        self._check_rank(role, rank)
        if rank == self._rank:
            raise ValueError(f"{role}, rank {rank}, is this rank itself: it must be another one of the group")
        return rank

    def _check_rank(self, role: str, rank: int) -> None:
        if not 0 <= rank < self._num_ranks:
            raise ValueError(
                f"{role}, rank {rank} is not a rank of the group: it has ranks 0 to {self._num_ranks - 1}"
            )

    def _targets(
        self, staged: StagedTensors, outputs: Sequence[torch.Tensor], source: torch.Tensor
    ) -> list[int]:
        """Return the target addresses by source rank; this rank's own can be the source itself."""
        is_own = outputs[self._rank].data_ptr() == source.data_ptr()
        return [target.data_ptr() for target in staged.targets(outputs, () if is_own else (source,))]

    def _receive(self, tensors: list[torch.Tensor], source: int | None, tag: int) -> dist.Work:
        self._check_process()
        check_one("recv", tensors)
        tag, staged = _tag("recv", tag), StagedTensors()
        target = staged.target(tensors[0])

        def describe() -> str:
            whom = "any rank" if source is None else f"rank {self._ranks[source]}"
            return f"a message from {whom} {self._membership.watch.where()}"

        def receive() -> dist.Work:
            then = staged.copy_back if staged.has_copies else None
            work: dist.Work = self._messages.receive(target, source, tag, describe, then)
            return work

        return without_dispatch_modes(receive)

    def _all_reduce(self, tensors: list[torch.Tensor], opts: Any) -> dist.Work:
        if any(tensor.layout is torch.sparse_coo for tensor in tensors):
            return self._sum_sparse(tensors, opts)
        reduction, staged = _reduction(opts), StagedTensors()
        for tensor in tensors:
            check_reduction(reduction, tensor.dtype)
        parts = [flat(tensor) for tensor in staged.all_in_out(tensors)]

        def run(call: Call) -> None:
            for part in parts:
                self.collectives.all_reduce(self._slots, _of(call, part, reduction=reduction), part)
            staged.copy_back()

        return self._issue("all_reduce", run, opts, tensors)

    def _sum_sparse(self, tensors: list[torch.Tensor], opts: Any) -> dist.Work:
        reduction = _reduction(opts)
        for tensor in tensors:
            check_sparse(reduction, _reducible(tensor, reduction))

        def run(call: Call) -> None:
            # The caller keeps the entries, which are new tensors: they must not be inference tensors.
            with torch.inference_mode(False), torch.no_grad():
                for tensor in tensors:
                    mine = _of(call, tensor, reduction=reduction)
                    self.collectives.all_reduce_sparse(self._slots, mine, tensor)

        return self._issue("all_reduce_sparse", run, opts, tensors)

    # Shared bodies of torch's methods. Those call no other public method, which can be wrapped.

    def _scatter_sums(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any) -> dist.Work:
        check_pairs("reduce_scatter", outputs, inputs)
        reduction, staged = _reduction(opts), StagedTensors()
        pairs = []
        for output, tensor in zip(outputs, inputs, strict=True):
            check_share("reduce_scatter", tensor, output, self._num_ranks)
            source = staged.source(tensor)
            target = staged.separate_target(staged.target(_reducible(output, reduction)), source, self._rank)
            pairs.append((flat(target), flat(source)))

        def run(call: Call) -> None:
            for target, source in pairs:
                self.collectives.reduce_scatter(
                    self._slots, _of(call, target, reduction=reduction), target, source
                )
            staged.copy_back()

        return self._issue("reduce_scatter", run, opts, outputs)

    def _gather_singles(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any
    ) -> dist.Work:
        check_pairs("all_gather", outputs, inputs)
        staged = StagedTensors()
        pairs = []
        for output, tensor in zip(outputs, inputs, strict=True):
            check_share("all_gather", output, tensor, self._num_ranks)
            target, share = staged.target(output), tensor.nbytes
            first = target.data_ptr()
            source = staged.separate_source(tensor, target, own=first + self._rank * share)
            pairs.append(([first + rank * share for rank in range(self._num_ranks)], source))
        return self._gather_all(pairs, staged, opts, outputs)

    def _gather_lists(
        self, operation: str, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any
    ) -> dist.Work:
        staged, pairs = StagedTensors(), []
        for listed, tensor in zip(outputs, inputs, strict=True):
            check_list(operation, listed, tensor, self._num_ranks)
            source = staged.source(tensor)
            pairs.append((self._targets(staged, listed, source), source))
        return self._gather_all(pairs, staged, opts, [output for listed in outputs for output in listed])

    def _gather_all(
        self,
        pairs: Sequence[tuple[Sequence[int], torch.Tensor]],
        staged: StagedTensors,
        opts: Any,
        results: Sequence[torch.Tensor],
    ) -> dist.Work:
        def run(call: Call) -> None:
            for targets, source in pairs:
                self.collectives.all_gather(self._slots, _of(call, source), targets, *bytes_of(source))
            staged.copy_back()

        return self._issue("all_gather", run, opts, staged=staged, tensors=results)

    def _exchange(
        self,
        operation: str,
        targets: Sequence[Bytes],
        sources: Sequence[Bytes],
        dtype: torch.dtype,
        staged: StagedTensors,
        opts: Any,
        results: Sequence[torch.Tensor],
    ) -> dist.Work:
        given, room = sources[self._rank][1], targets[self._rank][1]
        if given != room:
            raise ValueError(
                f"{operation}: rank {self._rank} gives itself {given} bytes and has room for {room}: both "
                "must be of one size"
            )

        def run(call: Call) -> None:
            self.collectives.all_to_all(self._slots, call._replace(dtype=dtype), targets, sources)
            staged.copy_back()

        return self._issue("all_to_all", run, opts, staged=staged, tensors=results)

    def _issue(
        self,
        operation: str,
        run: Callable[[Call], None],
        opts: Any,
        tensors: Sequence[torch.Tensor] = (),
        *,
        staged: StagedTensors | None = None,
    ) -> dist.Work:
        """Run a collective: a blocking one in this thread, an asynchronous one in the group's queue.

        Args:
            operation: Name of the operation in torch.
            run: Function of this rank.
            opts: Options of torch.
            tensors: Tensors of the results.
            staged: Sources and targets of a call that only copies.
        """
        self._check_process()
        self._membership.watch.check()
        recorded = self._record.begin(operation, tensors)
        stamp = self.stamps.pop(recorded.thread, 0)
        item = current_meeting() if stamp else None
        stamp_text = b"" if item is None else f"{item.describe()}\n{item.advice}".encode()
        call = Call(recorded.number, operation, stamp=stamp, stamp_text=stamp_text)
        # Within a machine such a call copies bytes without torch operators, so no dispatch mode applies.
        only_bytes = staged is not None and not staged.has_copies and self._slots.num_ranks == self._num_ranks

        def run_call() -> None:
            try:
                if only_bytes:
                    run(call)
                else:
                    without_dispatch_modes(run, call)
            except BaseException as error:
                self._membership.give_up(error, call.described(self._membership.watch.where()))
                raise
            finally:
                self._record.end(recorded)

        def describe() -> str:
            ranks = ", ".join(map(str, self._slots.missing()))
            waits = f", which waits for rank {ranks}," if ranks else ""
            return f"{call.described(self._membership.watch.where())}{waits}"

        if getattr(opts, "asyncOp", True):
            return self._membership.calls.start(run_call, tensors, describe)
        self._membership.calls.run(run_call)
        return EndedWork(tensors)

    def _check_process(self) -> None:
        if not self._membership.is_of_this_process:
            raise RuntimeError(
                f"a forked child cannot make a call {self._membership.watch.where()}: its parent, process "
                f"{self._membership._pid}, is the member; let the parent communicate, or use spawn"
            )


class _Blocking:
    asyncOp = False


def _of(call: Call, tensor: torch.Tensor, *, reduction: str = "", root: int = -1) -> Call:
    return call._replace(num_elements=tensor.numel(), dtype=tensor.dtype, reduction=reduction, root=root)


def _tag(operation: str, tag: int) -> int:
    tag = index(tag)
    if not 0 <= tag <= _MOST_TAG:
        raise ValueError(f"{operation}: the tag is {tag}, and must be 0 to {_MOST_TAG}")
    return tag


def _reduction(opts: Any) -> str:
    """Return the name of the reduction of some options."""
    if opts is None:
        return "SUM"
    return _REDUCTION_NAMES.get(opts.reduceOp.op) or str(opts.reduceOp.op).rpartition(".")[2]


def _reducible(tensor: torch.Tensor, reduction: str) -> torch.Tensor:
    check_reduction(reduction, tensor.dtype)
    return tensor
