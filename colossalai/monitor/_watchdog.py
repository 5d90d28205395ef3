"""Watchdog: a thread of each rank that names the ranks at fault for a hang, and then ends the job.

It checks the issued and the complete calls of this rank about ten times per timeout. Without progress for the
timeout, it raises the alarm in the store. Every rank's thread finds it, and stores a report of its rank; rank
0 combines them into one report. Nothing here uses the process groups.

[Note: failures during a hang]
The watchdog has its own connection to the store, so a thread that waits in the store does not block it, and
its calls have a time limit. A rank whose thread cannot run (its process has died, is stopped, or computes in
compiled code without releasing Python's lock) does not answer: its neighbors on the machine read the state of
its process. If rank 0 is one of these, the lowest rank that answers makes the diagnosis. If the store does
not answer, since rank 0 can be its server ([Note: server of the store] in `_store.py`), each rank reports
itself alone; it has read the locations of the others before.

[Note: deadlines of an alarm]
A rank that has waited for `timeout` sets the alarm. Each rank sees it at its next look, at most `poll_s`
later, and stores its report. Rank 0 then collects the reports for at most `grace_s` (two looks and 1.5 s),
less if all missing ranks are known to be gone, and writes the diagnosis. The others wait for rank 0's report
for `grace_s`, and for the diagnosis for `_DIAGNOSIS_S` more; if one of these is missing, the lowest reporting
rank takes rank 0's part. All store calls end after 3 to 10 s, so every rank completes this in any case. At
the end each rank shows its error and records that in the store; the ranks at fault first, the others
`_LATER_S` after them. No rank ends before all have shown their errors, for which it waits at most
`_ERRORS_S`, since the first process that ends closes the connections of the others.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from typing import Any

import torch.distributed as dist

from colossalai._clock import Clock
from colossalai.monitor._calls import AxisOf, CallRecord
from colossalai.monitor._diagnosis import DepartedRank, Diagnosis, deadlock, diagnose
from colossalai.monitor._flight_recorder import prepare_recorder
from colossalai.monitor._hang_report import flush_output, write_notice, write_report
from colossalai.monitor._last_calls import (
    MessageRecord,
    NeighborSignatures,
    SignatureRecord,
    disagreements,
)
from colossalai.monitor._options import WatchdogOptions
from colossalai.monitor._peer_processes import (
    DIED,
    RankProcess,
    innermost_place,
    register_this_process,
    unregister_this_process,
)
from colossalai.monitor._rank_report import RankReport, report_of_this_rank
from colossalai.monitor._sections import clear_meetings, meetings_reached
from colossalai.monitor._store import DeadlineStore
from colossalai.monitor._wait_timer import WaitTimer

_NO_DIAGNOSIS = {
    "lines": ["ranks wait for one another, and none has said in time for whom"],
    "blamed": [],
    "speakers": [],
}

_LEAST_STORE_S, _MOST_STORE_S = 3.0, 10.0  # limits for an answer of the store
_STACKS_S = 0.8  # for neighbors to get the stacks of a rank that does not answer
_POLL_S = 0.05  # between two looks while reports come in
_FIRST_POLL_S = 0.02  # the next ones come ever later
_END_S = 0.5  # for a process that closes its connections to be gone
_DIAGNOSIS_S = 3.0  # beyond the grace, for the diagnosis of another rank
_ERRORS_S = 3.0  # for a rank to show its error
_LATER_S = 0.5  # between what is to blame and the others: clocks of several machines agree no better


class HangError(RuntimeError):
    """A job in which ranks waited for others in vain; the message names those."""


class Watchdog:
    """Watches over one rank of a job.

    Args:
        options: Time limits of waits, and the action after them.
        store: The store of the job; the watchdog opens a connection of its own to it.
        rank: Global rank of this process.
        world_size: Number of ranks.
        axis_of: Returns the name of the mesh axis along some ranks.
        clock: The clock of its looks and of the deadlines of an alarm.

    Attributes:
        has_shown_error: Whether it has shown why this process ends.
    """

    def __init__(
        self,
        options: WatchdogOptions,
        store: dist.Store,
        *,
        rank: int,
        world_size: int,
        axis_of: AxisOf,
        clock: Clock,
    ) -> None:
        self._options = options
        self._clock = clock
        self._rank = rank
        self._world_size = world_size
        self._axis_of = axis_of
        self._store_s = min(max(options.timeout, _LEAST_STORE_S), _MOST_STORE_S)
        self._store = DeadlineStore("watchdog", store, timeout=self._store_s, clock=clock)
        self._all_processes: dict[int, RankProcess] = {}  # all processes, once all are in the store
        self._signatures = SignatureRecord()
        self._neighbor_signatures = NeighborSignatures()
        self._record = MessageRecord()
        self._since = time.time()
        self.has_shown_error = False
        self._alarms = 0  # that are over
        self._notices = 0  # the same
        self._stop = threading.Event()
        self._open = ExitStack()
        self._thread = threading.Thread(target=self._run, name="colossalai-watchdog", daemon=True)
        prepare_recorder()
        clear_meetings()
        self._timer = WaitTimer(self._record, watches_sections=options.watches_steps, clock=clock)
        self._process = register_this_process(self._signatures.descriptor)

    def start(self) -> None:
        """Begin to watch."""
        self._store.set(f"process/{self._rank}", self._process.to_json())
        self._open.enter_context(self._record.recording())
        self._open.enter_context(self._signatures.recording())
        self._thread.start()

    def stop(self, reason: str = "") -> None:
        """Stop watching, and note in the store that this rank does not wait any more.

        Args:
            reason: Why, if it is an error.
        """
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join(2 * self._store_s)
        self._open.close()
        self._neighbor_signatures.close()
        self._signatures.close()
        unregister_this_process(self._process)
        met = {channel: item.number for channel, item in meetings_reached().items()}
        try:
            self._store.set(f"met/{self._rank}", json.dumps(met))
            self._store.set(f"left/{self._rank}", reason or "has left the job: its script has ended it")
        except dist.DistError:
            return  # the store has ended before, with rank 0
        finally:
            self._store.close()

    def find_ended_ranks(self) -> list[str]:
        """Name the ranks that have ended or are stopped, as far as this rank can see within a second."""
        patience = self._clock.now() + _END_S
        try:
            while not (lines := self._ended_rank_lines()) and self._clock.now() < patience:
                self._clock.sleep(_POLL_S)
        except dist.DistError as error:
            absent, lines = self._states_without_store(error)
            lines += [f"rank {rank} {how}" for rank, how in absent.items()]
        return lines

    def find_disagreement(self) -> str:
        """Return the first collective in which ranks differ, as far as this rank can see within a second.

        The signatures of the ranks of this machine are read from their files, which outlive them; those of
        other ranks from the store, if it is still there.
        """
        found = {**self._neighbor_signatures.read(), self._rank: self._signatures.read()}
        with suppress(dist.DistError):
            own = {rank: list(map(asdict, calls)) for rank, calls in found.items()}
            self._store.set(f"signatures/{self._rank}", json.dumps(own))
            others = [rank for rank in range(self._world_size) if rank not in found]
            patience = self._clock.now() + _END_S
            while others and self._clock.now() < patience:
                for text in filter(None, [self._store.text(f"signatures/{rank}") for rank in others]):
                    noted = {
                        int(rank): list(map(CallRecord.from_plain, calls))
                        for rank, calls in json.loads(text).items()
                    }
                    found = {**noted, **found}
                others = [rank for rank in others if rank not in found]
                self._clock.sleep(_POLL_S if others else 0.0)
        return next((line for _, line in disagreements(found, self._axis_of)), "")

    def _ended_rank_lines(self) -> list[str]:
        processes = self._processes()
        gone = self._ended_neighbors(processes)
        found = {
            rank: self._store.text(f"left/{rank}") or gone.get(rank, "")
            for rank in processes
            if rank != self._rank
        }
        return [f"rank {rank} {processes[rank].name} {how}" for rank, how in found.items() if how]

    def _run(self) -> None:
        pause = _FIRST_POLL_S
        while not self._clock.wait(self._stop, pause):
            pause = min(self._options.poll_s, 2 * pause)  # short at first, for the locations of the others
            try:
                self._poll()
            except dist.DistError as error:
                self._diagnose_without_store(error)

    def _poll(self) -> None:
        self._timer.look(self._options.poll_s)
        overdue = self._timer.overdue(self._options.timeout)
        self._store.set(f"alive/{self._rank}", str(time.time()))
        if overdue:
            self._store.set(f"alarm/{self._alarms}", str(self._rank))
        elif self._timer.is_impatient() or (
            self._options.notice < self._options.timeout and self._timer.slow(self._options.notice)
        ):
            self._store.set(f"notice/{self._notices}", str(self._rank))
        if not self._all_processes and self._store.check(*self._process_keys()):
            self._all_processes = self._processes()
            for rank, process in self._neighbors(self._all_processes).items():
                self._neighbor_signatures.open(rank, pid=process.pid, descriptor=process.signature_file)
        if self._store.check(f"alarm/{self._alarms}"):
            self._answer_alarm(overdue)
        elif self._store.check(f"notice/{self._notices}"):
            self._give_notice()

    def _give_notice(self) -> None:
        """Report the activity of this rank; one rank writes a line about the waits, and the job continues.

        If there is a `deadlock`, it ends as after an alarm.
        """
        number = f"notice-{self._notices}"
        self._notices += 1
        waits = self._timer.slow(self._options.notice)
        self._timer.mark_noticed()
        diagnosis = self._report_and_wait(number, waits)
        if diagnosis.get("is_deadlock"):
            self._act(number, diagnosis)

    def _answer_alarm(self, overdue: str) -> None:
        """Report the activity of this rank, wait for the diagnosis, and act on it.

        See [Note: deadlines of an alarm].
        """
        number = str(self._alarms)
        self._alarms += 1
        self._act(number, self._report_and_wait(number, overdue))

    def _act(self, number: str, diagnosis: dict[str, Any]) -> None:
        """End this process or let it continue, depending on the options."""
        if self._options.action == "end":
            self._end(number, diagnosis)
        self._timer.forgive()

    def _report_and_wait(self, number: str, overdue: str) -> dict[str, Any]:
        """Report the activity of this rank, and return the diagnosis."""
        deadline = self._clock.now() + self._options.grace_s
        self._report(number, overdue, deadline=deadline)
        patience = self._clock.now() + self._options.grace_s + _DIAGNOSIS_S
        if not self._wait_for_key(
            f"diagnosis/{number}", number, deadline=patience
        ):  # the rank that makes it has died
            self._conclude_if_lowest(number, deadline=deadline)
        text = self._store.text(f"diagnosis/{number}")
        diagnosis: dict[str, Any] = json.loads(text) if text else _NO_DIAGNOSIS
        return diagnosis

    def _report(self, number: str, overdue: str, *, deadline: float) -> None:
        """Store the report of this rank, and make the diagnosis from all reports if this rank has to."""
        report = self._describe(overdue, self._ended_neighbors(self._processes()))
        self._store.set(f"report/{number}/{self._rank}", report.to_json())
        if self._rank == 0:
            concludes = not self._store.check(f"silent/{number}")  # else another rank makes it
        else:
            concludes = not self._wait_for_key(f"report/{number}/0", number, deadline=deadline)
        if concludes:
            self._conclude_if_lowest(number, deadline=deadline)

    def _describe(self, overdue: str, gone: dict[int, str]) -> RankReport:
        seen = {rank: items for rank, items in self._neighbor_signatures.read().items() if rank in gone}
        return report_of_this_rank(
            rank=self._rank,
            host=self._process.host,
            pid=self._process.pid,
            record=self._record,
            axis_of=self._axis_of,
            since=self._since,
            overdue=overdue,
            gone=gone,
            signatures={**seen, self._rank: self._signatures.read()},
        )

    def _wait_for_key(self, key: str, number: str, *, deadline: float) -> bool:
        """Wait for a key, writing stacks for silent neighbors meanwhile; the end of the job ends a notice."""
        while not (is_there := self._store.check(key)) and self._clock.now() < deadline:
            if self._stop.is_set() and number.startswith("notice"):
                break
            self._dump_silent_neighbors(number)
            self._clock.sleep(_POLL_S)
        return is_there

    def _conclude_if_lowest(self, number: str, *, deadline: float) -> None:
        """Make the diagnosis if this is rank 0, or if rank 0 is silent and this is the lowest to answer."""
        others = (rank for rank in range(1, self._world_size) if self._store.check(f"report/{number}/{rank}"))
        if self._rank == 0 or self._rank == next(others, None):
            self._conclude(number, deadline=deadline)

    def _conclude(self, number: str, *, deadline: float) -> None:
        """Collect the reports and write the diagnosis, unless another rank has: then this one was silent."""
        if self._store.check(f"diagnosis/{number}"):
            return
        reports = self._collect(number, deadline=deadline)
        silent = [rank for rank in range(self._world_size) if rank not in reports]
        self._store.set(
            f"silent/{number}", json.dumps(silent)
        )  # neighbors see it in `_wait_for_key`, and help
        stacks: dict[int, str] = {}
        known = {rank for report in reports.values() for rank in report.gone}
        if set(silent) - known:
            self._dump_silent_neighbors(number)
            stacks = self._wait_for_stacks(number, silent)
        absent = {rank: self._state_of(rank, reports, stacks.get(rank, "")) for rank in silent}
        is_notice = number.startswith("notice")
        stuck = deadlock(reports, self._departed_ranks(absent, reports)) if is_notice else None
        diagnosis = stuck or diagnose(reports, absent, self._axis_of)
        if self._store.add(f"told/{number}", 1) > 1:
            return  # another rank was first: all ranks use its diagnosis
        if is_notice and stuck is None:
            # In the store, since another rank than the one before can write this notice.
            noticed = {tuple(end) for end in json.loads(self._store.text("noticed") or "[]")}
            write_notice(
                diagnosis,
                reports,
                noticed,
                notice=self._options.notice,
                timeout=self._options.timeout,
                ends=self._options.action == "end",
            )
            self._store.set("noticed", json.dumps(sorted(noticed)))
        else:
            self._write_report(diagnosis, reports, stacks)
        outcome = {
            "lines": diagnosis.lines,
            "blamed": diagnosis.blamed,
            "speakers": sorted(reports),
            "is_deadlock": stuck is not None,
        }
        self._store.set(f"diagnosis/{number}", json.dumps(outcome))

    def _collect(self, number: str, *, deadline: float) -> dict[int, RankReport]:
        reports: dict[int, RankReport] = {}
        missing = set(range(self._world_size))
        while missing:
            for rank in sorted(missing):
                text = self._store.text(f"report/{number}/{rank}")
                if text:
                    reports[rank] = RankReport.from_json(text)
                if text or self._store.text(f"left/{rank}"):
                    missing.discard(rank)
            gone = {rank for report in reports.values() for rank in report.gone}
            if missing <= gone or self._clock.now() > deadline:
                break
            self._clock.sleep(_POLL_S)
        return reports

    def _state_of(self, rank: int, reports: dict[int, RankReport], stacks: str) -> str:
        """Describe a rank that does not answer."""
        text = self._store.text(f"process/{rank}")
        name = RankProcess.from_json(text).name if text else "(which has never been heard of)"
        left = self._store.text(f"left/{rank}")
        seen = next((report.gone[rank] for report in reports.values() if rank in report.gone), "")
        if left or seen:
            return f"{name} {left or seen}"
        alive = self._store.text(f"alive/{rank}")
        ago = f", last sign of life {time.time() - float(alive):.0f} s ago" if alive else ""
        if stacks:
            return f"{name} does not answer{ago}: compiled code holds Python's lock{innermost_place(stacks)}"
        return f"{name} does not answer{ago}: its machine is out of reach, or compiled code holds its lock"

    def _departed_ranks(
        self, absent: dict[int, str], reports: dict[int, RankReport]
    ) -> dict[int, DepartedRank]:
        """Return the ranks without a report that have left the job or have died."""
        died = {rank for report in reports.values() for rank, how in report.gone.items() if how == DIED}
        return {
            rank: DepartedRank(how, json.loads(self._store.text(f"met/{rank}") or "{}"))
            for rank, how in absent.items()
            if rank in died or self._store.text(f"left/{rank}")
        }

    def _dump_silent_neighbors(self, number: str) -> None:
        """Have neighbors that do not answer write their stacks, unless another rank has."""
        silent = json.loads(self._store.text(f"silent/{number}") or "[]")
        for rank, process in self._neighbors(self._processes()).items() if silent else ():
            key = f"stacks/{number}/{rank}"
            if rank in silent and not process.problem() and self._store.add(f"{key}/taken", 1) == 1:
                self._store.set(key, process.dump_stacks(self._clock))

    def _wait_for_stacks(self, number: str, silent: Sequence[int]) -> dict[int, str]:
        """Return the stacks of silent ranks, empty for those of which no neighbor has written any in time."""
        keys = [f"stacks/{number}/{rank}" for rank in silent]
        deadline = self._clock.now() + _STACKS_S
        while not self._store.check(*keys) and self._clock.now() < deadline:
            self._clock.sleep(_POLL_S)
        return {rank: self._store.text(key) for rank, key in zip(silent, keys, strict=True)}

    def _write_report(
        self, diagnosis: Diagnosis, reports: dict[int, RankReport], stacks: dict[int, str]
    ) -> None:
        write_report(
            diagnosis,
            reports,
            stacks,
            folder=self._options.folder,
            timeout=diagnosis.seconds or self._options.timeout,
            ends=self._options.action == "end",
        )

    def _end(self, number: str, diagnosis: dict[str, Any]) -> None:
        """End this process from here, since its other threads may wait for ever.

        The ranks to blame show their error first, so that a launcher names them first. All ranks have shown
        theirs before the first one ends: its partners fail at once, with errors that explain less.
        """
        speakers, blamed = diagnosis["speakers"], diagnosis["blamed"]
        if self._rank not in blamed and set(blamed) & set(speakers):
            self._wait_for_errors(number, [rank for rank in speakers if rank in blamed])
            self._clock.sleep(_LATER_S)
        self._show_error(diagnosis["lines"])
        try:
            self._store.set(f"spoken/{number}/{self._rank}", "1")
        finally:
            self._wait_for_errors(number, speakers)
            os._exit(1)

    def _wait_for_errors(self, number: str, ranks: list[int]) -> None:
        """Wait until other ranks have shown why they end, for a few seconds."""
        keys = [f"spoken/{number}/{rank}" for rank in ranks]
        patience = self._clock.now() + _ERRORS_S
        with suppress(dist.DistError):  # the store has ended, with rank 0
            while keys and not self._store.check(*keys) and self._clock.now() < patience:
                self._clock.sleep(_POLL_S)

    def _show_error(self, lines: Sequence[str]) -> None:
        """Show why this process ends."""
        sys.excepthook(HangError, HangError("; ".join(lines)), None)
        self.has_shown_error = True
        flush_output()

    def _diagnose_without_store(self, error: Exception) -> None:
        """Report and end without the store, which does not answer, if this rank waits for another rank."""
        self._timer.look(self._options.poll_s)
        overdue = self._timer.overdue(self._options.timeout)
        if not overdue or self._stop.is_set():
            return
        absent, lines = self._states_without_store(error)
        reports = {self._rank: self._describe(overdue, self._ended_neighbors(self._all_processes))}
        diagnosis = Diagnosis(lines=(*lines, *diagnose(reports, absent, self._axis_of).lines))
        self._write_report(diagnosis, reports, {})
        if self._options.action == "end":
            self._show_error(diagnosis.lines)
            os._exit(1)
        self._timer.forgive()

    def _states_without_store(self, error: Exception) -> tuple[dict[int, str], list[str]]:
        """Return the known states of the other processes while the store does not answer.

        Returns:
            By rank, the state of those that are gone; and a line if the store's server is not one of them.
        """
        # See [Note: failures during a hang].
        reason = str(error).strip().splitlines()[0]
        gone = self._ended_neighbors(self._all_processes)
        absent = {rank: f"{self._all_processes[rank].name} {how}" for rank, how in gone.items()}
        if self._store.launcher:
            return absent, [
                f"the store does not answer any more: the launcher at {self._store.launcher}, which serves "
                f"it, is gone or stopped, or its machine is out of reach ({reason})"
            ]
        if 0 in absent:
            absent[0] += ", and with it the store"
        else:
            name = f"{self._all_processes[0].name} " if self._all_processes else ""
            absent[0] = (
                f"{name}serves the store, which does not answer any more: it is gone or stopped, or its "
                f"machine is out of reach ({reason})"
            )
        return absent, []

    def _process_keys(self) -> list[str]:
        return [f"process/{rank}" for rank in range(self._world_size)]

    def _processes(self) -> dict[int, RankProcess]:
        """Return where the ranks run, as far as that is in the store."""
        if self._all_processes:
            return self._all_processes
        texts = dict(enumerate(map(self._store.text, self._process_keys())))
        return {rank: RankProcess.from_json(text) for rank, text in texts.items() if text}

    def _ended_neighbors(self, processes: dict[int, RankProcess]) -> dict[int, str]:
        """Return the ranks of this machine whose processes have ended or are stopped, and how."""
        neighbors = self._neighbors(processes)
        return {rank: how for rank, process in neighbors.items() if (how := process.problem())}

    def _neighbors(self, processes: dict[int, RankProcess]) -> dict[int, RankProcess]:
        """Return the other ranks of this machine."""
        here = self._process.place
        return {
            rank: process
            for rank, process in processes.items()
            if process.place == here and rank != self._rank
        }
