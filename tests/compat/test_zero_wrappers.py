"""ZeRO without Booster: several optimizers of one model, several models, the shapes of a loop."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
from torch import nn

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import LowLevelZeroPlugin, TorchDDPPlugin
from colossalai.core import global_context as gpc
from colossalai.logging import get_dist_logger
from colossalai.zero import LowLevelZeroOptimizer, zero_model_wrapper, zero_optim_wrapper
from tests.amp.twins import TwinsOfSeveral
from tests.ranks import run_ranks
from tests.tiers import further
from tests.zero.training import SMALL, Net, Twins, adamw, assert_same, batch_of, part_of, plugin

pytestmark = pytest.mark.dist


def launch() -> None:
    colossalai.launch_from_torch({}, verbose=False)


def models(build: Callable[[], nn.Module] = Net) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = build().double()
    return model, copy.deepcopy(model)


def two_optimizers(stage: int) -> None:
    """One for the first layer, one for the rest, at their own pace."""
    launch()
    model, twin = models()

    def optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
        rest = [param for name, param in model.named_parameters() if not name.startswith("first")]
        return [
            torch.optim.SGD(model.first.parameters(), lr=0.1, momentum=0.9),
            torch.optim.Adam(rest, lr=0.05),
        ]

    raw = optimizers(model)
    wrapped = zero_model_wrapper(model, stage, precision="fp32", bucket_cap_mb=SMALL)
    cut = [zero_optim_wrapper(wrapped, optimizer) for optimizer in raw]
    assert all(isinstance(optimizer, LowLevelZeroOptimizer) for optimizer in cut)
    twins = TwinsOfSeveral(wrapped, cut, twin, optimizers(twin), 1e-10)
    for step in range(4):
        twins.zero_grad()
        twin(batch_of(step)).square().mean().backward()
        cut[0].backward(wrapped(part_of(batch_of(step))).square().mean())
        twins.step(*((step % 2,) if step else ()))
    gpc.destroy()


@pytest.mark.parametrize("stage", [1, further(2)])
def test_two_optimizers_of_one_model(stage: int) -> None:
    run_ranks(two_optimizers, 2, stage)


def adversaries(stage: int) -> None:
    """Two models; the backward of one leaves gradients in the other, too."""
    launch()
    torch.manual_seed(0)
    pair = [nn.Linear(5, 5).double(), nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).double()]
    twins = [copy.deepcopy(model) for model in pair]

    def play(maker, judge, maker_optimizer, judge_optimizer, backward, x) -> None:
        judge_optimizer.zero_grad()
        made = maker(x)
        backward(judge_optimizer, judge(x).mean() - judge(made.detach()).mean())
        judge_optimizer.step()
        maker_optimizer.zero_grad()
        backward(maker_optimizer, judge(made).mean())
        maker_optimizer.step()

    plain = [adamw(model) for model in twins]
    booster = Booster(plugin=plugin(stage))
    boosted = [booster.boost(model, adamw(model))[:2] for model in pair]
    for step in range(3):
        x = batch_of(step)
        play(*twins, *plain, lambda optimizer, loss: loss.backward(), x)
        part = part_of(x)
        (maker, made_by), (judge, judged_by) = boosted
        play(maker, judge, made_by, judged_by, lambda optimizer, loss: optimizer.backward(loss), part)
        for (model, _), twin in zip(boosted, twins, strict=True):
            assert_same(model, twin, step)
    gpc.destroy()


@pytest.mark.parametrize("stage", [further(1), 2])
def test_two_models_that_play_against_each_other(stage: int) -> None:
    run_ranks(adversaries, 2, stage)


def loops(stage: int) -> None:
    """Several backwards before a step, with and without no_sync; a backward that is thrown away; closures."""
    launch()
    twins = Twins(plugin(stage))
    booster, model, optimizer, _, plain = twins

    def check(step: int) -> None:
        twins.step(step)
        twins.zero_grad()

    for step in range(2):  # no no_sync: each backward averages
        twins.backward(batch_of(step))
    check(0)
    for step in range(3):  # averaged, then not, then averaged
        with booster.no_sync(model) if step == 1 else nullcontext():
            twins.backward(batch_of(step))
    check(1)
    booster.backward(twins.losses(batch_of(5))[0], optimizer)
    optimizer.zero_grad()  # thrown away
    twins.backward(batch_of(2))
    check(2)
    with booster.no_sync(model):  # only under no_sync
        twins.backward(batch_of(3))
    check(3)
    # Two forwards, then two backwards.
    for loss, of_twin in [twins.losses(batch_of(step)) for step in (0, 1)]:
        of_twin.backward()
        booster.backward(loss, optimizer)
    check(4)
    twins.backward(batch_of(0))
    plain.step()
    optimizer.step()
    twins.zero_grad(set_to_none=False)
    check(5)  # zero gradients: the averages of AdamW go on

    def closure_of(optimizer, backward, which):
        def closure():
            optimizer.zero_grad()
            value = twins.losses(batch_of(6))[which]
            backward(value)
            return value

        return closure

    plain.step(closure_of(plain, torch.Tensor.backward, 1))
    optimizer.step(closure_of(optimizer, optimizer.backward, 0))
    assert_same(model, twins.twin, 6)
    gpc.destroy()


@pytest.mark.parametrize("stage", [further(1), 2])
def test_the_shapes_of_a_loop(stage: int) -> None:
    run_ranks(loops, 2, stage)


class Normalized(nn.Module):
    """A model whose buffers follow the batches of its rank."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def batch_norm(stage: int) -> None:
    """Statistics are those of each rank's batch, so what is compared is DDP."""
    launch()
    runs = []
    for chosen in (TorchDDPPlugin(), plugin(stage)):
        booster = Booster(plugin=chosen)
        model, _ = models(Normalized)
        model, optimizer, *_ = booster.boost(model, adamw(model))
        for step in range(3):
            optimizer.zero_grad()
            booster.backward(model(part_of(batch_of(step))).square().mean(), optimizer)
            optimizer.step()
        runs.append(model)
    ours = runs[1]
    assert_same(ours, runs[0].unwrap(), 2)
    if gpc.get_global_rank() == 0:  # under DDP the others get the buffers before the next forward only
        for name, buffer in ours.unwrap().named_buffers():
            torch.testing.assert_close(buffer, runs[0].unwrap().get_buffer(name), rtol=0, atol=1e-10)
    means = [torch.empty(6, dtype=torch.float64) for _ in range(2)]
    torch.distributed.all_gather(means, ours.unwrap().layers[1].running_mean)
    assert torch.equal(means[0], means[1])
    gpc.destroy()


