"""`autoparallelize` and `initialize_model`: an ordinary training loop, equal to one process."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import colossalai
from colossalai.auto_parallel import load_plan, make_plan
from colossalai.auto_parallel.tensor_shard.initialize import (
    autoparallelize,
    initialize_device_mesh,
    initialize_model,
)
from colossalai.device import DeviceMesh
from colossalai.tensor import spec_of
from tests.auto_parallel.plan.models import (
    LOSSES,
    arguments_in_double,
    batches_of,
    bert,
    gpt,
    gpt2,
    llama,
    resnet,
    vit,
)
from tests.launched import on_ranks
from tests.parity.training import whole
from tests.ranks import run_ranks
from tests.tiers import further
from tests.turns import in_turn

pytestmark = pytest.mark.dist

BATCH = 8
PAIRS = {(0, 1): (1e-6, 1e-9), (2, 3): (2e-6, 3e-9), (0, 2): (1e-5, 1e-8)}


def built(build: Any) -> nn.Module:
    colossalai.launch_from_torch({}, verbose=False)
    torch.manual_seed(1024)
    return build().double()


def trains(build: Any, options: dict[str, Any], norm_type: float) -> tuple[str, int]:
    model = built(build)
    twin = copy.deepcopy(model)
    given = arguments_in_double(build, BATCH)
    if shape := options.pop("shape", None):
        mesh = DeviceMesh(torch.arange(dist.get_world_size()), mesh_shape=shape, init_process_group=True)
        module, solution = initialize_model(model, given, device_mesh=mesh, return_solution=True, **options)
    else:
        module, solution = autoparallelize(model, given, return_solution=True, **options)
    assert [name for name, _ in module.named_parameters()] == [name for name, _ in twin.named_parameters()]
    assert list(module.state_dict()) == list(twin.state_dict())
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.05, momentum=0.9) for each in (module, twin)]
    num_parts = dist.get_world_size() if options.get("dataloader_option") == "distributed" else 1
    for inputs, labels in batches_of(build, BATCH):
        inputs = inputs.double() if inputs.is_floating_point() else inputs
        found = []
        for each, optimizer in zip((module, twin), optimizers, strict=True):
            x, y = inputs, labels
            if each is module and num_parts > 1:
                x, y = (given.chunk(num_parts)[dist.get_rank()] for given in (inputs, labels))
            optimizer.zero_grad()
            loss = LOSSES[build](each(x), y)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(each.parameters(), 0.5, norm_type=norm_type)
            optimizer.step()
            if each is module and num_parts > 1:
                dist.all_reduce(loss.data)
                loss = loss / num_parts
            found.append((loss.item(), norm.item()))
        assert found[0] == pytest.approx(found[1], rel=1e-10)
    for (name, param), expected in zip(module.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(whole(param, param), expected.data, rtol=1e-10, atol=1e-10, msg=name)
    if num_parts == 1:
        module.eval()
        with torch.no_grad():
            outputs = [each(inputs) for each in (module, twin.eval())]
        one, other = (each if isinstance(each, Tensor) else each.logits for each in outputs)
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    assert len(solution) == len({line.partition(":")[0] for line in solution})
    return solution[-1], sum(spec_of(param) is not None for param in module.parameters())


@pytest.mark.parametrize(
    ("build", "num_ranks", "options", "is_cut"),
    [
        further(gpt, 1, {}, False),
        further(gpt, 2, {"solver_preference": "dp"}, False),
        further(gpt, 2, {"solver_preference": "tp"}, True),
        further(
            gpt, 4, {"logical_mesh_shape": (2, 2), "alpha_beta_dict": PAIRS, "shard_option": "shard"}, True
        ),
        further(gpt, 4, {"shape": (2, 2), "overlap": True, "shard_option": "shard_last_axis"}, True),
        further(gpt, 4, {"shape": (2, 2), "shard_option": "full_shard"}, True),
        (gpt, 2, {"dataloader_option": "distributed", "solver_preference": "dp"}, False),
        further(resnet, 2, {"solver_preference": "dp"}, False),
        (resnet, 4, {"shape": (2, 2), "shard_option": "shard_last_axis"}, True),
        further(resnet, 2, {"solver_preference": "tp"}, True),
        further(bert, 2, {"solver_preference": "tp"}, True),
        further(vit, 4, {"shape": (2, 2), "shard_option": "shard_last_axis"}, True),
        further(gpt2, 4, {"shape": (2, 2), "shard_option": "shard_last_axis"}, True),
        further(llama, 2, {"solver_preference": "tp"}, True),
    ],
)
def test_three_steps(build: Any, num_ranks: int, options: dict[str, Any], is_cut: bool) -> None:
    if build in (gpt2, llama):
        pytest.importorskip("transformers")
    norm_type = float("inf") if num_ranks == 4 else 2.0
    found = run_ranks(trains, num_ranks, build, options, norm_type)
    assert len(set(found)) == 1
    assert (found[0][1] > 0) == is_cut


class WithLoss(nn.Module):
    """A model that returns its loss as well, as those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.layer(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def keeps_a_budget(path: Path, budget: float) -> list[float]:
    autoparallelize(
        built(gpt),
        arguments_in_double(gpt, BATCH),
        shard_option="full_shard",
        memory_budget=budget,
        save_solver_solution=True,
        solver_solution_path=path,
    )
    dist.barrier()
    counted = load_plan(path).counted_bytes
    assert counted is not None
    return [counted, budget]


@pytest.mark.long
def test_a_plan_for_a_budget_is_run_before_it_is_carried_out(tmp_path: Path) -> None:
    budget = 0.7 * make_plan(gpt().double(), arguments_in_double(gpt, BATCH), world_size=1).peak_bytes
    for counted, given in run_ranks(keeps_a_budget, 2, tmp_path / "budget.json", budget):
        assert 0 < counted <= given


def look_at_a_model_that_returns_its_loss() -> None:
    """The loss is that of the whole batch."""
    model = built(WithLoss)
    twin = copy.deepcopy(model)
    given = {"x": torch.randn(8, 8).double(), "labels": torch.arange(8)}
    module = autoparallelize(model, given, solver_preference="dp")
    outputs = [module(**given), twin(given["x"], given["labels"])]
    assert outputs[0]["loss"].item() == pytest.approx(outputs[1]["loss"].item(), rel=1e-12)
    torch.testing.assert_close(outputs[0]["logits"], outputs[1]["logits"])
    for each in outputs:  # a loss made of both
        (each["loss"] + each["logits"].square().mean()).backward()
    torch.testing.assert_close(model.layer.weight.grad, twin.layer.weight.grad, rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match="labels has labels of -100, in other numbers on each of 2 ranks"):
        module(given["x"], torch.tensor([-100, *range(1, 8)]))
    assert module(given["x"], torch.tensor([-100, 1, 2, 3, -100, 5, 6, 7]))["loss"].isfinite()
    with pytest.raises(ValueError, match="a batch of 3 cannot be shared by 2 data-parallel ranks"):
        module(given["x"][:3], given["labels"][:3])
    assert module(given["x"][:4], given["labels"][:4])["logits"].shape == (4, 8)


class WithNumbers(nn.Module):
    """A model that returns a sum, a count, and what all ranks have alike."""

    def __init__(self, is_masked: bool = False) -> None:
        super().__init__()
        self.layer, self.is_masked = nn.Linear(8, 8), is_masked

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.layer(x)
        losses = nn.functional.cross_entropy(logits, labels, reduction="none")
        mask = (labels > 0).to(losses.dtype)
        loss = (losses * mask).sum() / mask.sum() if self.is_masked else losses.sum()
        return loss, (logits.argmax(-1) == labels).sum(), self.layer.weight.square().sum()


def look_at_a_model_that_returns_numbers() -> list[str]:
    """Sums are those of the whole batch, and no plan divides other numbers."""
    model = built(WithNumbers)
    twin = copy.deepcopy(model)
    given = {"x": torch.randn(8, 8).double(), "labels": torch.arange(8)}
    module = autoparallelize(model, given, solver_preference="dp")
    outputs = [module(**given), twin(**given)]
    for one, other in zip(*outputs, strict=True):
        assert one.item() == pytest.approx(other.item(), rel=1e-12)
    for loss, _, decay in outputs:
        (loss + decay).backward()
    torch.testing.assert_close(model.layer.weight.grad, twin.layer.weight.grad, rtol=1e-12, atol=1e-12)
    masked = WithNumbers(is_masked=True).double()
    before = list(masked.parameters())
    with pytest.raises(ValueError, match=r"output 0 of the model, of shape .* because of aten\.div"):
        autoparallelize(masked, given, solver_preference="dp")
    assert all(one is other for one, other in zip(masked.parameters(), before, strict=True))
    module, solution = autoparallelize(masked, given, return_solution=True)  # a plan without replicas
    assert not list(module._forward_hooks)
    return solution


class TakesAnything(nn.Module):
    """A model whose forward has no names, as those that peft puts around another one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = WithLoss()

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        kwargs.pop("extra", None)
        found: dict[str, Tensor] = self.inner(*args, **kwargs)
        return found


def look_at_arguments_by_name() -> list[float]:
    model = built(TakesAnything)
    twin = copy.deepcopy(model)
    given = {"x": torch.randn(8, 8).double(), "labels": torch.arange(8)}
    module = autoparallelize(model, given, solver_preference="dp")
    assert module(**given)["loss"].item() == pytest.approx(twin(**given)["loss"].item(), rel=1e-12)
    with pytest.raises(ValueError, match="labels has labels of -100, in other numbers on each of 2 ranks"):
        module(x=given["x"], labels=torch.tensor([-100, *range(1, 8)]))
    with pytest.raises(ValueError, match=r"argument 0 was not in meta_args, .*it has labels, x"):
        module(given["x"], labels=given["labels"])
    with pytest.raises(ValueError, match="extra is a dict with tensors, and it is unknown"):
        module(**given, extra={"weights": given["x"]})
    logits: list[float] = module(**given)["logits"].tolist()
    return logits


def look_at_an_encoder() -> None:
    """Its layers are cut in evaluation, too."""
    options: dict[str, Any] = {"dropout": 0.0, "batch_first": True}
    model = built(lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, **options), 2))
    twin = copy.deepcopy(model).eval()
    mask = torch.zeros(4, 6).double()
    mask[1, 4:] = -torch.inf  # padding on the right, by which torch would make nested tensors
    given = {"src": torch.randn(4, 6, 16).double(), "src_key_padding_mask": mask}
    module = autoparallelize(model, given, solver_preference="tp").eval()
    for names in (("src",), ("src", "src_key_padding_mask")):
        own = {name: given[name] for name in names}
        with torch.no_grad():
            expected = twin(**own)
            torch.testing.assert_close(module(**own)[:, :4], expected[:, :4], rtol=1e-10, atol=1e-10)
    # Of a linear layer that is cut by rows the bias is whole.
    assert sum(spec_of(param) is not None for param in module.parameters()) == 6


def look_at_a_saved_solution(path: Path) -> None:
    """It is loaded again, and mistakes change nothing."""
    how: dict[str, Any] = {"solver_solution_path": path, "return_solution": True}
    given = arguments_in_double(gpt, BATCH)
    _, saved = autoparallelize(built(gpt), given, solver_preference="tp", save_solver_solution=True, **how)
    assert any(line.endswith(": output") for line in saved)
    dist.barrier()
    module, solution = autoparallelize(gpt().double(), given, load_solver_solution=True, **how)
    assert solution == saved
    assert any(spec_of(param) is not None for param in module.parameters())
    with pytest.raises(ValueError, match="which is none of the layouts of this grid"):
        autoparallelize(gpt().double(), given, load_solver_solution=True, solver_preference="dp", **how)
    with pytest.raises(
        ValueError, match="is the plan of another trace, of GPT with a batch of 8: this is Bert"
    ):
        autoparallelize(bert().double(), arguments_in_double(bert, BATCH), load_solver_solution=True, **how)
    with pytest.raises(ValueError, match=r"bytes of a rank, and memory_budget is 1,000: solve again with it"):
        autoparallelize(gpt().double(), given, load_solver_solution=True, memory_budget=1000.0, **how)
    model = gpt().double()
    before = list(model.named_parameters())
    with pytest.raises(ValueError, match="smallest budget that was found to work is"):
        autoparallelize(model, given, memory_budget=10.0)
    with pytest.raises(ValueError, match="start it by colossalai run --nproc_per_node 4"):
        initialize_model(model, given, DeviceMesh(torch.arange(4), (2, 2)))
    assert [id(param) for _, param in before] == [id(param) for param in model.parameters()]


def test_a_loader_says_what_the_forward_takes() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    batches = [(torch.zeros(2, 4), torch.zeros(2))]
    module = autoparallelize(model, data_loader=batches, data_process_func=lambda batch: {"input": batch[0]})
    assert module(batches[0][0]).shape == (2, 4)
    for options, said in (
        ({}, "give meta_args"),
        ({"data_loader": []}, "data_loader is empty"),
        ({"data_loader": batches}, "data_loader yields a tuple: give data_process_func"),
        ({"data_loader": batches, "meta_args": {}}, "both define the arguments"),
        ({"meta_args": {"inputs": torch.zeros(2, 4)}}, "inputs"),
        (
            {"meta_args": {"input": torch.zeros(2, 4)}, "solver_preference": "pp"},
            "choose one of standard, tp, dp",
        ),
        (
            {"meta_args": {"input": torch.zeros(2, 4)}, "solver_preference": "dp", "shard_option": "shard"},
            "leave one of them out",
        ),
        ({"meta_args": {"input": torch.zeros(2, 4)}, "load_solver_solution": True}, "give its path"),
    ):
        with pytest.raises(ValueError, match=said):
            autoparallelize(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), **options)  # type: ignore[arg-type]


def look_at_lines_of_a_solution() -> None:
    """There is one for each operation."""
    colossalai.launch_from_torch({}, verbose=False)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    given = {"input": torch.zeros(4, 8)}
    _, solution = autoparallelize(model, given, solver_preference="tp", return_solution=True)
    assert solution == [
        "linear: linear.default of 0: output",
        "relu: relu.default of 1: cut as its operands are",
        "linear_1: linear.default of 2: input",
    ]


def test_in_jobs_of_two_ranks(tmp_path: Path) -> None:
    """The first plan of a rank takes as long as three later ones, and so ranks are started once."""
    looks: list[tuple[Any, ...]] = [
        (look_at_a_model_that_returns_its_loss,),
        (look_at_a_model_that_returns_numbers,),
        (look_at_arguments_by_name,),
        (look_at_an_encoder,),
        (look_at_a_saved_solution, tmp_path / "plan.json"),
        (look_at_lines_of_a_solution,),
    ]
    one, other = run_ranks(in_turn, 2, looks)
    assert one == other


@on_ranks(4)
def test_a_grid_with_the_speeds_of_pairs() -> None:
    mesh = initialize_device_mesh(alpha_beta_dict=PAIRS, logical_mesh_shape=(2, 2))
    assert mesh.shape == (2, 2)
    assert mesh.mesh_alpha == (1e-5, 2e-6)
    assert mesh.mesh_beta == (1e-8, 3e-9)
    with pytest.raises(ValueError, match="no pair of ranks that are neighbours along axis 0"):
        initialize_device_mesh(alpha_beta_dict={(0, 1): (1.0, 1.0)}, logical_mesh_shape=(2, 2))
    with pytest.raises(ValueError, match="world_size=3, and the job has 4 ranks"):
        initialize_device_mesh(3)
    with pytest.raises(ValueError, match="physical_devices"):
        initialize_device_mesh(4, [0, 1, 2, 2])
