"""Layers over a scheme of tensor parallelism."""

from colossalai.nn.layer._flow import current_cut as current_cut
from colossalai.nn.layer._flow import restart as restart
from colossalai.nn.layer._linear import ParallelLinear as ParallelLinear
from colossalai.nn.layer._linear import next_linear as next_linear
from colossalai.nn.layer._product import product as product
from colossalai.nn.layer._scheme import LINEAR_SCHEMES as LINEAR_SCHEMES
from colossalai.nn.layer._scheme import Cut as Cut
from colossalai.nn.layer._scheme import LinearScheme as LinearScheme
from colossalai.nn.layer._scheme import linear_scheme as linear_scheme
