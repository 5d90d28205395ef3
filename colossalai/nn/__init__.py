"""Layers, losses, metrics, optimizers and learning-rate schedules."""

from functools import partial
from typing import TYPE_CHECKING

from colossalai._not_landed import refuse_name
from colossalai.nn import layer as layer
from colossalai.nn import loss as loss
from colossalai.nn import lr_scheduler as lr_scheduler
from colossalai.nn import metric as metric
from colossalai.nn import optimizer as optimizer
from colossalai.nn._checkpoint import CheckpointModule as CheckpointModule
from colossalai.nn._checkpoint import checkpoint as checkpoint
from colossalai.nn.layer import Classifier as Classifier
from colossalai.nn.layer import Classifier1D as Classifier1D
from colossalai.nn.layer import Classifier2D as Classifier2D
from colossalai.nn.layer import Classifier2p5D as Classifier2p5D
from colossalai.nn.layer import Classifier3D as Classifier3D
from colossalai.nn.layer import Dropout as Dropout
from colossalai.nn.layer import Dropout1D as Dropout1D
from colossalai.nn.layer import Embedding as Embedding
from colossalai.nn.layer import Embedding1D as Embedding1D
from colossalai.nn.layer import Embedding2D as Embedding2D
from colossalai.nn.layer import Embedding2p5D as Embedding2p5D
from colossalai.nn.layer import Embedding3D as Embedding3D
from colossalai.nn.layer import LayerNorm as LayerNorm
from colossalai.nn.layer import LayerNorm1D as LayerNorm1D
from colossalai.nn.layer import LayerNorm2D as LayerNorm2D
from colossalai.nn.layer import LayerNorm2p5D as LayerNorm2p5D
from colossalai.nn.layer import LayerNorm3D as LayerNorm3D
from colossalai.nn.layer import Linear as Linear
from colossalai.nn.layer import Linear1D as Linear1D
from colossalai.nn.layer import Linear1D_Col as Linear1D_Col
from colossalai.nn.layer import Linear1D_Row as Linear1D_Row
from colossalai.nn.layer import Linear2D as Linear2D
from colossalai.nn.layer import Linear2p5D as Linear2p5D
from colossalai.nn.layer import Linear3D as Linear3D
from colossalai.nn.layer import PatchEmbedding as PatchEmbedding
from colossalai.nn.layer import PatchEmbedding1D as PatchEmbedding1D
from colossalai.nn.layer import PatchEmbedding2D as PatchEmbedding2D
from colossalai.nn.layer import PatchEmbedding2p5D as PatchEmbedding2p5D
from colossalai.nn.layer import PatchEmbedding3D as PatchEmbedding3D
from colossalai.nn.layer import RingAV as RingAV
from colossalai.nn.layer import RingQK as RingQK
from colossalai.nn.layer import TransformerSelfAttentionRing as TransformerSelfAttentionRing
from colossalai.nn.layer import VanillaClassifier as VanillaClassifier
from colossalai.nn.layer import VanillaLayerNorm as VanillaLayerNorm
from colossalai.nn.layer import VanillaLinear as VanillaLinear
from colossalai.nn.layer import VanillaPatchEmbedding as VanillaPatchEmbedding
from colossalai.nn.layer import VocabParallelClassifier1D as VocabParallelClassifier1D
from colossalai.nn.layer import VocabParallelClassifier2D as VocabParallelClassifier2D
from colossalai.nn.layer import VocabParallelClassifier2p5D as VocabParallelClassifier2p5D
from colossalai.nn.layer import VocabParallelClassifier3D as VocabParallelClassifier3D
from colossalai.nn.layer import VocabParallelEmbedding1D as VocabParallelEmbedding1D
from colossalai.nn.layer import VocabParallelEmbedding2D as VocabParallelEmbedding2D
from colossalai.nn.layer import VocabParallelEmbedding2p5D as VocabParallelEmbedding2p5D
from colossalai.nn.layer import VocabParallelEmbedding3D as VocabParallelEmbedding3D
from colossalai.nn.loss import CrossEntropyLoss as CrossEntropyLoss
from colossalai.nn.loss import CrossEntropyLoss2D as CrossEntropyLoss2D
from colossalai.nn.loss import CrossEntropyLoss2p5D as CrossEntropyLoss2p5D
from colossalai.nn.loss import CrossEntropyLoss3D as CrossEntropyLoss3D
from colossalai.nn.loss import LinearCrossEntropyLoss as LinearCrossEntropyLoss
from colossalai.nn.loss import MoeCrossEntropyLoss as MoeCrossEntropyLoss
from colossalai.nn.loss import MoeLoss as MoeLoss
from colossalai.nn.loss import VocabParallelCrossEntropyLoss1D as VocabParallelCrossEntropyLoss1D
from colossalai.nn.loss import VocabParallelCrossEntropyLoss2D as VocabParallelCrossEntropyLoss2D
from colossalai.nn.loss import VocabParallelCrossEntropyLoss2p5D as VocabParallelCrossEntropyLoss2p5D
from colossalai.nn.loss import VocabParallelCrossEntropyLoss3D as VocabParallelCrossEntropyLoss3D
from colossalai.nn.metric import Accuracy as Accuracy
from colossalai.nn.metric import Accuracy2D as Accuracy2D
from colossalai.nn.metric import Accuracy2p5D as Accuracy2p5D
from colossalai.nn.metric import Accuracy3D as Accuracy3D
from colossalai.nn.optimizer import CPUAdam as CPUAdam
from colossalai.nn.optimizer import FusedAdam as FusedAdam
from colossalai.nn.optimizer import FusedLAMB as FusedLAMB
from colossalai.nn.optimizer import FusedSGD as FusedSGD
from colossalai.nn.optimizer import HybridAdam as HybridAdam
from colossalai.nn.optimizer import Lamb as Lamb
from colossalai.nn.optimizer import Lars as Lars
from colossalai.nn.optimizer import RowWiseAdagrad as RowWiseAdagrad

if not TYPE_CHECKING:
    __getattr__ = partial(refuse_name, __name__)  # PEP 562: missing names
