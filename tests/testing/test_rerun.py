"""The retry decorators: which exceptions lead to another try, and how many."""

import socket

import pytest

from colossalai.testing import free_port, rerun_if_address_is_in_use, rerun_on_exception

pytestmark = pytest.mark.unit


class _Flaky:
    """Raises the given errors, one a call, then returns what it is called with."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.num_calls = 0

    def __call__(self, value: int) -> int:
        self.num_calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return value

    __name__ = "flaky"


def test_runs_again_until_it_works() -> None:
    flaky = _Flaky(RuntimeError("boom 1"), RuntimeError("boom 2"))
    assert rerun_on_exception(RuntimeError, pattern=r"boom \d")(flaky)(3) == 3
    assert flaky.num_calls == 3


@pytest.mark.parametrize("error", [KeyError("boom"), RuntimeError("bang")])
def test_other_exceptions_pass(error: Exception) -> None:
    flaky = _Flaky(error)
    with pytest.raises(type(error)):
        rerun_on_exception(RuntimeError, pattern="boom")(flaky)(3)
    assert flaky.num_calls == 1


def test_gives_up() -> None:
    flaky = _Flaky(*[RuntimeError(str(n)) for n in range(9)])
    with pytest.raises(RuntimeError, match="2"):
        rerun_on_exception(max_try=3)(flaky)(3)
    assert flaky.num_calls == 3


def test_no_limit() -> None:
    flaky = _Flaky(*[RuntimeError(str(n)) for n in range(9)])
    assert rerun_on_exception(max_try=None)(flaky)(3) == 3


def test_address_in_use() -> None:
    taken, calls = socket.create_server(("127.0.0.1", 0)), []

    @rerun_if_address_is_in_use()
    def serve() -> int:
        calls.append(free_port() if calls else taken.getsockname()[1])
        with socket.create_server(("127.0.0.1", calls[-1])) as server:
            return server.getsockname()[1]

    with taken:
        assert serve() == calls[1]
    assert len(calls) == 2


@pytest.mark.parametrize("arguments", [{"max_try": 0}, {"exception_type": "RuntimeError"}])
def test_wrong_arguments(arguments: dict) -> None:
    with pytest.raises(ValueError, match="|".join(arguments)):
        rerun_on_exception(**arguments)
