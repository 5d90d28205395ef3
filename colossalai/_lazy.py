"""Lazy imports: names of a package that are imported at their first access (PEP 562).

For packages that a command imports without using all of them: `import torch` takes seconds.
"""

import importlib
from collections.abc import Mapping
from typing import Any

from colossalai._not_landed import NOT_LANDED, refuse_name

JOB_PARTS: Mapping[str, str] = {
    "transport_of": "colossalai.communication.shared_memory",
    "make_group": "colossalai.communication.shared_memory",
    "matmul_of_job": "colossalai.kernel",
    "given_plan": "colossalai.auto_parallel",
    "precision_of_config": "colossalai.amp",
    "gemini_of_config": "colossalai.zero.gemini",
}
"""Functions on higher floors that `launch` calls for a job, with their modules, which are imported then."""


def find_name(package: str, homes: Mapping[str, str], name: str) -> Any:
    """Return the value for a package's `__getattr__`: a public name, or a sub-module.

    Args:
        package: The package's `__name__`.
        homes: The module of each public name.
        name: Name of the attribute.

    Raises:
        AttributeError: `package` has no public name and no sub-module `name`; for a documented name that does
            not exist yet, the message has a replacement.
    """
    if f"{package}.{name}" in NOT_LANDED:
        refuse_name(package, name)
    if name in homes:
        return getattr(importlib.import_module(homes[name]), name)
    try:
        return importlib.import_module(f"{package}.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"{package}.{name}":
            raise
    raise AttributeError(f"module {package!r} has no attribute {name!r}")
