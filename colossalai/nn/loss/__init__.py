"""Losses."""

from colossalai.nn.loss._chunks import VocabularySlice as VocabularySlice
from colossalai.nn.loss._cross_entropy import CrossEntropyLoss as CrossEntropyLoss
from colossalai.nn.loss._cross_entropy import ParallelCrossEntropyLoss as ParallelCrossEntropyLoss
from colossalai.nn.loss._fused import MISSING_LOGITS as MISSING_LOGITS
from colossalai.nn.loss._fused import FusesLoss as FusesLoss
from colossalai.nn.loss._fused import HeadOperands as HeadOperands
from colossalai.nn.loss._fused import LanguageModelOutput as LanguageModelOutput
from colossalai.nn.loss._fused import LossOfOutput as LossOfOutput
from colossalai.nn.loss._fused import MissingLogits as MissingLogits
from colossalai.nn.loss._fused import MissingLogitsError as MissingLogitsError
from colossalai.nn.loss._fused import ModelLoss as ModelLoss
from colossalai.nn.loss._fused import head_operands as head_operands
from colossalai.nn.loss._fused import logits_of as logits_of
from colossalai.nn.loss._fused import refuse_other_head as refuse_other_head
from colossalai.nn.loss._fused import wants_logits as wants_logits
from colossalai.nn.loss._linear_cross_entropy import LinearCrossEntropyLoss as LinearCrossEntropyLoss
from colossalai.nn.loss._moe import MoeCrossEntropyLoss as MoeCrossEntropyLoss
from colossalai.nn.loss._moe import MoeLoss as MoeLoss
from colossalai.nn.loss._named import CrossEntropyLoss2D as CrossEntropyLoss2D
from colossalai.nn.loss._named import CrossEntropyLoss2p5D as CrossEntropyLoss2p5D
from colossalai.nn.loss._named import CrossEntropyLoss3D as CrossEntropyLoss3D
from colossalai.nn.loss._named import VocabParallelCrossEntropyLoss1D as VocabParallelCrossEntropyLoss1D
from colossalai.nn.loss._named import VocabParallelCrossEntropyLoss2D as VocabParallelCrossEntropyLoss2D
from colossalai.nn.loss._named import VocabParallelCrossEntropyLoss2p5D as VocabParallelCrossEntropyLoss2p5D
from colossalai.nn.loss._named import VocabParallelCrossEntropyLoss3D as VocabParallelCrossEntropyLoss3D
