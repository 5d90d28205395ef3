"""Tables in files: equal bits, what a file holds after an end and after a kill, and what is refused."""

import copy
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Optimizer, SparseAdam

from colossalai.nn.layer.cached_embedding import (
    CachedEmbedding,
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
)


def weights_of(path: Path) -> torch.Tensor:
    """Return the table of a file as another program reads it."""
    return load_file(path)["weight"]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_table_in_a_file_has_the_bits_of_torch(kind: str, tmp_path: Path) -> None:
    reference, bag = make_pair(padding_idx=3, weight_path=tmp_path / "below" / "table")
    optimizers = [OPTIMIZERS[kind](each.parameters()) for each in (reference, bag)]
    for bag_and_optimizer in zip((reference, bag), optimizers, strict=True):
        train(*bag_and_optimizer, batches(40))
    assert sum(bag.num_write_back_history) > 100  # else the file had no part in it
    check_equal(reference, bag, *optimizers)
    assert torch.equal(weights_of(tmp_path / "below" / "table"), reference.weight)


@pytest.mark.parametrize("shape", [(2**18 + 5, 64), (2**22 + 3, 1), (3, 5), (4, 4)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_initial_values_are_those_of_torch(
    shape: tuple[int, int], dtype: torch.dtype, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    wanted, next_values = nn.EmbeddingBag(*shape, dtype=dtype), torch.rand(3)
    torch.manual_seed(0)
    bag = CachedEmbeddingBag(*shape, dtype=dtype, weight_path=tmp_path / "table")
    assert torch.equal(bag.weight, wanted.weight)
    assert torch.equal(torch.rand(3), next_values)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_state_dicts_load_into_torch_and_under_any_ratio_and_place(kind: str, tmp_path: Path) -> None:
    reference, bag = make_pair(weight_path=tmp_path / "first")
    optimizers = [OPTIMIZERS[kind](each.parameters()) for each in (reference, bag)]
    for bag_and_optimizer in zip((reference, bag), optimizers, strict=True):
        train(*bag_and_optimizer, batches(10))
    saved = tmp_path / "saved"
    torch.save({"model": bag.state_dict(), "optimizer": optimizers[1].state_dict()}, saved)
    assert saved.stat().st_size < 3.5 * NUM_ROWS * DIM * 4 + 20_000  # tables, and not their files
    others = [
        nn.EmbeddingBag(NUM_ROWS, DIM, mode="sum", sparse=True),
        make_pair(0.1, weight_path=tmp_path / "second")[1],
        make_pair(1.0, weight_path=tmp_path / "third")[1],
        make_pair(0.3)[1],
    ]
    train(reference, optimizers[0], batches(10, seed=1))
    for other in others:
        optimizer = OPTIMIZERS[kind](other.parameters())
        loaded = torch.load(saved, mmap=True)  # torch's optimizers change it
        other.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        train(other, optimizer, batches(10, seed=1))
        check_equal(reference, other, optimizers[0], optimizer)


def test_states_are_in_files_that_end_with_their_optimizer(tmp_path: Path) -> None:
    bag = make_pair(weight_path=tmp_path / "table")[1]
    optimizer = SparseAdam(bag.parameters())
    train(bag, optimizer, batches(3))
    assert _num_deleted_files(tmp_path) == 2
    assert [each.name for each in tmp_path.iterdir()] == ["table"]
    del optimizer
    train(bag, SGD(bag.parameters(), lr=0.1), batches(3))
    assert _num_deleted_files(tmp_path) == 0


def _num_deleted_files(folder: Path) -> int:
    """Return the number of files without a name that this process has open in a folder."""
    targets = {os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()}
    return sum(each.startswith(f"{folder}/") and each.endswith("(deleted)") for each in targets)


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


class Interrupter:
    """Interrupts a call of the cache, before or after it.

    Attributes:
        place: Number of the call that is interrupted, 0 for none.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cache: CachedParamMgr) -> None:
        self.place = self._num_calls = 0
        for target, names in (
            (type(cache.new_rows((1, 1), torch.float32)), ("read", "write")),
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
        self._num_calls += 1
        if self._num_calls == self.place:
            raise KeyboardInterrupt


def train_interrupted(
    interrupter: Interrupter, place: int, kind: str, path: Path | None
) -> tuple[CachedEmbeddingBag, Optimizer, bool]:
    """Make eleven steps, and a twelfth that is interrupted; return whether it was."""
    bag = make_pair(weight_path=path)[1]
    optimizer = OPTIMIZERS[kind](bag.parameters())
    train(bag, optimizer, batches(11))
    interrupter.set(place)
    try:
        train(bag, optimizer, list(batches(12))[11:])
    except KeyboardInterrupt:
        return bag, optimizer, True
    finally:
        interrupter.set(0)
    return bag, optimizer, False


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_interrupt_anywhere_leaves_the_file_of_a_step(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
        bag, _, was_interrupted = train_interrupted(interrupter, place, kind, path)
        del bag, _
        bag = make_pair(weight_path=path)[1]
        assert torch.equal(bag.weight, before) or torch.equal(bag.weight, reference.weight), place
    assert place > 20


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_goes_on_after_an_interrupt_anywhere(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
        bag, optimizer, was_interrupted = train_interrupted(interrupter, place, kind, None)
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


def test_a_failed_constructor_leaves_no_file_and_no_lock(tmp_path: Path) -> None:
    for wrong in ({"ids_freq_mapping": [1, 2]}, {"warmup_ratio": 2}, {"buffer_size": -1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            CachedEmbedding(8, 4, cache_ratio=0.5, weight_path=tmp_path / "table", **wrong)
        assert not [*tmp_path.iterdir()]
    CachedEmbedding(8, 4, weight_path=tmp_path / "table")
    with pytest.raises(ValueError, match="ids_freq_mapping") as kept:
        CachedEmbedding(8, 4, weight_path=tmp_path / "table", ids_freq_mapping=[1, 2])
    CachedEmbedding(8, 4, weight_path=tmp_path / "table")
    del kept


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


def test_a_deleted_file_is_noticed_and_its_table_can_be_saved(tmp_path: Path) -> None:
    reference, bag = make_pair(weight_path=tmp_path / "table")
    for each in (reference, bag):
        train(each, SGD(each.parameters(), lr=0.1), batches(20))
    (tmp_path / "table").unlink()
    with pytest.raises(FileNotFoundError, match=r"deleted or replaced in training: save the state_dict\(\)"):
        bag(torch.tensor([[1]]))
    assert torch.equal(bag.state_dict()["weight"], reference.weight)


def test_rows_without_width() -> None:
    bag = CachedEmbeddingBag(50, 0, sparse=True, mode="sum", cache_ratio=0.5)
    assert bag(torch.tensor([[1, 2]])).shape == (1, 0)
    bag.load_state_dict(bag.state_dict())


def test_a_module_of_inference_mode_is_trained(tmp_path: Path) -> None:
    with torch.inference_mode():
        bag = make_pair(weight_path=tmp_path / "table")[1]
        bag(torch.tensor([[1]]))
    train(bag, SGD(bag.parameters(), lr=0.1), batches(2))


def test_refusals_of_files(tmp_path: Path) -> None:
    path = tmp_path / "table"

    def make(num_rows: int = 8, **options: Any) -> CachedEmbedding:
        return CachedEmbedding(num_rows, 4, cache_ratio=0.5, weight_path=path, **options)

    first = make()
    with pytest.raises(RuntimeError, match="table is used by another table"):
        make()
    with pytest.raises(RuntimeError, match="which a copy cannot share"):
        copy.deepcopy(first)
    with pytest.raises(RuntimeError, match=r"file of type torch.float32, which is not cast to torch.float64"):
        first.double()
    assert first.cache_weight_mgr.param.dtype == torch.float32
    first.float().to("cpu")
    del first
    with pytest.raises(ValueError, match="has a table of 8 x 4 of type F32, and this one is 9 x 4"):
        make(9)
    with pytest.raises(ValueError, match="this one is 8 x 4 of type BF16"):
        make(dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="from_pretrained or _weight give values"):
        make(_weight=torch.zeros(8, 4))
    with pytest.raises(ValueError, match=r"cannot be of type torch.int64"):
        CachedEmbedding.from_pretrained(torch.zeros(8, 4).long(), weight_path=tmp_path / "other")
    for shape in ((0, 4), (4, 0), (-1, 4)):
        with pytest.raises(ValueError, match="it has no rows"):
            CachedEmbedding(*shape, weight_path=tmp_path / "other")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="a device or a pipe"):
        CachedEmbedding(8, 4, weight_path=tmp_path / "pipe")
    assert make(np.int64(8)).num_embeddings == 8  # type: ignore[arg-type]
    torch.save({}, path)
    with pytest.raises(ValueError, match="not a table that was made with weight_path"):
        make()
    with pytest.raises(IsADirectoryError):
        CachedEmbedding(8, 4, weight_path=tmp_path)


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, old[1]))
    try:
        with pytest.raises(OSError, match=r"1052672 bytes needed, \d+ bytes free"):
            CachedEmbedding(4096, 64, weight_path=tmp_path / "table")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)
    assert not [*tmp_path.iterdir()]


def test_a_file_that_was_cut(tmp_path: Path) -> None:
    bag = make_pair(weight_path=tmp_path / "table")[1]
    os.truncate(tmp_path / "table", 5000)
    for use in (lambda: bag(torch.arange(70, 90)[None]), lambda: bag.weight):
        with pytest.raises(OSError, match="the file ends after 5000 bytes"):
            use()


def test_given_values_are_copied_into_a_file(tmp_path: Path) -> None:
    values = torch.randn(NUM_ROWS, DIM, dtype=torch.float64)
    bag = CachedEmbeddingBag.from_pretrained(
        values, freeze=False, weight_path=tmp_path / "table", cache_ratio=0.1
    )
    before = values.clone()
    train(bag, SGD(bag.parameters(), lr=0.1), batches(5))
    assert torch.equal(values, before)
    assert not torch.equal(bag.weight, before)
    bag.load_state_dict({"weight": before.float()}, assign=True)
    before = before.float().double()
    assert torch.equal(weights_of(tmp_path / "table"), before)
    nn.init.zeros_(bag.weight)
    assert not bag(torch.tensor([[1, 2]])).any()


LIMITED = """
import mmap, resource, sys
import torch
from torch.optim import Adagrad
from colossalai.nn.layer.cached_embedding import CachedEmbeddingBag

path, checkpoint = sys.argv[1] or None, sys.argv[2]
torch.set_num_threads(1)
NUM_ROWS, DIM, LIMIT = 1_000_000, 64, 64_000_000
small = CachedEmbeddingBag(100, DIM, mode="sum", sparse=True)  # what libraries take at their first use
small(torch.tensor([[1]])).sum().backward()
Adagrad(small.parameters()).step()
taken = 1024 * int(next(each for each in open("/proc/self/status") if each.startswith("VmData")).split()[1])
resource.setrlimit(resource.RLIMIT_DATA, (taken + LIMIT, -1))  # memory that the system cannot take back
bag = CachedEmbeddingBag(NUM_ROWS, DIM, mode="sum", sparse=True, cache_ratio=0.02, weight_path=path)
optimizer = Adagrad(bag.parameters(), lr=0.1)
for step in range(20):
    optimizer.zero_grad()
    bag(torch.randint(NUM_ROWS, (1024, 4))).square().sum().backward()
    optimizer.step()
torch.save([bag.state_dict(), optimizer.state_dict()], checkpoint)
torch.serialization.set_default_mmap_options(mmap.MAP_SHARED)  # a private mapping counts as taken
model, states = torch.load(checkpoint, mmap=True)
bag.load_state_dict(model)
optimizer.load_state_dict(states)
print("whole table: ", bag.weight.nbytes // LIMIT)
"""


@pytest.mark.long
def test_a_table_of_four_times_the_memory(tmp_path: Path) -> None:
    def run_limited(path: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", LIMITED, path, str(tmp_path / "checkpoint")]
        return subprocess.run(command, check=False, capture_output=True, text=True)

    done = run_limited(str(tmp_path / "table"))
    assert done.stdout == "whole table:  4\n", done.stderr
    assert "can't allocate memory" in run_limited("").stderr
