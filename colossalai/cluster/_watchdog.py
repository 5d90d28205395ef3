"""The watchdog: a thread of each rank that gives a hang a name, and then ends the job.

It looks some ten times per timeout at what this rank has issued and what of it is complete. Where nothing
has moved for the timeout, it raises the alarm in the store. Every rank's thread sees that, and leaves there
what its rank is doing; rank 0 makes one report of it all. Nothing here uses the process groups.

[Note: what may fail while a job hangs]
The store has a connection of its own here, so a thread that waits in the store does not hold ours, and its
calls give up after seconds. A rank whose thread cannot run (its process has died, is stopped, or computes in
compiled code without giving up Python's lock) does not answer: its neighbors on the machine look at its
process from outside. Should rank 0 be such a one, the lowest rank that answers reports. Should the store be
gone, each rank can only speak for itself, and does.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta

import torch.distributed as dist

from colossalai.cluster._watchdog_answer import Answer, answer_of_this_rank
from colossalai.cluster._watchdog_options import WatchdogOptions
from colossalai.cluster._watchdog_process import (
    RankProcess,
    innermost_place,
    register_this_process,
    unregister_this_process,
)
from colossalai.cluster._watchdog_progress import Progress
from colossalai.cluster._watchdog_records import MessageRecord, prepare_recorder
from colossalai.cluster._watchdog_report import flush_output, write_report
from colossalai.cluster._watchdog_verdict import Verdict, judge

AxisOf = Callable[[tuple[int, ...]], str | None]

_STORE_S = 10.0  # an answer of the store that takes longer does not come
_STACKS_S = 0.8  # for neighbors to get the stacks of a rank that does not answer
_LOOK_S = 0.05  # between two looks while answers come in
_TROUBLE_S = 0.5  # for a process that closes its connections to be gone
_LATER_S = 0.1  # by which those who waited speak after those they waited for


class HangError(RuntimeError):
    """A job in which ranks waited for others in vain; the message names those."""


class Watchdog:
    """Watches over one rank of a job.

    Args:
        options: How long a wait may take, and what then.
        store: Where the ranks meet; a connection of its own to it is opened.
        rank: Global rank of this process.
        world_size: Number of ranks.
        axis_of: What is the mesh axis along some ranks?

    Attributes:
        has_spoken: Whether it has said why this process ends.
    """

    def __init__(
        self, options: WatchdogOptions, store: dist.Store, *, rank: int, world_size: int, axis_of: AxisOf
    ) -> None:
        self._options = options
        self._rank = rank
        self._world_size = world_size
        self._axis_of = axis_of
        self._store = dist.PrefixStore("watchdog", store.clone())  # type: ignore[attr-defined]
        self._store.set_timeout(timedelta(seconds=_STORE_S))
        self._record = MessageRecord()
        self._since = time.time()
        self.has_spoken = False
        self._alarms = 0  # that are over
        self._stop = threading.Event()
        self._open = ExitStack()
        self._thread = threading.Thread(target=self._run, name="colossalai-watchdog", daemon=True)
        prepare_recorder()
        self._progress = Progress(self._record, watches_sections=options.watches_steps)
        self._process = register_this_process()

    def start(self) -> None:
        """Begin to watch."""
        self._store.set(f"process/{self._rank}", self._process.to_json())
        self._open.enter_context(self._record.recording())
        self._thread.start()

    def stop(self, reason: str = "") -> None:
        """End to watch, and leave word for the others that this rank waits for nobody any more.

        Args:
            reason: Why, if it is an error.
        """
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join(2 * _STORE_S)
        self._open.close()
        unregister_this_process(self._process)
        try:
            self._store.set(f"left/{self._rank}", reason or "has left the job: its script has ended it")
        except dist.DistError:
            return  # the store has ended before, with rank 0
        finally:
            del self._store

    def troubles_soon(self) -> list[str]:
        """Name the ranks that have ended or are stopped, as far as this rank can see within a second."""
        patience = time.monotonic() + _TROUBLE_S
        while not (lines := self._troubles()) and time.monotonic() < patience:
            time.sleep(_LOOK_S)
        return lines

    def _troubles(self) -> list[str]:
        lines = []
        for rank, process in self._processes().items():
            if rank == self._rank:
                continue
            left = self._text(f"left/{rank}")
            trouble = process.trouble() if process.place == self._process.place else None
            if left or trouble:
                lines.append(f"rank {rank} {process.name} {left or trouble}")
        return lines

    def _run(self) -> None:
        while not self._stop.wait(self._options.poll_s):
            try:
                self._look()
            except dist.DistError as error:
                self._go_on_without_store(error)

    def _look(self) -> None:
        overdue = self._progress.overdue(self._options.timeout, look_s=self._options.poll_s)
        self._store.set(f"alive/{self._rank}", str(time.time()))
        if overdue:
            self._store.set(f"alarm/{self._alarms}", str(self._rank))
        if self._store.check([f"alarm/{self._alarms}"]):
            self._answer(overdue)

    def _answer(self, overdue: str) -> None:
        """Say what this rank is doing, wait for the verdict, and do what the options say."""
        number = self._alarms
        self._alarms += 1
        self._store.set(f"answer/{number}/{self._rank}", self._describe(overdue).to_json())
        if self._rank == 0:
            self._conclude(number)
        patience = time.monotonic() + self._options.grace_s + 3.0
        while not self._store.check([f"verdict/{number}"]) and time.monotonic() < patience:
            self._help_silent(number)
            time.sleep(_LOOK_S)
        if not self._store.check([f"verdict/{number}"]):
            self._conclude_for_rank_0(number)
        verdict = json.loads(self._text(f"verdict/{number}") or '{"lines": ["?"], "blamed": []}')
        if self._options.action == "end":
            self._end(verdict["lines"], is_blamed=self._rank in verdict["blamed"])
        self._progress.forgive()

    def _describe(self, overdue: str) -> Answer:
        neighbors = self._neighbors()
        return answer_of_this_rank(
            rank=self._rank,
            host=self._process.host,
            pid=self._process.pid,
            record=self._record,
            axis_of=self._axis_of,
            since=self._since,
            overdue=overdue,
            gone={rank: how for rank, process in neighbors.items() if (how := process.trouble())},
        )

    def _conclude(self, number: int) -> None:
        """Collect the answers, judge, and write the report."""
        answers = self._collect(number)
        silent = [rank for rank in range(self._world_size) if rank not in answers]
        self._store.set(f"silent/{number}", json.dumps(silent))
        stacks: dict[int, str] = {}
        known = {rank for answer in answers.values() for rank in answer.gone}
        if set(silent) - known:
            self._help_silent(number)
            time.sleep(_STACKS_S)
            stacks = {rank: self._text(f"stacks/{number}/{rank}") for rank in silent}
        absent = {rank: self._how_is(rank, answers, stacks.get(rank, "")) for rank in silent}
        verdict = judge(answers, absent)
        self._tell(verdict, answers, stacks)
        self._store.set(
            f"verdict/{number}", json.dumps({"lines": verdict.lines, "blamed": list(verdict.blamed)})
        )

    def _conclude_for_rank_0(self, number: int) -> None:
        """Rank 0 is silent: the lowest rank that is not concludes, and the others wait for it."""
        lowest = next(
            rank for rank in range(self._world_size) if self._store.check([f"answer/{number}/{rank}"])
        )
        if lowest == self._rank:
            self._conclude(number)
            return
        patience = time.monotonic() + self._options.grace_s + 3.0
        while not self._store.check([f"verdict/{number}"]) and time.monotonic() < patience:
            time.sleep(_LOOK_S)

    def _collect(self, number: int) -> dict[int, Answer]:
        patience = time.monotonic() + self._options.grace_s
        answers: dict[int, Answer] = {}
        missing = set(range(self._world_size))
        while missing and time.monotonic() < patience:
            for rank in sorted(missing):
                text = self._text(f"answer/{number}/{rank}")
                if text:
                    answers[rank] = Answer.from_json(text)
                if text or self._text(f"left/{rank}"):
                    missing.discard(rank)
            if missing and missing <= {rank for answer in answers.values() for rank in answer.gone}:
                break
            time.sleep(_LOOK_S)
        return answers

    def _how_is(self, rank: int, answers: dict[int, Answer], stacks: str) -> str:
        """Say how it is with a rank that does not answer."""
        text = self._text(f"process/{rank}")
        name = RankProcess.from_json(text).name if text else "(which has never been heard of)"
        left = self._text(f"left/{rank}")
        seen = next((answer.gone[rank] for answer in answers.values() if rank in answer.gone), "")
        if left or seen:
            return f"{name} {left or seen}"
        alive = self._text(f"alive/{rank}")
        ago = f", last sign of life {time.time() - float(alive):.0f} s ago" if alive else ""
        if stacks:
            return f"{name} does not answer{ago}: compiled code holds Python's lock{innermost_place(stacks)}"
        return f"{name} does not answer{ago}: its machine is out of reach, or compiled code holds its lock"

    def _help_silent(self, number: int) -> None:
        """Have neighbors that do not answer write their stacks, if nobody has yet."""
        silent = json.loads(self._text(f"silent/{number}") or "[]")
        for rank, process in self._neighbors().items() if silent else ():
            key = f"stacks/{number}/{rank}"
            if rank in silent and not process.trouble() and self._store.add(f"{key}/taken", 1) == 1:
                self._store.set(key, process.stacks_from_outside())

    def _tell(self, verdict: Verdict, answers: dict[int, Answer], stacks: dict[int, str]) -> None:
        write_report(
            verdict,
            answers,
            stacks,
            folder=self._options.folder,
            timeout=self._options.timeout,
            ends=self._options.action == "end",
        )

    def _end(self, lines: list[str], *, is_blamed: bool) -> None:
        """End this process from here, since its other threads may wait for ever.

        What is to blame speaks first, so that a launcher names it first. All have spoken before the first
        one ends: its partners fail at once, with less to say.
        """
        if not is_blamed:
            time.sleep(_LATER_S)
        error = HangError("; ".join(lines))
        sys.excepthook(HangError, error, None)
        self.has_spoken = True
        flush_output()
        if is_blamed:
            time.sleep(2 * _LATER_S)
        os._exit(1)

    def _go_on_without_store(self, error: Exception) -> None:
        """The store does not answer. That matters if this rank waits for somebody."""
        overdue = self._progress.overdue(self._options.timeout, look_s=self._options.poll_s)
        if not overdue or self._stop.is_set():
            return
        answer = answer_of_this_rank(
            rank=self._rank,
            host=self._process.host,
            pid=self._process.pid,
            record=self._record,
            axis_of=self._axis_of,
            since=self._since,
            overdue=overdue,
            gone={},
        )
        reason = str(error).strip().splitlines()[0]
        line = f"the store at rank 0 does not answer any more: rank 0, or its machine, is gone ({reason})"
        verdict = Verdict(lines=(line,))
        self._tell(verdict, {self._rank: answer}, {})
        if self._options.action == "end":
            self._end([line], is_blamed=False)
        self._progress.forgive()

    def _processes(self) -> dict[int, RankProcess]:
        texts = {rank: self._text(f"process/{rank}") for rank in range(self._world_size)}
        return {rank: RankProcess.from_json(text) for rank, text in texts.items() if text}

    def _neighbors(self) -> dict[int, RankProcess]:
        """Return the other ranks of this machine."""
        here = self._process.place
        return {
            rank: process
            for rank, process in self._processes().items()
            if process.place == here and rank != self._rank
        }

    def _text(self, key: str) -> str:
        """Return what is in the store under a key, empty if nothing is; without waiting for it."""
        return self._store.get(key).decode() if self._store.check([key]) else ""
