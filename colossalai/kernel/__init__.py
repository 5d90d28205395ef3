"""Selection of the library that multiplies float32 matrices on CPU: the BLAS of the torch build, or oneDNN.

For users: `onednn_products` and `torch_products` for a block of code outside of the scope of the config's key
`matmul`. For the package: `matmul_of_job`, which `launch` imports by name.
"""

from colossalai.kernel._choice import LEAST_SPEEDUP as LEAST_SPEEDUP
from colossalai.kernel._choice import Choice as Choice
from colossalai.kernel._choice import Facts as Facts
from colossalai.kernel._choice import auto_product as auto_product
from colossalai.kernel._choice import decide as decide
from colossalai.kernel._choice import facts_of_this_process as facts_of_this_process
from colossalai.kernel._choice import matmul_of_job as matmul_of_job
from colossalai.kernel._installation import is_installed as is_installed
from colossalai.kernel._installation import onednn_products as onednn_products
from colossalai.kernel._installation import torch_products as torch_products
from colossalai.kernel._installation import why_unavailable as why_unavailable
from colossalai.kernel._profile_cache import RenewedProfile as RenewedProfile
from colossalai.kernel._profile_cache import measured_profile as measured_profile
from colossalai.kernel._profile_cache import renew_profile as renew_profile
from colossalai.kernel._rule import Profile as Profile
