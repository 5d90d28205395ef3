"""What ranks tell each other is plain: nothing that came over a socket or the store is unpickled."""

import ast
import math
import os
import pickle
from collections import Counter, OrderedDict
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

import colossalai
from colossalai.checkpoint_io import TrainingState, save_training_state, wait_for_saves
from colossalai.checkpoint_io.storage._async_save import _StoreExchange
from colossalai.cluster import PlainCodec, broadcast_value, gather_bytes, gather_values
from colossalai.core import global_context as gpc
from colossalai.pipeline.execution._payload import PayloadSpec
from tests.ranks import ROOT, run_ranks


@dataclass(frozen=True)
class Place:
    name: str
    extents: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Thing:
    place: Place
    dtype: torch.dtype


CODEC = PlainCodec(Place, Thing)
VALUES = [
    None,
    [True, -(1 << 80), 0.1, -0.0, math.inf, "\udcffé", b"\x00\xff"],
    (1, (2, [3]), ()),
    {"a": 1, 2: "b", (3, None): {4}, False: {}},
    Counter({5: 2}),
    torch.float8_e4m3fn,
    [Place("x", (1, 2)), {"y": Place("x", (1, 2))}],
]


class Runs:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def __reduce__(self):
        return os.mkdir, (self.folder,)


@pytest.mark.unit
@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_comes_back(value):
    found = CODEC.decode(CODEC.encode(value))
    assert found == value
    assert repr(found) == repr(value)


@pytest.mark.unit
def test_tensors_and_shared_records_come_back():
    thing = Thing(Place("x", (3,)), torch.int64)
    tensors = [
        torch.tensor(True),
        torch.randn(2, 3).T,
        torch.empty(0, 4),
        torch.ones(2, dtype=torch.bfloat16),
    ]
    found, one, other, meta = CODEC.decode(
        CODEC.encode([tensors, thing, thing, torch.ones(2, device="meta")])
    )
    assert all(map(torch.equal, found, tensors))
    assert [tensor.dtype for tensor in found] == [tensor.dtype for tensor in tensors]
    assert one is other
    assert (one.place, one.dtype) == (thing.place, thing.dtype)
    assert meta.is_meta


@pytest.mark.unit
def test_equal_values_have_equal_bytes():
    value = OrderedDict(a=Place("x", (1,)), b=(2,))
    assert CODEC.encode(value) == CODEC.encode({"a": Place("x", (1,)), "b": (2,)})


@pytest.mark.unit
def test_what_is_not_plain_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"is a .*Runs, which ranks cannot exchange"):
        CODEC.encode([Runs(tmp_path / "made")])
    with pytest.raises(ValueError, match="Place"):
        PlainCodec().encode(Place("x", ()))


@pytest.mark.unit
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"[" * 100_000,
        b'[{"record": 3}, []]',
        b'[{"os.system": "true"}, []]',
        b'[1, [["Runs", ["x"]]]]',
        b'[{"dtype": "load"}, []]',
        b'[{"tensor": ["float32", [1073741824, 1073741824, 1073741824], ""]}, []]',
        b'[{"dict": [[[], 1]]}, []]',
        pickle.dumps(Place("x", ())),
    ],
)
def test_other_bytes_are_no_value(data):
    with pytest.raises(ValueError, match="not an encoded plain value"):
        CODEC.decode(data)


@pytest.mark.unit
def test_a_payload_makes_containers_only(tmp_path):
    spec = PayloadSpec((Counter(),), ())
    told = bytes(spec.encode().tolist())
    for other in (
        b'"os","_Environ"',
        b'"pathlib","Path"',
        b'"os","path.join"',
        b'"nowhere","x"',
        b'"os","nothing"',
    ):
        hostile = told.replace(b'"collections","Counter"', other)
        assert hostile != told
        with pytest.raises(ValueError, match="not a known container"):
            PayloadSpec.decode(torch.tensor(list(hostile), dtype=torch.uint8))
    pickled = torch.tensor(list(pickle.dumps(Runs(tmp_path / "made"))), dtype=torch.uint8)
    with pytest.raises(ValueError, match="not an encoded plain value"):
        PayloadSpec.decode(pickled)
    assert not (tmp_path / "made").exists()


