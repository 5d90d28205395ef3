"""Who is to blame, from what the ranks say; no process is needed for that."""

import dataclasses
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from colossalai.monitor._calls import CallRecord
from colossalai.monitor._diagnosis import diagnose
from colossalai.monitor._hang_report import write_notice, write_report
from colossalai.monitor._peer_processes import DIED
from colossalai.monitor._rank_report import RankReport
from colossalai.monitor._watchdog import Watchdog

pytestmark = pytest.mark.unit

PARTNERS = (0, 1, 2, 3)


def wait(number=118, *, op="all_reduce", group="tp", partners=PARTNERS, channel=None, shapes=((8, 128),)):
    return CallRecord(
        op=op,
        channel=channel or group,
        number=number,
        partners=partners,
        where=f"of axis {group}",
        shapes=shapes,
        dtypes=("float",),
        seconds=60.0,
        module="blocks.2.attn",
    )


def answer(rank, *waits, reached=None, does="it is in data loading", overdue=""):
    """Return what a rank says that has issued what it waits for, and `reached`."""
    own = {item.channel: item.number for item in waits if item.op not in ("send", "recv")}
    recent = {item.channel: [item] for item in waits}
    return RankReport(
        rank=rank,
        host=f"host{rank // 2 + 1}",
        pid=100 + rank,
        activity=does,
        waiting=waits,
        reached={**own, **(reached or {})},
        recent=recent,
        overdue=overdue,
    )


def diagnosis(*answers, absent=None):
    return diagnose({item.rank: item for item in answers}, absent or {})


def test_a_rank_that_does_not_come_is_named_with_what_it_does():
    found = diagnosis(*(answer(rank, wait()) for rank in range(3)), answer(3, reached={"tp": 117}))
    assert found.lines == (
        "rank 3 (host2) did not enter all_reduce #118 of axis tp in blocks.2.attn; it is in data loading",
    )
    assert found.blamed == (3,)


def test_the_rank_at_the_end_of_a_chain_is_to_blame():
    """0 waits for 1 along tp, 1 for 3 along dp; 3 sleeps."""
    found = diagnosis(
        answer(0, wait(partners=(0, 1))),
        answer(1, wait(5, group="dp", partners=(1, 3)), reached={"tp": 117}),
        answer(3, reached={"dp": 4}),
    )
    assert found.blamed == (3,)
    assert len(found.lines) == 1


def test_a_dead_rank_is_to_blame_and_not_those_that_wait_for_it():
    found = diagnosis(
        answer(0, wait(partners=(0, 1))),
        answer(1, wait(5, group="dp", partners=(1, 3)), reached={"tp": 117}),
        absent={3: "(host2, pid 103) has died"},
    )
    assert found.blamed == (3,)
    assert found.lines[0].startswith("rank 3 (host2, pid 103) has died; awaited by rank 1 in all_reduce #5")


def test_the_rank_in_another_collective_is_to_blame():
    odd = answer(2, wait(op="broadcast"), does="it is at train.py:7 in step")
    found = diagnosis(*(answer(rank, wait()) for rank in (0, 1, 3)), odd)
    assert found.blamed == (2,)
    assert "rank 2 (host2) entered broadcast as #118 of axis tp" in found.lines[0]
    assert "train.py:7" in found.lines[0]


def test_a_rank_whose_other_collective_has_ended_is_found_in_what_it_has_issued():
    odd = answer(1, wait(119, partners=(0, 1)))
    odd.recent["tp"].insert(0, wait(118, op="broadcast", shapes=((4,),)))
    found = diagnosis(answer(0, wait(partners=(0, 1))), odd)
    assert "entered broadcast as #118" in found.lines[0]


def test_different_shapes_are_named():
    found = diagnosis(answer(0, wait(partners=(0, 1))), answer(1, wait(partners=(0, 1), shapes=((8, 64),))))
    assert "different shapes: rank 0 with [(8, 128)]; rank 1 with [(8, 64)]" in found.lines[0]


def test_of_different_shapes_the_fewer_are_to_blame():
    odd = answer(3, wait(shapes=((8, 64),)))
    assert diagnosis(*(answer(rank, wait()) for rank in range(3)), odd).blamed == (3,)


def signature(number, shape, *, op="all_reduce"):
    return CallRecord(
        op=op, channel="tp", partners=PARTNERS, number=number, dtypes=("float32",), shapes=(shape,)
    )


