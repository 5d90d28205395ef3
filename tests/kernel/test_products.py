"""Products by oneDNN against torch's own: any shape, strides, bias, type; same errors; same bits again."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from colossalai.kernel import Profile, onednn_products, torch_products
from colossalai.kernel._installation import installation
from colossalai.kernel._products import REPLACED
from colossalai.kernel._rule import LEAST_MULTIPLICATIONS, leading_piece

pytestmark = pytest.mark.unit

SIZES = (1, 2, 7, 8, 31, 64, 96, 100, 129, 256)
EPSILON = torch.finfo(torch.float32).eps


@contextmanager
def calls_of_onednn(profile: Profile | None = None) -> Iterator[list[tuple[int, ...]]]:
    """Products by oneDNN, and the sizes of the left operands that it is given."""
    with onednn_products(profile):
        products, seen = installation.products, []

        def noting(function):
            def noted(a, *args):
                seen.append(tuple(a.shape))
                return function(a, *args)

            return noted

        with (
            mock.patch.object(products, "_linear", noting(products._linear)),
            mock.patch.object(products, "_linear_and_add", noting(products._linear_and_add)),
        ):
            yield seen


def operand(
    rows: int, columns: int, layout: str, dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    """A matrix of some layout in memory."""
    make = {
        "plain": lambda: torch.randn(rows, columns, generator=generator),
        "transposed": lambda: torch.randn(columns, rows, generator=generator).t(),
        "gaps": lambda: torch.randn(rows, columns + 3, generator=generator)[:, 1 : columns + 1],
        "steps": lambda: torch.randn(rows * 2, columns * 2, generator=generator)[::2, ::2],
        "expanded": lambda: torch.randn(1, columns, generator=generator).expand(rows, columns),
        "overlapping": lambda: torch.randn(rows + columns, generator=generator).as_strided(
            (rows, columns), (1, 1)
        ),
        "offset": lambda: torch.randn(rows * columns + 5, generator=generator)[5:].view(rows, columns),
    }
    return make[layout]().to(dtype) if dtype is not torch.float32 else make[layout]()


LAYOUTS = ("plain", "transposed", "gaps", "steps", "expanded", "overlapping", "offset")


def added(kind: str, m: int, n: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """What `addmm` adds."""
    made = {
        "row": lambda: torch.randn(n, generator=generator),
        "strided": lambda: torch.randn(2 * n, generator=generator)[::2],
        "expanded": lambda: torch.randn(1, generator=generator).expand(n),
        "one": lambda: torch.randn(1, generator=generator),
        "scalar": lambda: torch.randn((), generator=generator),
        "matrix": lambda: torch.randn(m, n, generator=generator),
        "column": lambda: torch.randn(m, 1, generator=generator),
    }[kind]()
    return made.to(dtype)


BIASES = ("row", "strided", "expanded", "one", "scalar", "matrix", "column")
OPERATORS = ("mm", "mm_out", "addmm", "addmm_out", "addmm_", "linear")


def apply(
    operator: str, bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, **scales: float
) -> torch.Tensor:
    """Run one of the operators; what it writes to is made here."""
    size = (a.shape[0], b.shape[1])
    if operator == "mm":
        return torch.mm(a, b)
    if operator == "mm_out":
        return torch.mm(a, b, out=a.new_full(size, 7.0))
    if operator == "addmm":
        return torch.addmm(bias, a, b, **scales)
    if operator == "addmm_out":
        return torch.addmm(bias, a, b, **scales, out=a.new_full(size, 7.0))
    if operator == "addmm_":
        return bias.expand(size).clone().addmm_(a, b, **scales)
    return nn.functional.linear(a, b.t(), bias.expand(b.shape[1]) if bias.dim() < 2 else None)


@settings(max_examples=150)
@given(st.data())
def test_any_operands_give_what_torch_gives(data: st.DataObject) -> None:
    draw = data.draw
    m, k, n = (draw(st.sampled_from(SIZES)) for _ in range(3))
    dtype = draw(st.sampled_from((torch.float32,) * 6 + (torch.float64, torch.bfloat16)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    a = operand(m, k, draw(st.sampled_from(("plain", "plain", "transposed", *LAYOUTS))), dtype, generator)
    b = operand(
        k, n, draw(st.sampled_from(("plain", "transposed", "transposed", *LAYOUTS))), dtype, generator
    )
    bias = added(draw(st.sampled_from(("row", "row", *BIASES))), m, n, dtype, generator)
    scales = draw(st.sampled_from(({}, {}, {"beta": 0}, {"beta": 0.5, "alpha": 2})))
    operator = draw(st.sampled_from(OPERATORS))
    expected = apply(operator, bias, a, b, **scales)
    with (
        mock.patch("colossalai.kernel._products.LEAST_MULTIPLICATIONS", 0),
        calls_of_onednn(Profile(call_us=0.0, turn_ns=0.0)) as calls,
    ):
        found = apply(operator, bias, a, b, **scales)
    assert found.dtype is expected.dtype
    assert found.stride() == expected.stride()
    if dtype is not torch.float32 or not calls:
        assert torch.equal(found, expected)
    # A sum of k terms rounds k times, in an order that each library has of its own.
    bound = (
        4 * k * EPSILON * (a.abs().double() @ b.abs().double()).amax().item()
        + 4 * EPSILON * expected.abs().amax()
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=float(bound))


def test_products_of_few_terms_are_torchs_where_results_are_slow_to_write() -> None:
    slow = Profile(write_ns=0.5)
    for terms, pays in ((16, False), (256, True)):
        assert slow.pays(1024, terms, 1024, a_is_plain=True) == pays
        assert Profile().pays(1024, terms, 1024, a_is_plain=True)
    assert not Profile().pays(4096, 1024, 8, a_is_plain=True)
    assert Profile().pays(4096, 1024, 16, a_is_plain=True)


def test_most_ordinary_products_are_onednns() -> None:
    x, w, bias = torch.randn(999, 256), torch.randn(512, 256), torch.randn(512)
    with calls_of_onednn() as calls:
        nn.functional.linear(x, w, bias)
        assert calls == [(896, 256), (96, 256)]  # and 7 rows by torch
        calls.clear()
        torch.mm(x[:512], w.t())
        torch.mm(x.t(), torch.randn(999, 512))
        assert calls == [(512, 256), (256, 896)]
        calls.clear()
        with torch_products():
            torch.mm(x, w.t())
        assert not calls


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.mm(torch.randn(256, 256), torch.randn(255, 256)),
        lambda: torch.mm(torch.randn(256, 256), torch.randn(256, 256, dtype=torch.float64)),
        lambda: torch.mm(torch.randn(65536), torch.randn(256, 256)),
        lambda: torch.mm(torch.randn(256, 256), torch.randn(65536)),
        lambda: torch.addmm(torch.randn(255), torch.randn(256, 256), torch.randn(256, 256)),
        lambda: torch.addmm(torch.randn(256).double(), torch.randn(256, 256), torch.randn(256, 256)),
        lambda: torch.mm(torch.randn(256, 256), torch.randn(256, 256), out=torch.empty(256, 256).double()),
        lambda: torch.randn(256, 255).addmm_(torch.randn(256, 256), torch.randn(256, 256)),
        lambda: torch.randn(256).addmm_(torch.randn(256, 256), torch.randn(256, 256)),
        lambda: torch.mm(
            torch.randn(256, 256, requires_grad=True), torch.randn(256, 256), out=torch.empty(256, 256)
        ),
        lambda: torch.mm(
            torch.randn(256, 256), torch.randn(256, 256).to_sparse(), out=torch.empty(256, 256).double()
        ),
        lambda: torch.mm(torch.randn(256, 256), "no matrix"),
    ],
)
def test_wrong_calls_raise_what_torch_raises(call) -> None:
    with pytest.raises(Exception) as theirs:  # noqa: PT011 - whatever torch raises
        call()
    with onednn_products(), pytest.raises(type(theirs.value)) as ours:
        call()
    assert str(ours.value) == str(theirs.value)


def test_special_values_and_empty_dimensions_are_as_torchs() -> None:
    a, b = torch.randn(256, 256), torch.randn(256, 256)
    nans, infinite = torch.full((256,), torch.nan), a.clone()
    infinite[3, 5] = torch.inf
    zeros = b.clone()
    zeros[5] = 0
    with calls_of_onednn() as calls:
        assert not torch.addmm(nans, a, b, beta=0).isnan().any()
        assert not torch.addmm(nans, a, b, beta=0, out=torch.full((256, 256), torch.nan)).isnan().any()
        assert not calls
        assert torch.mm(infinite, zeros)[3].isnan().all()
        assert torch.addmm(nans, a, b).isnan().all()
        assert len(calls) == 2
        for m, k, n in ((0, 256, 256), (256, 0, 256), (256, 256, 0)):
            found = torch.addmm(torch.ones(n), torch.randn(m, k), torch.randn(k, n))
            assert found.shape == (m, n)
            assert k or (found == 1).all()
        out = torch.empty(0)
        torch.mm(a, b, out=out)  # torch lays it out
        assert out.shape == (256, 256)
        torch.mm(a, b, out=a)  # an operand: torch's affair
        assert len(calls) == 2


def test_two_runs_are_equal_bit_for_bit() -> None:
    def grads() -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(192, 768), nn.GELU(), nn.Linear(768, 192))
        x = torch.randn(300, 192, requires_grad=True)
        model(x).square().sum().backward()
        return [x.grad, *(param.grad for param in model.parameters())]

    with calls_of_onednn() as calls:
        first = grads()
        assert len(calls) > 6
        assert all(torch.equal(one, other) for one, other in zip(first, grads(), strict=True))
    plain = grads()
    with torch_products():
        assert all(torch.equal(one, other) for one, other in zip(plain, grads(), strict=True))
    for one, other in zip(first, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def _trained(
    num_steps: int, *, recomputes: bool = False, state: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Train from the start or from a state, on batches that are known by their numbers; return the state."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(192, 768), nn.GELU(), nn.Linear(768, 192))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = 0
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    for step in range(first, first + num_steps):
        x = torch.randn(300 + 7 * step, 192, generator=torch.Generator().manual_seed(step))
        y = checkpoint(model, x, use_reentrant=False) if recomputes else model(x)
        y.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": first + num_steps}
    return copy.deepcopy(state)


def test_recomputation_and_a_resumed_run_give_the_same_bits() -> None:
    with calls_of_onednn() as calls:
        whole = _trained(4)["model"]
        assert len(calls) > 4 * 6
        recomputed = _trained(4, recomputes=True)["model"]
        kept = _trained(2)
    with calls_of_onednn() as calls:  # another installation, as in another process
        resumed = _trained(2, state=kept)["model"]
        assert calls
    for name, param in whole.items():
        assert torch.equal(recomputed[name], param), name
        assert torch.equal(resumed[name], param), name


def test_other_types_and_a_users_setting_stay_as_they_are() -> None:
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        a, b = torch.randn(256, 256, dtype=dtype), torch.randn(256, 256, dtype=dtype)
        expected = a @ b
        with calls_of_onednn() as calls:
            assert torch.equal(a @ b, expected)
            assert not calls
    a, b = torch.randn(256, 256), torch.randn(256, 256)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        expected = a @ b
        with calls_of_onednn() as calls:
            assert torch.equal(a @ b, expected)
            assert not calls
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    with torch.backends.mkldnn.flags(enabled=False), calls_of_onednn() as calls:
        torch.mm(a, b)
        assert not calls


def test_what_stands_above_the_kernels_works_as_before() -> None:
    a, b = torch.randn(128, 128, dtype=torch.float32), torch.randn(128, 128)

    def value(x: torch.Tensor) -> torch.Tensor:
        return (x @ b).pow(3).sum() / 1000

    def everything() -> list[torch.Tensor]:
        x = a.clone().requires_grad_()
        (first,) = torch.autograd.grad(value(x), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        with torch.inference_mode():
            inferred = a @ b
        with torch.autocast("cpu", torch.bfloat16):
            cast = a @ b
        return [
            first,
            second,
            inferred.clone(),
            cast.float(),
            torch.func.grad(value)(a),
            torch.func.jvp(value, (a,), (b,))[1],
            torch.func.vmap(torch.mm, in_dims=(0, None))(torch.stack([a, b]), b),
            torch.func.jacrev(lambda x: (x @ b).sum(0))(a[:8]),
            torch.einsum("ij,jk->ik", a, b),
        ]

    expected = everything()
    with onednn_products():
        for found, want in zip(everything(), expected, strict=True):
            torch.testing.assert_close(found, want, rtol=1e-3, atol=1e-3)
        assert torch.mm(a.to("meta"), b.to("meta")).is_meta
        with torch._subclasses.FakeTensorMode() as mode:
            fake = torch.mm(mode.from_tensor(a), mode.from_tensor(b))
        assert isinstance(fake, torch._subclasses.FakeTensor)
        numbers = torch.mm(nn.Parameter(a), b)
        assert numbers.grad_fn.name() == "MmBackward0"
        assert type(torch.mm(a.as_subclass(Marked), b)) is Marked


class Marked(torch.Tensor):
    pass


def test_sizes_of_pieces_are_few() -> None:
    assert len({leading_piece(rows) for rows in range(64, 4097)}) == 4 * 6 + 1
    assert all(rows * 0.75 < leading_piece(rows) <= rows for rows in range(1, 5000))
    assert all(leading_piece(rows) == rows for rows in (*range(8), 96, 128, 384, 1024, 1280, 3072))


def test_thin_and_small_products_are_torchs() -> None:
    with calls_of_onednn() as calls:
        torch.randn(1, 4096) @ torch.randn(4096, 1024)
        torch.randn(1, 4096) @ torch.randn(1024, 4096).t()
        torch.randn(4096, 1).t() @ torch.randn(4096, 1024)
        torch.randn(4096, 1024) @ torch.randn(1024, 1)
        torch.randn(101, 101) @ torch.randn(101, 101)
        assert LEAST_MULTIPLICATIONS > 101**3
        assert not calls


def test_thousands_of_lengths_are_few_shapes() -> None:
    """A shape leaves 0.6 to 1.1 MiB behind."""
    weight, shapes = torch.randn(128, 256), set()

    def noted(a, w, *rest):
        shapes.add((*a.shape, a.stride(1) == 1, *w.shape, w.stride(1) == 1))
        return a.new_empty(a.shape[0], w.shape[0])

    plain = dict.fromkeys(REPLACED, lambda *_, **__: None)
    with onednn_products():
        products = installation.products
        with mock.patch.multiple(products, _linear=noted, _plain=plain):
            for rows in range(64, 2064):
                x, grad = torch.empty(rows, 256), torch.empty(rows, 128)
                for a, b in ((x, weight.t()), (grad, weight), (grad.t(), x)):
                    assert products._takes(a, b)
                    products._product(None, a, b, None)
    assert len(shapes) < 100
    with onednn_products(), mock.patch.object(installation.products, "_linear", noted):
        shapes.clear()
        for length in range(256, 446):  # where lengths take the place of features
            torch.mm(weight, torch.empty(256, length))
        assert len(shapes) == 128


@pytest.mark.long
def test_thousands_of_lengths_leave_little_memory() -> None:
    """In a process of its own: what other tests have compiled would hide it."""
    code = """
import torch
from torch import nn
from colossalai.kernel import Profile, onednn_products
torch.set_num_threads(1)
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**20
layer, x = nn.Linear(128, 128), torch.randn(2100, 128)
def step(rows):
    layer(x[:rows].clone().requires_grad_()).sum().backward()
with onednn_products():
    step(2047)
    before = resident()
    for rows in range(64, 2064):
        step(rows)
    print(resident() - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ},
        timeout=120,
    )
    assert float(done.stdout) < 200
