"""Memory that is not there: ranks agree on gloo or small slots, and say why; other files are not mapped."""

import errno
import os
import stat
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from colossalai.communication.shared_memory import _islands, _segment, empty_in_arena, transport_of
from colossalai.communication.shared_memory._membership import bound_of_machine
from colossalai.communication.shared_memory._segment import (
    PAGE,
    Arena,
    NoMemoryError,
    create_segment,
    open_segment,
)
from tests.communication.shared_memory.ranks_that_end import error_of, group
from tests.ranks import run_ranks

SIZE = 1 << 20


def no_memfd(*_):
    raise OSError(errno.ENOSYS, "no memfd here")


def no_memory(descriptor, start, length):
    raise OSError(errno.ENOSPC, "No space left on device")


def in_a_group(path, prepare, after=lambda: None):
    """Say how the ranks of a group talk, and whether that gives the right sums."""
    prepare()
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(str(path), num_ranks)
    dist.init_process_group("shared_memory", store=store, rank=rank, world_size=num_ranks)
    how = transport_of()
    after()
    is_right = True
    for size in (3, 30_000, 700_000):
        tensor = torch.arange(size, dtype=torch.float32) + rank
        dist.all_reduce(tensor)
        gathered = [torch.zeros(size) for _ in range(num_ranks)]
        dist.all_gather(gathered, torch.full((size,), float(rank)))
        is_right &= torch.equal(tensor, num_ranks * torch.arange(size) + num_ranks * (num_ranks - 1) / 2.0)
        is_right &= all(part.eq(float(source)).all().item() for source, part in enumerate(gathered))
    if rank < 2:
        message = error_of(lambda: dist.recv(torch.ones(3), 0) if rank else dist.send(torch.ones(3), 1))[1]
    else:
        message = ""
    dist.destroy_process_group()
    return how, is_right, message


def without_memfd():
    os.memfd_create = no_memfd
    seen, open_offer = [], _segment._open_offer

    def opened(offer, size):
        found = os.stat(offer)
        seen.append((Path(offer).parent, stat.S_IMODE(found.st_mode), len(Path(offer).name)))
        return open_offer(offer, size)

    _segment._open_offer = opened
    return seen


def use_named_files(path):
    seen = without_memfd()
    return in_a_group(path, lambda: None), seen


@pytest.mark.dist
def test_named_files_are_private_and_gone_once_they_are_mapped(tmp_path):
    (first, opened), (second, by_second), _ = run_ranks(use_named_files, 3, tmp_path / "files")
    assert first == second == ("shared memory", True, "")
    assert opened == []
    ((folder, mode, length),) = by_second
    assert folder == _segment._place_of_files()
    assert mode == 0o600
    assert length > 32
    assert not list(folder.glob("colossalai-*"))


def nowhere():
    os.memfd_create = no_memfd
    _segment._place_of_files = lambda: Path("/proc/nowhere")


def nothing_from_the_start():
    if os.environ["RANK"] == "1":
        os.posix_fallocate = no_memory


def bound(text):
    os.environ["COLOSSALAI_SHARED_MEMORY"] = text


@pytest.mark.dist
@pytest.mark.parametrize(
    ("prepare", "said"),
    [
        (nowhere, "no shared memory can be made here: [Errno"),
        (nothing_from_the_start, "no 16 KiB of shared memory: No space left on device"),
        (partial(bound, "4096"), "share of COLOSSALAI_SHARED_MEMORY; 32768 bytes more are needed"),
    ],
)
def test_without_memory_all_ranks_take_gloo_and_say_why(tmp_path, capfd, prepare, said):
    assert run_ranks(in_a_group, 2, tmp_path / "gloo", prepare) == [("gloo", True, "")] * 2
    out = "".join(capfd.readouterr())
    assert "the ranks of this machine talk over gloo, not through its memory: " in out
    assert said in out


