"""Row tables: a second copy of weights, in the fastest layout for products with one row.

[Note: one row as a sum of rows]
A product with one row reads the whole weight and computes little. `embedding_bag` with weights, a weighted
sum of rows of a table, prefetches rows, and so reads faster than oneDNN's kernels for few rows. In a row
table, outputs are divided into groups of up to 320 (as many sums as registers hold); row (group, feature)
holds the weights of this feature for the outputs of this group. The outputs of a group are the sum of its
rows, each times this feature of x, in float32. For more rows of x the packed weight is faster, because it is
read once for all of them.

[Note: exact sums of codes]
Codes of a row and codes of a weight are integers of at most 127, so float32 adds 1,024 of their products
without rounding (1,024 * 127^2 < 2^24). So a row of `int8` is summed in parts of 1,024 features, and the
parts in float64: the result equals the integer product bit for bit, whether or not a request is alone in its
step. Processors without VNNI add two rounded products ([Note: saturation of integer products]): the results
differ in the last bit there, so no tables are kept.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from colossalai.logging import get_dist_logger

_LARGEST_GROUP = 320
_VECTOR = 16  # values per register
_EXACT_TERMS = 1024
_BYTES_BESIDE_CODES = 8  # for each row: scale and offset in float32
_OFFSET = 128  # codes in a table are unsigned: 0 is stored as 128

# By default a copy is built only if it takes at most this part of the free memory, and if the weights do not
# fit into a cache.
_LARGEST_PART = 0.1
_LEAST_BYTES = 32 << 20
_MEASURED_BYTES = 1 << 26  # of products of one shape
_MEASURED_ROUNDS = 7
_WORTHWHILE = 0.95  # relative to the time without a table
# Largest difference between products with and without a table, relative to the largest result.
_AGREED_ERROR = {torch.float32: 1e-4, torch.bfloat16: 0.03}


class RowTable(ABC):
    """Abstract: a weight as a table of rows to sum. See [Note: one row as a sum of rows].

    Args:
        weight: (out, in), stored in its own dtype.

    Attributes:
        out_features: Number of outputs.
    """

    def __init__(self, weight: Tensor) -> None:
        self.out_features, in_features = weight.shape
        self._num_groups, group_size = groups_of(self.out_features)
        missing = self._num_groups * group_size - self.out_features
        groups = functional.pad(weight, (0, 0, 0, missing)).view(self._num_groups, group_size, in_features)
        # Always a copy, even if the transposed weight is contiguous: the table owns its memory.
        rows = groups.transpose(1, 2).clone(memory_format=torch.contiguous_format)
        self._table = rows.view(self._num_groups * in_features, group_size)
        self._rows = torch.arange(self._num_groups * in_features, dtype=torch.int32)
        self._starts = torch.arange(0, len(self._rows), in_features, dtype=torch.int32)

    @abstractmethod
    def multiply(self, x: Tensor) -> Tensor:
        """Return x W^T in new memory; x is (1, in_features)."""

    @property
    def num_bytes(self) -> int:
        """Size of the table and its indices in bytes."""
        return self._table.nbytes + self._rows.nbytes

    def _repeat_input(self, x: Tensor) -> Tensor:
        """Return (rows of the table,) the factors of the rows."""
        return x.expand(self._num_groups, -1).reshape(-1)


class FloatRowTable(RowTable):
    """Row table of a weight in float32 or bfloat16.

    Args:
        weight: (out, in).
    """

    def multiply(self, x: Tensor) -> Tensor:
        """Return x W^T; x is (1, in_features)."""
        # The operator behind `functional.embedding_bag`, without its checks and gradients.
        sums: Tensor = torch._embedding_bag_forward_only(
            self._table, self._rows, self._starts, False, 0, False, self._repeat_input(x), False, -1
        )[0]
        return sums.view(1, -1)[:, : self.out_features]


class CodesRowTable(RowTable):
    """Row table of a weight in 8-bit codes, with exact sums. See [Note: exact sums of codes].

    Args:
        codes: (out, in) int8.
    """

    def __init__(self, codes: Tensor) -> None:
        super().__init__(codes)
        in_features = codes.shape[1]
        codes_of_rows = self._table.view(torch.uint8).bitwise_xor_(_OFFSET)  # adds it to a signed number
        scale_and_offset = torch.tensor([1.0, -_OFFSET]).view(torch.uint8).expand(len(codes_of_rows), -1)
        self._table = torch.cat((codes_of_rows, scale_and_offset), 1)
        parts = torch.arange(0, in_features, _EXACT_TERMS, dtype=torch.int32)
        self._num_parts = len(parts)
        self._starts = (self._starts[:, None] + parts).view(-1)

    def multiply(self, x: Tensor) -> Tensor:
        """Return x W^T in float32; x is (1, in_features) float32, integers of at most 127."""
        sums: Tensor = torch.ops.quantized.embedding_bag_byte_rowwise_offsets(
            self._table, self._rows, self._starts, False, 0, False, self._repeat_input(x), None, False
        )
        if self._num_parts > 1:
            sums = sums.view(self._num_groups, self._num_parts, -1).sum(1, dtype=torch.float64).float()
        return sums.view(1, -1)[:, : self.out_features]


def groups_of(out_features: int) -> tuple[int, int]:
    """Return number and size of the groups of outputs: balanced over threads, with little padding."""
    num_threads = torch.get_num_threads()
    fewest = max(-(-out_features // _LARGEST_GROUP), min(num_threads, -(-out_features // _VECTOR)))

    def size_of(num_groups: int) -> int:
        return -(-out_features // (num_groups * _VECTOR)) * _VECTOR

    num_groups = min(
        range(fewest, 2 * fewest + 1),
        key=lambda number: (-(-number // num_threads) * num_threads * size_of(number), number),
    )
    return num_groups, size_of(num_groups)


def row_table_bytes(out_features: int, in_features: int, dtype: torch.dtype) -> int:
    """Return the size of a row table and its indices in bytes.

    Args:
        out_features: Number of outputs of the product.
        in_features: Number of its inputs.
        dtype: Dtype of the weight; int8 for codes.
    """
    num_groups, group_size = groups_of(out_features)
    beside = _BYTES_BESIDE_CODES if dtype == torch.int8 else 0
    return num_groups * in_features * (group_size * dtype.itemsize + beside + torch.int32.itemsize)


class HasRowTable(Protocol):
    """A product with an optional row table."""

    out_features: int
    in_features: int
    row_table: RowTable | None

    @property
    def table_dtype(self) -> torch.dtype | None:
        """Dtype of its row table, int8 for codes; None if not supported."""

    @property
    def input_dtype(self) -> torch.dtype:
        """Dtype of its inputs."""

    def make_row_table(self) -> RowTable:
        """Build a row table of its weight."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product."""


