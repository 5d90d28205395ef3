"""What a file of a table holds after an end, a kill and an interrupt, and who may use it."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from torch.optim import SGD, Adagrad, Optimizer

from colossalai.nn.layer.cached_embedding import (
    CachedEmbeddingBag,
    CachedParamMgr,
    SlotMap,
)
from tests.nn.layer.cached_embedding.tables import (
    DIM,
    NUM_ROWS,
    OPTIMIZERS,
    backward,
    batches,
    check_equal,
    make_pair,
    train,
    weights_of,
)
from tests.tiers import further


def test_a_file_goes_on_with_its_values(tmp_path: Path) -> None:
    bag = make_pair(weight_path=tmp_path / "table")[1]
    train(bag, SGD(bag.parameters(), lr=0.1), batches(20))
    backward(bag, torch.tensor([[1]]))
    trained = bag.weight.clone()
    optimizer = SGD(bag.parameters(), lr=0.1)
    optimizer.step()  # cached rows are newer than the file once more
    cache = bag.cache_weight_mgr
    assert not torch.equal(weights_of(tmp_path / "table"), wanted := trained.index_copy(
        0, cache.row_of[cache.row_of >= 0], cache.param.detach()[cache.row_of >= 0]
    ))  # fmt: skip
    del bag, cache
    state = torch.get_rng_state()
    again = CachedEmbeddingBag(NUM_ROWS, DIM, cache_ratio=0.2, weight_path=tmp_path / "table")
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(again.weight, wanted)


PROGRAM = """
import os, signal, sys
import torch
from torch.optim import Adagrad
from colossalai.nn.layer.cached_embedding import CachedEmbeddingBag
from tests.nn.layer.cached_embedding.tables import DIM, NUM_ROWS, batches, train

end, path, checkpoint = sys.argv[1:]
torch.manual_seed(0)
bag = CachedEmbeddingBag(NUM_ROWS, DIM, mode="sum", sparse=True, cache_ratio=0.2, weight_path=path)
optimizer = Adagrad(bag.parameters(), lr=0.1)
train(bag, optimizer, list(batches(60))[:30])
torch.save([bag.state_dict(), optimizer.state_dict()], checkpoint)
train(bag, optimizer, list(batches(60))[30:45])
if end == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if end == "exception":
    raise RuntimeError("an error of the loop")