@pytest.mark.unit
def test_nothing_in_the_package_unpickles_what_others_send():
    """Files that load pickles read them from disk where the caller allows it, or from this very process."""
    allowed = {
        "checkpoint_io/formats/_torch_dcp.py": "a file, with --allow-pickle",
        "chat/rewards/_timed_calls.py": "a process of its own, for the user's function",
        "monitor/_flight_recorder.py": "what torch's recorder in this process has noted",
    }
    calls = {"all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"}
    calls |= {"send_object_list", "recv_object_list"}
    found = set()
    for path in (ROOT / "colossalai").rglob("*.py"):
        text = path.read_text()
        if not any(word in text for word in ("loads", "Unpickler", *calls)):
            continue  # to parse all of them takes longer than all else here
        for node in ast.walk(ast.parse(text)):
            name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
            is_load = name in ("loads", "Unpickler") and "pickle" in ast.unparse(node)
            if is_load or name in calls:
                found.add(path.relative_to(ROOT / "colossalai").as_posix())
    assert found == set(allowed)


def exchange():
    rank = int(os.environ["RANK"])
    colossalai.launch_from_torch({}, verbose=False)
    told = {"rank": rank, "text": "x" * 100 * rank, "tensor": torch.ones(rank)}
    found = gather_values(told)
    assert [each["rank"] for each in found] == [0, 1]
    assert [len(each["text"]) for each in found] == [0, 100]
    assert [each["tensor"].numel() for each in found] == [0, 1]
    assert broadcast_value((rank, [None]), source=1) == (1, [None])
    with pytest.raises(ValueError, match="cannot exchange"):  # on both, where one has it
        gather_values(print if rank else None)
    gpc.destroy()


@pytest.mark.dist
def test_ranks_exchange_values():
    run_ranks(exchange, 2)


def all_gathers():
    """Return how many all-gathers values of some lengths take; every value has arrived whole."""
    rank = int(os.environ["RANK"])
    colossalai.launch_from_torch({}, verbose=False)
    counts, issue = [], dist.all_gather

    def counted(*args, **kwargs):
        counts[-1] += 1
        return issue(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_gather", counted)
        for lengths in ((0, 0), (1016, 3), (3, 1016), (1017, 3), (3, 1017), (5000, 5000)):
            counts.append(0)
            assert gather_bytes(b"x" * lengths[rank]) == [b"x" * length for length in lengths]
    gpc.destroy()
    return counts


@pytest.mark.dist
def test_short_values_take_one_all_gather():
    """All ranks agree on the second one, also where only another rank's value is long."""
    assert run_ranks(all_gathers, 2) == [[1, 1, 1, 2, 2, 2]] * 2


@pytest.mark.unit
def test_a_process_without_a_job_exchanges_with_none():
    assert gather_values([1, "two"]) == [[1, "two"]]


def keys_of_saves(store):
    """Without those of the watchdog, whose thread writes its first ones at any moment."""
    return {key for key in store.list_keys() if key.startswith("colossalai/checkpoint")}


def poisoned_save(folder):
    """Where somebody who can reach the store writes a pickle into it; and what is left when all is well."""
    rank = int(os.environ["RANK"])
    colossalai.launch_from_torch({}, verbose=False)
    store = _get_default_store()
    state = TrainingState(model=torch.nn.Linear(2, 2))
    save_training_state(folder / "states", state, step=0)
    dist.barrier()
    before = keys_of_saves(store)
    dist.barrier()  # a rank that goes on writes keys
    for step in (1, 2):
        save_training_state(folder / "states", state, step=step, save_async=True)
        wait_for_saves()
    dist.barrier()
    assert keys_of_saves(store) == before
    dist.barrier()
    original = _StoreExchange.__call__

    def poison(exchange, data):
        return original(exchange, pickle.dumps(Runs(folder / f"made-{rank}")))

    _StoreExchange.__call__ = poison
    save_training_state(folder / "states", state, step=3, save_async=True)
    with pytest.raises(ValueError, match="not an encoded plain value"):
        wait_for_saves()
    _StoreExchange.__call__ = original
    gpc.destroy()


@pytest.mark.dist
def test_a_pickle_in_the_store_is_not_run_and_no_key_is_left(tmp_path):
    run_ranks(poisoned_save, 2, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["states"]
