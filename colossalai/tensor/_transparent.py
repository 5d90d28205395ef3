"""Transparent wrappers: attributes of a wrapper are set and deleted where they are read.

[Note: attributes of a wrapper]
Reading looks into the wrapper first: the attributes that its `__init__` has set, its class, and then the
wrapped object. Setting and deleting follow the same order, so that a read returns the value that was set, and
the wrapped object uses it.
"""

from typing import Any

from torch import Tensor, nn

_HOW_TO_CHANGE = (
    "the optimizer and the plan rely on the parameters that were there before: change the model before "
    "Booster.boost (colossalai.initialize, zero_model_wrapper, GeminiDDP) and before the optimizer is built; "
    "new values go into a parameter by load_state_dict or copy_"
)


def is_own_attribute(wrapper: object, name: str) -> bool:
    """Return whether a wrapper itself has an attribute; otherwise reads go to the wrapped object."""
    return name in vars(wrapper) or any(name in vars(base) for base in type(wrapper).__mro__)


class TransparentModule(nn.Module):
    """A module whose attributes are those of the module that it wraps, except its own.

    A subclass sets its own attributes in `__init__` and calls `_stand_for(raw)` last; see [Note: attributes
    of a wrapper]. The parameters of the wrapped module stay the same: an assignment that adds or removes one
    is refused. If both have an attribute of one name, the wrapper's is read, and assigning it is refused: use
    `unwrap()`.

    Attributes:
        training: Mode of the wrapped module.
    """

    _mutable: frozenset[str] = frozenset()  # public attributes of the wrapper that the package sets later

    def _stand_for(self, raw: nn.Module) -> None:
        # Not a sub-module: its parameters are already those of `module`.
        object.__setattr__(self, "_raw", raw)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_raw" not in self.__dict__:
                raise
            return getattr(self._raw, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute where it is read; see the class.

        Raises:
            ValueError: `value` adds or removes a parameter, or `name` belongs to the wrapper.
        """
        raw: nn.Module | None = self.__dict__.get("_raw")
        if raw is None:
            super().__setattr__(name, value)
        elif name == "forward":
            raise ValueError(
                f"{type(raw).__name__}.forward cannot be set on the wrapper, whose forward applies the plan: "
                "set it before Booster.boost (or colossalai.initialize), or use register_forward_pre_hook "
                "and register_forward_hook"
            )
        elif name in self._modules or is_own_attribute(self, name):
            self._refuse_own(name)
            super().__setattr__(name, value)
        else:
            _check_same_params(raw, name, value)
            setattr(raw, name, value)

    def __delattr__(self, name: str) -> None:
        """Delete an attribute where it is read.

        Raises:
            ValueError: `name` is or has a parameter, or belongs to the wrapper.
        """
        raw: nn.Module | None = self.__dict__.get("_raw")
        if raw is None:
            super().__delattr__(name)
        elif name in self._modules or is_own_attribute(self, name):
            self._refuse_own(name)
            super().__delattr__(name)
        else:
            _check_same_params(raw, name, None)
            delattr(raw, name)

    @property
    def training(self) -> bool:
        """Whether the wrapped module is in training mode."""
        raw: nn.Module | None = self.__dict__.get("_raw")
        return True if raw is None else raw.training

    @training.setter
    def training(self, mode: bool) -> None:
        raw: nn.Module | None = self.__dict__.get("_raw")
        if raw is not None:  # nn.Module.__init__ sets it, too
            raw.training = mode

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """Add a buffer to the wrapped module."""
        self._target().register_buffer(name, tensor, persistent)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Add a name to the wrapped module that has no parameter.

        Raises:
            ValueError: `param` is a parameter.
        """
        raw = self._target()
        _check_same_params(raw, name, param)
        raw.register_parameter(name, param)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Add a child to the wrapped module.

        Raises:
            ValueError: `module` has parameters that the wrapped module lacks, or replaces some.
        """
        raw = self._target()
        _check_same_params(raw, name, module)
        raw.add_module(name, module)

    def set_submodule(self, target: str, module: nn.Module, strict: bool = False) -> None:
        """Replace a module anywhere below the wrapped one.

        Raises:
            ValueError: `module` has parameters that the wrapped module lacks, or replaces some.
        """
        raw = self._target()
        _check_same_params(raw, target, module)
        raw.set_submodule(target, module, strict)

    def _target(self) -> nn.Module:
        raw: nn.Module = self.__dict__["_raw"]
        return raw

    def _refuse_own(self, name: str) -> None:
        is_public = name in self._modules or (name in vars(self) and not name.startswith("_"))
        if is_public and name not in self._mutable:
            raise ValueError(
                f"{name!r} is an attribute of {type(self).__name__}, the wrapper that Booster.boost, "
                "colossalai.initialize or a function of colossalai.zero returned: for the attribute of your "
                f"own model use model.unwrap().{name}"
            )


def _check_same_params(raw: nn.Module, name: str, value: Any) -> None:
    """Refuse a value that would add a parameter to a module, or remove one, under a (dotted) name.

    Raises:
        ValueError: `value` adds, replaces or removes a parameter.
    """
    path, _, last = name.rpartition(".")
    try:
        parent = raw.get_submodule(path)
    except AttributeError:
        parent = None  # torch's own message follows
    own = {} if parent is None else parent._parameters
    present = own.get(last)
    if isinstance(value, nn.Parameter) or present is not None:
        if value is present:
            return
        verb = (
            "replaced"
            if present is not None and value is not None
            else "added"
            if present is None
            else "removed"
        )
        raise ValueError(f"{type(raw).__name__}.{name}: a parameter is {verb}, but {_HOW_TO_CHANGE}")
    old = None if parent is None else parent._modules.get(last)
    old_params = set() if old is None else set(old.parameters())
    new_params = (
        {} if not isinstance(value, nn.Module) else {each: key for key, each in value.named_parameters()}
    )
    if not old_params and not new_params:
        return
    known = set(raw.parameters())
    if added := [key for each, key in new_params.items() if each not in known]:
        raise ValueError(
            f"{type(raw).__name__}.{name}: the parameter {added[0]} is added, but {_HOW_TO_CHANGE}"
        )
    lost = {
        each: key for key, each in raw.named_parameters() if each in old_params and each not in new_params
    }
    if lost and parent is not None:
        names = raw.named_parameters(remove_duplicate=False)
        elsewhere = {each for key, each in names if not key.startswith(f"{name}.")}
        if removed := [key for each, key in lost.items() if each not in elsewhere]:
            raise ValueError(
                f"{type(raw).__name__}.{name}: the parameter {removed[0]} is removed, but {_HOW_TO_CHANGE}"
            )
