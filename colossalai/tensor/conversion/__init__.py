"""Conversion of layouts: from any sharding of a tensor over a mesh to any other one; see docs/design.

| term | definition |
| --- | --- |
| layout | a `ShardingSpec`, and the axes along which ranks hold terms of a sum (`ShardingLayout`) |
| placement | the axes without shape and mesh: a node of the search graph |
| move | one collective, or one local step, from a placement to another (`Move`) |
| direct exchange | the move that sends every rank its missing boxes at once (`DirectExchange`) |
| path | a sequence of moves |
| plan | the steps of a conversion: a path, optionally with a direct exchange at its end (`ConversionPlan`) |
"""

from colossalai.tensor.conversion._convert import convert as convert
from colossalai.tensor.conversion._costs import CollectiveCosts as CollectiveCosts
from colossalai.tensor.conversion._costs import MessageCosts as MessageCosts
from colossalai.tensor.conversion._direct import DirectExchange as DirectExchange
from colossalai.tensor.conversion._layout import ShardingLayout as ShardingLayout
from colossalai.tensor.conversion._moves import Move as Move
from colossalai.tensor.conversion._plan import ConversionPlan as ConversionPlan
from colossalai.tensor.conversion._plan import ConversionPlanner as ConversionPlanner
from colossalai.tensor.conversion._shape_consistency import (
    ShapeConsistencyManager as ShapeConsistencyManager,
)
