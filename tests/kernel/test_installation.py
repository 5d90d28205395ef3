"""Ends of the replaced kernels: counted, in any order, beside threads and forks; then torch's to the bit."""

from __future__ import annotations

import multiprocessing
import random
import threading
import warnings
from contextlib import ExitStack
from unittest import mock

import pytest
import torch

from colossalai.kernel import is_installed, onednn_products, torch_products, why_unavailable
from colossalai.kernel._installation import Installation, installation

pytestmark = pytest.mark.unit


def table() -> str:
    """Who is called for the operators on the CPU."""
    lines = [
        torch._C._dispatch_dump_table(f"aten::{name}")
        for name in ("mm", "addmm", "addmm_", "mm.out", "addmm.out")
    ]
    return "\n".join(line for text in lines for line in text.splitlines() if line.startswith("CPU"))


def test_ends_come_in_any_order_and_leave_torchs_kernels() -> None:
    before, a, b = table(), torch.randn(128, 256), torch.randn(256, 128)
    expected = a @ b
    for seed in range(6):
        blocks = [ExitStack() for _ in range(4)]
        for number, block in enumerate(blocks):
            block.enter_context(torch_products() if number == 2 else onednn_products())
            assert is_installed() == (number < 2)
        random.Random(seed).shuffle(blocks)
        for block in blocks:
            torch.testing.assert_close(a @ b, expected, rtol=0, atol=1e-4)
            block.close()
            assert installation.count + installation.suspended <= 3
        assert not is_installed()
        assert table() == before
        assert torch.equal(a @ b, expected)
    assert installation.count == installation.suspended == 0


def test_an_error_ends_it_and_a_block_can_be_entered_again() -> None:
    for _ in range(3):
        with pytest.raises(KeyError), onednn_products():
            raise KeyError
        assert not is_installed()


def test_replacing_warns_nobody_and_leaves_the_one_warning_to_users() -> None:
    was_always = torch.is_warn_always_enabled()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with onednn_products():
            pass
    assert not seen
    assert torch.is_warn_always_enabled() == was_always


def test_other_threads_compute_while_ends_come() -> None:
    """Kernels stay in the table as long as a thread may be about to call them, and pass everything on."""
    a, b = torch.randn(64, 256), torch.randn(256, 256)
    expected, stop, wrong = a @ b, threading.Event(), []

    def compute() -> None:
        while not stop.is_set():
            if not torch.allclose(a @ b, expected, atol=1e-3):
                wrong.append(1)

    threads = [threading.Thread(target=compute) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(200):
            with onednn_products(), onednn_products():
                pass
            assert is_installed()
            assert torch.equal(a @ b, expected)
            with onednn_products(), torch_products():
                assert torch.equal(a @ b, expected)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not wrong
    with onednn_products():
        pass
    assert not is_installed()


def test_installations_from_several_threads_are_counted() -> None:
    def use() -> None:
        for _ in range(50):
            with onednn_products():
                torch.mm(torch.ones(128, 128), torch.ones(128, 128))

    threads = [threading.Thread(target=use) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert installation.count == 0
    with onednn_products():
        assert is_installed()
    assert not is_installed()


def _in_the_child(queue) -> None:
    with onednn_products():
        inside = torch.mm(torch.ones(128, 128), torch.ones(128, 128)).sum().item()
    queue.put((inside, installation.count))


def test_a_forked_child_goes_on_with_it() -> None:
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    with onednn_products():
        child = context.Process(target=_in_the_child, args=(queue,))
        child.start()
        found = queue.get()
        child.join()
    assert child.exitcode == 0
    assert found == (128.0**3, 1)
    assert not is_installed()


def test_nothing_is_fetched_or_replaced_before_the_first_use() -> None:
    fresh = Installation()
    with mock.patch("colossalai.kernel._installation.installation", fresh):
        with torch_products():
            assert fresh.products is None
        assert not is_installed()


def test_where_it_cannot_be_had_the_sentence_says_why() -> None:
    assert why_unavailable() is None
    assert "computes on meta" in str(why_unavailable(torch.device("meta")))
    is_missing = mock.patch.object(torch.backends.mkldnn, "is_available", return_value=False)
    with is_missing, pytest.raises(ValueError, match="built without oneDNN"), onednn_products():
        pass
    assert not is_installed()
