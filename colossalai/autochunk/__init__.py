"""AutoChunk: less memory of activations by loops over chunks (https://arxiv.org/abs/2401.10652).

`autochunk(model, example_inputs, memory_budget="2 GB")` traces a model and runs the parts of it with the
largest activations chunk by chunk, as few as the budget needs.

| noun | meaning |
| --- | --- |
| cut | the part of a tensor that belongs to a chunk: a dimension, and its elements per element of a chunk |
| rule | the cuts of the inputs of an operation for a cut of its result |
| region | consecutive operations that run chunk by chunk |
| leaf | a tensor or another value among the arguments, also in lists, tuples and dicts |
| hoisted | an operation of a region that runs once before its loop |
"""

from colossalai.autochunk._autochunk import autochunk as autochunk
from colossalai.autochunk._module import ChunkedModule as ChunkedModule
from colossalai.autochunk._module import DynamicChunkedModule as DynamicChunkedModule
from colossalai.autochunk._plan import ChunkPlan as ChunkPlan
from colossalai.autochunk._plan import ChunkRegion as ChunkRegion
