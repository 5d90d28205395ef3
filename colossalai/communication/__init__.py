"""Collectives along mesh axes, their conjugates for the backward, and the ledger of sent bytes.

Messages between pipeline stages (`recv_forward` and its siblings) are aliases (`NAMES` of
`colossalai._aliases`).
"""

from typing import Any

from colossalai._aliases import NAMES
from colossalai._lazy import find_name
from colossalai.communication._collectives import all_gather as all_gather
from colossalai.communication._collectives import all_reduce as all_reduce
from colossalai.communication._collectives import all_reduce_in_place as all_reduce_in_place
from colossalai.communication._collectives import all_to_all as all_to_all
from colossalai.communication._collectives import as_axis as as_axis
from colossalai.communication._collectives import broadcast as broadcast
from colossalai.communication._collectives import empty_to_send as empty_to_send
from colossalai.communication._collectives import reduce as reduce
from colossalai.communication._collectives import reduce_in_place as reduce_in_place
from colossalai.communication._collectives import reduce_scatter as reduce_scatter
from colossalai.communication._collectives import ring_forward as ring_forward
from colossalai.communication._collectives import shares_memory as shares_memory
from colossalai.communication._collectives import start_all_reduce as start_all_reduce
from colossalai.communication._collectives import start_gather_of_sections as start_gather_of_sections
from colossalai.communication._collectives import start_sum_of_sections as start_sum_of_sections
from colossalai.communication._conjugate import TensorInFlight as TensorInFlight
from colossalai.communication._conjugate import (
    all_to_all_forward_all_to_all_backward as all_to_all_forward_all_to_all_backward,
)
from colossalai.communication._conjugate import (
    all_to_all_forward_all_to_all_backward_async as all_to_all_forward_all_to_all_backward_async,
)
from colossalai.communication._conjugate import copy_forward_reduce_backward as copy_forward_reduce_backward
from colossalai.communication._conjugate import (
    exchange_forward_exchange_backward as exchange_forward_exchange_backward,
)
from colossalai.communication._conjugate import (
    gather_forward_scatter_backward as gather_forward_scatter_backward,
)
from colossalai.communication._conjugate import (
    gather_forward_scatter_backward_async as gather_forward_scatter_backward_async,
)
from colossalai.communication._conjugate import gather_forward_split_backward as gather_forward_split_backward
from colossalai.communication._conjugate import outside_graphs as outside_graphs
from colossalai.communication._conjugate import reduce_forward_copy_backward as reduce_forward_copy_backward
from colossalai.communication._conjugate import (
    scatter_forward_gather_backward as scatter_forward_gather_backward,
)
from colossalai.communication._conjugate import slice_of as slice_of
from colossalai.communication._conjugate import split_forward_gather_backward as split_forward_gather_backward
from colossalai.communication._exchange import exchange as exchange
from colossalai.communication._exchange import exchange_pieces as exchange_pieces
from colossalai.communication._exchange import start_messages as start_messages
from colossalai.communication._ledger import Ledger as Ledger
from colossalai.communication._ledger import LedgerEntry as LedgerEntry
from colossalai.communication._ledger import is_timed as is_timed
from colossalai.communication._ledger import ledger as ledger
from colossalai.communication._ledger import record as record
from colossalai.communication._ledger import record_bytes as record_bytes
from colossalai.communication._ring import RingShift as RingShift
from colossalai.communication._ring import RingSum as RingSum
from colossalai.communication._ring import ring_blocks as ring_blocks
from colossalai.communication._ring import ring_shift_async as ring_shift_async


def __getattr__(name: str) -> Any:
    """Import an alias at its first access (PEP 562)."""
    return find_name(__name__, NAMES[__name__], name)
