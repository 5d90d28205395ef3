"""Debug mode for sends and receives: both ends compare shapes and dtypes of a message.

[Note: pairs of sends and receives]
A send can be issued long before its receive, and the other way around, so no rank can wait for the partner
before it issues: two ranks that both send first and receive then would wait for each other. Instead, each
side writes the properties of its half to the store, and then reads whether the other half is there. The
second side
finds the first, compares, and issues nothing if they differ: no data is sent, which gloo would answer with an
abort. The first side has issued its half; it compares when it waits for it, since that wait cannot end before
the partner has arrived. Halves are paired as the library pairs them: by group, ranks, tag and order.

The source of a receive from any rank is known only when the data is there, and it is compared then.
"""

import json
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from colossalai.monitor._calls import (
    AxisOf,
    DisagreementError,
    Properties,
    describe_group,
    difference,
    op_and_place,
    op_and_shapes,
    properties_of,
)
from colossalai.monitor._flight_recorder import replaced
from colossalai.monitor._store import DeadlineStore

_Tensors = list[torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class _Half:
    """A send or a receive of this rank.

    Attributes:
        properties: The compared properties.
        key: The common key of both halves in the store.
        where: The same for people: "#2 from rank 0 to rank 1 of axis tp".
        partner: The global rank of the other half.
    """

    properties: Properties
    key: str
    where: str
    partner: int

    @property
    def other_key(self) -> str:
        """Key of the partner's half in the store."""
        return f"{self.key}/{_OTHER[self.properties['op']]}"


_OTHER = {"send": "recv", "recv": "send"}


class MessageCheck:
    """Compares every send of this rank with its receive, and every receive with its send.

    Args:
        store: The store of the ranks.
        rank: Global rank of this process.
        timeout: Seconds to wait for the partner of an awaited message.
        axis_of: Returns the name of the mesh axis along some ranks.
    """

    def __init__(self, store: DeadlineStore, *, rank: int, timeout: float, axis_of: AxisOf) -> None:
        self._store = store
        self._rank = rank
        self._timeout = timeout
        self._axis_of = axis_of
        self._numbers: Counter[str] = Counter()
        self._uncompared: weakref.WeakKeyDictionary[dist.Work, _Half] = weakref.WeakKeyDictionary()
        self._of_any_source: weakref.WeakKeyDictionary[dist.Work, Callable[[int], _Half]] = (
            weakref.WeakKeyDictionary()
        )

    @contextmanager
    def checking(self) -> Iterator[None]:
        """Within the block, check every message that Python code issues."""
        makers: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
            "send": partial(self._checked, "send"),
            "recv": partial(self._checked, "recv"),
            "recv_anysource": self._checked_from_any,
        }
        with replaced(dist.ProcessGroup, makers), replaced(dist.Work, {"wait": self._checked_wait}):
            yield

    def _checked(self, op: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def check_and_issue(group: dist.ProcessGroup, tensors: _Tensors, peer: int, tag: int) -> Any:
            half = self._publish(properties_of(op, tensors), group, peer, tag)
            is_first = not self._store.check(half.other_key)
            if not is_first:
                self._compare(half)
            work = original(group, tensors, peer, tag)
            if is_first and work is not None:
                self._uncompared[work] = half
            return work

        return check_and_issue

    def _checked_from_any(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def issue(group: dist.ProcessGroup, tensors: _Tensors, tag: int) -> Any:
            properties = properties_of("recv", tensors)
            work = original(group, tensors, tag)
            if work is not None:
                self._of_any_source[work] = lambda peer: self._publish(properties, group, peer, tag)
            return work

        return issue

    def _checked_wait(self, original: Callable[..., bool]) -> Callable[..., bool]:
        def wait(work: dist.Work, *args: Any, **kwargs: Any) -> bool:
            half = self._uncompared.pop(work, None)
            if half is not None:
                self._wait_for_partner(half)
            done = original(work, *args, **kwargs)
            publish = self._of_any_source.pop(work, None)
            if publish is not None:
                self._wait_for_partner(publish(work._source_rank()))
            return done

        return wait

    def _publish(self, properties: Properties, group: dist.ProcessGroup, peer: int, tag: int) -> _Half:
        """Write the properties of this rank's half to the store."""
        op, name = properties["op"], group.group_name
        own, partner = self._rank, dist.get_global_rank(group, peer)
        source, target = (own, partner) if op == "send" else (partner, own)
        channel = f"{name}/{source}>{target}/{tag}"
        self._numbers[f"{channel}/{op}"] += 1
        number = self._numbers[f"{channel}/{op}"]
        of_group = describe_group(self._axis_of(tuple(sorted(dist.get_process_group_ranks(group)))), name)
        with_tag = f" with tag {tag}" if tag else ""
        way = f"to rank {target}" if op == "send" else f"from rank {source}"
        properties["where"] = f"#{number}{with_tag} {way} {of_group}"
        half = _Half(
            properties=properties,
            key=f"message/{channel}/{number}",
            where=f"#{number}{with_tag} from rank {source} to rank {target} {of_group}",
            partner=partner,
        )
        text = json.dumps(properties)
        self._store.set(f"{half.key}/{op}", text)
        self._store.set(f"now/{own}", text)
        return half

    def _wait_for_partner(self, half: _Half) -> None:
        """Compare with the other half, which may be still to come.

        Raises:
            DisagreementError: The two halves of the message differ, or the partner's does not come in time.
        """
        try:
            self._store.wait([half.other_key], self._timeout)
        except dist.DistError:
            verb = "sent" if half.properties["op"] == "recv" else "received"
            fault = f"rank {half.partner} has not {verb} it"
            wait = f"rank {self._rank} waits for it, issued at"
            raise late_error(
                self._store, half.properties, [half.partner], fault=fault, seconds=self._timeout, wait=wait
            ) from None
        self._compare(half)

    def _compare(self, half: _Half) -> None:
        """Raise if the halves do not match; the second rank that finds a match removes both keys.

        Raises:
            DisagreementError: The two halves of the message differ.
        """
        other = json.loads(self._store.text(half.other_key))
        both = {self._rank: half.properties, half.partner: other}
        message = difference(half.where, {rank: {**both[rank], "op": "message"} for rank in sorted(both)})
        if message:
            raise DisagreementError(message)
        if self._store.add(f"{half.key}/read", 1) == 2:
            self._store.delete(*(f"{half.key}/{end}" for end in ("send", "recv", "read")))


def late_error(
    store: DeadlineStore, own: Properties, late: Iterable[int], *, fault: str, seconds: float, wait: str
) -> DisagreementError:
    """Return the error of a rank that has waited too long for other ranks.

    Args:
        store: The store of the ranks.
        own: The call of this rank.
        late: The ranks that are missing, each of which is named with its last call.
        fault: "rank 1 has not sent it".
        seconds: The time limit.
        wait: "rank 0 waits at", for the line of the script.
    """
    lines = [f"{op_and_shapes(own)} {own['where']}: after {seconds:g} s {fault}"]
    for rank in late:
        text = store.text(f"now/{rank}")
        last = f"was last in {op_and_place(json.loads(text))}" if text else "has entered no collective yet"
        lines.append(f"  rank {rank} {last}")
    return DisagreementError("\n".join([*lines, f"  {wait} {own['place']}"]))
