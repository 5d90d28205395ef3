"""Parameters in chunks: seen wherever they are used, safe wherever they are not."""

import copy
import pickle
from collections.abc import Callable
from functools import partial
from io import BytesIO
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import colossalai
from colossalai.core import global_context as gpc
from tests.ranks import run_ranks
from tests.tiers import further
from tests.zero.gemini.nets import CHECKPOINTING, batch, put, trained, twins

pytestmark = pytest.mark.dist
STEPS = 3
CHUNK = 2200  # elements: two blocks of weights do not fit into one


def part_of(tensors: tuple[torch.Tensor, ...], rank: int) -> tuple[torch.Tensor, ...]:
    return tuple(tensor[4 * rank : 4 * rank + 4] for tensor in tensors)


def train(checkpointing: str, accumulation: int) -> tuple[float, float, int, float]:
    """Train a net in chunks and its twin; return how far they are apart, and what was present."""
    colossalai.launch_from_torch({}, verbose=False)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    net, twin = twins(checkpointing)
    applied = put(net, CHUNK)
    make = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    step, optimizer = trained(net, applied, make), make(twin.parameters())
    tensors, far = batch(num_ranks), 0.0
    for _ in range(STEPS):
        loss = step(*[part_of(tensors, rank)] * accumulation)
        losses = [twin(*part_of(tensors, other)) for other in range(num_ranks)]
        for _ in range(accumulation - 1):  # the running statistics of batch normalization move as often
            twin(*part_of(tensors, rank))
        (sum(losses) / num_ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
        far = max(far, abs(loss.item() - losses[rank].item()))
    cache = applied.cache
    largest = max(chunk.num_bytes for chunk in cache.chunks)
    peak = cache.peak_bytes / largest
    held = [chunk for chunk in cache.chunks if chunk.is_cut and chunk.whole is not None]
    assert not any(chunk.layout.params[0].requires_grad for chunk in held), "they are out of date"
    assert cache.present_bytes == sum(chunk.num_bytes for chunk in held)
    with cache.gathered():
        apart = max(
            (a - b).abs().max().item() for a, b in zip(net.parameters(), twin.parameters(), strict=True)
        )
    gpc.destroy()
    return far, apart, len(cache.chunks), peak


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize(("num_ranks", "accumulation"), [(1, 1), (2, 1), (2, 2), further(4, 1)])
def test_training_is_that_of_one_process_with_two_chunks_present(
    num_ranks: int, accumulation: int, checkpointing: str
) -> None:
    for far, apart, num_chunks, peak in run_ranks(train, num_ranks, checkpointing, accumulation):
        assert far < 1e-12
        assert apart < 1e-12
        assert num_chunks >= 5
        assert peak == (2.0 if num_ranks > 1 else 0.0)  # one rank alone has nothing to gather


OUTSIDE: dict[str, Callable[[nn.Parameter], Any]] = {
    "sum": torch.sum,
    "norm": torch.linalg.norm,
    "clone": torch.clone,
    "detach": torch.Tensor.detach,
    "data": lambda param: param.data,
    "numpy": lambda param: param.detach().numpy(),
    "tolist": torch.Tensor.tolist,
    "T": lambda param: param.T,
    "mT": lambda param: param.mT,
    "an index": lambda param: param[0],
    "a product": lambda param: 2 * param,
    "a product with a tensor": lambda param: torch.ones(3, 16, dtype=param.dtype) @ param.t(),
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "save": lambda param: torch.save(param, BytesIO()),
    "to": lambda param: param.to(torch.float32),
    "zero_": lambda param: torch.no_grad()(param.zero_)(),
    "copy_": lambda param: torch.no_grad()(param.copy_)(torch.ones(16, 16)),
    "fill by index": lambda param: torch.no_grad()(param.__setitem__)(0, 1.0),
    "normal_": nn.init.normal_,
    "cat": lambda param: torch.cat([param, param]),
    "new_tensor": lambda param: param.new_tensor(param),
    "new_tensor by name": lambda param: param.new_tensor(data=param),
    "bool": bool,
    "iteration": list,
}


def look_outside() -> tuple[dict[str, str], str, list[Any]]:
    """Do with a parameter what needs its values, outside of a forward: what is said; and what needs none."""
    colossalai.launch_from_torch({}, verbose=False)
    net, _ = twins("none")
    put(net, CHUNK)
    param = net.reused.weight
    said = {}
    for name, look in OUTSIDE.items():
        try:
            said[name] = f"gave {look(param)}"
        except RuntimeError as error:
            said[name] = str(error)
    state = ""
    try:
        net.state_dict()
    except RuntimeError as error:
        state = str(error)
    free = [
        tuple(param.shape),
        param.dtype is torch.float64,
        param.numel(),
        param.requires_grad,
        param.grad is None,
        param.is_leaf,
        len(param),
        isinstance(param, nn.Parameter),
        repr(param),
        hash(param) == id(param),
        sum(p.numel() for p in net.parameters()) > 0,
        type(torch.zeros_like(param)) is torch.Tensor,
        torch.zeros_like(param, requires_grad=False).stride() == (16, 1),
        param.new_ones(3).sum().item() == 3.0,
        param.new_tensor([1.0, 2.0]).sum().item() == 3.0,
    ]
    gpc.destroy()
    return said, state, free


def test_outside_of_a_use_everything_that_needs_values_says_where_they_are() -> None:
    for said, state, free in run_ranks(look_outside, 2):
        for name, text in {**said, "state_dict": state}.items():
            assert "values lie in a chunk" in text, (name, text)
            assert "with model.gathered():" in text, (name, text)
        assert free[:8] == [(16, 16), True, 256, True, True, True, 16, True]
        assert free[8] == "ChunkedParameter(reused.weight, shape=(16, 16), dtype=torch.float64, in a chunk)"
        assert free[9:] == [True] * 6


def look_inside() -> tuple[dict[str, bool], bool, bool]:
    """Do the same inside of `gathered`: compare with a plain parameter; then write on one rank each."""
    colossalai.launch_from_torch({}, verbose=False)
    net, twin = twins("none")
    applied = put(net, CHUNK)
    param, plain = net.reused.weight, twin.reused.weight
    alike = {}
    with applied.cache.gathered():
        for name, look in OUTSIDE.items():
            if name in ("zero_", "copy_", "fill by index", "normal_", "bool", "pickle", "save", "iteration"):
                continue
            found, wanted = look(param), look(plain)
            is_same = found == wanted
            alike[name] = bool(is_same) if isinstance(is_same, bool) else bool(is_same.all())
        restored = pickle.loads(pickle.dumps(param))
        alike["pickle"] = type(restored) is nn.Parameter and torch.equal(restored, plain)
        alike["repr"] = repr(plain).splitlines()[1] in repr(param)
        alike["state_dict"] = all(
            torch.equal(value, twin.state_dict()[name]) for name, value in net.state_dict().items()
        )
    with torch.no_grad(), applied.cache.gathered():
        if dist.get_rank() == dist.get_world_size() - 1:
            param.fill_(3.0)
        nn.init.ones_(net.frozen.weight)
    with applied.cache.gathered():
        is_kept = bool(param.eq(3.0).all()) and bool(net.frozen.weight.eq(1.0).all())
        is_left = torch.equal(net.reused.bias, twin.reused.bias)
    gpc.destroy()
    return alike, is_kept, is_left


@pytest.mark.parametrize("num_ranks", [1, further(2), 3])
def test_inside_of_gathered_values_are_read_and_written(num_ranks: int) -> None:
    for alike, is_kept, is_left in run_ranks(look_inside, num_ranks):
        assert all(alike.values()), alike
        assert is_kept
        assert is_left


class Writer(nn.Module):
    """Writes into its weight while it runs."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embedding = nn.Embedding(8, 4)
        self.other = nn.Embedding(8, 4)  # in the next chunk

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return embeddings."""
        if self.kind == "clamp":
            with torch.no_grad():
                self.embedding.weight.clamp_(-0.1, 0.1)
        if self.kind == "copy":
            with torch.no_grad():
                self.embedding.weight.copy_(self.other.weight)
        if self.kind == "renorm":
            with torch.no_grad():
                return nn.functional.embedding(ids, self.embedding.weight, max_norm=0.1)
        if self.kind == "renorm with gradients":
            return nn.functional.embedding(ids, self.embedding.weight, max_norm=0.1)
        if self.kind == "leaf":
            self.embedding.weight.mul_(2.0)
        return self.embedding(ids)


def write_in_a_forward(kind: str) -> tuple[str, bool, bool]:
    colossalai.launch_from_torch({}, verbose=False)
    torch.manual_seed(0)
    net = Writer(kind).double()
    twin = copy.deepcopy(net)
    applied = put(net, 16)
    ids, text = torch.tensor([1, 2]), ""
    try:
        net(ids)
        twin(ids)
    except RuntimeError as error:
        text = str(error)
    is_pinned = any(chunk.num_uses for chunk in applied.cache.chunks)
    with applied.cache.gathered():
        is_same = torch.equal(net.embedding.weight, twin.embedding.weight)
    gpc.destroy()
    return text, is_same, is_pinned


@pytest.mark.parametrize("kind", ["copy", "renorm", "renorm with gradients", "clamp", "leaf"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_writes_in_a_forward_are_kept_or_refused(kind: str, num_ranks: int) -> None:
    for text, is_same, is_pinned in run_ranks(write_in_a_forward, num_ranks, kind):
        assert is_same  # as in the twin, or as before
        assert not is_pinned  # the other chunk of a function that has failed can be evicted
        if kind == "leaf":
            assert "a leaf Variable that requires grad is being used in an in-place operation" in text
        else:
            assert text == "" if num_ranks == 1 else "embedding.weight was written in a forward" in text


def fail_in_a_gather() -> tuple[list[int], bool]:
    """Fail in the gather of a function's second chunk; return the pins, and whether the net then runs."""
    colossalai.launch_from_torch({}, verbose=False)
    net = nn.Linear(16, 16).double()
    twin = copy.deepcopy(net)
    cache = put(net, 256).cache
    x, gather, numbers = torch.ones(2, 16, dtype=torch.float64), cache._gather, []

    def failing(chunk: Any) -> torch.Tensor:
        numbers.append(chunk.number)
        if len(numbers) == 2:
            raise MemoryError("no memory for a gather")
        return gather(chunk)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "_gather", failing)
        with pytest.raises(MemoryError):
            net(x)
    pins = [chunk.num_uses for chunk in cache.chunks]
    is_same = torch.equal(net(x), twin(x))
    gpc.destroy()
    return pins, is_same


def test_a_failed_gather_leaves_no_pins() -> None:
    assert run_ranks(fail_in_a_gather, 2) == [([0, 0], True)] * 2


def num_writes_in_training() -> int:
    """Return the number of writes of a user that chunks have noted in three steps without any."""
    colossalai.launch_from_torch({}, verbose=False)
    net, _ = twins("none")
    applied = put(net, CHUNK)
    step = trained(net, applied, partial(torch.optim.SGD, lr=0.1))
    for _ in range(STEPS):
        step(part_of(batch(dist.get_world_size()), dist.get_rank()))
    num_writes = sum(chunk.num_writes + chunk.is_written for chunk in applied.cache.chunks)
    gpc.destroy()
    return num_writes


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_update_of_an_optimizer_is_not_a_write_of_the_user(num_ranks: int) -> None:
    assert run_ranks(num_writes_in_training, num_ranks) == [0] * num_ranks


class Modules(nn.Module):
    """Modules that take several weights at once, or in ways of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 6, num_layers=2, batch_first=True)
        self.gru = nn.GRU(6, 6, batch_first=True, bidirectional=True)
        self.attention = nn.MultiheadAttention(12, 3, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(12, 2, 24, batch_first=True, dropout=0.0)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(12, 12))
        self.orthogonal = nn.utils.parametrizations.orthogonal(nn.Linear(12, 12))
        self.conv = nn.Conv1d(12, 12, 3, padding=1, groups=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a loss."""
        x = self.gru(self.lstm(x)[0])[0]
        x = x + self.attention(x, x, x)[0]
        x = self.orthogonal(self.normed(self.layer(x)))
        return self.conv(x.transpose(1, 2)).square().mean()


def run_modules() -> tuple[list[bool], float]:
    colossalai.launch_from_torch({}, verbose=False)
    torch.manual_seed(0)
    net = Modules().double()
    twin = copy.deepcopy(net)
    applied = put(net, 300)
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    alike = [net(x).item() == twin(x).item()]
    grads = torch.autograd.grad(net(x), list(net.parameters()))
    wanted = torch.autograd.grad(twin(x), list(twin.parameters()))
    alike += [torch.equal(a, b) for a, b in zip(grads, wanted, strict=True)]
    recomputed = checkpoint(net, x, use_reentrant=False)
    grads = torch.autograd.grad(recomputed, list(net.parameters()))
    alike += [torch.equal(a, b) for a, b in zip(grads, wanted, strict=True)]
    net.eval()
    twin.eval()
    with torch.no_grad():  # the fast paths
        alike.append(torch.allclose(net(x), twin(x), rtol=0, atol=1e-15))
        alike.append(torch.allclose(net.lstm(x)[0], twin.lstm(x)[0], rtol=0, atol=1e-15))  # a part by itself
    peak = applied.cache.peak_bytes / max(chunk.num_bytes for chunk in applied.cache.chunks)
    gpc.destroy()
    return alike, peak


def test_modules_with_ways_of_their_own() -> None:
    for alike, peak in run_ranks(run_modules, 2):
        assert all(alike), alike
        assert peak >= 2.0


def transform() -> list[str]:
    """Run what does not run the model as it is."""
    colossalai.launch_from_torch({}, verbose=False)
    torch.manual_seed(0)
    net = nn.Linear(4, 4).double()
    put(net, 16)
    x, said = torch.ones(3, 4, dtype=torch.float64), []
    for run in (
        lambda: torch.vmap(net)(x),
        lambda: torch.func.grad(lambda each: net(each).sum())(x[0]),
        lambda: torch.jit.trace(net, x),
    ):
        try:
            said.append(f"gave {run()}")
        except RuntimeError as error:
            said.append(str(error))
    net(x).sum().backward()  # as it did before
    gpc.destroy()
    return said


def test_transformations_are_refused_by_name() -> None:
    for said in run_ranks(transform, 1):
        assert all("in chunks under torch.func, vmap or torch.jit.trace" in text for text in said), said
