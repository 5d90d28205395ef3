"""Device mesh: the ranks as a grid of numbered axes, with the costs of communication along each of them.

For users: `DeviceMesh`. For the package: `MeshSpeed`, the costs of operations along some axes.
"""

from functools import partial
from typing import TYPE_CHECKING

from colossalai._not_landed import refuse_name
from colossalai.device._device_mesh import DeviceMesh as DeviceMesh
from colossalai.device._fit import AlphaBeta as AlphaBeta
from colossalai.device._fit import fit_alpha_beta as fit_alpha_beta
from colossalai.device._profile import PROFILE_SIZES as PROFILE_SIZES
from colossalai.device._profile import measure_operation as measure_operation
from colossalai.device._search import ShapeChoice as ShapeChoice
from colossalai.device._speed import OPERATIONS as OPERATIONS
from colossalai.device._speed import Machine as Machine
from colossalai.device._speed import MeshSpeed as MeshSpeed

if not TYPE_CHECKING:
    __getattr__ = partial(refuse_name, __name__)  # PEP 562: missing names
