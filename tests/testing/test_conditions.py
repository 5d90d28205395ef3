"""Decorators that skip a test where it cannot run."""

import gc
import unittest
import weakref

import pytest
import torch

from colossalai.testing import clear_cache_before_run, run_on_environment_flag, skip_if_not_enough_gpus

pytestmark = pytest.mark.unit


def test_not_enough_gpus() -> None:
    found = torch.accelerator.device_count()
    assert skip_if_not_enough_gpus(min_gpus=found)(lambda value: value + 1)(1) == 2
    with pytest.raises(unittest.SkipTest, match=f"it needs {found + 1} accelerators, and there are {found}"):
        skip_if_not_enough_gpus(min_gpus=found + 1)(lambda: None)()
    with pytest.raises(ValueError, match="min_gpus is <function"):
        skip_if_not_enough_gpus(lambda: None)  # type: ignore[arg-type]


def test_an_environment_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    @run_on_environment_flag("COLOSSALAI_LONG_TESTS")
    def long_test() -> str:
        return "ran"

    for value in (None, "0", ""):
        monkeypatch.delenv("COLOSSALAI_LONG_TESTS", raising=False)
        if value is not None:
            monkeypatch.setenv("COLOSSALAI_LONG_TESTS", value)
        with pytest.raises(unittest.SkipTest, match="it runs with COLOSSALAI_LONG_TESTS=1"):
            long_test()
    monkeypatch.setenv("COLOSSALAI_LONG_TESTS", "1")
    assert long_test() == "ran"
    assert long_test.__name__ == "long_test"
    with pytest.raises(ValueError, match="the name of the variable is"):
        run_on_environment_flag(long_test)  # type: ignore[arg-type]


def test_the_cache_is_cleared() -> None:
    class Node:
        """Holds itself."""

    gc.disable()
    gc.freeze()  # what is there already, a second of it: it is not looked at
    try:
        node = Node()
        node.own = node  # type: ignore[attr-defined]
        alive = weakref.ref(node)
        del node
        assert alive() is not None
        assert clear_cache_before_run()(lambda: alive())() is None
    finally:
        gc.unfreeze()
        gc.enable()
