"""Base of embeddings with a cached table: the trained parameter is a cache, `weight` the whole table."""

import atexit
import operator
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from colossalai.logging import get_dist_logger
from colossalai.nn.layer.cached_embedding._host_rows import HostRows
from colossalai.nn.layer.cached_embedding._param_mgr import CachedParamMgr
from colossalai.nn.layer.cached_embedding._prefetch import PrefetchLoader, prefetch
from colossalai.nn.layer.cached_embedding._slots import CacheOverflowError, EvictionStrategy
from colossalai.nn.layer.cached_embedding._table_file import TableFile
from colossalai.tensor import RowCacheModule, cached_tables

Batch = TypeVar("Batch")

_IN_FILES: "weakref.WeakSet[CachedParamMgr]" = weakref.WeakSet()  # caches of tables in files


@dataclass(frozen=True)
class CacheOptions:
    """Options of a cache; see `CachedEmbeddingBag`.

    Raises:
        ValueError: `cache_ratio` is out of range, or `overflow` is neither "error" nor "split".
    """

    cache_ratio: float
    ids_freq_mapping: Tensor | Sequence[int] | None
    warmup_ratio: float
    buffer_size: int
    pin_weight: bool | None
    evict_strategy: EvictionStrategy
    overflow: str

    def __post_init__(self) -> None:
        if self.overflow not in ("error", "split"):
            raise ValueError(f"overflow is {self.overflow!r}; it must be 'error' or 'split'")
        if not 0 < self.cache_ratio <= 1:
            raise ValueError(f"cache_ratio is {self.cache_ratio}; it must be above 0 and at most 1")

    def num_slots(self, num_rows: int, *, least: int) -> int:
        """Return the number of rows of the cache of a table."""
        return min(max(round(self.cache_ratio * num_rows), least), num_rows)


