"""Who failed first, and how it is said."""

import json
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from colossalai.cluster import Host
from colossalai.launcher import _notebook
from colossalai.launcher._controller import AgentHandle, Stage
from colossalai.launcher._failure import (
    JobFailure,
    NodeLoss,
    RankError,
    RankState,
    find_failure,
    first_failure,
    read_error,
    refuse,
)
from colossalai.launcher._worker import WorkerErrorHook

pytestmark = pytest.mark.unit

NOW = 1000.0


def _rank(global_rank: int, exit_code: int | None, *, error: str = "", age: float = 0.1) -> RankState:
    found = RankError(message=error, traceback=f"Traceback of {error}\n", time=NOW - age, exit_code=1)
    return RankState(
        global_rank=global_rank, pid=100 + global_rank, exit_code=exit_code, error=found if error else None
    )


def _failure(*ranks: RankState) -> JobFailure | None:
    return find_failure(list(ranks), now=NOW, patience_s=3.0)


def test_of_a_refusal_only_the_sentence_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with pytest.raises(SystemExit) as ended:
        refuse(ValueError("the model cannot be cut so"))
    assert ended.value.code == 2
    # What the worker's hook hears of the exit does not take its place.
    WorkerErrorHook(str(tmp_path / "error.json")).record_exit(ended.value)
    error = read_error(tmp_path / "error.json")
    ranks = [replace(_rank(number, 2), error=error) for number in range(2)]
    failure = _failure(*ranks)
    assert failure.is_refusal
    assert failure.describe() == "the model cannot be cut so"
    assert failure.first.shell_code == 2
    assert not _failure(_rank(0, 1, error="boom")).is_refusal
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE")
    with pytest.raises(ValueError, match="so there"):
        refuse(ValueError("so there"))


def test_peers_of_a_rank_that_aborts_may_say_why():
    aborted = _rank(0, -signal.SIGABRT)
    just_now, long_ago = (replace(aborted, ended_at=NOW - age) for age in (0.1, 3.1))
    assert _failure(just_now, _rank(1, None)) is None
    assert _failure(long_ago, _rank(1, None)).first.global_rank == 0
    assert _failure(just_now, replace(_rank(1, -signal.SIGABRT), ended_at=NOW)) is not None  # nobody is left
    said = _failure(just_now, _rank(1, 1, error="shape is (1000,) on rank 0"), _rank(2, None))
    assert said.first.global_rank == 1


@pytest.mark.parametrize(
    ("ranks", "first"),
    [
        pytest.param(
            [_rank(0, 1, error="late", age=0.1), _rank(1, 1, error="early", age=0.2)], 1, id="oldest"
        ),
        pytest.param([_rank(0, 1, error="closed"), _rank(1, -signal.SIGKILL)], 1, id="killed"),
        pytest.param([_rank(0, 1, error="closed"), _rank(1, -signal.SIGTERM)], 1, id="killed-politely"),
        pytest.param([_rank(0, -signal.SIGABRT), _rank(1, 1, error="boom")], 1, id="aborted-for-a-peer"),
        pytest.param([_rank(0, None), _rank(1, -signal.SIGABRT)], 1, id="aborted"),
        pytest.param(
            [_rank(0, 1, error="closed", age=0.1), _rank(1, None, error="slow to end", age=0.2)], 1, id="slow"
        ),
        pytest.param(
            [_rank(0, -signal.SIGSEGV, error="closed", age=0.1), _rank(1, 1, error="boom", age=0.2)],
            1,
            id="crashed-at-its-end",
        ),
        pytest.param([_rank(0, 7), _rank(1, 1, error="boom")], 1, id="os._exit"),
        pytest.param([_rank(0, None, error="hangs", age=3.1)], 0, id="hangs"),
    ],
)
def test_the_first_failure(ranks: list[RankState], first: int):
    failure = _failure(*ranks)
    assert failure is not None
    assert isinstance(failure.first, RankState)
    assert failure.first.global_rank == first


def test_no_failure():
    assert _failure(_rank(0, 0), _rank(1, None)) is None
    assert _failure(_rank(0, None, error="may still end by itself", age=2.9)) is None
    assert _failure(_rank(0, 0, error="it said that all is well in the end")) is None


