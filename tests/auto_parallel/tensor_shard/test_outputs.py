"""How the outputs of parts of a batch make those of the whole: found in traces, compared with values."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from colossalai.auto_parallel.tensor_shard._outputs import WholeOutputs, whole_outputs
from colossalai.auto_parallel.trace._trace import trace_model
from tests.auto_parallel.plan.models import gpt2, llama

NUM_PARTS, BATCH, FEATURES = 2, 8, 8

Forward = Callable[[Tensor, Tensor, Tensor, nn.Linear], Any]  # inputs, targets, labels, layer


class OneLayer(nn.Module):
    """A layer, and a forward that makes outputs of it."""

    def __init__(self, compute: Forward) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, FEATURES)
        self.compute = compute

    def forward(self, x: Tensor, y: Tensor, labels: Tensor) -> Any:
        return self.compute(x, y, labels, self.layer)


def in_place(x: Tensor, y: Tensor, labels: Tensor, layer: nn.Linear) -> Tensor:
    total = torch.zeros((), dtype=torch.double)
    total += F.mse_loss(layer(x), y)
    total.add_(F.cross_entropy(layer(x), labels))
    return total


def of_a_changed_number(x: Tensor, y: Tensor, labels: Tensor, layer: nn.Linear) -> Tensor:
    total = torch.zeros((), dtype=torch.double)
    view = total.view(1)
    total.add_(layer(x).max())
    return view


FORWARDS: list[tuple[Forward, str]] = [
    (lambda x, y, t, f: f(x), "samples"),
    (lambda x, y, t, f: f(x)[:, None].repeat_interleave(3, dim=1).flatten(0, 1), "samples"),
    (lambda x, y, t, f: F.mse_loss(f(x), y), "mean"),
    (lambda x, y, t, f: F.mse_loss(f(x), y, reduction="sum"), "sum"),
    (lambda x, y, t, f: F.cross_entropy(f(x), t), "mean"),
    (lambda x, y, t, f: F.cross_entropy(f(x), t, reduction="sum"), "sum"),
    (lambda x, y, t, f: F.cross_entropy(f(x), y.softmax(-1)), "mean"),
    (lambda x, y, t, f: F.binary_cross_entropy_with_logits(f(x), y.sigmoid()), "mean"),
    (lambda x, y, t, f: F.kl_div(f(x).log_softmax(-1), y.softmax(-1), reduction="batchmean"), "mean"),
    (lambda x, y, t, f: (f(x) - y).square().sum() / x.shape[0], "mean"),
    (lambda x, y, t, f: (f(x) - y).square().sum() / BATCH, "sum"),
    (lambda x, y, t, f: (f(x) - y).square().mean(0).sum(), "mean"),
    (lambda x, y, t, f: (f(x) - y).square().sum(1).mean(), "mean"),
    (lambda x, y, t, f: (f(x) - y).square().mean() * len(x), "sum"),
    (lambda x, y, t, f: 1.0 - f(x).mean() + 0.1 * f.weight.square().sum(), "mean"),
    (lambda x, y, t, f: f(x).sum() * f.bias[0] + y.sum(), "sum"),
    (lambda x, y, t, f: (f(x).argmax(1) == t).sum(), "sum"),
    (lambda x, y, t, f: f(x).mean(0), "mean"),
    (lambda x, y, t, f: torch.stack([f(x).mean(), y.mean()]), "mean"),
    (lambda x, y, t, f: f.weight.norm(), "same"),
    (in_place, "mean"),
]
REFUSED: list[tuple[Forward, str]] = [
    (lambda x, y, t, f: f(x).max(), r"aten\.max"),
    (lambda x, y, t, f: f(x).square().mean().sqrt(), r"aten\.sqrt"),
    (lambda x, y, t, f: (f(x) * (y > 0)).sum() / (y > 0).sum(), r"aten\.div"),
    (lambda x, y, t, f: F.cross_entropy(f(x), t, weight=f.bias.detach().exp()), r"aten\.cross_entropy"),
    (
        lambda x, y, t, f: F.cross_entropy(f(x), torch.where(y[:, 0] > 0, t, -100)),
        r"aten\.cross_entropy_loss\.default of the model itself",
    ),
    (lambda x, y, t, f: f(x).sum() + f.weight.sum(), r"aten\.add"),
    (lambda x, y, t, f: f(x).sum() + 1.0, r"aten\.add"),
    (lambda x, y, t, f: f(x).mean() * y.mean(), r"aten\.mul"),
    (lambda x, y, t, f: f(x).mean() ** 2, r"aten\.pow"),
    (lambda x, y, t, f: f(x).mean() / x.shape[0], r"aten\.div"),
    (lambda x, y, t, f: f(x)[0], r"aten\.select"),
    (lambda x, y, t, f: f(x) - f(x).mean(0), r"aten\.sub"),
    (lambda x, y, t, f: f(x).T @ y, r"aten\.matmul"),
    (lambda x, y, t, f: f(x).T, r"does not have the samples in dimension 0"),
    (of_a_changed_number, r"aten\.max"),
]


def arguments(batch: int = BATCH) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(2, BATCH, FEATURES, generator=generator, dtype=torch.double)
    labels = torch.randint(FEATURES, (BATCH,), generator=generator)
    return {"x": drawn[0][:batch], "y": drawn[1][:batch], "labels": labels[:batch]}


def found_of(model: nn.Module, given: dict[str, Tensor], parts: list[dict[str, Tensor]]) -> WholeOutputs:
    return whole_outputs(trace_model(model, given), trace_model(model, parts[0]), len(parts))


def parts_of(given: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    return [
        {name: value.chunk(NUM_PARTS)[number] for name, value in given.items()} for number in range(NUM_PARTS)
    ]


COMBINED: dict[str, Callable[[list[Tensor]], Tensor]] = {
    "samples": torch.cat,
    "mean": lambda parts: torch.stack(parts).mean(0),
    "sum": lambda parts: torch.stack(parts).sum(0),
    "same": lambda parts: parts[-1],
}


@pytest.mark.unit
@pytest.mark.parametrize(("compute", "kind"), FORWARDS)
def test_parts_make_the_whole(compute: Forward, kind: str) -> None:
    torch.manual_seed(0)
    model = OneLayer(compute).double()
    given = arguments()
    parts = parts_of(given)
    assert found_of(model, given, parts).kinds == (kind,)
    whole = model(**given)
    torch.testing.assert_close(COMBINED[kind]([model(**each) for each in parts]), whole, rtol=1e-12, atol=0)


@pytest.mark.unit
@pytest.mark.parametrize(("compute", "reason"), REFUSED)
def test_what_parts_do_not_make_is_refused_by_the_operation(compute: Forward, reason: str) -> None:
    given = arguments()
    with pytest.raises(ValueError, match=reason):
        found_of(OneLayer(compute).double(), given, parts_of(given))


@pytest.mark.unit
def test_labels_that_are_left_out_are_known_by_argument_and_value() -> None:
    given = arguments()
    for index in (-100, 0):
        model = OneLayer(
            lambda x, y, t, f, index=index: F.cross_entropy(f(x), t[:, None].flatten(), ignore_index=index)
        )
        assert found_of(model.double(), given, parts_of(given)).ignored == {"labels": index}
    model = OneLayer(lambda x, y, t, f: F.cross_entropy(f(x), t, reduction="sum"))
    assert found_of(model.double(), given, parts_of(given)).ignored == {}


@pytest.mark.unit
@pytest.mark.parametrize("build", [gpt2, llama])
def test_losses_of_transformers_are_means(build: Callable[[], nn.Module]) -> None:
    pytest.importorskip("transformers")
    ids = torch.zeros(4, 6, dtype=torch.long)
    given = {"input_ids": ids, "labels": ids}
    found = found_of(build(), given, parts_of(given))
    assert found == WholeOutputs(("mean", "samples"), (True, False), {"labels": -100})