@torch.inference_mode()
def keep_row_tables(
    products: Iterable[HasRowTable], *, is_wanted: bool | None, free_memory: Callable[[], float]
) -> int:
    """Build row tables for the products of an inference-only model that are faster with them on this machine.

    Args:
        products: The products.
        is_wanted: Whether to build them; None: if they are not small, and take at most a tenth of the free
            memory.
        free_memory: Returns the memory available to this rank in bytes.

    Returns:
        Size of the tables in bytes.

    Raises:
        ValueError: `is_wanted` is True, and none of `products` supports one.
    """
    if is_wanted is False:
        return 0
    able = [product for product in products if product.table_dtype is not None]
    if is_wanted and not able:
        raise ValueError(
            "has_row_tables=True; no product of this model can have one: they are for weights in float32, "
            "bfloat16 or int8 on a CPU with oneDNN. Leave it out"
        )
    wanted_bytes = sum(map(_bytes_of, able))
    logger = get_dist_logger()
    if is_wanted is None:
        if wanted_bytes < _LEAST_BYTES:
            return 0
        if wanted_bytes > _LARGEST_PART * free_memory():
            logger.log_once(
                f"no row tables: they would make steps of one token faster, and take "
                f"{wanted_bytes / 2**20:,.0f} MiB, more than a tenth of the free memory; "
                "has_row_tables=True (--row-tables) keeps them all the same",
                level="INFO",
            )
            return 0
    kept = _keep_faster(able)
    num_bytes = sum(product.row_table.num_bytes for product in kept if product.row_table is not None)
    logger.log_once(
        f"row tables of {len(kept)} of {len(able)} products take {num_bytes / 2**20:,.0f} MiB: steps of one "
        "token read these"
        if kept
        else "no row tables: on this machine products with one row are not faster with them, or not the same",
        level="INFO",
    )
    return num_bytes


