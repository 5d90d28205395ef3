"""`parameterize`: all values, all combinations, and a failure that says which."""

import inspect

import pytest

from colossalai.testing import parameterize

pytestmark = pytest.mark.unit


def test_runs_every_combination() -> None:
    seen = []

    @parameterize("a", [1, 2])
    @parameterize("b", ("x", "y"))
    def collect(base: int, a: int, b: str) -> None:
        seen.append((base, a, b))

    collect(7)
    assert seen == [(7, 1, "x"), (7, 1, "y"), (7, 2, "x"), (7, 2, "y")]


def test_an_iterator_of_values_serves_many_calls() -> None:
    seen = []

    @parameterize("a", iter([1, 2]))
    def collect(a: int) -> None:
        seen.append(a)

    collect()
    collect()
    assert seen == [1, 2, 1, 2]


def test_pytest_does_not_see_the_argument() -> None:
    @parameterize("a", [1])
    def check(tmp_path: object, a: int) -> None: ...

    assert list(inspect.signature(check).parameters) == ["tmp_path"]


@parameterize("a", [1, 2])
def test_as_a_test_with_a_fixture(a: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert a in (1, 2)
    assert monkeypatch


def test_a_failure_names_the_value() -> None:
    @parameterize("a", [1, 0])
    def divide(a: int) -> float:
        return 1 / a

    with pytest.raises(ZeroDivisionError) as caught:
        divide()
    assert caught.value.__notes__ == ["with a=0"]


def test_unknown_argument() -> None:
    with pytest.raises(ValueError, match=r"check has no such parameter; it has \['b'\]"):

        @parameterize("a", [1])
        def check(b: int) -> None: ...
