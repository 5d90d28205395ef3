"""Every operation of torch on float32 tensors that behave as bfloat16, against the operation on bfloat16."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from colossalai.tensor import with_full_precision
from colossalai.tensor._full_precision import source_of

LOW = torch.bfloat16
NUM_PARTS = 12
NUM_SAMPLES = 4
NUM_SAMPLES_OF_VARIANTS = 2
MAX_ELEMENTS = 20_000  # of a sample: the few larger ones take most of the time, and show nothing else
TOLERANCE = 2.0**-6  # two roundings to bfloat16, whose relative error is at most 2**-8 each, and some more
MIN_CALLS = 150  # in a part, for which bfloat16 works: far fewer are a mistake of the test

EXCLUDED = {
    "_softmax_backward_data": "the last argument, a dtype, is that of the input, and not of the result",
}
WITHOUT_VALUES = dict.fromkeys(
    ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"),
    "the memory is not initialized",
)
WITHOUT_VIEWS = {
    **dict.fromkeys(("bfloat16", "masked.prod"), "converts to bfloat16, which copies"),
    **dict.fromkeys(
        ("broadcast_tensors", "meshgrid", "atleast_1d", "atleast_2d", "atleast_3d"),
        "takes several tensors: next to one of 16 bits, all are rounded",
    ),
}
# With ordinary float32 tensors next to those that behave as bfloat16.
EXCLUDED_NEXT_TO_FLOAT32 = {
    **dict.fromkeys(
        ("native_batch_norm", "native_group_norm", "native_layer_norm"), "internal: F.batch_norm calls it"
    ),
    **dict.fromkeys(
        ("_native_batch_norm_legit", "_batch_norm_with_update"), "internal: F.batch_norm calls it"
    ),
    **dict.fromkeys(
        ("broadcast_tensors", "atleast_1d", "atleast_2d", "atleast_3d"),
        "returns several tensors, each in the dtype of its own argument; float32 next to float32 is harmless",
    ),
    **dict.fromkeys(
        ("nn.functional.binary_cross_entropy_with_logits", "nn.functional.soft_margin_loss"),
        "scalars of two dtypes: the loss has that of one of them, and not the promoted one",
    ),
    **dict.fromkeys(("addr", "column_stack"), "promotes scalars as if they had dimensions"),
    "nn.functional.linear_cross_entropy": "promotes in one of its ways to compute, and not in the others",
    "resize_as_": "torch.resize_as_, which the compiler cannot look up, has no answer of its own",
    "normal": "has the dtype of the mean, if both are scalars",
}

Convert = Callable[[int, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Role:
    """Which of the float32 tensors of a sample behave as bfloat16, and what the others become."""

    name: str
    is_full: Callable[[int], bool]
    others: torch.dtype = LOW

    def low(self, number: int, tensor: torch.Tensor) -> torch.Tensor:
        """Convert for the reference."""
        return tensor.to(LOW if self.is_full(number) else self.others)

    def full(self, number: int, tensor: torch.Tensor) -> torch.Tensor:
        """Convert for what is tested."""
        return with_full_precision(tensor, LOW) if self.is_full(number) else tensor.to(self.others)

    def exact(self, number: int, tensor: torch.Tensor) -> torch.Tensor:
        """Convert for a float32 computation on the same values."""
        return tensor if self.is_full(number) else tensor.to(self.others).float()

    def of_rounded(self, number: int, tensor: torch.Tensor) -> torch.Tensor:
        """Convert for a float32 computation on the values of the reference."""
        return self.low(number, tensor).float()


ALL = Role("all", lambda number: True)
ROLES = (ALL, Role("the first", lambda number: number == 0), Role("the others", lambda number: number > 0))
NEXT_TO_FLOAT32 = (
    Role("the first, next to float32", lambda number: number == 0, torch.float32),
    Role("the others, next to float32", lambda number: number > 0, torch.float32),
)


class Call:
    """A call of an operation with the arguments of a sample."""

    def __init__(self, func: Callable[..., Any], sample: Any) -> None:
        self._func = func
        self._leaves, self._spec = tree_flatten(((sample.input, *sample.args), sample.kwargs))
        self._numbers = {
            place: number
            for number, place in enumerate(
                place for place, leaf in enumerate(self._leaves) if _is_float32(leaf)
            )
        }
        self.num_floats = len(self._numbers)
        self._references: dict[str | None, tuple[list[Any], list[torch.Tensor]] | None] = {}
        self.is_random = False

    def run(self, convert: Convert) -> tuple[list[Any], list[torch.Tensor]]:
        """Return results, and the arguments that were converted."""
        torch.default_generator.manual_seed(0)
        leaves = [
            convert(self._numbers[place], leaf.detach().clone()) if place in self._numbers else _copied(leaf)
            for place, leaf in enumerate(self._leaves)
        ]
        args, kwargs = tree_unflatten(leaves, self._spec)
        return tree_leaves(self._func(*args, **kwargs)), [leaves[place] for place in self._numbers]

    def reference(self, role: Role) -> tuple[list[Any], list[torch.Tensor]] | None:
        """Return results and arguments of the call without full precision; None where it is not supported."""
        key = None if role in ROLES else role.name  # all is bfloat16
        if key not in self._references:
            torch.default_generator.manual_seed(0)
            state = torch.get_rng_state()
            self._references[key] = self.attempt(role.low)
            self.is_random = not torch.equal(state, torch.get_rng_state())
        return self._references[key]

    def attempt(self, convert: Convert) -> tuple[list[Any], list[torch.Tensor]] | None:
        """Run; None where torch does not support it."""
        try:
            return self.run(convert)
        except Exception:
            return None

    def grads(self, convert: Convert, is_leaf: Callable[[int], bool]) -> list[torch.Tensor | None]:
        """Return the gradients of the converted arguments that are leaves; none without a graph."""
        leaves = []

        def with_leaf(number: int, tensor: torch.Tensor) -> torch.Tensor:
            if convert == ALL.full:  # the leaf is what it is a view of
                leaves.append(tensor.requires_grad_())
                return convert(number, tensor)
            converted = convert(number, tensor)
            if is_leaf(number):
                leaves.append(converted.requires_grad_())
            return converted

        results = [each for each in self.run(with_leaf)[0] if getattr(each, "requires_grad", False)]
        if not leaves or not results:
            return []
        sum((each.abs() if each.is_complex() else each).float().sum() for each in results).backward()
        return [leaf.grad for leaf in leaves]

    def attempt_grads(self, convert: Convert, is_leaf: Callable[[int], bool]) -> list[torch.Tensor | None]:
        """Return the gradients; none where torch does not support it."""
        try:
            return self.grads(convert, is_leaf)
        except Exception:
            return []


def _is_float32(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float32 and leaf.layout == torch.strided


def _copied(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


def kind_of(value: Any) -> Any:
    return (value.dtype, tuple(value.shape)) if isinstance(value, torch.Tensor) else type(value)


def values_of(value: Any) -> torch.Tensor:
    tensor = torch.as_tensor(source_of(value).detach() if isinstance(value, torch.Tensor) else value)
    tensor = tensor if tensor.layout == torch.strided else tensor.to_dense()
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def are_close(values: list[Any], candidates: list[list[Any]], *, scaled: bool = False) -> bool:
    """Whether each value is one of the candidates for it, up to roundings.

    Args:
        values: The values.
        candidates: Lists of values.
        scaled: Whether errors are relative to the largest element, or to 1, as those of sums are.
    """
    return all(
        any(_is_close(value, candidate[place], scaled=scaled) for candidate in candidates)
        for place, value in enumerate(values)
        if isinstance(value, torch.Tensor | bool | int | float)
    )


def _is_close(value: Any, candidate: Any, *, scaled: bool) -> bool:
    found, wanted = values_of(value), values_of(candidate)
    finite = wanted[wanted.isfinite()].abs()
    scale = finite.max().clamp(min=1.0).item() if scaled and finite.numel() else 0.0
    is_same_shape = found.shape == wanted.shape
    return is_same_shape and torch.allclose(
        found, wanted, rtol=TOLERANCE, atol=1e-5 + TOLERANCE * scale, equal_nan=True
    )


def calls_of(op: Any) -> Iterator[tuple[str, Call, bool]]:
    """Yield a name, a call, and whether it writes into its first argument, for each way to call it."""
    samples = islice(op.sample_inputs("cpu", torch.float32), NUM_SAMPLES)
    for number, sample in enumerate(samples):
        leaves = tree_leaves(((sample.input, *sample.args), sample.kwargs))
        if sum(leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor)) > MAX_ELEMENTS:
            continue
        for each in (op, *op.aliases) if number == 0 else (op,):
            variants = {"": each.op}
            if number < NUM_SAMPLES_OF_VARIANTS:
                variants |= {" as a method": each.method_variant, " in place": each.inplace_variant}
            if each is op and number == 0:
                variants[" as an operator"] = op.operator_variant
                variants[" as an operator in place"] = op.inplace_operator_variant
            for variant, func in variants.items():
                if func is not None:
                    yield f"{each.name}{variant}", Call(func, sample), variant.endswith("in place")


def check(name: str, call: Call, role: Role, *, in_place: bool) -> str | None:
    """Return what is wrong with the result; None if nothing is, or if bfloat16 does not work."""
    reference = call.reference(role)
    if reference is None:
        return None
    try:
        results, args = call.run(role.full)
    except Exception as error:
        return f"raises {error!r}"
    kinds = [[kind_of(each) for each in of] for of in (results, reference[0])]
    if kinds[0] != kinds[1]:
        return f"returns {kinds[0]} in the place of {kinds[1]}"
    if in_place and source_of(results[0]) is not source_of(args[0]):
        return "does not write into the float32 tensor"
    if name not in WITHOUT_VIEWS and _shares(reference) and role.is_full(0) and not _shares((results, args)):
        return "does not return a view"
    if call.is_random or name in WITHOUT_VALUES or are_close(results, [reference[0]]):
        return None
    exact = [call.attempt(convert) for convert in (role.exact, role.of_rounded)]
    candidates = [reference[0], *(each[0] for each in exact if each is not None)]
    return None if are_close(results, candidates) else f"returns {results}, and not one of {candidates}"


def _shares(call: tuple[list[Any], list[torch.Tensor]]) -> bool:
    """Whether the first result has the memory of the first argument."""
    result, arg = (
        source_of(each) if isinstance(each, torch.Tensor) else each for each in (call[0][0], call[1][0])
    )
    if not isinstance(result, torch.Tensor) or result.layout != torch.strided:
        return False
    return result.untyped_storage().data_ptr() == arg.untyped_storage().data_ptr() and arg.numel() > 0


def check_grads(call: Call, role: Role) -> str | None:
    """Return what is wrong with gradients; None if nothing is, or if bfloat16 has none."""

    def is_leaf(number: int) -> bool:
        return role is ALL or not role.is_full(number)

    reference = call.attempt_grads(role.low, is_leaf)
    if not reference:
        return None
    try:
        grads = call.grads(role.full, is_leaf)
    except Exception as error:
        return f"raises {error!r} in backward"
    wanted = torch.float32 if role is ALL else LOW
    if [None if grad is None else wanted for grad in reference] != [
        grad if grad is None else grad.dtype for grad in grads
    ]:
        return f"has the gradients {grads} in the place of {reference}"
    if call.is_random or are_close(grads, [reference], scaled=True):
        return None
    exact = [call.attempt_grads(convert, is_leaf) for convert in (role.exact, role.of_rounded)]
    candidates = [reference, *(each for each in exact if each)]
    return None if are_close(grads, candidates, scaled=True) else f"has the gradients {grads}: {candidates}"


@pytest.mark.unit
@pytest.mark.parametrize("part", range(NUM_PARTS))
@pytest.mark.filterwarnings("ignore")  # of torch, about what its own samples do
def test_operations_behave_as_those_of_16_bits(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with mock.patch.object(torch.backends, "disable_global_flags"):  # for all tests that come after it
        from torch.testing._internal import common_utils
        from torch.testing._internal.common_methods_invocations import op_db  # an import of ten seconds
        from torch.testing._internal.opinfo import core

    for module in (common_utils, core):  # it looks for a unittest at the source of each frame of the stack
        monkeypatch.setattr(module, "extract_test_fn", lambda: None)
    wrong, num_calls = [], 0
    for op in op_db[part::NUM_PARTS]:
        if torch.float32 not in op.supported_dtypes("cpu") or op.name in EXCLUDED:
            continue
        for name, call, in_place in calls_of(op):
            roles = ROLES if op.name in EXCLUDED_NEXT_TO_FLOAT32 else (*ROLES, *NEXT_TO_FLOAT32)
            for role in roles[: len(roles) if call.num_floats > 1 else call.num_floats]:
                if in_place and not role.is_full(0):
                    continue
                found = check(op.name, call, role, in_place=in_place)
                if found is None and role in ROLES and name == op.name:
                    found = check_grads(call, role)
                wrong += [f"{name}, {role.name}: {found}"] if found is not None else []
                num_calls += 1
    assert not wrong, "\n".join(wrong)
    assert num_calls >= MIN_CALLS
