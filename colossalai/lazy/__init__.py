"""Lazily built models: construction without memory, and materialization of the part that a process owns."""

from colossalai.lazy._context import LazyInitContext as LazyInitContext
from colossalai.lazy._materialize import Materialization as Materialization
from colossalai.lazy._materialize import is_lazy as is_lazy
from colossalai.lazy._materialize import materialize as materialize
from colossalai.lazy._materialize import materialize_tensor as materialize_tensor
