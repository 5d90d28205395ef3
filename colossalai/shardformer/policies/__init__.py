"""Sharding policies: the rules of families of models, a module for each family."""

from colossalai.shardformer.policies._bert import BERT as BERT
from colossalai.shardformer.policies._bloom import BLOOM as BLOOM
from colossalai.shardformer.policies._causal import CAUSAL as CAUSAL
from colossalai.shardformer.policies._gpt2 import GPT2 as GPT2
from colossalai.shardformer.policies._gpt_neox import GPT_NEOX as GPT_NEOX
from colossalai.shardformer.policies._left_out import GPT_OSS as GPT_OSS
from colossalai.shardformer.policies._left_out import LEFT_OUT as LEFT_OUT
from colossalai.shardformer.policies._left_out import PHI as PHI
from colossalai.shardformer.policies._llama import LLAMA as LLAMA
from colossalai.shardformer.policies._opt import OPT as OPT
from colossalai.shardformer.policies._rule import Policy as Policy
from colossalai.shardformer.policies._rule import Rule as Rule
from colossalai.shardformer.policies._t5 import T5 as T5
from colossalai.shardformer.policies._vit import VIT as VIT
