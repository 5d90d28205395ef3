"""The Evoformer: the trunk of AlphaFold 2, over an alignment of sequences and over pairs of residues."""

from colossalai.model_zoo.evoformer._esmfold import FoldingBlock as FoldingBlock
from colossalai.model_zoo.evoformer._esmfold import inject_fastnn as inject_fastnn
from colossalai.model_zoo.evoformer._esmfold import remove_fastnn as remove_fastnn
from colossalai.model_zoo.evoformer._model import Evoformer as Evoformer
from colossalai.model_zoo.evoformer._model import EvoformerBlock as EvoformerBlock
from colossalai.model_zoo.evoformer._model import EvoformerConfig as EvoformerConfig
