"""What the executor does besides training: evaluation, mistakes, deaths, what it frees and tells."""

import gc
import os
import weakref

import pytest
import torch
from torch import nn

import colossalai
from colossalai.core import global_context as gpc
from colossalai.pipeline.execution._executor import PipelineExecutor
from colossalai.pipeline.schedules._generators import make_schedule
from tests.ranks import RanksError, run_ranks
from tests.turns import run_each

pytestmark = pytest.mark.dist

CPU = torch.device("cpu")


class Stage(nn.Linear):
    """A linear layer that notes what happens, and can be told to do something at a forward."""

    def __init__(self, act=None):
        super().__init__(4, 4)
        self.double()
        self.calls, self.act, self.outputs = 0, act, []

    def forward(self, x):
        self.calls += 1
        output = super().forward(x)
        if self.act is not None:
            output = self.act(self.calls, output)
        self.outputs.append(weakref.ref(output))
        return output


def launch(size, *, tensor=1):
    parallel = (
        {"pipeline": size, "tensor": {"size": tensor, "mode": "1d"}} if tensor > 1 else {"pipeline": size}
    )
    colossalai.launch_from_torch({"parallel": parallel}, verbose=False)
    return gpc.mesh.axis("pp")


def executor_of(chunks, axis, name="1f1b", **options):
    return PipelineExecutor(
        chunks,
        axis,
        make_schedule=lambda count: make_schedule(name, axis.size, count),
        device=CPU,
        **options,
    )


def data(count=4, size=2):
    torch.manual_seed(0)
    return [torch.randn(size, 4, dtype=torch.float64) for _ in range(count)]


def mean(output, _=0):
    return output.square().mean()


def evaluation():
    axis = launch(2)
    torch.manual_seed(axis.rank)
    stage = Stage()
    executor = executor_of([stage], axis)
    trained = executor.run(data(), compute_loss=mean)
    grad = stage.weight.grad.clone()
    # Between training steps, with other sizes, with and without a loss.
    losses = executor.run(data(), compute_loss=mean, forward_only=True)
    outputs = executor.run(data(3, 5), forward_only=True, keep_outputs=True)
    assert executor.peak_live == [0]
    assert torch.equal(stage.weight.grad, grad)
    executor.run(data(), compute_loss=mean)
    torch.testing.assert_close(stage.weight.grad, 2 * grad)
    gc.collect()
    assert sum(output() is not None for output in stage.outputs) <= (3 if outputs.outputs else 0)
    if axis.rank == 0:
        assert losses.losses is outputs.outputs is None
        return None
    assert [loss.item() for loss in losses.losses] == [loss.item() for loss in trained.losses]
    return [tuple(output.shape) for output in outputs.outputs], outputs.losses


def test_evaluation():
    assert run_ranks(evaluation, 2) == [None, ([(5, 4)] * 3, None)]


def one_rank(name):
    axis = launch(1)
    stages = [Stage() for _ in range(2 if name in ("zb-v", "interleaved") else 1)]
    executor = executor_of(stages, axis, name)
    result = executor.run(data(), compute_loss=mean, loss_factors=[0.25] * 4)
    found = [stage.weight.grad.clone() for stage in stages]
    for stage in stages:
        stage.zero_grad()
    value = torch.cat(data())
    for stage in stages:
        value = stage(value)
    mean(value).backward()
    for stage, grad in zip(stages, found, strict=True):
        torch.testing.assert_close(grad, stage.weight.grad, rtol=1e-10, atol=1e-10)
    assert len(result.losses) == 4


def test_one_rank():
    run_each(1, one_rank, [(name,) for name in ("1f1b", "zb-h1", "zb-v", "interleaved")])


def kept_losses():
    executor = executor_of([Stage()], launch(1))
    result = executor.run(data(), compute_loss=lambda output, _: nn.functional.mse_loss(output, output * 2))
    gpc.destroy()
    return [loss.untyped_storage().nbytes() for loss in result.losses]


def test_a_loss_keeps_nothing_but_its_number():
    assert run_ranks(kept_losses, 1) == [[8] * 4]


def frozen_for_a_while():
    """Whether an output requires a gradient changes from step to step, and all later stages have to know."""
    axis = launch(3)
    stage = Stage()
    executor = executor_of([stage], axis)
    seen = []
    for trainable in ([True] * 3, [False, True, True], [False, False, True], [False] * 3, [True] * 3):
        stage.requires_grad_(trainable[axis.rank])
        stage.zero_grad()
        executor.run(data(), compute_loss=mean)
        seen.append(stage.weight.grad is not None)
    return seen


def test_parameters_may_be_frozen_between_steps():
    assert run_ranks(frozen_for_a_while, 3) == [
        [True, False, False, False, True],
        [True, True, False, False, True],
        [True, True, True, False, True],
    ]


def hooks_and_contexts(name):
    axis = launch(2)
    entered, called = [], []
    stages = [
        Stage(lambda calls, out: entered.append("forward") or out) for _ in range(2 if name == "zb-v" else 1)
    ]
    for index, stage in enumerate(stages):
        stage.weight.register_post_accumulate_grad_hook(lambda _, index=index: called.append(index))

    class Context:
        def __enter__(self):
            entered.append("in")

        def __exit__(self, *error):
            entered.append("out")

    executor = executor_of(
        stages,
        axis,
        name,
        stage_context=Context,
        on_last_backward=lambda chunk: called.append(f"last {chunk}"),
    )
    executor.run(data(), compute_loss=mean)
    assert entered == ["in", "forward", "out"] * (4 * len(stages))
    for index in range(len(stages)):
        mine = [entry for entry in called if entry in (index, f"last {index}")]
        assert mine == [index] * 3 + [f"last {index}", index]


