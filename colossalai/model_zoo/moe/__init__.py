"""WideNet: a vision transformer whose layers share one attention and one set of experts."""

from colossalai.model_zoo.moe._models import VanillaFFN as VanillaFFN
from colossalai.model_zoo.moe._models import VanillaSelfAttention as VanillaSelfAttention
from colossalai.model_zoo.moe._models import Widenet as Widenet
from colossalai.model_zoo.moe._models import WidenetBlock as WidenetBlock
from colossalai.model_zoo.moe._models import moe_mlp_args as moe_mlp_args
from colossalai.model_zoo.moe._models import moe_sa_args as moe_sa_args
