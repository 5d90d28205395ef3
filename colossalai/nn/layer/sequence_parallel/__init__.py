"""Sequence parallelism: attention over a sequence that is cut over the ranks of the SEQUENCE axis."""

from colossalai.nn.layer.sequence_parallel._attentions import ATTENTIONS as ATTENTIONS
from colossalai.nn.layer.sequence_parallel._attentions import RING as RING
from colossalai.nn.layer.sequence_parallel._attentions import ULYSSES as ULYSSES
from colossalai.nn.layer.sequence_parallel._attentions import SequenceAttention as SequenceAttention
from colossalai.nn.layer.sequence_parallel._dropout import numbered_lanes as numbered_lanes
from colossalai.nn.layer.sequence_parallel._order import Order as Order
from colossalai.nn.layer.sequence_parallel._order import own_positions as own_positions
from colossalai.nn.layer.sequence_parallel._order import zigzag_gather as zigzag_gather
from colossalai.nn.layer.sequence_parallel._order import zigzag_positions as zigzag_positions
from colossalai.nn.layer.sequence_parallel._order import zigzag_split as zigzag_split
from colossalai.nn.layer.sequence_parallel._ring_attention import ring_attention as ring_attention
from colossalai.nn.layer.sequence_parallel._scores import RingAV as RingAV
from colossalai.nn.layer.sequence_parallel._scores import RingQK as RingQK
from colossalai.nn.layer.sequence_parallel._self_attention import SharesSequence as SharesSequence
from colossalai.nn.layer.sequence_parallel._self_attention import (
    TransformerSelfAttentionRing as TransformerSelfAttentionRing,
)
from colossalai.nn.layer.sequence_parallel._ulysses_attention import ulysses_attention as ulysses_attention
