"""The backend "shared_memory" becomes known to torch with `import colossalai`, in whichever order both come.

`import colossalai` does not import torch, for the sake of the commands that do without. Where torch has been
imported already, the backend is registered at once; else right after torch's own module of backends.
"""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from colossalai._lazy import JOB_PARTS, find_name

NAME = "shared_memory"
_TORCH = "torch.distributed.distributed_c10d"


def register_shared_memory() -> None:
    """Make the backend known to torch, if torch can communicate at all."""
    backends = getattr(sys.modules[_TORCH], "Backend", None)
    if backends is not None:
        backends.register_backend(NAME, _make_group, extended_api=True, devices=["cpu"])


def register_with_torch() -> None:
    """Register the backend now, or as soon as torch is imported."""
    if _TORCH in sys.modules:
        register_shared_memory()
    elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport(_TORCH, register_shared_memory))


class _AfterImport(MetaPathFinder):
    """Calls a function once, right after a module has been imported.

    Args:
        name: Of the module.
        action: The function.
    """

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self._name = name
        self._action = action

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the module's own spec, whose loader calls the function, too; None for other modules."""
        if fullname != self._name:
            return None
        import importlib.util  # here, as `import colossalai` is to cost little

        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_act(module: ModuleType) -> None:
                execute(module)
                self._action()

            spec.loader.exec_module = execute_and_act  # type: ignore[method-assign]
        return spec


def _make_group(options: Any, _: Any = None) -> Any:
    """Make the process group that torch asks for; what it consists of is imported now."""
    return find_name("colossalai", JOB_PARTS, "make_group")(options)


register_with_torch()