class CachedTable(RowCacheModule):
    """Abstract: a table of embeddings with a cache.

    Args:
        num_embeddings: Number of rows of the table.
        embedding_dim: Width of a row.
        padding_idx: Id whose rows count as zero and have no gradient.
        max_norm: Refused; it would change rows in the forward.
        sparse: Whether gradients are sparse.
        weight: The table; None for one of normal random values, as torch's embeddings draw them.
        weight_path: File of the table, which is used in place if it is there; None for host memory.
        dtype: Data type of the table. Default: torch's default.
        device: Device of the cache. Default: torch's default device.
        options: Options of the cache.
        name: Name of the table in error messages.

    Raises:
        ValueError: An argument is out of range, or `max_norm` is given.
    """

    _at_end: "weakref.finalize[..., CachedTable] | None" = None  # for a table in a file

    @torch.inference_mode(False)  # else no version of a tensor is counted
    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        padding_idx: int | None,
        max_norm: float | None,
        sparse: bool,
        weight: Tensor | None,
        weight_path: str | Path | None,
        dtype: torch.dtype | None,
        device: torch.device | str | None,
        options: CacheOptions,
        name: str,
    ) -> None:
        super().__init__()
        kind = self._get_name()
        check_not_lazy(kind)
        if max_norm is not None:
            raise ValueError(
                f"max_norm={max_norm}: {kind} writes back the rows that a step has changed, and max_norm "
                "changes rows in the forward, also in evaluation: leave it out, and normalize the output"
            )
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ValueError(f"padding_idx is {padding_idx}; it must be within the {num_embeddings} rows")
        if weight is not None and tuple(weight.shape) != (num_embeddings, embedding_dim):
            raise ValueError(
                f"_weight has the shape {tuple(weight.shape)}; it must be (num_embeddings, embedding_dim), "
                f"({num_embeddings}, {embedding_dim})"
            )
        self.num_embeddings = num_embeddings = operator.index(num_embeddings)
        self.embedding_dim = embedding_dim = operator.index(embedding_dim)
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        self.sparse = sparse
        self.cache_ratio = options.cache_ratio
        self.overflow = options.overflow
        self.cache_op = True
        name = name or f"{kind}({num_embeddings}, {embedding_dim})"
        table = self._open_table(weight, weight_path, dtype, name)
        try:
            self.cache_weight_mgr = CachedParamMgr(
                table,
                options.num_slots(num_embeddings, least=1 if padding_idx is None else 2),
                options.buffer_size,
                options.pin_weight,
                options.evict_strategy,
                device=device,
                fixed=self.padding_idx,
                name=name,
            )
            # Registered directly: the class has a property of this name, which is the whole table.
            self._parameters["weight"] = self.cache_weight_mgr.param
            self.cache_weight_mgr.reorder(options.ids_freq_mapping, options.warmup_ratio)
        except BaseException:
            if isinstance(table, TableFile):
                table.discard()
            raise
        if isinstance(table, TableFile):
            self._at_end = weakref.finalize(self, self.cache_weight_mgr.flush_at_end)
            _IN_FILES.add(self.cache_weight_mgr)

    @classmethod
    def from_pretrained(cls, embeddings: Tensor, freeze: bool = True, **options: Any) -> Self:
        """Return a module with a given table.

        Args:
            embeddings: The table, (rows, dim), used in place, or copied to a new file at `weight_path`.
            freeze: Whether it is not trained.
            options: Arguments of the class.

        Raises:
            ValueError: `embeddings` does not have two dimensions.
        """
        if embeddings.dim() != 2:
            raise ValueError(f"embeddings have the shape {tuple(embeddings.shape)}; it must be (rows, dim)")
        module = cls(*embeddings.shape, **{**options, "_weight": embeddings})
        module.cache_weight_mgr.param.requires_grad_(not freeze)
        return module

    @property
    def weight(self) -> Tensor:
        """The whole table, (num_embeddings, embedding_dim), in host memory or a file, with the newest values.

        The parameter that is trained, `cache_weight_mgr.param`, is a cache of it. The table can be changed in
        place before the next step.
        """
        return self.cache_weight_mgr.weight

    @property
    def num_hits_history(self) -> list[int]:
        """For each forward the number of distinct rows that were cached."""
        return self.cache_weight_mgr.num_hits_history

    @property
    def num_miss_history(self) -> list[int]:
        """For each forward the number of distinct rows that were read from the table."""
        return self.cache_weight_mgr.num_miss_history

    @property
    def num_write_back_history(self) -> list[int]:
        """For each forward the number of rows that were written back to the table."""
        return self.cache_weight_mgr.num_write_back_history

    @property
    def swap_in_bandwidth(self) -> float:
        """Megabytes per second of the rows read from the table so far; 0.0 before the first."""
        return self.cache_weight_mgr.swap_in_bandwidth

    @property
    def swap_out_bandwidth(self) -> float:
        """Megabytes per second of the rows written to the table so far; 0.0 before the first."""
        return self.cache_weight_mgr.swap_out_bandwidth

    def set_cache_op(self, cache_op: bool = True) -> None:
        """Set whether the forward takes ids, or slots that `cache_weight_mgr.prepare_ids` has returned.

        Args:
            cache_op: True for ids. With False the forwards take the slots in the order of those calls.
        """
        self.cache_op = cache_op

    def set_cache_mgr_async_copy(self, flag: bool) -> None:
        """Set whether copies to an accelerator may overlap with the host's work."""
        self.cache_weight_mgr.set_async_copy(flag)

    def print_comm_stats(self) -> None:
        """Log hits, misses and the rows that moved so far."""
        self.cache_weight_mgr.print_comm_stats()

    def prefetch(
        self,
        loader: Iterable[Batch],
        depth: int = 4,
        ids: Callable[[Batch], Tensor | Sequence[Tensor]] | None = None,
    ) -> "PrefetchLoader[Batch]":
        """Return a loader of the same batches, whose rows come while the batch before them computes.

        The loader is read `depth` batches ahead. Rows that these batches need leave the cache after all
        others, those of the furthest next use first. Results do not depend on it.

        Args:
            loader: Batches; one of `prefetch` of another table has the rows of both.
            depth: Number of batches that are known ahead; 0 for none.
            ids: Function that returns the ids of a batch, a tensor or several. Default: a batch is its ids.

        Raises:
            ValueError: `depth` is not a number of batches.
            TypeError: `loader` cannot be iterated, or `ids` not be called.
        """
        return prefetch(loader, [self.cache_weight_mgr], depth, ids)

    def close(self) -> None:
        """Write the newest rows to the file of the table, if it has one, and release the file.

        The end of the module does so, too, which a notebook can delay. The module cannot be used afterwards.
        """
        if self._at_end is not None:
            self.cache_weight_mgr.flush_at_end()
            self._at_end.detach()  # a flush that has failed is tried again at the end
            self.cache_weight_mgr.close()

    def _check_split(
        self, error: CacheOverflowError, *, has_parts: bool, factors: Tensor | None = None
    ) -> None:
        """Check that a batch can be computed in parts.

        Args:
            error: The error of the whole batch.
            has_parts: Whether it can be cut.
            factors: Factors of the rows.

        Raises:
            CacheOverflowError: `overflow` is "error", the batch cannot be cut, or it needs a gradient.
        """
        if self.overflow == "error" or not has_parts:
            raise error
        needs_grad = self.cache_weight_mgr.param.requires_grad or (
            factors is not None and factors.requires_grad
        )
        if torch.is_grad_enabled() and needs_grad:
            raise CacheOverflowError(
                f"{error}. overflow='split' computes parts under torch.no_grad() only: rows of a gradient "
                "stay in the cache, all of them, until the step"
            ) from error

    def element_size(self) -> int:
        """Return the bytes of an element of the table."""
        return self.cache_weight_mgr.param.element_size()

    def _look_up(self, ids: Tensor, read: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Return the result of a function of the slots of ids and of the cache."""
        if torch.compiler.is_compiling():  # the cache moves rows by the values of ids
            output: Tensor = torch.compiler.disable(self._look_up_eagerly)(ids, read)
            return output
        return self._look_up_eagerly(ids, read)

    def _look_up_eagerly(self, ids: Tensor, read: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        cache = self.cache_weight_mgr
        self._check_ranks(cache.name)
        if self._parameters.get("weight") is not cache.param:
            raise RuntimeError(
                f"the parameter of {cache.name} was replaced, which is a cache of some rows: write to the "
                "attribute `weight` in place, or call load_state_dict"
            )
        # The rows are pinned after the lookup and before any other: `follow` needs the output's node.
        slots, distinct = cache.lookup(ids) if self.cache_op else (ids, cache.in_flight.check_prepared(ids))
        output = read(slots, cache.param)
        cache.in_flight.follow(output, distinct, is_prepared=not self.cache_op)
        return output

    def _open_table(
        self, weight: Tensor | None, path: str | Path | None, dtype: torch.dtype | None, name: str
    ) -> Tensor | TableFile:
        """Return the table with its values.

        Raises:
            ValueError: Values are given for a file that has some.
        """
        shape = (self.num_embeddings, self.embedding_dim)
        if path is None:
            if weight is None:
                weight = torch.empty(shape, dtype=dtype, device="cpu")
                self._draw(HostRows(weight))
            return weight
        self._check_ranks(name)
        table = TableFile(
            path, shape, (dtype or torch.get_default_dtype()) if weight is None else weight.dtype
        )
        if not table.is_new:
            if weight is not None:
                table.release()
                raise ValueError(
                    f"{table.path} has a table, and from_pretrained or _weight give values for a new one: "
                    "leave them out, load them with load_state_dict, or delete the file"
                )
            state = ", which is unfinished: load a checkpoint" if table.is_unfinished else ""
            get_dist_logger().info(f"{name} goes on with the table in {table.path}{state}", ranks=[0])
            return table
        try:
            if weight is None:
                self._draw(table)
            else:
                table.load(weight)
            table.finish()
        except BaseException:
            table.discard()
            raise
        return table

    def _draw(self, rows: HostRows) -> None:
        rows.fill_normal()
        if self.padding_idx is not None:
            rows.tensor[self.padding_idx].zero_()

    def _check_ranks(self, name: str) -> None:
        """Check that the job has the ranks that the table is for: one.

        Raises:
            RuntimeError: The job has several.
        """
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise RuntimeError(
                f"{name} is in a job of {dist.get_world_size()} ranks, which have other rows in the "
                "same slots, so their gradients cannot be averaged: use ParallelCachedEmbeddingBag, or train "
                "it in one process"
            )

    @property
    def _padding_slot(self) -> int | None:
        return self.cache_weight_mgr.padding_slot

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move or cast the cache; the table is cast with it and stays in host memory."""
        cache = self.cache_weight_mgr
        is_there = self._parameters["weight"] is not None  # else in `without_row_caches`
        if is_there:
            cache.check_castable(fn)
            cache.flush()  # `fn` may return other values, such as those of `to_empty`
        super()._apply(fn, recurse)
        param = self._parameters["weight"]
        if param is not None:
            cache.rebind(param)
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(
            destination, prefix, keep_vars
        )  # parameters and buffers of a subclass, too
        # As for other modules `keep_vars` returns tensors of this rank, without a copy.
        tables = self._own_tables() if keep_vars else self._saved_tables()
        for key, table in tables:
            destination[prefix + key] = table if keep_vars else table.detach()
        if "weight" not in self._saved_shapes:
            del destination[prefix + "weight"]  # the cache

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        param = self._parameters["weight"]
        self._parameters["weight"] = None  # the base class skips it: the table has another shape
        try:
            super()._load_from_state_dict(
                state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
            )
        finally:
            self._parameters["weight"] = param
        is_assigned = local_metadata.get("assign_to_params_buffers", False)
        for key, shape in self._saved_shapes.items():
            full_key = prefix + key
            if full_key in unexpected_keys:
                unexpected_keys.remove(full_key)
            loaded = state_dict.get(full_key)
            if loaded is None:
                missing_keys.extend([full_key] if strict else [])
            elif tuple(loaded.shape) != shape:
                error_msgs.append(
                    f"size mismatch for {full_key}: copying a param with shape {tuple(loaded.shape)} from "
                    f"checkpoint, the shape of the table is {shape}."
                )
            else:
                self._load_table(key, loaded, is_assigned=is_assigned)

    @property
    def _saved_shapes(self) -> dict[str, tuple[int, int]]:
        """Shapes of the whole tables in the state dict, by their keys."""
        return {"weight": (self.num_embeddings, self.embedding_dim)}

    def _own_tables(self) -> Iterable[tuple[str, Tensor]]:
        """Return the tables of this rank, which carry the spec of their cut, with their keys."""
        return cached_tables(self.cache_weight_mgr.param).items()

    def _saved_tables(self) -> Iterable[tuple[str, Tensor]]:
        """Return the whole tables of the state dict with their keys."""
        return [("weight", self.weight)]

    def _load_table(self, key: str, loaded: Tensor, *, is_assigned: bool) -> None:
        """Take a whole table of a state dict.

        Args:
            key: Its key.
            loaded: The table.
            is_assigned: Whether it replaces the table, as `load_state_dict(assign=True)` requests.
        """
        if is_assigned:
            self.cache_weight_mgr.replace_table(loaded)
        else:
            self.cache_weight_mgr.load(loaded)

    def extra_repr(self) -> str:
        """Return the arguments in one line."""
        text = f"{self.num_embeddings}, {self.embedding_dim}, cache_ratio={self.cache_ratio}"
        if self.padding_idx is not None:
            text += f", padding_idx={self.padding_idx}"
        return f"{text}, sparse={self.sparse}"


def check_not_lazy(kind: str) -> None:
    """Check that tensors have values as soon as they are made.

    Raises:
        RuntimeError: A new tensor has no values, as in `LazyInitContext`.
    """
    made = type(torch.empty(0, device="cpu"))
    if made is not torch.Tensor:
        raise RuntimeError(
            f"{kind} is built where tensors are a {made.__name__}, and its table is in host memory or a file "
            "at once: build it before LazyInitContext, and the dense layers in it"
        )


@atexit.register
def _flush_all() -> None:
    """Write the rows of tables in files at the end of the process.

    Finalizers run after those of torch's libraries, which take long enough for a second Ctrl-C to end them.
    """
    for cache in [*_IN_FILES]:
        cache.flush_at_end()