@pytest.mark.parametrize("stage", [1, further(2)])
def test_batch_normalization_is_that_of_ddp(stage: int) -> None:
    run_ranks(batch_norm, 2, stage)


def names_of(model: nn.Module) -> list[list[str]]:
    found = (
        model.named_modules(),
        model.named_buffers(),
        model.named_parameters(),
        model.state_dict().items(),
    )
    return [[name for name, _ in each] for each in found]


def names() -> None:
    launch()
    model, twin = models(Normalized)
    assert names_of(zero_model_wrapper(model, precision="fp32")) == names_of(twin)
    gpc.destroy()


def test_the_names_are_those_of_the_model() -> None:
    run_ranks(names, 1)


def lr_scheduler() -> None:
    """A scheduler that was built on the optimizer before the door goes on working, and so does a new one."""
    launch()
    model, twin = models()
    plain, raw = adamw(twin), adamw(model)
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) for optimizer in (plain, raw)]
    booster = Booster(plugin=plugin(1))
    model, optimizer, _, _, schedulers[1] = booster.boost(model, raw, lr_scheduler=schedulers[1])
    for step in range(3):
        plain.zero_grad()
        optimizer.zero_grad()
        twin(batch_of(step)).square().mean().backward()
        booster.backward(model(part_of(batch_of(step))).square().mean(), optimizer)
        plain.step()
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
        assert_same(model, twin, step)
    gpc.destroy()


def test_a_scheduler() -> None:
    run_ranks(lr_scheduler, 2)


def refusals() -> None:
    launch()
    model = Net()
    with pytest.raises(ValueError, match="stage is 4"):
        zero_model_wrapper(model, 4)
    with pytest.raises(ValueError, match="gemini_config is for stage 3"):
        zero_model_wrapper(model, 1, {"device": "cpu"})
    with pytest.raises(ValueError, match="precision is 'int8'"):
        zero_model_wrapper(model, precision="int8")
    with pytest.raises(ValueError, match="stage is 0"):
        zero_model_wrapper(model, 0)
    with pytest.raises(ValueError, match="pass the result of zero_model_wrapper"):
        zero_optim_wrapper(model, adamw(model))
    wrapped = zero_model_wrapper(model)
    with pytest.raises(ValueError, match="LBFGS"):
        zero_optim_wrapper(wrapped, torch.optim.LBFGS(wrapped.parameters()))
    with pytest.raises(ValueError, match="max_norm is -1"):
        zero_optim_wrapper(zero_model_wrapper(Net()), adamw(model), max_norm=-1.0)
    zero_optim_wrapper(wrapped, torch.optim.SGD(model.first.parameters(), lr=0.1))
    with pytest.raises(ValueError, match=r"shape \(7, 5\) is in two optimizers of one model"):
        zero_optim_wrapper(wrapped, torch.optim.SGD([model.first.weight, model.gain], lr=0.1))
    zero_optim_wrapper(wrapped, torch.optim.SGD([model.gain], lr=0.1))
    sparse = nn.Embedding(4, 3, sparse=True)
    booster = Booster(plugin=plugin(1))
    with pytest.raises(ValueError, match=r"Embedding gives sparse gradients, .*sparse=False"):
        booster.boost(sparse, adamw(sparse))
    frozen = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    frozen[0].requires_grad_(False)
    model, optimizer, *_ = booster.boost(frozen, adamw(frozen))
    frozen[0].requires_grad_(True)
    booster.backward(model(torch.ones(1, 2)).sum(), optimizer)
    with pytest.raises(ValueError, match="was frozen when it was wrapped"):
        optimizer.step()
    gpc.destroy()


