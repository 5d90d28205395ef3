"""Layers over a scheme of tensor parallelism: those of the current mode, and each by the name of its mode."""

from functools import partial
from typing import TYPE_CHECKING

from colossalai._not_landed import refuse_name
from colossalai.nn.layer._current import VOCAB_PARALLEL_LIMIT as VOCAB_PARALLEL_LIMIT
from colossalai.nn.layer._current import Classifier as Classifier
from colossalai.nn.layer._current import Dropout as Dropout
from colossalai.nn.layer._current import Embedding as Embedding
from colossalai.nn.layer._current import LayerNorm as LayerNorm
from colossalai.nn.layer._current import Linear as Linear
from colossalai.nn.layer._current import PatchEmbedding as PatchEmbedding
from colossalai.nn.layer._current import next_linear as next_linear
from colossalai.nn.layer._divide import divide as divide
from colossalai.nn.layer.sequence_parallel import RingAV as RingAV
from colossalai.nn.layer.sequence_parallel import RingQK as RingQK
from colossalai.nn.layer.sequence_parallel import SharesSequence as SharesSequence
from colossalai.nn.layer.sequence_parallel import TransformerSelfAttentionRing as TransformerSelfAttentionRing
from colossalai.nn.layer.tensor_parallel import COLUMN as COLUMN
from colossalai.nn.layer.tensor_parallel import HEAD_SCHEMES as HEAD_SCHEMES
from colossalai.nn.layer.tensor_parallel import LINEAR_SCHEMES as LINEAR_SCHEMES
from colossalai.nn.layer.tensor_parallel import ROW as ROW
from colossalai.nn.layer.tensor_parallel import BackToFirstCut as BackToFirstCut
from colossalai.nn.layer.tensor_parallel import Classifier1D as Classifier1D
from colossalai.nn.layer.tensor_parallel import Classifier2D as Classifier2D
from colossalai.nn.layer.tensor_parallel import Classifier2p5D as Classifier2p5D
from colossalai.nn.layer.tensor_parallel import Classifier3D as Classifier3D
from colossalai.nn.layer.tensor_parallel import Cut as Cut
from colossalai.nn.layer.tensor_parallel import Dropout1D as Dropout1D
from colossalai.nn.layer.tensor_parallel import DropPath as DropPath
from colossalai.nn.layer.tensor_parallel import Embedding1D as Embedding1D
from colossalai.nn.layer.tensor_parallel import Embedding2D as Embedding2D
from colossalai.nn.layer.tensor_parallel import Embedding2p5D as Embedding2p5D
from colossalai.nn.layer.tensor_parallel import Embedding3D as Embedding3D
from colossalai.nn.layer.tensor_parallel import LayerNorm1D as LayerNorm1D
from colossalai.nn.layer.tensor_parallel import LayerNorm2D as LayerNorm2D
from colossalai.nn.layer.tensor_parallel import LayerNorm2p5D as LayerNorm2p5D
from colossalai.nn.layer.tensor_parallel import LayerNorm3D as LayerNorm3D
from colossalai.nn.layer.tensor_parallel import Linear1D as Linear1D
from colossalai.nn.layer.tensor_parallel import Linear1D_Col as Linear1D_Col
from colossalai.nn.layer.tensor_parallel import Linear1D_Row as Linear1D_Row
from colossalai.nn.layer.tensor_parallel import Linear2D as Linear2D
from colossalai.nn.layer.tensor_parallel import Linear2p5D as Linear2p5D
from colossalai.nn.layer.tensor_parallel import Linear3D as Linear3D
from colossalai.nn.layer.tensor_parallel import LinearScheme as LinearScheme
from colossalai.nn.layer.tensor_parallel import ParallelDropout as ParallelDropout
from colossalai.nn.layer.tensor_parallel import ParallelEmbedding as ParallelEmbedding
from colossalai.nn.layer.tensor_parallel import ParallelLayerNorm as ParallelLayerNorm
from colossalai.nn.layer.tensor_parallel import ParallelLinear as ParallelLinear
from colossalai.nn.layer.tensor_parallel import ParallelPatchEmbedding as ParallelPatchEmbedding
from colossalai.nn.layer.tensor_parallel import ParallelPositionEmbedding as ParallelPositionEmbedding
from colossalai.nn.layer.tensor_parallel import PatchEmbedding1D as PatchEmbedding1D
from colossalai.nn.layer.tensor_parallel import PatchEmbedding2D as PatchEmbedding2D
from colossalai.nn.layer.tensor_parallel import PatchEmbedding2p5D as PatchEmbedding2p5D
from colossalai.nn.layer.tensor_parallel import PatchEmbedding3D as PatchEmbedding3D
from colossalai.nn.layer.tensor_parallel import PositionEmbedding as PositionEmbedding
from colossalai.nn.layer.tensor_parallel import VanillaClassifier as VanillaClassifier
from colossalai.nn.layer.tensor_parallel import VanillaLayerNorm as VanillaLayerNorm
from colossalai.nn.layer.tensor_parallel import VanillaLinear as VanillaLinear
from colossalai.nn.layer.tensor_parallel import VanillaPatchEmbedding as VanillaPatchEmbedding
from colossalai.nn.layer.tensor_parallel import VocabParallelClassifier1D as VocabParallelClassifier1D
from colossalai.nn.layer.tensor_parallel import VocabParallelClassifier2D as VocabParallelClassifier2D
from colossalai.nn.layer.tensor_parallel import VocabParallelClassifier2p5D as VocabParallelClassifier2p5D
from colossalai.nn.layer.tensor_parallel import VocabParallelClassifier3D as VocabParallelClassifier3D
from colossalai.nn.layer.tensor_parallel import VocabParallelEmbedding1D as VocabParallelEmbedding1D
from colossalai.nn.layer.tensor_parallel import VocabParallelEmbedding2D as VocabParallelEmbedding2D
from colossalai.nn.layer.tensor_parallel import VocabParallelEmbedding2p5D as VocabParallelEmbedding2p5D
from colossalai.nn.layer.tensor_parallel import VocabParallelEmbedding3D as VocabParallelEmbedding3D
from colossalai.nn.layer.tensor_parallel import as_autocast as as_autocast
from colossalai.nn.layer.tensor_parallel import current_cut as current_cut
from colossalai.nn.layer.tensor_parallel import first_cut as first_cut
from colossalai.nn.layer.tensor_parallel import head_cut as head_cut
from colossalai.nn.layer.tensor_parallel import head_scheme as head_scheme
from colossalai.nn.layer.tensor_parallel import launched_job as launched_job
from colossalai.nn.layer.tensor_parallel import linear_scheme as linear_scheme
from colossalai.nn.layer.tensor_parallel import mark_cut as mark_cut
from colossalai.nn.layer.tensor_parallel import own_part as own_part
from colossalai.nn.layer.tensor_parallel import product as product
from colossalai.nn.layer.tensor_parallel import recorded_cut as recorded_cut
from colossalai.nn.layer.tensor_parallel import require_cut as require_cut
from colossalai.nn.layer.tensor_parallel import require_mode as require_mode
from colossalai.nn.layer.tensor_parallel import restart as restart

if not TYPE_CHECKING:
    __getattr__ = partial(refuse_name, __name__)  # PEP 562: missing names