def test_last_backward_is_announced():
    run_each(2, hooks_and_contexts, [(name,) for name in ("1f1b", "zb-h1", "zb-v")])


def fails(kind):
    axis = launch(3)
    last = axis.rank == 2

    def die(calls, output):
        if last and calls == 2:
            os._exit(7)
        return output

    def interrupt(calls, output):
        if last and calls == 2:
            raise KeyboardInterrupt
        return output

    def other_shape(calls, output):
        return output[:, :3] if axis.rank == 0 and calls == 3 else output

    def unsendable(calls, output):
        return {1, 2} if axis.rank == 0 else output

    options = {"tensor_shape": (2, 5), "dtype": torch.float64} if kind == "tensor_shape" else {}
    acts = {"die": die, "interrupt": interrupt, "other shape": other_shape, "unsendable": unsendable}
    stage = Stage(acts.get(kind))
    if kind == "unsendable":
        stage.forward = lambda x: {1, 2}
    executor = executor_of([stage], axis, **options)
    count = 4 + (kind == "count" and last)
    size = 2 + (kind == "sizes" and last)
    try:
        executor.run(data(count, size), compute_loss=None if kind == "no loss" else mean)
    except KeyboardInterrupt as error:
        raise RuntimeError("interrupted; " + " ".join(error.__notes__)) from error


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (  # what was sent before the death arrives; over gloo a connection that is reset may drop it
            "die",
            r"stage 2 \(rank 2\) is gone while stage 1 \(rank 1\) waited for the gradient of microbatch "
            + ("[01]" if os.environ.get("TESTS_BACKEND") == "gloo" else "1"),
        ),
        ("interrupt", r"interrupted; in the forward of microbatch 1 on stage 2 \(rank 2, action 2F1"),
        ("other shape", r"stage 0 returned \(2, 3\) float64 where it returned \(2, 4\) float64 before"),
        ("unsendable", "a stage returned a set, which cannot be sent"),
        ("tensor_shape", r"stage 0 returned \(2, 4\) float64, but tensor_shape is \(2, 5\) float64"),
        (
            "sizes",
            r"stage 1 \(rank 1\) and stage 2 \(rank 2\) run different schedules, or their microbatches",
        ),
        (
            "count",
            r"stage 1 \(rank 1\) and stage 2 \(rank 2\) run different schedules, or their microbatches",
        ),
        ("no loss", "compute_loss is None"),
    ],
)
def test_what_goes_wrong_is_named(kind, message):
    with pytest.raises(RanksError, match=message):
        run_ranks(fails, 3, kind)


def wrong_number_of_chunks():
    axis = launch(2)
    with pytest.raises(ValueError, match=r"stages \[0, 3\] on pipeline rank 0.*1 chunks|stages \[1, 2\]"):
        executor_of([Stage()], axis, "zb-v").run(data(), forward_only=True)
    executor = PipelineExecutor(
        [Stage()], axis, make_schedule=lambda _: make_schedule("1f1b", 3, 4), device=CPU
    )
    with pytest.raises(ValueError, match="for 3 pipeline ranks, there are 2"):
        executor.run(data())
    executor = PipelineExecutor(
        [Stage()], axis, make_schedule=lambda _: make_schedule("1f1b", 2, 8), device=CPU
    )
    with pytest.raises(ValueError, match="for 8 microbatches, there are 4"):
        executor.run(data())


def test_wrong_number_of_chunks():
    run_ranks(wrong_number_of_chunks, 2)


def scattered(width):
    axis = launch(2, tensor=2)
    torch.manual_seed(axis.rank)
    whole, parts = nn.Linear(width, width).double(), nn.Linear(width, width).double()
    parts.load_state_dict(whole.state_dict())
    batch = [torch.randn(3, width, dtype=torch.float64) for _ in range(4)]
    executor_of([whole], axis).run(batch, compute_loss=mean)
    executor = executor_of([parts], axis, scatter_axis=gpc.mesh.axis("tp"))
    sizes = []
    start = executor._channel._start
    executor._channel._start = lambda operation, tensors, *args: start(
        operation, [sizes.append(tensor.numel()) or tensor for tensor in tensors], *args
    )
    executor.run(batch, compute_loss=mean)
    assert torch.equal(whole.weight.grad, parts.weight.grad)
    return sizes.count(3 * width), sizes.count(3 * width // 2)


def test_each_tensor_rank_sends_its_part():
    assert run_each(4, scattered, [(4,), (5,)]) == [[(0, 8)] * 4, [(8, 0)] * 4]


def count_messages(name, fixed):
    axis = launch(2)
    chunks = 2 if name == "zb-v" else 1
    options = {"tensor_shape": (2, 4), "dtype": torch.float64} if fixed else {}
    executor = executor_of([Stage() for _ in range(chunks)], axis, name, **options)
    channel, counts = executor._channel, []
    send = channel.send
    channel.send = lambda *args, **kwargs: counts.append(1) or send(*args, **kwargs)
    found = []
    for _ in range(3):
        counts.clear()
        executor.run(data(), compute_loss=mean)
        found.append(len(counts))
    return found


def test_number_of_messages():
    expected = {
        # First run: a greeting, a token, a spec with its length, 4 activations; later the token and those.
        ("1f1b", False): [[1 + 1 + 1 + 4, 5, 5], [1 + 4, 4, 4]],
        ("1f1b", True): [[1 + 4, 4, 4], [1 + 4, 4, 4]],
        # Stage 1 and 2 are both on rank 1, 3 on rank 0: each rank sends activations and gradients.
        ("zb-v", False): [[1 + 1 + 1 + 4 + 4, 9, 9]] * 2,
    }
    assert run_each(2, count_messages, expected) == list(expected.values())