def test_what_cannot_be_is_refused() -> None:
    run_ranks(refusals, 1)


def without_effect() -> None:
    launch()
    model = Net()
    with patch.object(get_dist_logger(), "log_once") as log:
        zero_optim_wrapper(zero_model_wrapper(model), adamw(model), growth_factor=4.0, verbose=True)
        LowLevelZeroPlugin(verbose=True, max_scale=4.0, norm_type=1.0)
        LowLevelZeroOptimizer(adamw(Net()), min_scale=2.0, hysteresis=3)
    assert [call.args[0].partition(":")[0] for call in log.call_args_list] == [
        "growth_factor, verbose",
        "norm_type has no effect with max_norm=0",
        "max_scale, verbose",
        "min_scale, hysteresis",
    ]
    with pytest.raises(
        ValueError, match="max_scale, partition_grad: the model comes from zero_model_wrapper"
    ):
        LowLevelZeroOptimizer(
            adamw(model), model=zero_model_wrapper(model), max_scale=4.0, partition_grad=True
        )
    gpc.destroy()


def test_options_without_effect_are_said() -> None:
    run_ranks(without_effect, 1)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("stage", 3, "stage is 3; it must be 1 or 2. .* TorchFSDPPlugin"),
        ("reduce_bucket_size_in_m", 0, "reduce_bucket_size_in_m is 0"),
        ("communication_dtype", "fp16", "communication_dtype is 'fp16'"),
        ("overlap_communication", "no", "overlap_communication is 'no'; it must be True or False"),
        ("cpu_offload", 1, "cpu_offload is 1; it must be True or False"),
        ("norm_type", 0.5, "norm_type 0.5"),
    ],
)
def test_wrong_options_of_the_plugin(option: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LowLevelZeroPlugin(**{option: value})


def from_an_optimizer_alone(partition_grad: bool) -> None:
    """The form of the documents: the model is called as it is."""
    launch()
    model, twin = models()
    raw, plain = adamw(model), adamw(twin)
    raw.add_param_group({"params": [nn.Parameter(torch.ones(3, dtype=torch.float64))], "lr": 0.1})
    optimizer = LowLevelZeroOptimizer(
        raw,
        overlap_communication=True,
        partition_grad=partition_grad,
        reduce_bucket_size=40,
        clip_grad_norm=0.5,
    )
    for step in range(4):
        optimizer.zero_grad()
        plain.zero_grad()
        twin(batch_of(step)).square().mean().backward()
        nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
        optimizer.backward(model(part_of(batch_of(step))).square().mean())
        optimizer.step()
        plain.step()
        assert_same(model, twin, step)
    half = nn.Linear(8, 8)
    scaled = LowLevelZeroOptimizer(
        torch.optim.SGD(half.parameters(), lr=0.1), initial_scale=2.0**8, forced_dtype=torch.float16
    )
    assert half.weight.dtype == torch.float16
    scaled.backward(half(torch.ones(2, 8, dtype=torch.float16)).float().mean())
    scaled.step()
    assert scaled.stepped
    assert scaled.scaler.scale == 2.0**8
    for options, message in [
        ({"forced_dtype": torch.float64}, "forced_dtype is torch.float64"),
        ({"reduce_bucket_size": 0}, "reduce_bucket_size is 0"),
        ({"clip_grad_norm": -1}, "max_norm is -1"),
        ({"communication_dtype": 16}, "communication_dtype is 16"),
    ]:
        with pytest.raises(ValueError, match=message):
            LowLevelZeroOptimizer(adamw(nn.Linear(2, 2)), **options)
    with pytest.raises(ValueError, match=r"the optimizer is a Linear; it must be a torch.optim.Optimizer"):
        LowLevelZeroOptimizer(nn.Linear(2, 2))
    mixed = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, dtype=torch.float16))]
    with pytest.raises(
        ValueError, match=r"torch.float16, torch.float32; cast the model, or give forced_dtype"
    ):
        LowLevelZeroOptimizer(torch.optim.SGD(mixed, lr=0.1))
    gpc.destroy()


@pytest.mark.parametrize("partition_grad", [further(False), True])
def test_an_optimizer_alone_is_cut(partition_grad: bool) -> None:
    run_ranks(from_an_optimizer_alone, 2, partition_grad)
