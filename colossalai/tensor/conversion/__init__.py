"""Conversion of layouts: from any cut of a tensor over a mesh to any other one; see docs/design.

| word | what it is |
| --- | --- |
| layout | a `ShardingSpec`, and the axes along which ranks hold terms of a sum (`ShardingLayout`) |
| placement | the axes alone, without shape and mesh: a node of the graph that is searched |
| move | one collective, or one local step, from a placement to another (`Move`) |
| direct exchange | the move that brings every rank what it lacks at once (`DirectExchange`) |
| path | moves one after the other |
| plan | what is run: a path, with or without a direct exchange at its end (`ConversionPlan`) |
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
