"""Layers over a scheme of tensor parallelism: those of the current mode, and each by the name of its mode."""

from functools import partial
from typing import TYPE_CHECKING

from colossalai._not_landed import refuse_name
from colossalai.nn.layer._base import require_mode as require_mode
from colossalai.nn.layer._batch import own_part as own_part
from colossalai.nn.layer._current import Classifier as Classifier
from colossalai.nn.layer._current import Dropout as Dropout
from colossalai.nn.layer._current import Embedding as Embedding
from colossalai.nn.layer._current import LayerNorm as LayerNorm
from colossalai.nn.layer._current import Linear as Linear
from colossalai.nn.layer._current import PatchEmbedding as PatchEmbedding
from colossalai.nn.layer._current import next_linear as next_linear
from colossalai.nn.layer._divide import divide as divide
from colossalai.nn.layer._drop_path import DropPath as DropPath
from colossalai.nn.layer._dropout import ParallelDropout as ParallelDropout
from colossalai.nn.layer._embedding import ParallelEmbedding as ParallelEmbedding
from colossalai.nn.layer._embedding import ParallelPatchEmbedding as ParallelPatchEmbedding
from colossalai.nn.layer._flow import current_cut as current_cut
from colossalai.nn.layer._flow import head_cut as head_cut
from colossalai.nn.layer._flow import restart as restart
from colossalai.nn.layer._linear import ParallelLinear as ParallelLinear
from colossalai.nn.layer._modes import Linear1D_Col as Linear1D_Col
from colossalai.nn.layer._modes import Linear1D_Row as Linear1D_Row
from colossalai.nn.layer._named import Classifier1D as Classifier1D
from colossalai.nn.layer._named import Classifier2D as Classifier2D
from colossalai.nn.layer._named import Classifier2p5D as Classifier2p5D
from colossalai.nn.layer._named import Classifier3D as Classifier3D
from colossalai.nn.layer._named import Dropout1D as Dropout1D
from colossalai.nn.layer._named import Embedding1D as Embedding1D
from colossalai.nn.layer._named import Embedding2D as Embedding2D
from colossalai.nn.layer._named import Embedding2p5D as Embedding2p5D
from colossalai.nn.layer._named import Embedding3D as Embedding3D
from colossalai.nn.layer._named import LayerNorm1D as LayerNorm1D
from colossalai.nn.layer._named import LayerNorm2D as LayerNorm2D
from colossalai.nn.layer._named import LayerNorm2p5D as LayerNorm2p5D
from colossalai.nn.layer._named import LayerNorm3D as LayerNorm3D
from colossalai.nn.layer._named import Linear1D as Linear1D
from colossalai.nn.layer._named import Linear2D as Linear2D
from colossalai.nn.layer._named import Linear2p5D as Linear2p5D
from colossalai.nn.layer._named import Linear3D as Linear3D
from colossalai.nn.layer._named import PatchEmbedding1D as PatchEmbedding1D
from colossalai.nn.layer._named import PatchEmbedding2D as PatchEmbedding2D
from colossalai.nn.layer._named import PatchEmbedding2p5D as PatchEmbedding2p5D
from colossalai.nn.layer._named import PatchEmbedding3D as PatchEmbedding3D
from colossalai.nn.layer._named import VanillaClassifier as VanillaClassifier
from colossalai.nn.layer._named import VanillaLayerNorm as VanillaLayerNorm
from colossalai.nn.layer._named import VanillaLinear as VanillaLinear
from colossalai.nn.layer._named import VanillaPatchEmbedding as VanillaPatchEmbedding
from colossalai.nn.layer._named import VocabParallelClassifier1D as VocabParallelClassifier1D
from colossalai.nn.layer._named import VocabParallelClassifier2D as VocabParallelClassifier2D
from colossalai.nn.layer._named import VocabParallelClassifier2p5D as VocabParallelClassifier2p5D
from colossalai.nn.layer._named import VocabParallelClassifier3D as VocabParallelClassifier3D
from colossalai.nn.layer._named import VocabParallelEmbedding1D as VocabParallelEmbedding1D
from colossalai.nn.layer._named import VocabParallelEmbedding2D as VocabParallelEmbedding2D
from colossalai.nn.layer._named import VocabParallelEmbedding2p5D as VocabParallelEmbedding2p5D
from colossalai.nn.layer._named import VocabParallelEmbedding3D as VocabParallelEmbedding3D
from colossalai.nn.layer._norm import ParallelLayerNorm as ParallelLayerNorm
from colossalai.nn.layer._position import ParallelPositionEmbedding as ParallelPositionEmbedding
from colossalai.nn.layer._position import PositionEmbedding as PositionEmbedding
from colossalai.nn.layer._product import product as product
from colossalai.nn.layer._record import mark_cut as mark_cut
from colossalai.nn.layer._record import recorded_cut as recorded_cut
from colossalai.nn.layer._record import require_cut as require_cut
from colossalai.nn.layer._recut import BackToFirstCut as BackToFirstCut
from colossalai.nn.layer._scheme import COLUMN as COLUMN
from colossalai.nn.layer._scheme import HEAD_SCHEMES as HEAD_SCHEMES
from colossalai.nn.layer._scheme import LINEAR_SCHEMES as LINEAR_SCHEMES
from colossalai.nn.layer._scheme import ROW as ROW
from colossalai.nn.layer._scheme import Cut as Cut
from colossalai.nn.layer._scheme import LinearScheme as LinearScheme
from colossalai.nn.layer._scheme import first_cut as first_cut
from colossalai.nn.layer._scheme import head_scheme as head_scheme
from colossalai.nn.layer._scheme import linear_scheme as linear_scheme
from colossalai.nn.layer.parallel_sequence import RingAV as RingAV
from colossalai.nn.layer.parallel_sequence import RingQK as RingQK
from colossalai.nn.layer.parallel_sequence import SharesSequence as SharesSequence
from colossalai.nn.layer.parallel_sequence import TransformerSelfAttentionRing as TransformerSelfAttentionRing

if not TYPE_CHECKING:
    __getattr__ = partial(refuse_name, __name__)  # PEP 562: names that have not landed