"""


def run(end: str, folder: Path) -> int:
    """Train in another process that ends in a given way; return its exit status."""
    command = [sys.executable, "-c", PROGRAM, end, str(folder / "table"), str(folder / "checkpoint")]
    return subprocess.run(command, check=False, capture_output=True).returncode


def test_a_killed_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    assert run("kill", tmp_path) == -signal.SIGKILL
    make_pair(weight_path=tmp_path / "table")  # ends at once, and changes nothing
    reference, bag = make_pair(weight_path=tmp_path / "table")
    optimizers = [Adagrad(each.parameters(), lr=0.1) for each in (reference, bag)]
    ids = list(batches(60))
    for use in (lambda: bag(ids[0]), lambda: bag.weight, bag.state_dict):
        with pytest.raises(RuntimeError, match=r"rows of different steps, .* load a checkpoint"):
            use()
    model, states = torch.load(tmp_path / "checkpoint")
    bag.load_state_dict(model)
    optimizers[1].load_state_dict(states)
    train(bag, optimizers[1], ids[30:])
    train(reference, optimizers[0], ids)
    check_equal(reference, bag, *optimizers)


@pytest.mark.parametrize("end", ["normal", "exception"])
def test_a_run_that_ends_leaves_the_rows_of_its_last_step(end: str, tmp_path: Path) -> None:
    assert run(end, tmp_path) == (end == "exception")
    reference, bag = make_pair(weight_path=tmp_path / "table")
    train(reference, Adagrad(reference.parameters(), lr=0.1), list(batches(60))[:45])
    assert torch.equal(bag.weight, reference.weight)


class TwoUpdates(SGD):
    """An optimizer of a user that is interrupted between two updates."""

    is_row_wise = True

    def step(self) -> None:  # type: ignore[override]
        (param,) = self.param_groups[0]["params"]
        param.data.mul_(2)
        raise KeyboardInterrupt


def test_a_step_in_parts_that_is_interrupted_leaves_an_unfinished_table(tmp_path: Path) -> None:
    bag = make_pair(weight_path=tmp_path / "table")[1]
    optimizer = TwoUpdates(bag.parameters(), lr=0.1)
    backward(bag, next(batches(1)))
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    del bag, optimizer
    again = make_pair(weight_path=tmp_path / "table")[1]
    with pytest.raises(RuntimeError, match="rows of different steps"):
        again(torch.tensor([[0]]))
    again.load_state_dict(load_file(tmp_path / "table"))  # the user takes them as they are
    again(torch.tensor([[0]]))


KINDS = [(kind, None) for kind in OPTIMIZERS] + [("adagrad", 4), further("sparse_adam", 1)]


class Interrupter:
    """Interrupts a call of the cache, before or after it.

    Attributes:
        place: Number of the call that is interrupted, 0 for none.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cache: CachedParamMgr) -> None:
        self.place = self._num_calls = 0
        for target, names in (
            (type(cache.new_rows((1, 1), torch.float32)), ("read", "write")),
            (CachedParamMgr, ("enter", "plan_ahead")),
            (SlotMap, ("plan", "apply", "count", "pin", "unpin")),
            (type(cache.in_flight), ("end_step",)),
            (type(cache.states), ("read", "write_back", "_make_tables")),
        ):
            for name in names:
                monkeypatch.setattr(target, name, self._wrapped(getattr(target, name)))

    def set(self, place: int) -> None:
        self.place, self._num_calls = place, 0

    def _wrapped(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._count()
            result = method(*args, **kwargs)
            self._count()
            return result

        return call

    def _count(self) -> None:
        if current_thread() is not main_thread():  # an interrupt is raised in the main thread
            return
        self._num_calls += 1
        if self._num_calls == self.place:
            raise KeyboardInterrupt


def train_interrupted(
    interrupter: Interrupter, place: int, kind: str, path: Path | None, depth: int | None
) -> tuple[CachedEmbeddingBag, Optimizer, bool]:
    """Make eleven steps, and a twelfth that is interrupted; return whether it was."""
    bag = make_pair(weight_path=path)[1]
    optimizer = OPTIMIZERS[kind](bag.parameters())
    loader = batches(12) if depth is None else iter(bag.prefetch(batches(12), depth=depth))
    train(bag, optimizer, islice(loader, 11))
    interrupter.set(place)
    try:
        train(bag, optimizer, loader)
    except KeyboardInterrupt:
        return bag, optimizer, True
    finally:
        interrupter.set(0)
    return bag, optimizer, False


@pytest.mark.parametrize(("kind", "depth"), KINDS)
def test_an_interrupt_anywhere_leaves_the_file_of_a_step(
    kind: str, depth: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, ids = tmp_path / "table", list(batches(12))
    reference, bag = make_pair(weight_path=path)
    interrupter = Interrupter(monkeypatch, bag.cache_weight_mgr)
    optimizer = OPTIMIZERS[kind](reference.parameters())
    train(reference, optimizer, ids[:-1])
    before = reference.weight.detach().clone()
    train(reference, optimizer, ids[-1:])
    place, was_interrupted = 0, True
    while was_interrupted:
        del bag
        path.unlink()
        place += 1
        bag, _, was_interrupted = train_interrupted(interrupter, place, kind, path, depth)
        del bag, _
        bag = make_pair(weight_path=path)[1]
        assert torch.equal(bag.weight, before) or torch.equal(bag.weight, reference.weight), place
    assert place > 20


@pytest.mark.parametrize(("kind", "depth"), KINDS)
def test_training_goes_on_after_an_interrupt_anywhere(
    kind: str, depth: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = list(batches(14))
    reference, bag = make_pair()
    interrupter = Interrupter(monkeypatch, bag.cache_weight_mgr)
    train(bag, OPTIMIZERS[kind](bag.parameters()), ids[:11])
    version_of_eleven = bag.cache_weight_mgr.param._version
    wanted = OPTIMIZERS[kind](reference.parameters())
    train(reference, wanted, ids)
    place, was_interrupted = 0, True
    while was_interrupted:
        place += 1
        bag, optimizer, was_interrupted = train_interrupted(interrupter, place, kind, None, depth)
        has_stepped = optimizer.param_groups[0]["params"][0]._version > version_of_eleven
        train(bag, optimizer, ids[12 if has_stepped else 11 :])
        check_equal(reference, bag, wanted, optimizer)
    assert place > 20


def test_an_interrupted_load_is_an_unfinished_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bag = make_pair(weight_path=tmp_path / "table")[1]
    rows = type(bag.cache_weight_mgr.new_rows((1, 1), torch.float32))

    def interrupt(self: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patches:
        patches.setattr(rows, "release_memory", interrupt)
        with pytest.raises(KeyboardInterrupt):
            bag.load_state_dict({"weight": torch.zeros(NUM_ROWS, DIM)})
    with pytest.raises(RuntimeError, match="load_state_dict interrupted"):
        bag(torch.tensor([[0]]))
    del bag
    again = make_pair(weight_path=tmp_path / "table")[1]
    with pytest.raises(RuntimeError, match="load_state_dict interrupted"):
        again(torch.tensor([[0]]))


@pytest.mark.parametrize("values", [None, torch.zeros(NUM_ROWS, DIM)], ids=["random", "given"])
def test_a_kill_while_a_file_is_filled_leaves_a_new_file(
    values: Tensor | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "table"
    rows = type(make_pair(weight_path=path)[1].cache_weight_mgr.new_rows((1, 1), torch.float32))
    path.unlink()
    pid = os.fork()
    if pid == 0:
        monkeypatch.setattr(rows, "release_memory", lambda self: os.kill(os.getpid(), signal.SIGKILL))
        CachedEmbeddingBag(NUM_ROWS, DIM, weight_path=path, _weight=values)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    torch.manual_seed(0)
    bag = CachedEmbeddingBag(NUM_ROWS, DIM, weight_path=path, _weight=values)
    assert torch.equal(bag.weight, make_pair()[0].weight if values is None else values)


def test_a_file_without_contents_is_a_new_one(tmp_path: Path) -> None:
    size = 4096 + NUM_ROWS * DIM * 4
    for contents in (b"", bytes(size)):
        (tmp_path / "table").write_bytes(contents)
        reference, bag = make_pair(weight_path=tmp_path / "table")
        assert torch.equal(bag.weight, reference.weight)
        del bag
    (tmp_path / "table").write_bytes(bytes(size - 1))
    with pytest.raises(ValueError, match="not a table"):
        make_pair(weight_path=tmp_path / "table")


def test_a_fork_leaves_the_file_alone(tmp_path: Path) -> None:
    bag = make_pair(weight_path=tmp_path / "table")[1]
    train(bag, SGD(bag.parameters(), lr=0.1), batches(20))
    before = weights_of(tmp_path / "table").clone()
    pid = os.fork()
    if pid == 0:
        num_refused = 0
        try:
            bag.cache_weight_mgr.flush_at_end()
            for use in (
                lambda: bag(torch.arange(300, 320)[None]),
                lambda: bag.weight,
                bag.cache_weight_mgr.flush,
                lambda: bag.load_state_dict({"weight": before}),
            ):
                try:
                    use()
                except RuntimeError as error:
                    num_refused += "was opened by another process" in str(error)
        finally:
            os._exit(num_refused)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 4
    assert torch.equal(weights_of(tmp_path / "table"), before)
    assert not torch.equal(bag.weight, before)


def test_a_file_is_finished_when_it_is_as_new_as_the_cache(tmp_path: Path) -> None:
    def mark() -> str:
        with safe_open(tmp_path / "table", "pt") as file:
            return file.metadata()["rows"]  # type: ignore[no-any-return]

    bag = make_pair(1.0, weight_path=tmp_path / "table")[1]
    optimizer = SGD(bag.parameters(), lr=0.1)
    assert mark() == "finished"
    train(bag, optimizer, batches(1))  # nothing is evicted
    assert mark() == "changing"
    bag.state_dict()
    assert mark() == "finished"
    bag(torch.tensor([[1]]))
    assert mark() == "finished"
    optimizer.zero_grad()
    backward(bag, next(batches(1)))
    with torch.no_grad():
        param = bag.cache_weight_mgr.param
        param.add_(param.grad)  # type: ignore[arg-type]
    bag(torch.tensor([[1]]))
    assert mark() == "changing"


def test_a_closed_file_is_free(tmp_path: Path) -> None:
    reference, bag = make_pair(weight_path=tmp_path / "table")
    for each in (reference, bag):
        train(each, SGD(each.parameters(), lr=0.1), batches(20))
    bag.close()
    bag.close()
    with pytest.raises(RuntimeError, match="was closed"):
        bag(torch.tensor([[1]]))
    again = make_pair(weight_path=tmp_path / "table")[1]
    assert torch.equal(again.weight, reference.weight)
    del bag
    cycle = [again]
    cycle.append(cycle)  # type: ignore[arg-type]
    del again, cycle
    again = make_pair(weight_path=tmp_path / "table")[1]
    train(again, SGD(again.parameters(), lr=0.1), batches(20))
    make_pair()[1].close()  # nothing to release


def test_a_file_that_cannot_be_flushed_stays_locked_and_unfinished(tmp_path: Path) -> None:
    bag = make_pair(weight_path=tmp_path / "table")[1]
    table = bag.weight
    train(bag, SGD(bag.parameters(), lr=0.1), batches(1))
    with torch.no_grad():
        table[0] = 1  # rows of the cache are newer
    with pytest.raises(RuntimeError, match="changed in place after"):
        bag.close()
    with pytest.raises(RuntimeError, match="used by another table"):
        make_pair(weight_path=tmp_path / "table")
    bag.close()
    make_pair(weight_path=tmp_path / "table")[1](torch.tensor([[1]]))


def test_a_file_that_is_read_alone_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "table"
    make_pair(weight_path=path)[1].close()
    os.utime(path, (1, 1))
    bag = make_pair(weight_path=path)[1]
    with torch.no_grad():
        bag(next(batches(1)))
    bag.close()
    assert path.stat().st_mtime == 1


def test_a_deleted_file_is_noticed_and_its_table_can_be_saved(tmp_path: Path) -> None:
    reference, bag = make_pair(weight_path=tmp_path / "table")
    for each in (reference, bag):
        train(each, SGD(each.parameters(), lr=0.1), batches(20))
    (tmp_path / "table").unlink()
    with pytest.raises(FileNotFoundError, match=r"deleted or replaced in training: save the state_dict\(\)"):
        bag(torch.tensor([[1]]))
    assert torch.equal(bag.state_dict()["weight"], reference.weight)
