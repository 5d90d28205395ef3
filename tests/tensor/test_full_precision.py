"""Float32 tensors that behave as tensors of 16 bits: attributes, writes, gradients, copies, modules."""

import copy
import gc
import io
import pickle
import weakref
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from torch import nn
from torch._functorch import config as functorch_config
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from colossalai.tensor import FullPrecisionTensor, keep_full_precision, with_full_precision
from colossalai.tensor._full_precision import FullPrecisionBuffers, rounded, source_of

pytestmark = pytest.mark.unit

LOW_DTYPES = (torch.bfloat16, torch.float16)
VALUES = (999.0, 3.3, 0.1)  # neither is one of bfloat16, and the last two are none of float16


@pytest.fixture(params=LOW_DTYPES, ids=str)
def low_dtype(request):
    return request.param


@pytest.fixture
def source():
    return torch.tensor(VALUES)


@pytest.fixture
def tensor(source, low_dtype):
    return with_full_precision(source, low_dtype)


class Net(nn.Module):
    """Reads a table, and keeps an average."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("table", torch.tensor(VALUES))
        self.register_buffer("average", torch.full((3,), 1000.0))
        self.register_buffer("plain", torch.ones(3))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("absent", None)

    def forward(self, x):
        h = self.layer(x) * self.table + x
        with torch.no_grad():
            self.average.add_(h.detach().mean(0), alpha=0.001)
            self.count += 1
        return h, self.table * 2


def kept_net(low_dtype=torch.bfloat16):
    torch.manual_seed(0)
    net = Net()
    for param in net.parameters():
        param.data = param.data.to(low_dtype)
    keep_full_precision(
        net, low_dtype, is_plain=lambda buffer: buffer is net.plain or not buffer.is_floating_point()
    )
    return net


def test_it_answers_as_its_copy_in_16_bits(tensor, source, low_dtype):
    assert tensor.dtype == low_dtype
    assert torch.finfo(tensor.dtype).bits == 16
    assert (tensor.itemsize, tensor.element_size(), tensor.nbytes) == (2, 2, 6)
    assert tensor.type() == source.to(low_dtype).type()
    assert torch.result_type(tensor, 1.0) == low_dtype
    assert tensor.is_floating_point()
    assert (tensor.shape, len(tensor), tensor.tolist()) == (source.shape, 3, source.tolist())
    assert [type(each) for each in tensor] == 3 * [type(tensor)]
    assert "low_dtype" in repr(tensor)
    assert {tensor: 1}[tensor] == 1


def test_memory_that_is_read_is_that_of_the_copy(tensor, source, low_dtype):
    address = tensor.data_ptr()
    assert address != source.data_ptr()
    assert rounded(tensor).data_ptr() == address  # and stays, as long as the tensor
    assert len(tensor.untyped_storage()) == 6
    assert torch.from_dlpack(tensor).equal(source.to(low_dtype))


def test_conversions(tensor, source, low_dtype):
    for converted in (
        tensor.float(),
        tensor.to(torch.float32),
        tensor.type(torch.float32),
        tensor.to(source),
    ):
        assert type(converted) is torch.Tensor
        assert converted.equal(source)
        assert converted.data_ptr() != source.data_ptr()  # as from 16 bits: it is written into by its owner
    assert tensor.double().equal(source.double())
    for dtype in LOW_DTYPES:
        assert tensor.to(dtype).equal(source.to(low_dtype).to(dtype))
    assert tensor.half().dtype == torch.float16
    assert tensor.bfloat16().dtype == torch.bfloat16
    assert tensor.to("meta").dtype == low_dtype
    assert tensor.long().tolist() == [999, 3, 0]


def test_conversions_of_others_to_it(tensor, source, low_dtype):
    for converted in (source.to(tensor), source.type_as(tensor)):
        assert converted.dtype == low_dtype
        assert source_of(converted).equal(source)
        assert converted.mul_(2).dtype == low_dtype
    assert source.equal(torch.tensor(VALUES))
    assert source_of(torch.tensor([999]).to(tensor)).item() == 999
    assert source_of(source.to(low_dtype).to(tensor)).equal(source.to(low_dtype))


def test_results_have_16_bits(tensor, source, low_dtype):
    weight = torch.ones(3, dtype=low_dtype)
    assert source_of(torch.sin(tensor)).equal(torch.sin(source))
    low = source.to(low_dtype)
    error = F.mse_loss(tensor, low)
    assert error.equal(F.mse_loss(source, low.float()).to(low_dtype))
    assert error > 0  # which is that of rounding
    assert (tensor - low).tolist() == [0, 0, 0]
    assert F.linear(tensor, weight[None]).dtype == low_dtype
    assert (tensor * 2).dtype == (tensor * torch.ones(())).dtype == low_dtype
    assert (tensor * torch.ones(3)).dtype == (tensor[0] * torch.ones(())).dtype == torch.float32
    assert source_of(tensor.view_as(weight)).data_ptr() == source.data_ptr()
    assert torch.linalg.vector_norm(tensor, dtype=low_dtype).dtype == low_dtype


def test_normalization_with_float32_parameters_returns_16_bits(low_dtype):
    x = torch.randn(4, 3)
    given = with_full_precision(x, low_dtype)
    for module in (nn.BatchNorm1d(3), nn.LayerNorm(3), nn.GroupNorm(3, 3), nn.BatchNorm1d(3, affine=False)):
        twin = copy.deepcopy(module)
        result = module(given)
        assert result.dtype == low_dtype
        assert source_of(result).equal(twin(x))


def test_factories(tensor, low_dtype):
    """Two ranks exchange a tensor and what another one made like it: both have the same memory."""
    for made in (
        torch.zeros_like(tensor),
        torch.full_like(tensor, 2),
        tensor.new_zeros(2),
        tensor.new_tensor([1, 2]),
        torch.zeros_like(input=tensor),
    ):
        assert type(made) is type(tensor)
        assert made.dtype == low_dtype
    assert type(torch.zeros_like(tensor, dtype=tensor.dtype)) is torch.Tensor
    assert torch.zeros_like(tensor, dtype=torch.float64).dtype == torch.float64
    assert torch.ones(1).new_full((2,), tensor[0]).dtype == torch.float32


def test_named_tuples_and_lists(tensor):
    largest = tensor.max(dim=0)
    assert type(largest) is torch.return_types.max
    assert source_of(largest.values).item() == 999
    parts = tensor.split(1)
    assert [source_of(part).item() for part in parts] == source_of(tensor).tolist()


def _set(target, update):
    target[:] = update


WRITES = {
    "add_": lambda target, update: target.add_(update),
    "mul_": lambda target, update: target.mul_(update),
    "copy_": lambda target, update: target.copy_(999.3 + update.float()),
    "lerp_": lambda target, update: target.lerp_(update, 0.001),
    "index_add_": lambda target, update: target.index_add_(0, torch.tensor([0, 1, 2]), update),
    "__setitem__": lambda target, update: _set(target, update),
    **{
        name: lambda target, update, name=name: getattr(target, name)(update)
        for name in (
            "__iadd__",
            "__isub__",
            "__imul__",
            "__itruediv__",
            "__ifloordiv__",
            "__imod__",
            "__ipow__",
        )
    },
    "out": lambda target, update: torch.hypot(target, update, out=target),
    "out of others": lambda target, update: torch.exp(update, out=target),
    "foreach": lambda target, update: torch._foreach_add_([target], [update]),
    "init": lambda target, update: nn.init.constant_(target, 999.3),
    "slice": lambda target, update: target[1:].add_(update[1:]),
    "aten": lambda target, update: torch.ops.aten.add_(target, update),
    "in place": lambda target, update: F.threshold(target, 5.0, 0.3, inplace=True),
}


@pytest.mark.parametrize("name", WRITES)
def test_writes_of_16_bits_are_not_rounded(name, tensor, source, low_dtype):
    update = torch.tensor([0.1, 0.2, 0.3]).to(low_dtype)
    wanted = source.clone()
    WRITES[name](wanted, update.float())
    WRITES[name](tensor, update)
    assert source.equal(wanted)
    assert not source.equal(torch.tensor(VALUES))
    assert rounded(tensor).equal(wanted.to(low_dtype))


@pytest.mark.parametrize("norm", [F.batch_norm, F.instance_norm])
def test_running_statistics_are_not_rounded(norm, low_dtype):
    x = torch.randn(4, 3, 5).to(low_dtype)
    start, scale = torch.full((3,), 1000.0), torch.ones(3)
    mean, var = start.clone(), start.clone()
    options = {"momentum": 0.001} | (
        {"training": True} if norm is F.batch_norm else {"use_input_stats": True}
    )
    result = norm(
        x,
        with_full_precision(mean, low_dtype),
        with_full_precision(var, low_dtype),
        scale.to(low_dtype),
        **options,
    )
    wanted_mean, wanted_var = start.clone(), start.clone()
    norm(x.float(), wanted_mean, wanted_var, scale, **options)
    assert result.dtype == low_dtype
    assert torch.allclose(mean, wanted_mean)
    assert torch.allclose(var, wanted_var)
    assert not mean.equal(start)


def test_data_is_set_in_float32(tensor, source, low_dtype):
    tensor.data = torch.tensor([1.0, 2.0, 3.0, 4.0]).to(low_dtype)
    assert source.dtype == torch.float32
    assert source.tolist() == source_of(tensor).tolist() == [1, 2, 3, 4]
    assert tensor.shape == (4,)


def test_the_copy_is_made_once_for_several_readers(tensor, source):
    first = rounded(tensor)
    assert rounded(tensor) is first
    source.add_(100)
    second = rounded(tensor)
    assert second.equal(source.to(second.dtype))
    assert not second.equal(first)
    second.zero_()  # by a reader who owns it
    assert rounded(tensor).equal(source.to(second.dtype))


def test_what_is_written_through_data_is_read(tensor, source):
    held = rounded(tensor)
    tensor.data.add_(100)  # torch does not count it
    assert rounded(tensor).equal(source.to(held.dtype))
    assert not rounded(tensor).equal(held)


def test_what_is_written_into_a_buffer_without_a_count_is_read(low_dtype):
    net = kept_net(low_dtype)
    held = rounded(net.table)
    dict(net.named_buffers())["table"].data.add_(100)
    assert not rounded(net.table).equal(held)


def test_the_address_of_a_buffer_is_that_of_memory_in_use(low_dtype):
    net = kept_net(low_dtype)
    address = net.table.data_ptr()
    others = [torch.zeros(3, dtype=low_dtype) for _ in range(100)]
    assert address not in [each.data_ptr() for each in others]


def test_the_copy_is_freed_with_its_last_reader(tensor):
    weight = torch.ones(3, dtype=tensor.dtype, requires_grad=True)
    result = torch.dot(tensor, weight)
    reference = weakref.ref(rounded(tensor))
    assert reference() is not None  # the graph has it
    assert rounded(tensor) is reference()
    del result
    gc.collect()
    assert reference() is None


def test_the_copy_of_one_mode_is_not_given_to_another(tensor):
    with torch.inference_mode():
        held = rounded(tensor)
        assert rounded(tensor) is held
    weight = torch.ones(3, dtype=tensor.dtype, requires_grad=True)
    torch.dot(tensor, weight).backward()
    assert weight.grad.equal(held)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, weight):
        ctx.save_for_backward(tensor, weight)
        return tensor * weight

    @staticmethod
    def backward(ctx, grad):
        tensor, weight = ctx.saved_tensors
        return grad * weight, grad * tensor


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        return tensor * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def test_gradients_of_what_it_meets(tensor, source, low_dtype):
    weight = torch.ones(3, dtype=low_dtype, requires_grad=True)
    for product in (torch.mul, Product.apply):
        result = product(tensor, weight)
        (grad,) = torch.autograd.grad(result.sum(), weight)
        assert result.dtype == grad.dtype == low_dtype
        assert grad.equal(source.to(low_dtype))


def test_it_is_a_leaf_after_requires_grad(tensor, low_dtype):
    leaf = tensor.clone().requires_grad_()
    assert leaf.is_leaf
    assert leaf.requires_grad
    weight = torch.full((3,), 2.0, dtype=low_dtype)
    for result in (leaf * weight, Product.apply(leaf, weight), Double.apply(leaf), Double.apply(leaf) * 1):
        leaf.grad = None
        result.sum().backward()
        assert leaf.grad.dtype == low_dtype
        assert leaf.grad.tolist() == [2, 2, 2]
        (grad,) = torch.autograd.grad(Double.apply(leaf) * weight, leaf, grad_outputs=weight)
        assert grad.dtype == low_dtype
        assert grad.tolist() == [8, 8, 8]
    leaf.grad = None
    (leaf * leaf).backward(gradient=weight, inputs=[leaf])
    assert torch.allclose(leaf.grad.float(), 4 * tensor.float())
    plain = torch.ones(3).requires_grad_()
    (with_full_precision(plain, low_dtype) * weight).sum().backward()
    assert plain.grad.tolist() == [2, 2, 2]


def test_second_derivatives(tensor, source):
    leaf = tensor.clone().requires_grad_()
    (first,) = torch.autograd.grad((leaf**3).sum(), leaf, create_graph=True)
    assert isinstance(first, FullPrecisionTensor)
    assert torch.allclose(source_of(first), 3 * source**2)
    (second,) = torch.autograd.grad(first.sum(), [leaf], retain_graph=True)
    assert torch.allclose(source_of(second), 6 * source)
    first.sum().backward()
    assert torch.allclose(source_of(leaf.grad), 6 * source)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints(tensor, low_dtype, use_reentrant):
    def part(given, weight):
        dtypes.append(given.dtype)
        return torch.sin(given) * weight

    dtypes = []
    weights = [torch.ones(3, dtype=low_dtype, requires_grad=True) for _ in range(2)]
    part(tensor, weights[0]).sum().backward()
    checkpoint(part, tensor, weights[1], use_reentrant=use_reentrant).sum().backward()
    assert dtypes == 3 * [low_dtype]
    assert weights[1].grad.equal(weights[0].grad)


def test_vmap_over_what_it_meets(tensor, low_dtype):
    weights = torch.randn(4, 2, 3).to(low_dtype)
    result = torch.vmap(lambda weight: F.linear(tensor, weight))(weights)
    assert result.dtype == low_dtype
    wanted = torch.stack([F.linear(tensor, weight) for weight in weights])
    assert torch.allclose(result, wanted, rtol=0.02)


def test_copies_and_files(tensor, source, low_dtype):
    for another in (copy.copy(tensor), copy.deepcopy(tensor)):
        assert another.dtype == low_dtype
        assert source_of(another).equal(source)
    assert source_of(copy.deepcopy(tensor)).data_ptr() != source.data_ptr()
    file = io.BytesIO()
    torch.save({"tensor": tensor}, file)
    file.seek(0)
    for loaded in (pickle.loads(pickle.dumps(tensor)), torch.load(file)["tensor"]):
        assert type(loaded) is torch.Tensor
        assert loaded.equal(source)


def test_sparse_tensors_are_rounded(low_dtype):
    sparse = torch.eye(2).to_sparse()
    assert with_full_precision(sparse, low_dtype).dtype == low_dtype
    assert with_full_precision(torch.eye(2), low_dtype).to_sparse().dtype == low_dtype


def test_a_module_reads_its_buffers_in_16_bits_and_shows_them_in_float32(low_dtype):
    net = kept_net(low_dtype)
    assert net.table.dtype == low_dtype
    assert net.absent is None
    assert type(net.plain) is torch.Tensor
    assert net.count.dtype == torch.int64
    assert {buffer.dtype for buffer in net.buffers()} == {torch.float32, torch.int64}
    assert all(type(each) is torch.Tensor for each in net.state_dict().values())
    assert net.state_dict()["table"].tolist() == net.table.tolist()


def test_a_module_updates_its_buffers_in_float32(low_dtype):
    net = kept_net(low_dtype)
    x = with_full_precision(torch.ones(2, 3), low_dtype)
    first, table = net(x)
    assert (first.dtype, table.dtype) == (low_dtype, low_dtype)
    change = net.state_dict()["average"] - 1000
    assert torch.allclose(change, 0.001 * first.detach().float().mean(0), atol=1e-4)
    assert change.abs().max() > 0.01  # which is lost next to 1000 in 16 bits
    assert net.count.item() == 1


def test_what_is_assigned_to_a_buffer_is_stored_in_float32(low_dtype):
    net = kept_net(low_dtype)
    net.table = torch.ones(3, dtype=low_dtype)
    assert net.table.dtype == low_dtype
    assert dict(net.named_buffers())["table"].dtype == torch.float32
    net.table = net.table * 0.3
    assert type(dict(net.named_buffers())["table"]) is torch.Tensor
    assert net.state_dict()["table"].equal(torch.full((3,), 0.3))
    net.register_buffer("late", torch.ones(3))
    source = torch.tensor(VALUES)
    net.register_buffer("given", with_full_precision(source, low_dtype))
    assert net.late.dtype == net.given.dtype == low_dtype
    assert dict(net.named_buffers())["given"] is source
    net.table = None
    assert net.table is None


@pytest.mark.parametrize("assign", [True, False])
@pytest.mark.parametrize("is_low", [True, False])
def test_states_are_loaded(assign, is_low, low_dtype):
    net, state = kept_net(low_dtype), kept_net(low_dtype).state_dict()
    state["table"] = torch.tensor([7.7, 8.8, 9.9]).to(low_dtype if is_low else torch.float32)
    net.load_state_dict(state, assign=assign)
    assert net.table.dtype == low_dtype
    assert dict(net.named_buffers())["table"].dtype == torch.float32
    assert net.state_dict()["table"].equal(state["table"].float())


def _saved(net):
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net)), _saved])
def test_modules_are_copied_and_stored_with_their_buffers(again, low_dtype):
    net = kept_net(low_dtype)
    net.table = torch.tensor([5.5, 6.6, 7.7])
    other = again(net)
    assert isinstance(other._buffers, FullPrecisionBuffers)
    assert other.table.dtype == low_dtype
    assert (other.count.dtype, other.plain.dtype, other.absent) == (torch.int64, torch.float32, None)
    other.table.add_(1)
    other.average = torch.zeros(3, dtype=low_dtype)
    assert torch.allclose(other.state_dict()["table"], torch.tensor([6.5, 7.6, 8.7]))
    assert net.state_dict()["table"].tolist() == torch.tensor([5.5, 6.6, 7.7]).tolist()
    assert other.state_dict()["average"].dtype == torch.float32


def test_a_module_is_moved_and_cast_as_a_whole(low_dtype):
    net = kept_net(low_dtype)
    table = net.table
    net.double()
    assert net.table.dtype == torch.float64
    net = kept_net(low_dtype)
    net.to("meta")
    assert net.table.device.type == "meta"
    assert table.device.type == "cpu"


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@mock.patch.object(functorch_config, "check_custom_op_aliasing", False)
def test_modules_and_functions_are_compiled(backend):
    torch._dynamo.reset()
    x, weight = torch.tensor([VALUES, VALUES]), torch.ones(3, dtype=torch.bfloat16, requires_grad=True)

    def part(given, weight):
        kept, update = given.clone(), weight.detach()
        kept += update
        kept *= update
        kept **= update
        kept //= update
        kept[0] = update
        rows = sum(row for row in given)
        return torch.sin(given) * weight, given * 2, given.float(), given.to(weight), kept, rows

    for eager, args in ((kept_net(), ()), (part, (weight,))):
        given = with_full_precision(x.clone(), torch.bfloat16)
        twin = copy.deepcopy(eager)
        found = torch.compile(eager, backend=backend, fullgraph=True)(given, *args)
        wanted = twin(given, *args)
        assert [type(each) for each in found] == [type(each) for each in wanted]
        for one, other in zip(found, wanted, strict=True):
            assert one.dtype == other.dtype
            assert torch.allclose(source_of(one).float(), source_of(other).float(), rtol=0.01)
        if isinstance(eager, nn.Module):
            assert torch.allclose(eager.state_dict()["average"], twin.state_dict()["average"], atol=1e-4)
            assert not eager.state_dict()["average"].equal(torch.full((3,), 1000.0))
        else:
            found[0].sum().backward()
            assert weight.grad.equal(torch.sin(x).to(torch.bfloat16).sum(0))
    torch._dynamo.reset()


@dataclass
class Secretive:
    """Attributes that are there and cannot be read, as in some configs of transformers."""

    heads: int = 2

    def __getattribute__(self, name):
        if name == "heads":
            raise AttributeError("per layer")
        return super().__getattribute__(name)


def test_buffers_under_another_attribute_are_cast(low_dtype):
    net = nn.Module()
    for name in ("alias", "listed", "nested", "alone"):
        net.register_buffer(name, torch.tensor([999.0]))
    net.other = net.alias
    net.tables = [net.listed]
    net.cache = {"tables": (net.nested, {})}
    net.cache["itself"] = net.cache
    object.__setattr__(net, "config", Secretive.__new__(Secretive))
    keep_full_precision(net, low_dtype, is_plain=lambda buffer: False)
    assert {name: buffer.dtype for name, buffer in net.named_buffers()} == {
        **dict.fromkeys(("alias", "listed", "nested"), low_dtype),
        "alone": torch.float32,
    }
    assert net.other is dict(net.named_buffers())["alias"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_trained_module_is_converted_to_another_dtype(low_dtype, dtype):
    """Batch normalization, whose statistics are ordinary tensors, has those of the new dtype."""
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    statistics = {id(buffer) for buffer in net.buffers()}
    net[0].register_buffer("table", torch.tensor([999.0, 1.0, 2.0]))
    net[0].to(low_dtype)
    net[0].table = torch.tensor([999.0, 1.0, 2.0])
    keep_full_precision(net, low_dtype, is_plain=lambda buffer: id(buffer) in statistics)
    converted = copy.deepcopy(net).to(dtype)
    assert converted(torch.ones(4, 3, dtype=dtype)).dtype == dtype
    assert converted[0].table.dtype == converted[1].running_mean.dtype == dtype
    assert net[1].running_mean.dtype == torch.float32