def test_a_rank_that_died_of_another_ones_shape_is_not_to_blame():
    """Rank 0 has been aborted; its neighbor, rank 1, has read what it had issued."""
    seen = {0: [signature(117, (4,)), signature(118, (8, 128))], 1: [signature(118, (8, 128))]}
    answers = {
        1: dataclasses.replace(answer(1, wait()), signatures=seen),
        2: dataclasses.replace(answer(2, wait()), signatures={2: [signature(118, (8, 64))]}),
        3: dataclasses.replace(answer(3, wait()), signatures={3: [signature(118, (8, 128))]}),
    }
    found = diagnose(answers, {0: "(host1, pid 100) has died"}, lambda ranks: "tp")
    assert found.blamed[0] == 2
    said = (
        "ranks do not agree on all_reduce #118 of axis tp: shape is (8, 128) on ranks [0, 1, 3], (8, 64) on"
    )
    assert found.lines[0] == f"{said} rank [2]"
    assert RankReport.from_json(answers[1].to_json()) == answers[1]


def test_a_sender_that_does_not_send_is_named():
    receive = wait(3, op="recv", group="pp", partners=(0,), channel="pp/send/0>1")
    found = diagnosis(answer(0, reached={"pp/send/0>1": 2}), answer(1, receive))
    assert found.lines == (
        "rank 0 (host1) did not send message #3 to rank 1 of axis pp; it is in data loading",
    )


def test_ranks_that_wait_for_one_another_are_all_named():
    found = diagnosis(
        answer(0, wait(5, group="tp", partners=(0, 1)), reached={"dp": 3}),
        answer(1, wait(4, group="dp", partners=(0, 1)), reached={"tp": 4}),
    )
    assert found.blamed == (0, 1)
    assert "rank 0 waits in all_reduce #5 of axis tp" in found.lines[0]
    assert "rank 1 waits in all_reduce #4 of axis dp" in found.lines[0]


def test_a_long_step_that_waits_for_nobody_is_named():
    late = answer(1, overdue="has been in the forward for more than 60 s", does="it is at model.py:3")
    found = diagnosis(answer(0), late)
    assert found.lines == ("rank 1 (host1) has been in the forward for more than 60 s; it is at model.py:3",)


def test_where_all_have_come_no_rank_is_to_blame():
    found = diagnosis(*(answer(rank, wait()) for rank in PARTNERS))
    assert found.blamed == ()
    assert "all of ranks 0, 1, 2, 3 have entered all_reduce #118" in found.lines[0]


def test_a_wait_for_something_outside_of_the_job_has_a_line_too(capfd: pytest.CaptureFixture[str]):
    said = {0: answer(0), 1: answer(1, overdue="has been in a save for more than 60 s")}
    write_notice(diagnosis(*said.values()), said, set(), notice=60.0, timeout=1620.0, ends=True)
    assert capfd.readouterr().err == (
        "colossalai watchdog: rank 1 (host1) has been in a save for more than 60 s; it is in data loading; "
        "if nothing moves, the job is ended in 1560 s\n"
    )
    write_notice(diagnosis(answer(0)), {0: answer(0)}, set(), notice=60.0, timeout=1620.0, ends=True)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_a_report_is_read_by_those_whom_the_umask_lets(tmp_path: Path, umask: int):
    said = {0: answer(0)}
    before = os.umask(umask)
    try:
        paths = [
            write_report(diagnosis(*said.values()), said, {}, folder=str(tmp_path), timeout=1.0, ends=False)
            for _ in range(2)
        ]
    finally:
        os.umask(before)
    assert len({*paths}) == 2
    assert [path.stat().st_mode & 0o777 for path in paths if path] == [0o666 & ~umask] * 2


def test_an_answer_survives_the_store():
    said = answer(1, wait(), reached={"dp": 3})
    said.gone[3] = "has died"
    assert RankReport.from_json(said.to_json()) == said


def test_a_rank_that_leaves_while_it_is_looked_at_has_not_died():
    """It notes in the store that it leaves, and then its process ends."""
    left = {}

    def ends():
        left["left/1"] = "has left the job: its script has ended it"
        return DIED

    process = SimpleNamespace(place="here", name="(host, pid 7)", problem=ends)
    watchdog = object.__new__(Watchdog)
    watchdog._rank, watchdog._process, watchdog._all_processes = 0, process, {0: process, 1: process}
    watchdog._store = SimpleNamespace(text=lambda key: left.get(key, ""))
    assert watchdog._ended_rank_lines() == ["rank 1 (host, pid 7) has left the job: its script has ended it"]
