"""The choice of a job: measured, agreed between ranks, said in one line; and what is refused."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import colossalai
from colossalai.context import ConfigException
from colossalai.core import global_context as gpc
from colossalai.kernel import Choice, Facts, Profile, auto_product, decide, is_installed
from colossalai.kernel._installation import installation
from colossalai.kernel._probe import Measurement, measure_profile, processor_and_version
from tests.ranks import run_ranks

HERE = "an EPYC, torch 2.13.0"


def profile(speedup: float) -> Profile:
    return Profile(torch_gflops=100.0, onednn_gflops=100.0 * speedup)


def never() -> Profile:
    raise AssertionError("it was measured")


@pytest.mark.unit
@pytest.mark.parametrize(
    ("ranks", "ratio", "takes", "words"),
    [
        ([Facts("auto", HERE)], 1.15, True, "1.15 times"),
        ([Facts("auto", HERE)], 1.14, False, ""),
        ([Facts("auto", HERE)], 0.0, False, ""),  # it rounds
        ([Facts("auto", HERE), Facts("auto", HERE)], 2.0, True, "2.00 times"),
        ([Facts("auto", HERE), Facts("auto", "another")], never, False, ""),
        ([Facts("auto", HERE, "no oneDNN")], never, False, ""),
        ([Facts("auto", HERE), Facts("auto", HERE, "no oneDNN")], never, False, ""),
        ([Facts("torch", HERE)], never, False, ""),
        ([Facts("onednn", HERE)], never, True, "as matmul='onednn' asks"),
        ([Facts("onednn", HERE), Facts("onednn", "another")], never, True, "different processors"),
    ],
)
def test_decisions(ranks, ratio, takes, words) -> None:
    choice = decide(ranks, ratio if callable(ratio) else lambda: profile(ratio))
    assert (choice.profile is not None) == takes
    assert words in choice.line
    assert bool(words) == bool(choice.line)
    assert not choice.error


@pytest.mark.unit
def test_what_cannot_be_is_an_error() -> None:
    choice = decide(
        [Facts("onednn", HERE), Facts("onednn", HERE, "this torch was built without oneDNN")], never
    )
    assert "rank 1: this torch was built without oneDNN" in choice.error
    assert (
        "'onednn' on rank 0 and 'auto' elsewhere"
        in decide([Facts("onednn", HERE), Facts("auto", HERE)]).error
    )


@pytest.mark.unit
def test_what_a_measurement_depends_on(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    text = "processor\t: 0\nmodel name\t: An EPYC\nflags\t\t: avx2\ncpu MHz\t\t: 2000\n\nprocessor\t: 1\n"
    found = []
    for change in (text, text.replace("2000", "3000"), text.replace("avx2", "avx2 avx512f")):
        file.write_text(change)
        found.append(processor_and_version(cpuinfo=file, environment={"HOME": "/"}))
    found.append(processor_and_version(cpuinfo=file, environment={"MKL_ENABLE_INSTRUCTIONS": "AVX2"}))
    assert found[0] == found[1]
    assert len({*found}) == 3
    assert found[0].startswith(f"An EPYC, torch {torch.__version__}, ")
    assert processor_and_version(cpuinfo=tmp_path / "none")


@pytest.mark.unit
def test_the_measurement_leaves_random_states_alone_and_sees_rounding() -> None:
    state = torch.get_rng_state()
    threads = torch.get_num_threads()
    seen = measure_profile().profile
    assert seen.torch_gflops > 0.1
    assert seen.onednn_gflops > 0.1
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)

    with torch.device("meta"):
        assert measure_profile().profile.onednn_gflops > 0.1

    def rounding(x, w, *rest):
        return (x.bfloat16() @ w.t().bfloat16()).float()

    with mock.patch.object(torch.ops.mkldnn._linear_pointwise, "default", rounding):
        assert measure_profile().profile.speedup == 0.0


def launched(config, arguments, ratio, environment=()):
    """Return whether kernels are replaced in a job and after it, and if products after it are as before."""
    torch.manual_seed(0)
    a, b = torch.randn(256, 256), torch.randn(256, 256)
    products, installed = [a @ b], []
    with (
        mock.patch.dict("os.environ", dict(environment)),
        mock.patch(
            "colossalai.kernel._profile_cache.measure_profile", return_value=Measurement(profile(ratio))
        ),
        mock.patch("colossalai.kernel._profile_cache.cache_file", return_value=None),
    ):
        colossalai.launch_from_torch(config, **arguments)
        products.append(a @ b)
        installed.append(is_installed())
        gpc.destroy()
    products.append(a @ b)
    return [*installed, is_installed()], all(torch.equal(each, products[0]) for each in products[::2])


@pytest.mark.dist
@pytest.mark.parametrize(
    ("config", "arguments", "ratio", "environment", "installed", "line"),
    [
        ({}, {}, 1.5, {}, True, "1.50 times"),
        ({}, {}, 1.0, {}, False, None),
        ({}, {"verbose": False}, 1.5, {}, True, None),
        ({"matmul": "torch"}, {}, 1.5, {}, False, None),
        ({"matmul": "torch"}, {"matmul": "onednn"}, 1.0, {}, True, "asks"),
        ({}, {"matmul": "onednn"}, 1.5, {"COLOSSALAI_CONFIG_SET": "matmul=torch"}, False, None),
    ],
)
def test_a_job_takes_it_from_launch_to_end(
    capfd, config, arguments, ratio, environment, installed, line
) -> None:
    for found, is_as_before in run_ranks(launched, 2, config, arguments, ratio, environment):
        assert found == [installed, False]
        assert is_as_before
    text = "".join(capfd.readouterr())
    lines = [each for each in text.splitlines() if "float32 products" in each]
    assert len(lines) == (line is not None)
    assert line is None or line in lines[0]


def launched_unlike(option):
    """Two ranks that say different processors of themselves."""
    rank = int(__import__("os").environ["RANK"])
    with mock.patch("colossalai.kernel._choice.processor_and_version", return_value=f"processor {rank}"):
        try:
            colossalai.launch_from_torch({"matmul": option if option != "mixed" else ("auto", "torch")[rank]})
            return is_installed()
        except ValueError as error:
            return str(error)
        finally:
            gpc.destroy()


@pytest.mark.dist
def test_ranks_that_are_not_alike(capfd) -> None:
    assert run_ranks(launched_unlike, 2, "auto") == [False, False]
    capfd.readouterr()
    assert run_ranks(launched_unlike, 2, "onednn") == [True, True]
    text = "".join(capfd.readouterr())
    assert text.count("different processors or versions of torch") == 1
    for error in run_ranks(launched_unlike, 2, "mixed"):
        assert error == "matmul is 'auto' on rank 0 and 'torch' elsewhere: give all ranks the same"


def multiply_sharded():
    """Multiply DTensors; return whether oneDNN did, and how far it is from the product of whole ones."""
    colossalai.launch_from_torch(matmul="onednn", verbose=False)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    x, w = torch.randn(256, 256), torch.randn(256, 512, requires_grad=True)
    whole = x.double() @ w.double()
    (wanted,) = torch.autograd.grad(whole.square().mean(), w)
    sharded = distribute_tensor(w.detach(), mesh, [Shard(1)]).requires_grad_()
    installation.products.sides.clear()
    found = distribute_tensor(x, mesh, [Replicate()]) @ sharded
    found.square().mean().backward()
    errors = [found.full_tensor() - whole, sharded.grad.full_tensor() - wanted]
    sides = len(installation.products.sides)
    gpc.destroy()
    return sides, [error.abs().max().item() for error in errors]


@pytest.mark.dist
def test_products_of_sharded_tensors() -> None:
    for sides, (product, gradient) in run_ranks(multiply_sharded, 2):
        assert sides
        assert product < 1e-3
        assert gradient < 1e-6


def launched_without(problem):
    with mock.patch("colossalai.kernel._choice.why_unavailable", return_value=problem):
        try:
            colossalai.launch_from_torch({}, matmul="onednn")
        except ValueError as error:
            return str(error), gpc.is_launched


@pytest.mark.dist
def test_bad_input_is_a_sentence_at_launch() -> None:
    (found,) = run_ranks(launched_without, 1, "this torch was built without oneDNN")
    assert found[0].startswith(
        "matmul is 'onednn', and oneDNN cannot multiply here (rank 0: this torch was built"
    )
    assert not found[1]
    for wrong in ("mkl", "", 3, ["auto"], True):
        with pytest.raises(ConfigException, match=r"it must be one of 'auto', 'torch', 'onednn'"):
            colossalai.launch({}, rank=0, world_size=1, host="127.0.0.1", port=29511, matmul=wrong)
    assert not gpc.is_launched


@pytest.mark.unit
def test_a_choice_is_plain_data() -> None:
    assert Choice() == Choice(profile=None, line="", error="")


@pytest.mark.unit
def test_what_auto_multiplies_by() -> None:
    assert auto_product(partial(profile, 1.1)) is torch.mm
    a, b = torch.randn(64, 64), torch.randn(64, 64)
    product = auto_product(partial(profile, 1.9))
    assert product is not torch.mm
    torch.testing.assert_close(product(a, b), a @ b)
