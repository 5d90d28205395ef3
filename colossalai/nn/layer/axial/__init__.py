"""Layers of axial models: attention along one of two axes, and products over the third residue of a triangle.

Activations have two axes of positions, (batch, rows, columns, dim): sequences and residues of a multiple
sequence alignment (MSA), pairs of residues, or the height and width of a grid. Masks are True, or 1, for
positions that exist, and False, 0, or -1 (padding) for others. The layers are those of AlphaFold 2 (Jumper et
al., Nature 596, 2021, supplement 1.6), whose algorithms their docstrings name.
"""

from colossalai.nn.layer.axial._attention import ColumnAttention as ColumnAttention
from colossalai.nn.layer.axial._attention import GatedAttention as GatedAttention
from colossalai.nn.layer.axial._attention import GlobalColumnAttention as GlobalColumnAttention
from colossalai.nn.layer.axial._attention import RowAttention as RowAttention
from colossalai.nn.layer.axial._attention import TriangleAttention as TriangleAttention
from colossalai.nn.layer.axial._dap import AxialModule as AxialModule
from colossalai.nn.layer.axial._dap import DapGroup as DapGroup
from colossalai.nn.layer.axial._dap import dap_group as dap_group
from colossalai.nn.layer.axial._dropout import SharedDropout as SharedDropout
from colossalai.nn.layer.axial._products import OuterProductMean as OuterProductMean
from colossalai.nn.layer.axial._products import TriangleMultiplication as TriangleMultiplication
from colossalai.nn.layer.axial._shapes import check_shape as check_shape
from colossalai.nn.layer.axial._transition import Transition as Transition
