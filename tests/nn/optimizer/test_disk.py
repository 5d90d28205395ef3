"""States on disk: the same bits as in memory, errors that lose nothing, folders that do not stay."""

from __future__ import annotations

import copy
import errno
import os
import resource
import signal
import subprocess
import sys
import threading
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from colossalai.logging import get_dist_logger
from colossalai.nn.optimizer import CPUAdam, DiskOptions, HybridAdam
from colossalai.nn.optimizer._disk_file import StateFile
from tests.ranks import run_ranks

pytestmark = pytest.mark.unit

SMALL = DiskOptions(depth=2, buffer_size=4096)  # a page for each block: parameters are cut


def make_params(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    torch.manual_seed(0)
    shapes = [(50, 61), (3,), (2500,), (1024,), (), (2, 3, 4, 5)]
    params = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
    params[-1].data = params[-1].data.to(memory_format=torch.channels_last)
    return params


def set_grads(params: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for number, param in enumerate(params):
        grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        param.grad = None if number == 1 and step % 2 else grad


def train(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        set_grads(params, step)
        optimizer.step()


def assert_same(one: list[nn.Parameter], other: list[nn.Parameter]) -> None:
    for mine, theirs in zip(one, other, strict=True):
        assert torch.equal(mine, theirs)


def assert_same_states(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> None:
    mine, theirs = one.state_dict()["state"], other.state_dict()["state"]
    assert mine.keys() == theirs.keys()
    for number, state in mine.items():
        assert state.keys() == theirs[number].keys()
        for key, value in state.items():
            assert torch.equal(value, theirs[number][key]), (number, key)


def on_disk(params: list[nn.Parameter], folder: Path, **options: Any) -> HybridAdam:
    options = {"lr": 0.1, "weight_decay": 0.1, "nvme_offload_fraction": 1.0, "nvme_options": SMALL} | options
    return HybridAdam(params, nvme_offload_dir=folder, **options)


def in_memory(params: list[nn.Parameter]) -> HybridAdam:
    return HybridAdam(params, lr=0.1, weight_decay=0.1)


def state_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "owner")


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("fraction", [0.5, 1.0])
@pytest.mark.parametrize(
    "options",
    [SMALL, DiskOptions(depth=1, buffer_size=8192), DiskOptions(depth=4), DiskOptions(direct=False)],
    ids=str,
)
def test_weights_and_states_are_those_of_memory(
    tmp_path: Path, dtype: torch.dtype, fraction: float, options: DiskOptions
) -> None:
    mine, theirs = make_params(dtype), make_params(dtype)
    optimizer = on_disk(mine, tmp_path, nvme_offload_fraction=fraction, nvme_options=options)
    reference = in_memory(theirs)
    for step in range(5):
        train(optimizer, mine, 1, step)
        train(reference, theirs, 1, step)
        assert_same(mine, theirs)
        assert_same_states(optimizer, reference)
    assert state_files(tmp_path)


def test_the_fraction_is_kept(tmp_path: Path) -> None:
    params = [nn.Parameter(torch.ones(1024)) for _ in range(10)]
    for fraction, num_on_disk in ((0.0, 0), (0.25, 2), (0.5, 5), (1.0, 10)):
        folder = tmp_path / str(fraction)
        optimizer = on_disk(params, folder, nvme_offload_fraction=fraction)
        train(optimizer, params, 1)
        assert sum(path.stat().st_size for path in state_files(folder)) == num_on_disk * 2 * 4096


def test_groups_that_come_later_have_files_of_their_own(tmp_path: Path) -> None:
    mine, theirs = make_params(), make_params()
    optimizers = on_disk(mine[:2], tmp_path), in_memory(theirs[:2])
    for optimizer, params in zip(optimizers, (mine, theirs), strict=True):
        train(optimizer, params, 2)
        optimizer.add_param_group({"params": params[2:], "lr": 0.01, "weight_decay": 0.0})
        train(optimizer, params, 3, 2)
    assert_same(mine, theirs)


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("source_on_disk", [True, False])
@pytest.mark.parametrize("target_on_disk", [True, False])
def test_checkpoints_go_to_disk_and_back(
    tmp_path: Path, dtype: torch.dtype, source_on_disk: bool, target_on_disk: bool
) -> None:
    params = make_params(dtype)
    first = on_disk(params, tmp_path) if source_on_disk else in_memory(params)
    train(first, params, 4)
    torch.save({"params": params, "optimizer": first.state_dict()}, tmp_path / "checkpoint")
    train(first, params, 3, 4)

    content = torch.load(tmp_path / "checkpoint", weights_only=False)
    second = on_disk(content["params"], tmp_path) if target_on_disk else in_memory(content["params"])
    second.load_state_dict(content["optimizer"])
    train(second, content["params"], 3, 4)
    assert_same(content["params"], params)
    assert_same_states(second, first)


def test_a_state_dict_of_files_loads_while_they_live_and_after(tmp_path: Path) -> None:
    params = make_params()
    first = on_disk(params, tmp_path)
    train(first, params, 2)
    again = copy.deepcopy(params)
    second = HybridAdam(again)
    second.load_state_dict(first.state_dict())
    train(first, params, 2, 2)
    del first  # its files are gone
    train(second, again, 2, 2)
    assert_same(again, params)


def test_a_loaded_state_is_at_once_on_disk(tmp_path: Path) -> None:
    params = make_params()
    source = in_memory(params)
    train(source, params, 2)
    target = on_disk(make_params(), tmp_path)
    target.load_state_dict(source.state_dict())
    content = b"".join(path.read_bytes() for path in state_files(tmp_path))
    assert source.state[params[0]]["exp_avg"].numpy().tobytes() in content
    assert_same_states(target, source)


def test_a_state_that_is_put_in_place_by_hand_counts(tmp_path: Path) -> None:
    """So does colossalai.checkpoint_io: it writes `optimizer.state`."""
    mine, theirs = make_params(), make_params()
    optimizer, reference = on_disk(mine, tmp_path), in_memory(theirs)
    train(optimizer, mine, 2)
    train(reference, theirs, 2)
    for each, params in ((optimizer, mine), (reference, theirs)):
        each.state[params[0]]["exp_avg"] = torch.full(params[0].shape, 0.5)
        each.state[params[2]]["exp_avg"].fill_(0.25)
        train(each, params, 2, 2)
    assert_same(mine, theirs)


def test_a_deep_copy_has_files_of_its_own(tmp_path: Path) -> None:
    params = make_params()
    optimizer = on_disk(params, tmp_path)
    train(optimizer, params, 2)
    num_files = len(state_files(tmp_path))
    other_params, other = copy.deepcopy((params, optimizer))
    train(optimizer, params, 2, 2)
    train(other, other_params, 2, 2)
    assert_same(params, other_params)
    assert len(state_files(tmp_path)) == 2 * num_files


def fail_at(monkeypatch: pytest.MonkeyPatch, function: str, number: int, code: int) -> Any:
    """Let calls of a function of `os` fail from the given one on; return what makes it work again."""
    original = getattr(os, function)
    calls = iter(range(10**9))

    def failing(*args: Any) -> Any:
        if next(calls) >= number:
            raise OSError(code, os.strerror(code))
        return original(*args)

    monkeypatch.setattr(os, function, failing)
    return lambda: monkeypatch.setattr(os, function, original)


def values(params: list[nn.Parameter]) -> list[nn.Parameter]:
    return copy.deepcopy(params)


def test_a_full_disk_at_the_first_step_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, theirs = make_params(), make_params()
    optimizer = on_disk(mine, tmp_path)
    repair = fail_at(monkeypatch, "posix_fallocate", 1, errno.ENOSPC)
    with pytest.raises(OSError, match=r"bytes needed, \d+ bytes free") as caught:
        train(optimizer, mine, 1)
    assert caught.value.errno == errno.ENOSPC
    assert str(tmp_path) in str(caught.value)
    assert_same(mine, theirs)
    assert not state_files(tmp_path)
    repair()
    train(optimizer, mine, 3)
    train(in_memory(theirs), theirs, 3)
    assert_same(mine, theirs)


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("number", [0, 1, 2, 5, 9, 12])
@pytest.mark.parametrize(("function", "steps_before"), [("preadv", 2), ("pwritev", 2), ("pwritev", 0)])
def test_an_error_in_the_middle_of_a_step_loses_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    function: str,
    number: int,
    steps_before: int,
) -> None:
    mine, theirs = make_params(dtype), make_params(dtype)
    optimizer, reference = on_disk(mine, tmp_path), in_memory(theirs)
    train(optimizer, mine, steps_before)
    train(reference, theirs, steps_before)
    set_grads(mine, steps_before)
    repair = fail_at(monkeypatch, function, number, errno.ENOSPC)
    for _ in range(2):  # a second try on the broken disk changes nothing either
        with pytest.raises(OSError, match=r"bytes needed, \d+ bytes free"):
            optimizer.step()
    repair()
    optimizer.step()  # goes on with the same gradients
    train(reference, theirs, 1, steps_before)
    assert_same(mine, theirs)
    assert_same_states(optimizer, reference)
    train(optimizer, mine, 2, steps_before + 1)
    train(reference, theirs, 2, steps_before + 1)
    assert_same(mine, theirs)


@pytest.mark.parametrize("fails", [False, True])
def test_a_slow_read_holds_up_its_buffer_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """The first block of a parameter comes last, or not at all."""
    mine, theirs = make_params(), make_params()
    optimizer, reference = on_disk(mine, tmp_path), in_memory(theirs)
    train(optimizer, mine, 1)
    original, calls, others = os.preadv, count(), threading.Event()

    def slow_at_first(*args: Any) -> int:
        number = next(calls)
        if number == 0:
            assert others.wait(10), "the other buffer waits for the first"
            if fails:
                raise OSError(errno.EIO, "the disk is ill")
        elif number == 10:  # two keys in a block: five blocks
            others.set()
        return original(*args)

    monkeypatch.setattr(os, "preadv", slow_at_first)
    set_grads(mine, 1)
    if fails:
        with pytest.raises(OSError, match="the disk is ill"):
            optimizer.step()
    optimizer.step()
    train(reference, theirs, 2)
    assert_same(mine, theirs)
    assert_same_states(optimizer, reference)


def test_training_goes_on_with_a_smaller_fraction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, theirs = make_params(), make_params()
    optimizer, reference = on_disk(mine, tmp_path), in_memory(theirs)
    train(optimizer, mine, 2)
    train(reference, theirs, 2)
    with monkeypatch.context() as patch:
        fail_at(patch, "pwritev", 0, errno.ENOSPC)
        with pytest.raises(OSError, match="bytes needed"):
            train(optimizer, mine, 1, 2)
        saved = optimizer.state_dict()
        done = [number for number, state in saved["state"].items() if state["step"] == 3]
        smaller = in_memory(mine)
        smaller.load_state_dict(saved)
    # What the failed step had reached has been updated with its state; the rest has not been touched.
    train(reference, theirs, 1, 2)
    for number in done:
        assert torch.equal(mine[number], theirs[number])
        for key, value in smaller.state[mine[number]].items():
            assert torch.equal(value, reference.state[theirs[number]][key])


def test_a_limit_on_the_size_of_files(tmp_path: Path) -> None:
    """The real thing: the kernel refuses to write."""
    params, twins = make_params(), make_params()
    optimizer, reference = on_disk(params, tmp_path), in_memory(twins)
    train(optimizer, params, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
        with pytest.raises(OSError, match="bytes needed"):
            train(optimizer, params, 1, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    optimizer.step()
    train(reference, twins, 2)
    assert_same(params, twins)


def test_a_file_that_shrinks(tmp_path: Path) -> None:
    mine, theirs = make_params(), make_params()
    optimizer, reference = on_disk(mine, tmp_path), in_memory(theirs)
    train(optimizer, mine, 2)
    train(reference, theirs, 2)
    path = state_files(tmp_path)[0]
    content = path.read_bytes()
    os.truncate(path, 4096)
    before = values(mine)
    set_grads(mine, 2)
    for attempt in (optimizer.step, optimizer.state_dict):
        with pytest.raises(OSError, match="cut from outside") as caught:
            attempt()
        assert caught.value.filename == str(path)
        assert f"{len(content)} bytes needed" in str(caught.value)
    assert_same(mine, before)
    path.write_bytes(content)
    optimizer.step()
    train(reference, theirs, 1, 2)
    assert_same(mine, theirs)
    assert_same_states(optimizer, reference)


def test_a_lost_file_is_replaced_by_a_checkpoint(tmp_path: Path) -> None:
    mine, theirs = make_params(), make_params()
    optimizer, reference = on_disk(mine, tmp_path), in_memory(theirs)
    train(optimizer, mine, 2)
    train(reference, theirs, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    os.truncate(state_files(tmp_path)[0], 0)
    again = on_disk(mine, tmp_path)
    again.load_state_dict(saved)
    train(again, mine, 1, 2)
    train(reference, theirs, 1, 2)
    assert_same(mine, theirs)


def test_a_folder_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_at(monkeypatch, "mkdir", 0, errno.EACCES)
    with pytest.raises(PermissionError, match="bytes free") as caught:
        on_disk(make_params(), tmp_path)
    assert caught.value.filename == str(tmp_path)


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="nvme_offload_dir is not a folder") as caught:
        on_disk(make_params(), tmp_path / "file")
    assert caught.value.filename == str(tmp_path / "file")


def test_a_file_system_without_direct_access(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = os.open

    def refusing(path: Any, flags: int, *args: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct access")
        return original(path, flags, *args)

    monkeypatch.setattr(os, "open", refusing)
    mine, theirs = make_params(), make_params()
    train(on_disk(mine, tmp_path), mine, 2)
    train(in_memory(theirs), theirs, 2)
    assert_same(mine, theirs)


def test_short_reads_and_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv, pwritev = os.preadv, os.pwritev
    monkeypatch.setattr(os, "preadv", lambda fd, parts, at: preadv(fd, [parts[0][:4096]], at))
    monkeypatch.setattr(os, "pwritev", lambda fd, parts, at: pwritev(fd, [parts[0][:4096]], at))
    mine, theirs = make_params(), make_params()
    train(on_disk(mine, tmp_path, nvme_options=DiskOptions()), mine, 3)
    train(in_memory(theirs), theirs, 3)
    assert_same(mine, theirs)


def crash_and_fork(crashed: str, kept: str) -> None:
    """Leave the folder of a process that was killed; a fork leaves that of its parent alone."""
    param = nn.Parameter(torch.ones(10))
    param.grad = torch.ones(10)
    options: dict[str, Any] = {"nvme_offload_fraction": 1.0}
    if os.fork() == 0:
        optimizer = CPUAdam([param], nvme_offload_dir=crashed, **options)
        optimizer.step()
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == -signal.SIGKILL
    optimizer = CPUAdam([param], nvme_offload_dir=kept, **options)
    optimizer.step()
    if os.fork() == 0:
        del optimizer
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
    assert os.listdir(kept), "the fork has removed it"
    del optimizer
    assert not os.listdir(kept)


@pytest.mark.dist
def test_folders_after_a_crash_and_after_a_fork(tmp_path: Path) -> None:
    """Leftovers of a crash go at the next start."""
    crashed, kept = tmp_path / "crashed", tmp_path / "kept"
    crashed.mkdir()
    kept.mkdir()
    run_ranks(crash_and_fork, 1, str(crashed), str(kept))
    check_that_leftovers_go(crashed)


def check_that_leftovers_go(crashed: Path) -> None:
    assert len(list(crashed.iterdir())) == 1
    living = CPUAdam(make_params(), nvme_offload_fraction=1.0, nvme_offload_dir=crashed)
    folders = list(crashed.iterdir())
    assert len(folders) == 1
    second = CPUAdam(make_params(), nvme_offload_fraction=1.0, nvme_offload_dir=crashed)
    assert len(list(crashed.iterdir())) == 2, "the folder of a living optimizer must stay"
    del living, second
    assert not list(crashed.iterdir())


@pytest.mark.long  # it waits for torch to be imported
def test_folders_after_the_end_and_after_a_crash(tmp_path: Path) -> None:
    """The default folder goes with its process; leftovers of a crash go at the next start.

    One interpreter for both: it takes seconds to import torch, so the one that crashes is its fork.
    """
    default, crashed = tmp_path / "default", tmp_path / "crashed"
    default.mkdir()
    crashed.mkdir()
    code = f"""
import tempfile, os, signal, torch
from colossalai.nn.optimizer import CPUAdam, HybridAdam
param = torch.nn.Parameter(torch.ones(10)); param.grad = torch.ones(10)
if os.fork() == 0:
    optimizer = CPUAdam([param], nvme_offload_fraction=1.0, nvme_offload_dir={str(crashed)!r})
    optimizer.step()
    os.kill(os.getpid(), signal.SIGKILL)
assert os.waitstatus_to_exitcode(os.wait()[1]) == -signal.SIGKILL
optimizer = HybridAdam([param], nvme_offload_fraction=1.0)
optimizer.step()
assert os.listdir(tempfile.gettempdir()), "no folder"
if os.fork() == 0:
    raise SystemExit
os.wait()
assert os.listdir(tempfile.gettempdir()), "the fork has removed it"
"""
    environment = {**os.environ, "TMPDIR": str(default)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    assert not [path for path in default.iterdir() if "states" in path.name]
    check_that_leftovers_go(crashed)


def test_options_without_effect_warn(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(get_dist_logger(), "_once", set())
    HybridAdam(make_params(), nvme_offload_dir=tmp_path)
    assert "nvme_offload_dir has no effect" in capfd.readouterr().err
    holes = nn.Parameter(torch.ones(4, 4)[:, :2])
    holes.grad = torch.ones(4, 2)
    on_disk([holes], tmp_path).step()
    assert "nvme_offload_fraction has no effect" in capfd.readouterr().err


@pytest.mark.parametrize("options", [{"depth": 0}, {"buffer_size": 1000}, {"buffer_size": 0}])
def test_wrong_options(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        DiskOptions(**options)


@pytest.mark.parametrize(
    "options",
    [{"nvme_offload_fraction": "all"}, {"nvme_offload_fraction": 1.5}, {"nvme_options": {"depth": 2}}],
)
def test_wrong_arguments(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        on_disk(make_params(), tmp_path, **options)


def test_a_file_is_full_of_zeros_and_reads_what_was_written(tmp_path: Path) -> None:
    file = StateFile(tmp_path / "file", 8192, direct=True)
    assert not file.tensor(0, 2048, torch.float32).any()
    file.tensor(4096, 4, torch.float32).fill_(3.0)
    assert (tmp_path / "file").stat().st_size == 8192
