"""The older interface of Colossal-Auto: a module that trains like the given model.

For users: `autoparallelize`, `initialize_model`, `initialize_device_mesh`, also as `tensor_shard.initialize`.
"""

from colossalai.auto_parallel.tensor_shard._initialize import autoparallelize as autoparallelize
from colossalai.auto_parallel.tensor_shard._initialize import initialize_device_mesh as initialize_device_mesh
from colossalai.auto_parallel.tensor_shard._initialize import initialize_model as initialize_model
