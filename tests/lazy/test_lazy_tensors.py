"""What lazy tensors do before they are materialized, and what is refused."""

import copy
import gc
import io
import weakref

import pytest
import torch
from torch import nn

from colossalai.lazy import LazyInitContext, is_lazy, materialize, materialize_tensor

pytestmark = pytest.mark.unit


@pytest.fixture
def linear() -> nn.Linear:
    torch.manual_seed(0)
    with LazyInitContext():
        return nn.Linear(3, 4)


def eager_linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 4)


def test_a_lazy_tensor_is_on_the_meta_device_and_inside_the_context_where_it_will_be() -> None:
    with LazyInitContext():
        weight = nn.Linear(3, 4).weight
        assert (weight.device.type, weight.is_meta) == ("cpu", False)
        assert is_lazy(weight)
    assert (weight.device.type, weight.is_meta) == ("meta", True)
    assert is_lazy(weight)
    assert repr(weight) == "LazyTensor((4, 3), dtype=torch.float32)"


def test_a_default_device_is_that_of_tensors_without_one() -> None:
    with LazyInitContext(default_device="cpu"), torch.device("meta"):
        inner = nn.Linear(3, 3)
    with LazyInitContext(default_device=torch.device("cpu", 0)):
        made = torch.zeros(2)
        assert made.device == torch.device("cpu", 0)
    assert is_lazy(inner)
    assert materialize_tensor(made).tolist() == [0, 0]


def test_plain_meta_tensors_pass_through_a_lazy_model_for_their_shapes(linear: nn.Linear) -> None:
    output = linear(torch.empty(2, 3, device="meta"))
    assert output.is_meta
    assert not is_lazy(output)
    assert output.shape == (2, 4)


def test_a_real_input_is_refused(linear: nn.Linear) -> None:
    with pytest.raises(ValueError, match="materialize"):
        linear(torch.rand(2, 3))


def test_what_is_done_outside_the_context_is_recorded_too(linear: nn.Linear) -> None:
    wanted = eager_linear()
    values = torch.arange(4.0)
    for model in (linear, wanted):
        nn.init.normal_(model.weight)
        with torch.no_grad():
            model.bias.copy_(values)
            model.weight[1] += 2
        model.half()
        torch.manual_seed(0)
        nn.Linear(3, 4)  # as the lazy one was built before
    values.zero_()
    assert linear.weight.dtype is torch.float16
    torch.manual_seed(0)
    materialize(linear)
    assert linear.bias.tolist() == [0, 1, 2, 3]
    assert linear.weight[1].min() > -2
    assert torch.equal(linear.weight, wanted.weight)


def test_real_values_that_are_copied_are_those_of_that_time(linear: nn.Linear) -> None:
    with LazyInitContext():
        linear.load_state_dict({"weight": torch.ones(4, 3), "bias": torch.ones(4)})
    assert is_lazy(linear)
    assert materialize(linear)(torch.ones(1, 3)).tolist() == [[4, 4, 4, 4]]


def test_values_without_any_are_not_copied_into_a_lazy_tensor(linear: nn.Linear) -> None:
    with pytest.raises(ValueError, match="without values"), torch.no_grad():
        linear.bias.copy_(torch.empty(4, device="meta"))


def test_lazy_values_can_be_copied_into_a_real_tensor(linear: nn.Linear) -> None:
    real = torch.zeros(4, 3)
    real.copy_(linear.weight.detach())
    assert torch.equal(real, eager_linear().weight)
    assert is_lazy(linear.weight)


def test_a_lazy_tensor_is_not_saved(linear: nn.Linear) -> None:
    with pytest.raises(ValueError, match="no values to save"):
        torch.save(linear.state_dict(), io.BytesIO())


def test_copies_are_independent(linear: nn.Linear) -> None:
    copied = copy.deepcopy(linear)
    with torch.no_grad():
        linear.weight.zero_()
    materialize(copied)
    assert torch.equal(copied.weight, eager_linear().weight)
    assert materialize(linear).weight.sum() == 0


def test_what_is_dropped_is_freed() -> None:
    gc.freeze()  # to collect what is there already takes half a second
    with LazyInitContext():
        linear = nn.Linear(3, 4)
        with torch.no_grad():
            linear.weight.copy_(linear.weight * 2)
    tape = weakref.ref(linear.weight.untyped_storage().lazy_tape)
    del linear
    gc.collect()
    gc.unfreeze()
    assert tape() is None


def test_random_numbers_of_real_tensors_go_on_as_eagerly() -> None:
    torch.manual_seed(0)
    nn.Linear(3, 4)
    wanted = torch.rand(3)
    torch.manual_seed(0)
    with LazyInitContext():
        nn.Linear(3, 4)
        drawn = torch.rand(3)
    assert torch.equal(materialize_tensor(drawn), wanted)


def test_what_python_makes_is_real() -> None:
    with LazyInitContext():
        tensor = torch.tensor([1.0, 2.0])
        assert (tensor * 2).tolist() == [2, 4]
    assert not is_lazy(tensor)


def test_an_overwritten_value_is_not_computed_again() -> None:
    with LazyInitContext():
        weight = nn.Linear(30, 40).weight
        nn.init.normal_(weight)
    steps = weight.untyped_storage().lazy_tape.steps
    assert [step.op.__name__.split(".")[0] for step in steps] == ["empty", "uniform_", "normal_"]
    steps[0] = steps[1] = None  # not touched
    assert materialize_tensor(weight).std() > 0.5


def conjugates() -> list[torch.Tensor]:
    torch.manual_seed(0)
    z = torch.randn(4, 3, dtype=torch.complex64)
    written = torch.zeros_like(z)
    written.conj().copy_(z)
    turned = torch.polar(torch.ones(3), torch.arange(3.0))
    return [z.conj(), z.conj() * 2, z.conj().imag, z.conj().imag + 1, torch.view_as_real(z), written, turned]


def test_conjugates_are_views_that_are_read_as_such() -> None:
    with LazyInitContext():
        lazy = conjugates()
    for tensor, wanted in zip(lazy, conjugates(), strict=True):
        assert torch.equal(materialize_tensor(tensor), wanted)


def test_real_and_lazy_tensors_are_not_written_at_once(linear: nn.Linear) -> None:
    with pytest.raises(ValueError, match="at once"), torch.no_grad():
        torch._foreach_zero_([linear.bias, torch.ones(4)])
