"""Materializing a part: identity, attributes, ties, views, memory, and what is refused."""

import pytest
import torch
from torch import nn

from colossalai.lazy import LazyInitContext, is_lazy, materialize, materialize_tensor

pytestmark = pytest.mark.unit


def test_only_the_part_is_materialized() -> None:
    with LazyInitContext():
        model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(4)])
    LazyInitContext.materialize(model[2])
    assert [is_lazy(layer) for layer in model] == [True, True, False, True]
    assert is_lazy(model)


def test_parameters_stay_the_same_objects_with_their_attributes() -> None:
    with LazyInitContext():
        embedding, head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        head.weight = embedding.weight
    weight = head.weight
    weight.note = "kept"
    optimizer = torch.optim.SGD(head.parameters(), lr=1.0)
    materialize(embedding)
    assert head.weight is weight
    assert (weight.note, type(weight)) == ("kept", nn.Parameter)
    before = weight.detach().clone()
    head(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert torch.equal(embedding.weight, before - 1)


class Attributes(nn.Module):
    """Tensors outside of the tables of parameters and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4))
        self.table = {"twice": [self.weight.detach() * 2]}
        self.view = self.weight.detach().t()
        with torch.no_grad():
            self.row = self.weight[1]
        self.old_norm = nn.utils.weight_norm(nn.Linear(3, 3))


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_plain_attributes_are_materialized_and_views_share_memory() -> None:
    torch.manual_seed(1)
    wanted = Attributes()
    torch.manual_seed(1)
    with LazyInitContext():
        model = Attributes()
    materialize(model)
    assert torch.equal(model.table["twice"][0], wanted.table["twice"][0])
    assert torch.equal(model.old_norm(torch.ones(1, 3)), wanted.old_norm(torch.ones(1, 3)))
    with torch.no_grad():
        model.weight.zero_()
    assert model.view.abs().sum() == model.row.abs().sum() == 0


def test_inside_the_context_and_to_a_device() -> None:
    torch.manual_seed(1)
    wanted = nn.Linear(3, 3)
    torch.manual_seed(1)
    with LazyInitContext():
        model = materialize(nn.Linear(3, 3), device="cpu")
        assert not is_lazy(model)
    assert torch.equal(model.weight, wanted.weight)
    assert model.weight.device.type == "cpu"


def test_a_model_that_is_not_lazy_stays_as_it_is() -> None:
    model = nn.Linear(3, 3)
    weight = model.weight
    assert materialize(model).weight is weight
    assert not is_lazy(model)
    assert materialize_tensor(weight) is weight


def test_a_plain_meta_model_is_refused() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3))
    assert not is_lazy(model)
    with pytest.raises(ValueError, match=r"0\.weight of shape \(3, 3\).*LazyInitContext"):
        materialize(model)


def test_a_parameter_with_a_hook_is_refused() -> None:
    with LazyInitContext():
        model = nn.Linear(3, 3)
    model.weight.register_hook(lambda gradient: gradient)
    with pytest.raises(ValueError, match="weight has hooks"):
        materialize(model)
    assert is_lazy(model.bias)


def test_a_parameter_that_a_foreign_view_refers_to_is_refused() -> None:
    with LazyInitContext():
        model = nn.Linear(3, 3)
    row = model.weight[0]
    with pytest.raises(ValueError, match="weight cannot be materialized in place"):
        materialize(model)
    del row
    assert not is_lazy(materialize(model))