def _bytes_of(product: HasRowTable) -> int:
    assert product.table_dtype is not None, "it can have a table"
    return row_table_bytes(product.out_features, product.in_features, product.table_dtype)


_Kind = tuple[int, int, torch.dtype, torch.dtype | None]


def _keep_faster(products: Sequence[HasRowTable]) -> list[HasRowTable]:
    """Build row tables for the kinds of products that are faster with one; return these products."""
    kinds: dict[_Kind, list[HasRowTable]] = {}
    for product in products:
        kind = (product.out_features, product.in_features, product.input_dtype, product.table_dtype)
        kinds.setdefault(kind, []).append(product)
    samples = {kind: each[: max(1, _MEASURED_BYTES // _bytes_of(each[0]))] for kind, each in kinds.items()}
    tables = {kind: [product.make_row_table() for product in sample] for kind, sample in samples.items()}
    faster = are_faster(samples, tables)
    kept = []
    for kind, each in kinds.items():
        made = dict(zip(samples[kind], tables.pop(kind), strict=True))
        for product in each if kind in faster else []:
            product.row_table = made.get(product) or product.make_row_table()
            if _agrees(product):
                kept.append(product)
            else:
                product.row_table = None
    return kept


def are_faster(
    samples: Mapping[_Kind, Sequence[HasRowTable]], tables: Mapping[_Kind, Sequence[RowTable]]
) -> set[_Kind]:
    """Return the kinds of products that are faster with row tables.

    All kinds run in turn, as in a step, so that caches hold no more of their weights than in a step.

    Args:
        samples: Some products of each kind.
        tables: Row tables of these.
    """
    seconds: dict[tuple[_Kind, bool], list[float]] = {}
    for number in range(_MEASURED_ROUNDS + 1):  # the first one compiles kernels
        for has_table in (False, True):
            for kind, sample in samples.items():
                for product, table in zip(sample, tables[kind], strict=True):
                    product.row_table = table if has_table else None
                x = torch.ones(1, kind[1], dtype=kind[2])
                began = time.thread_time()
                for product in sample:
                    product(x)
                if number:
                    seconds.setdefault((kind, has_table), []).append(time.thread_time() - began)
                for product in sample:
                    product.row_table = None
    # Disturbances only add to a measurement, so compare minima.
    return {kind for kind in samples if min(seconds[kind, True]) < _WORTHWHILE * min(seconds[kind, False])}


def _agrees(product: HasRowTable) -> bool:
    """Return whether a product has the same result with and without its row table."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, product.in_features, generator=generator).to(product.input_dtype)
    table, made = product.row_table, product(x).double()
    product.row_table = None
    expected = product(x).double()
    product.row_table = table
    if product.table_dtype == torch.int8:  # not without VNNI, where a product is the sum of two rounded ones
        return torch.equal(made, expected)
    bound = _AGREED_ERROR[product.input_dtype] * expected.abs().max()
    return bool((made - expected).abs().max() <= bound)