def nothing_later():
    if os.environ["RANK"] == "1":
        os.posix_fallocate = no_memory


def nothing_in_the_middle():
    """The second half of a slot fails, once."""
    left, reserve = [1, 0], os.posix_fallocate

    def sometimes(descriptor, start, length):
        if left and not left.pop(0):
            no_memory(descriptor, start, length)
        reserve(descriptor, start, length)

    os.posix_fallocate = sometimes


def nothing():
    pass


@pytest.mark.dist
@pytest.mark.parametrize("after", [nothing_later, nothing_in_the_middle])
def test_slots_that_cannot_grow_give_the_same(tmp_path, after):
    results = run_ranks(in_a_group, 2, tmp_path / "small", nothing, after)
    assert [result[:2] for result in results] == [("shared memory", True)] * 2


@pytest.mark.dist
def test_messages_without_memory_are_an_error_that_says_what_to_raise(tmp_path):
    mine, theirs = run_ranks(in_a_group, 2, tmp_path / "bound", partial(bound, "100K"))
    assert mine[:2] == theirs[:2] == ("shared memory", True)
    assert mine[2] == (
        "no 64 KiB of shared memory for messages to rank 1: "
        "raise COLOSSALAI_SHARED_MEMORY, or use backend='gloo'"
    )
    assert "rank 0 has" in theirs[2]


def be_bound_wrongly(path):
    return error_of(lambda: in_a_group(path, partial(bound, "a lot")))


@pytest.mark.dist
def test_a_wrong_bound_is_refused(tmp_path):
    for kind, text in run_ranks(be_bound_wrongly, 2, tmp_path / "wrong"):
        assert kind == "ValueError"
        assert text.startswith("COLOSSALAI_SHARED_MEMORY is 'a lot'; it must be a number of bytes")


@pytest.mark.unit
def test_bounds():
    found = {
        text: bound_of_machine({"COLOSSALAI_SHARED_MEMORY": text}) for text in ("5", "2K", "3 MiB", " 1GB ")
    }
    assert found == {"5": 5, "2K": 2048, "3 MiB": 3 << 20, " 1GB ": 1 << 30}
    assert bound_of_machine({}) == bound_of_machine({"COLOSSALAI_SHARED_MEMORY": ""}) > 1 << 24
    for text in ("-1", "1.5G", "G", "0x10"):
        with pytest.raises(ValueError, match="must be a number of bytes"):
            bound_of_machine({"COLOSSALAI_SHARED_MEMORY": text})