@pytest.mark.parametrize(
    ("rank", "code"),
    [
        (_rank(0, 3, error="x"), 3),
        (_rank(0, -signal.SIGKILL), 137),
        (_rank(0, -signal.SIGSEGV, error="x"), 1),
        (_rank(0, None, error="x"), 1),
    ],
)
def test_the_exit_code_is_as_in_a_shell(rank: RankState, code: int):
    assert rank.shell_code == code


def test_the_description_names_all_and_shows_one_traceback():
    failure = _failure(
        _rank(0, 1, error="KeyError: 'x'", age=0.1), _rank(1, 1, error="ValueError: y", age=0.2)
    )
    assert failure is not None
    assert failure.describe() == (
        "rank 1 (pid 101) failed with exit code 1: ValueError: y\n"
        "\n"
        "Traceback of ValueError: y\n"
        "\n"
        "after it:\n"
        "  rank 0 (pid 100) failed with exit code 1: KeyError: 'x'"
    )


def test_deaths_without_a_python_error_are_described():
    killed = _failure(_rank(1, -signal.SIGKILL))
    assert killed is not None
    assert killed.describe() == (
        "rank 1 (pid 101) was killed by SIGKILL (if nobody sent it, the machine ran out of memory)"
    )
    assert _rank(0, -signal.SIGSEGV).describe() == "rank 0 (pid 100) was killed by SIGSEGV"
    assert _rank(0, -40).describe() == "rank 0 (pid 100) was killed by signal 40"
    assert _rank(0, 7).describe() == "rank 0 (pid 100) ended with exit code 7 and left no Python error"


def test_an_error_of_torch_is_read_and_half_a_file_is_not(tmp_path: Path):
    path = tmp_path / "error.json"
    assert read_error(path) is None
    path.write_text('{"message": {"mess')
    assert read_error(path) is None
    extra = {"py_callstack": "Traceback", "timestamp": "17"}
    path.write_text(json.dumps({"message": {"message": "ValueError: x", "extraInfo": extra}}))
    assert read_error(path) == RankError(
        message="ValueError: x", traceback="Traceback", time=17.0, exit_code=1
    )


@pytest.mark.parametrize(
    ("ranks", "is_the_node"),
    [
        pytest.param([], True, id="alone"),
        pytest.param([_rank(0, 1, error="closed by peer", age=1.0)], True, id="its-peers-raise"),
        pytest.param([_rank(0, 1, error="closed by peer", age=2.5)], True, id="news-of-a-loss-takes-time"),
        pytest.param([_rank(0, 1, error="boom", age=3.5)], False, id="a-rank-was-first"),
        pytest.param([_rank(0, -signal.SIGKILL)], False, id="a-rank-was-killed-elsewhere"),
        pytest.param([_rank(0, -signal.SIGABRT)], True, id="a-peer-aborts"),
    ],
)
def test_a_lost_node_and_the_ranks_of_others(ranks: list[RankState], is_the_node: bool):
    loss = NodeLoss(host="host2", what="its agent was killed by SIGKILL", time=NOW - 2.0)
    failure = first_failure(ranks, [loss])
    assert (failure.first is loss) == is_the_node
    assert len(failure.later) == len(ranks)
    lines = failure.describe().splitlines()
    assert any("host2 is lost: its agent was killed by SIGKILL" in line for line in lines)


def test_a_rank_on_a_host_is_named_with_it():
    rank = RankState(global_rank=3, pid=7, exit_code=3, error=None, host="host2")
    assert rank.describe().startswith("rank 3 on host2 (pid 7) ended with exit code 3")


def test_a_signal_without_a_name_is_given_by_its_number():
    """A real-time signal other than the first and the last has no name."""
    number = signal.SIGRTMIN + 7
    agent = AgentHandle(Host("host2"), ["ssh"], b"", None, lambda: None)
    agent.stage = Stage.READY
    assert agent._describe_end(-number) == f"ssh, which leads to it, was killed by signal {number}"
    assert agent._describe_end(128 + number) == f"its agent was killed by signal {number}"
    rank = SimpleNamespace(exitcode=-number, pid=7, is_alive=lambda: False)
    error = _notebook._failure([rank], [SimpleNamespace(poll=lambda: False)])
    assert str(error) == f"rank 0 ended with signal {number}"
