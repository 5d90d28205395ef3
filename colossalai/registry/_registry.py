"""A registry: a table from names to classes or functions, filled by a decorator."""

import difflib
import importlib
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, TypeVar

Registered = TypeVar("Registered", bound=Callable[..., Any])


class Registry:
    """A table from names to classes or functions.

    Example:
        ```python
        @MODELS.register_module
        class Net(nn.Module): ...

        MODELS.get_module("Net")  # the class
        ```

    Args:
        name: Name of the registry, for error messages.
        third_party_library: Modules, or their names, that are searched in this order for names that are not
            registered. A module is imported at its first search; if that fails it counts as empty, and the
            error of a failed search has the reason.
    """

    def __init__(self, name: str, third_party_library: Sequence[ModuleType | str] | None = None) -> None:
        self.name = name
        self._modules: dict[str, Callable[..., Any]] = {}
        self._libraries: list[ModuleType | str] = list(third_party_library or ())
        self._broken_libraries: dict[str, str] = {}

    def register_module(self, module_class: Registered) -> Registered:
        """Register a class or function under its `__name__`; used as a decorator.

        Raises:
            ValueError: Another module is registered under the name.
        """
        module_name = module_class.__name__
        present = self._modules.get(module_name)
        if present is not None:
            raise ValueError(
                f"{module_name!r} is already in the registry {self.name!r} ({_origin(present)}); "
                f"rename {_origin(module_class)}, or call remove_module({module_name!r}) first"
            )
        self._modules[module_name] = module_class
        return module_class

    def get_module(self, module_name: str) -> Any:
        """Return the class or function of a name.

        Raises:
            ValueError: The name is neither registered nor found in the third-party libraries.
        """
        found = self._find(module_name)
        if found is None:
            raise ValueError(self._unknown(module_name))
        return found

    def has(self, module_name: str) -> bool:
        """Return whether `get_module` finds the name."""
        return self._find(module_name) is not None

    def remove_module(self, module_name: str) -> None:
        """Remove a registered name.

        Raises:
            ValueError: The name was not registered; names of third-party libraries cannot be removed.
        """
        if module_name not in self._modules:
            raise ValueError(self._unknown(module_name))
        del self._modules[module_name]

    def _find(self, module_name: str) -> Callable[..., Any] | None:
        if module_name in self._modules:
            return self._modules[module_name]
        for library in self._imported_libraries():
            found: Callable[..., Any] | None = getattr(library, module_name, None)
            if callable(found) and not module_name.startswith("_"):
                return found
        return None

    def _imported_libraries(self) -> list[ModuleType]:
        for index, library in enumerate(self._libraries):
            if isinstance(library, str) and library not in self._broken_libraries:
                try:
                    self._libraries[index] = importlib.import_module(library)
                except (
                    Exception
                ) as error:  # an optional library can be broken in any way; `_unknown` has the reason
                    self._broken_libraries[library] = f"{type(error).__name__}: {error}"
        return [library for library in self._libraries if isinstance(library, ModuleType)]

    def _unknown(self, module_name: str) -> str:
        message = f"{module_name!r} is not in the registry {self.name!r}"
        nearest = self._nearest(module_name)
        if nearest is not None:
            message += f"; did you mean {nearest!r}?"
        elif self._modules:
            message += f"; registered are {', '.join(sorted(self._modules))}"
        else:
            message += "; nothing is registered: import the file that holds its @register_module first"
        for library, reason in self._broken_libraries.items():
            message += f" ({library} was not searched, it does not import: {reason})"
        return message

    def _nearest(self, module_name: str) -> str | None:
        known = list(self._modules)
        for library in self._imported_libraries():
            known += [
                name for name in dir(library) if name[0] != "_" and callable(getattr(library, name, None))
            ]
        by_lower = {
            name.lower(): name for name in reversed(known)
        }  # a registered name takes precedence over a library's
        matches = difflib.get_close_matches(module_name.lower(), by_lower, n=1)
        return by_lower[matches[0]] if matches else None


def _origin(registered: Callable[..., Any]) -> str:
    return f"{registered.__module__}.{registered.__qualname__}"


# A name that is not registered is looked up in the library that usually has it, which is then imported:
# `OPTIMIZERS.get_module("AdamW")` is `torch.optim.AdamW`.
LAYERS = Registry("layers", ["torch.nn"])
LOSSES = Registry("losses", ["torch.nn"])
OPTIMIZERS = Registry("optimizers", ["torch.optim"])
LR_SCHEDULERS = Registry("lr_schedulers", ["torch.optim.lr_scheduler"])
MODELS = Registry("models", ["torchvision.models"])
DATASETS = Registry("datasets", ["torchvision.datasets"])
GRADIENT_HANDLER = Registry("gradient_handler", ["colossalai.engine.gradient_handler"])
HOOKS = Registry("hooks")
SCHEDULE = Registry("schedule")
DIST_GROUP_INITIALIZER = Registry("dist_group_initializer")
