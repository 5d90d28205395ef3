"""Tensor parallelism: one layer of each kind, times a scheme of the axes that cut its tensors."""

from colossalai.nn.layer.tensor_parallel._batch import own_part as own_part
from colossalai.nn.layer.tensor_parallel._dropout import DropPath as DropPath
from colossalai.nn.layer.tensor_parallel._dropout import ParallelDropout as ParallelDropout
from colossalai.nn.layer.tensor_parallel._embedding import ParallelEmbedding as ParallelEmbedding
from colossalai.nn.layer.tensor_parallel._embedding import ParallelPatchEmbedding as ParallelPatchEmbedding
from colossalai.nn.layer.tensor_parallel._flow import current_cut as current_cut
from colossalai.nn.layer.tensor_parallel._flow import entry_of as entry_of
from colossalai.nn.layer.tensor_parallel._flow import head_cut as head_cut
from colossalai.nn.layer.tensor_parallel._flow import restart as restart
from colossalai.nn.layer.tensor_parallel._launched import LaunchedJob as LaunchedJob
from colossalai.nn.layer.tensor_parallel._launched import launched_job as launched_job
from colossalai.nn.layer.tensor_parallel._launched import require_mode as require_mode
from colossalai.nn.layer.tensor_parallel._linear import ParallelLinear as ParallelLinear
from colossalai.nn.layer.tensor_parallel._linear import ParallelMatmul as ParallelMatmul
from colossalai.nn.layer.tensor_parallel._linear import as_autocast as as_autocast
from colossalai.nn.layer.tensor_parallel._linear import product as product
from colossalai.nn.layer.tensor_parallel._modes import Linear1D_Col as Linear1D_Col
from colossalai.nn.layer.tensor_parallel._modes import Linear1D_Row as Linear1D_Row
from colossalai.nn.layer.tensor_parallel._named import Classifier1D as Classifier1D
from colossalai.nn.layer.tensor_parallel._named import Classifier2D as Classifier2D
from colossalai.nn.layer.tensor_parallel._named import Classifier2p5D as Classifier2p5D
from colossalai.nn.layer.tensor_parallel._named import Classifier3D as Classifier3D
from colossalai.nn.layer.tensor_parallel._named import Dropout1D as Dropout1D
from colossalai.nn.layer.tensor_parallel._named import Embedding1D as Embedding1D
from colossalai.nn.layer.tensor_parallel._named import Embedding2D as Embedding2D
from colossalai.nn.layer.tensor_parallel._named import Embedding2p5D as Embedding2p5D
from colossalai.nn.layer.tensor_parallel._named import Embedding3D as Embedding3D
from colossalai.nn.layer.tensor_parallel._named import LayerNorm1D as LayerNorm1D
from colossalai.nn.layer.tensor_parallel._named import LayerNorm2D as LayerNorm2D
from colossalai.nn.layer.tensor_parallel._named import LayerNorm2p5D as LayerNorm2p5D
from colossalai.nn.layer.tensor_parallel._named import LayerNorm3D as LayerNorm3D
from colossalai.nn.layer.tensor_parallel._named import Linear1D as Linear1D
from colossalai.nn.layer.tensor_parallel._named import Linear2D as Linear2D
from colossalai.nn.layer.tensor_parallel._named import Linear2p5D as Linear2p5D
from colossalai.nn.layer.tensor_parallel._named import Linear3D as Linear3D
from colossalai.nn.layer.tensor_parallel._named import PatchEmbedding1D as PatchEmbedding1D
from colossalai.nn.layer.tensor_parallel._named import PatchEmbedding2D as PatchEmbedding2D
from colossalai.nn.layer.tensor_parallel._named import PatchEmbedding2p5D as PatchEmbedding2p5D
from colossalai.nn.layer.tensor_parallel._named import PatchEmbedding3D as PatchEmbedding3D
from colossalai.nn.layer.tensor_parallel._named import VanillaClassifier as VanillaClassifier
from colossalai.nn.layer.tensor_parallel._named import VanillaLayerNorm as VanillaLayerNorm
from colossalai.nn.layer.tensor_parallel._named import VanillaLinear as VanillaLinear
from colossalai.nn.layer.tensor_parallel._named import VanillaPatchEmbedding as VanillaPatchEmbedding
from colossalai.nn.layer.tensor_parallel._named import VocabParallelClassifier1D as VocabParallelClassifier1D
from colossalai.nn.layer.tensor_parallel._named import VocabParallelClassifier2D as VocabParallelClassifier2D
from colossalai.nn.layer.tensor_parallel._named import (
    VocabParallelClassifier2p5D as VocabParallelClassifier2p5D,
)
from colossalai.nn.layer.tensor_parallel._named import VocabParallelClassifier3D as VocabParallelClassifier3D
from colossalai.nn.layer.tensor_parallel._named import VocabParallelEmbedding1D as VocabParallelEmbedding1D
from colossalai.nn.layer.tensor_parallel._named import VocabParallelEmbedding2D as VocabParallelEmbedding2D
from colossalai.nn.layer.tensor_parallel._named import (
    VocabParallelEmbedding2p5D as VocabParallelEmbedding2p5D,
)
from colossalai.nn.layer.tensor_parallel._named import VocabParallelEmbedding3D as VocabParallelEmbedding3D
from colossalai.nn.layer.tensor_parallel._norm import ParallelLayerNorm as ParallelLayerNorm
from colossalai.nn.layer.tensor_parallel._position import (
    ParallelPositionEmbedding as ParallelPositionEmbedding,
)
from colossalai.nn.layer.tensor_parallel._position import PositionEmbedding as PositionEmbedding
from colossalai.nn.layer.tensor_parallel._record import mark_cut as mark_cut
from colossalai.nn.layer.tensor_parallel._record import recorded_cut as recorded_cut
from colossalai.nn.layer.tensor_parallel._record import require_cut as require_cut
from colossalai.nn.layer.tensor_parallel._recut import BackToFirstCut as BackToFirstCut
from colossalai.nn.layer.tensor_parallel._scheme import COLUMN as COLUMN
from colossalai.nn.layer.tensor_parallel._scheme import HEAD_SCHEMES as HEAD_SCHEMES
from colossalai.nn.layer.tensor_parallel._scheme import LINEAR_SCHEMES as LINEAR_SCHEMES
from colossalai.nn.layer.tensor_parallel._scheme import ROW as ROW
from colossalai.nn.layer.tensor_parallel._scheme import Cut as Cut
from colossalai.nn.layer.tensor_parallel._scheme import LinearScheme as LinearScheme
from colossalai.nn.layer.tensor_parallel._scheme import first_cut as first_cut
from colossalai.nn.layer.tensor_parallel._scheme import head_scheme as head_scheme
from colossalai.nn.layer.tensor_parallel._scheme import linear_scheme as linear_scheme
