"""What is set on a wrapper is set on what it wraps; the parameters stay the same."""

import pytest
import torch
from torch import nn

from colossalai.amp import Masters, OptimizerWrapper
from colossalai.nn.parallel._data_method import NoSync
from colossalai.runtime import ModelWrapper, WatchedLoader

pytestmark = pytest.mark.unit


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head, self.scale = nn.Linear(2, 2), nn.Linear(2, 1), 1.0
        self.register_buffer("shift", torch.zeros(1))

    @property
    def doubled(self):
        return self.scale * 2

    @doubled.setter
    def doubled(self, value):
        self.scale = value / 2

    def forward(self, x):
        return self.head(self.body(x)) * self.scale + self.shift


@pytest.fixture
def raw():
    return Scaled()


@pytest.fixture
def model(raw):
    return ModelWrapper(raw, NoSync(raw))


def test_attributes_are_set_on_the_model(model, raw):
    model.scale, model.note = 3.0, "new"
    assert (raw.scale, raw.note, model.note) == (3.0, "new", "new")
    model.doubled = 8.0
    assert (raw.scale, "doubled" in vars(raw)) == (4.0, False)
    del model.note
    with pytest.raises(AttributeError, match="note"):
        _ = raw.note
    model.set_sync(False)
    assert "syncs" not in vars(raw)


def test_buffers_and_modules_without_parameters_are_set_on_the_model(model, raw):
    model.shift = torch.ones(1)
    model.register_buffer("table", torch.zeros(2), persistent=False)
    model.register_parameter("nothing", None)
    model.dropout = nn.Dropout(0.1)
    model.add_module("act", nn.ReLU())
    model.register_module("act2", nn.ReLU())
    assert raw.shift.item() == 1
    assert "table" not in model.state_dict()
    assert {"dropout", "act", "act2"} <= set(raw._modules)
    assert list(dict(model.named_buffers())) == ["shift", "table"]
    assert list(model._modules) == ["module"]
    del model.dropout
    assert "dropout" not in raw._modules


def test_a_child_is_replaced_by_one_with_the_same_parameters(model, raw):
    model.head = nn.Sequential(model.head, nn.Identity())
    model.set_submodule("head.1", nn.Dropout())
    assert isinstance(raw.head[1], nn.Dropout)
    model.body.weight = model.body.weight


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda model: setattr(model, "new", nn.Linear(2, 2)),
            "Scaled.new: the parameter weight is added.*before",
        ),
        (
            lambda model: setattr(model, "gain", nn.Parameter(torch.ones(1))),
            "Scaled.gain: a parameter is added",
        ),
        (lambda model: setattr(model, "head", nn.Identity()), "head.weight is removed"),
        (lambda model: setattr(model, "head", None), "head.weight is removed"),
        (lambda model: delattr(model, "head"), "head.weight is removed"),
        (lambda model: model.add_module("new", nn.Linear(2, 2)), "Scaled.new"),
        (lambda model: model.register_module("new", nn.Linear(2, 2)), "Scaled.new"),
        (lambda model: model.register_parameter("gain", nn.Parameter(torch.ones(1))), "Scaled.gain"),
        (
            lambda model: model.set_submodule("body", nn.Linear(2, 2)),
            "Scaled.body: the parameter weight is added",
        ),
        (lambda model: setattr(model, "forward", lambda x: x), "Scaled.forward cannot be set"),
        (lambda model: setattr(model, "data", 3), "model.unwrap\\(\\).data"),
        (lambda model: setattr(model, "module", nn.ReLU()), "model.unwrap\\(\\).module"),
    ],
)
def test_other_parameters_and_names_of_the_wrapper_are_refused(model, raw, change, message):
    names = list(dict(model.named_modules()))
    with pytest.raises(ValueError, match=message):
        change(model)
    assert list(dict(raw.named_modules())) == names
    assert len(list(raw.parameters())) == 4


def test_a_parameter_is_not_replaced():
    raw = nn.Linear(2, 2)
    model = ModelWrapper(raw, NoSync(raw))
    model.weight = raw.weight
    for value in (nn.Parameter(torch.ones(2, 2)), None):
        with pytest.raises(ValueError, match=r"Linear.weight: a parameter is re.*copy_"):
            model.weight = value
    with pytest.raises(ValueError, match=r"Linear.bias: a parameter is removed"):
        del model.bias


def test_the_mode_of_the_wrapper_is_that_of_the_model(model, raw):
    raw.eval()
    assert not model.training
    model.training = True
    assert (raw.training, raw.body.training) == (True, False)
    model.eval()
    assert not raw.training


def test_an_optimizer_is_set_through_its_wrapper():
    params = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    raw = torch.optim.SGD(params, lr=0.1)
    optimizer = OptimizerWrapper(raw)
    optimizer.param_groups = [{**raw.param_groups[0], "params": [param], "lr": 0.5} for param in params]
    assert [group["lr"] for group in raw.param_groups] == [0.5, 0.5]
    optimizer.defaults, optimizer.note = {"lr": 2.0}, 1
    assert (raw.defaults, raw.note) == ({"lr": 2.0}, 1)
    del optimizer.note
    assert "note" not in vars(raw)
    optimizer.max_norm = 1.0
    assert "max_norm" not in vars(raw)


def test_groups_with_parameters_without_masters_are_refused():
    param = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    raw = torch.optim.SGD([param], lr=0.1)
    masters = Masters({param: nn.Parameter(param.detach().float())})
    optimizer = OptimizerWrapper(raw, masters=masters.replace_params(raw))
    optimizer.param_groups = [dict(optimizer.param_groups[0], lr=0.3)]
    with pytest.raises(ValueError, match="float32 master would be missing"):
        optimizer.param_groups = [dict(raw.param_groups[0], params=[param])]
    assert raw.param_groups[0]["lr"] == 0.3


def test_a_loader_is_set_through_its_wrapper():
    raw = torch.utils.data.DataLoader([1, 2, 3])
    loader = WatchedLoader(raw)
    loader.note = 5
    assert (raw.note, "note" in vars(loader)) == (5, False)
    list(loader)
    assert "at_last_batch" not in vars(raw)