@pytest.mark.unit
def test_only_what_another_rank_has_made_is_mapped(tmp_path, monkeypatch):
    monkeypatch.setattr(_segment, "_place_of_files", lambda: tmp_path)
    segment = create_segment(SIZE, first=4096, named=True)
    (path,) = tmp_path.iterdir()
    assert segment.offers() == [str(path)]

    def is_mapped(offer=path, token=segment.token, size=SIZE):
        other = open_segment([str(offer)], token, size)
        if other is not None:
            other.close()
        return other is not None

    assert is_mapped()
    assert not is_mapped(token=b"\0" * 32)
    assert not is_mapped(size=SIZE // 2)
    assert not is_mapped(tmp_path / "nothing")
    (tmp_path / "link").symlink_to(path)
    assert not is_mapped(tmp_path / "link")
    path.chmod(0o640)
    assert not is_mapped()
    path.chmod(0o600)
    assert is_mapped()
    segment.hide()
    assert not path.exists()
    segment.close()


@pytest.mark.unit
def test_a_file_that_cannot_be_filled_is_not_left(tmp_path, monkeypatch):
    monkeypatch.setattr(_segment, "_place_of_files", lambda: tmp_path)
    monkeypatch.setattr(os, "posix_fallocate", no_memory)
    for named in (True, False):
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(NoMemoryError, match=r"no 8 KiB of shared memory: .*No space left"):
            create_segment(SIZE, first=8192, named=named)
        assert not list(tmp_path.iterdir())
        assert len(os.listdir("/proc/self/fd")) == before


def places(arena):
    """The holes of an arena, and the blocks that are kept: place and length of each, in order."""
    kept = [(place, length) for length, places in arena._kept.items() for place in places]
    return sorted([*arena._holes, *kept])


@pytest.mark.unit
@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 9000), st.booleans()), max_size=40), st.randoms())
def test_tensors_of_an_arena_have_places_of_their_own(drawn, draw):
    arena = Arena(64 * PAGE)
    held = []
    for number, (numel, drops) in enumerate(drawn):
        if drops and held:
            held.pop(draw.randrange(len(held)))
        tensor = arena.empty(numel, torch.float32)
        if tensor is None:
            continue
        assert arena.place(tensor.data_ptr(), tensor.nbytes) >= PAGE
        held.append((tensor.fill_(number), number))
        used = sum(-(-tensor.nbytes // PAGE) * PAGE for tensor, _ in held)
        assert used <= arena.num_reserved <= 63 * PAGE
    assert all(tensor.eq(number).all() for tensor, number in held)
    held.clear()
    tensor = None
    arena.give_back()
    assert arena.num_reserved == 0
    assert places(arena) == [(PAGE, 63 * PAGE)]
    assert arena.empty(64 * PAGE, torch.uint8) is None
    assert arena.empty(0, torch.uint8) is None
    assert arena.place(torch.ones(4).data_ptr(), 16) == 0


@pytest.mark.unit
def test_a_block_is_used_again_and_a_view_keeps_it():
    arena = Arena(1 << 20)
    first = arena.empty(1000, torch.float64)
    view, place = first[10:20].fill_(7.0), first.data_ptr()
    del first
    second = arena.empty(1000, torch.float64)
    assert second.data_ptr() != place
    assert view.eq(7.0).all()
    del view
    assert arena.empty(1000, torch.float64).data_ptr() == place


@pytest.mark.unit
def test_an_arena_without_memory_gives_none(monkeypatch):
    arena = Arena(1 << 20)
    monkeypatch.setattr(os, "posix_fallocate", no_memory)
    assert arena.empty(1000, torch.float32) is None
    assert arena.num_reserved == 0


def lend_with_little_memory(path):
    """Ask for more than half of what a rank may take, and for less; sum over a group that has either."""
    os.environ["COLOSSALAI_SHARED_MEMORY"] = "8MiB"
    with group(path) as rank:
        large = empty_in_arena(dist.group.WORLD, 1 << 20, torch.float32)
        small = empty_in_arena(dist.group.WORLD, 1 << 18, torch.float32)
        none_left = empty_in_arena(dist.group.WORLD, 1 << 19, torch.float32)
        small.fill_(rank + 1.0)
        dist.all_reduce(small)
        other = dist.new_group()
        return large is None, none_left is None, small.eq(3.0).all().item(), transport_of(other)


@pytest.mark.dist
def test_tensors_leave_half_of_the_memory_to_groups(tmp_path):
    told = run_ranks(lend_with_little_memory, 2, tmp_path / "little")
    assert told == [(True, True, True, "shared memory")] * 2


def open_no_arena(path):
    """Rank 1 cannot map the arena of rank 0, and so nobody lends."""
    if os.environ["RANK"] == "1":
        _islands.Arenas.open = lambda self, offer: None
    with group(path) as rank:
        lent = empty_in_arena(dist.group.WORLD, 1 << 20, torch.float32)
        tensor = torch.full((1 << 20,), rank + 1.0)
        dist.all_reduce(tensor)
        return lent is None, transport_of(), tensor.eq(3.0).all().item()


@pytest.mark.dist
def test_ranks_that_cannot_map_an_arena_lend_nothing(tmp_path):
    told = run_ranks(open_no_arena, 2, tmp_path / "closed")
    assert told == [(True, "shared memory", True)] * 2
