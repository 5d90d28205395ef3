"""Other documented spellings: a table of modules with one import finder, a table of names, no shim modules.

The finder also raises errors for documented modules and names that do not exist yet: `from a import b`
imports the module `a.b` if the package `a` has no `b`. And it registers the backend "shared_memory" with
torch, in any
order of imports: `import colossalai` does not import torch, for commands that run without it.

`import colossalai.context.config` gives the module `colossalai.context._config` itself, the same object under
a second name in `sys.modules`; so its classes exist once, for `isinstance` and pickle. Sub-modules of an
alias are resolved with it: `colossalai.mixed_precision.x` is `colossalai.booster.mixed_precision.x`.
"""

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from colossalai._lazy import JOB_PARTS, find_name
from colossalai._not_landed import NOT_LANDED

ALIASES: Mapping[str, str] = {
    "colossalai.amp.amp_type": "colossalai.amp._amp_type",
    "colossalai.amp.apex_amp": "colossalai.amp._amp_type",
    "colossalai.amp.naive_amp": "colossalai.amp._amp_type",
    "colossalai.amp.torch_amp": "colossalai.amp._amp_type",
    "colossalai.auto_parallel.tensor_shard.initialize": "colossalai.auto_parallel.tensor_shard._initialize",
    "colossalai.booster.accelerator": "colossalai.compat._accelerator",
    "colossalai.booster.plugin.gemini_plugin": "colossalai.booster.plugin._gemini",
    "colossalai.builder": "colossalai.compat.builder",
    "colossalai.builder.pipeline": "colossalai.compat.builder._pipeline",
    "colossalai.cluster.dist_coordinator": "colossalai.cluster._dist_coordinator",
    "colossalai.communication.p2p": "colossalai.compat._p2p",
    "colossalai.constants": "colossalai.context._group_initializer",
    "colossalai.context.config": "colossalai.context._config",
    "colossalai.context.dist_group_initializer": "colossalai.context._group_initializer",
    "colossalai.context.moe_context": "colossalai.context._moe_env",
    "colossalai.context.parallel_context": "colossalai.context._parallel_context",
    "colossalai.context.parallel_mode": "colossalai.context._parallel_mode",
    "colossalai.context.process_group_initializer": "colossalai.context._group_initializer",
    "colossalai.context.random": "colossalai.context._random",
    "colossalai.device.device_mesh": "colossalai.device._device_mesh",
    "colossalai.engine.gradient_handler": "colossalai.compat.gradient_handler",
    "colossalai.gemini": "colossalai.zero.gemini",
    "colossalai.global_variables": "colossalai.compat._global_variables",
    "colossalai.interface": "colossalai.runtime._wrapper",
    "colossalai.mixed_precision": "colossalai.booster.mixed_precision",
    "colossalai.model_zoo.moe.models": "colossalai.model_zoo.moe._models",
    "colossalai.nn.dap": "colossalai.compat._dap",
    "colossalai.nn.layer.parallel_2d": "colossalai.nn.layer.tensor_parallel._batch",
    "colossalai.nn.layer.parallel_2p5d": "colossalai.nn.layer.tensor_parallel._batch",
    "colossalai.nn.layer.parallel_3d": "colossalai.nn.layer.tensor_parallel._batch",
    "colossalai.nn.layer.parallel_sequence": "colossalai.nn.layer.sequence_parallel",
    "colossalai.nn.layer.utils": "colossalai.nn.layer._divide",
    "colossalai.nn.layer.wrapper": "colossalai.pipeline.stages._tied_weights",
    "colossalai.nn.moe": "colossalai.nn.layer.moe",
    "colossalai.nn.optimizer.cpu_adam": "colossalai.nn.optimizer._hybrid_adam",
    "colossalai.nn.optimizer.fused_adam": "colossalai.nn.optimizer._fused_adam",
    "colossalai.nn.optimizer.gemini_optimizer": "colossalai.compat._gemini_wrappers",
    "colossalai.nn.optimizer.hybrid_adam": "colossalai.nn.optimizer._hybrid_adam",
    "colossalai.nn.optimizer.zero_optimizer": "colossalai.compat._gemini_wrappers",
    "colossalai.nn.parallel.data_parallel": "colossalai.compat._gemini_wrappers",
    "colossalai.nn.parallel.layers": "colossalai.nn.layer.cached_embedding",
    "colossalai.nn.parallel.layers.cache_embedding": "colossalai.nn.layer.cached_embedding",
    "colossalai.pipeline.pipelinable": "colossalai.pipeline.stages._pipelinable",
    "colossalai.pipeline.utils": "colossalai.pipeline.stages._partition",
    "colossalai.tensor.colo_parameter": "colossalai.tensor.colo._tensor",
    "colossalai.tensor.compute_spec": "colossalai.tensor.colo._specs",
    "colossalai.tensor.distspec": "colossalai.tensor.colo._specs",
    "colossalai.tensor.shape_consistency": "colossalai.tensor.conversion._shape_consistency",
    "colossalai.tensor.sharding_spec": "colossalai.tensor._spec",
    "colossalai.tensor.tensor_spec": "colossalai.tensor.colo._specs",
    "colossalai.testing.random": "colossalai.compat._seed",
    "colossalai.utils": "colossalai.compat.utils",
    "colossalai.utils.activation_checkpoint": "colossalai.nn._checkpoint",
    "colossalai.utils.checkpointing": "colossalai.compat.utils._checkpoint",
    "colossalai.utils.common": "colossalai.compat.utils._parallel",
    "colossalai.utils.cuda": "colossalai.compat.utils._device",
    "colossalai.utils.data_sampler": "colossalai.compat.utils._dataloader",
    "colossalai.utils.memory": "colossalai.compat.utils._memory",
    "colossalai.utils.model": "colossalai.zero",
    "colossalai.utils.model.colo_init_context": "colossalai.zero._init_context",
    "colossalai.utils.moe": "colossalai.compat.utils._moe",
    "colossalai.utils.profiler": "colossalai.compat.utils._profiler",
    "colossalai.utils.timer": "colossalai.trainer._timer",
    "colossalai.zero.gemini.chunk": "colossalai.compat.chunk",
    "colossalai.zero.gemini.gemini_mgr": "colossalai.compat.chunk._chunk_manager",
    "colossalai.zero.gemini.utils": "colossalai.compat._gemini_wrappers",
}
"""From a documented module to the module that is its home."""

NAMES: Mapping[str, Mapping[str, str]] = {
    "colossalai.amp": {"ApexPrecision": "colossalai.compat._apex"},
    "colossalai.booster.mixed_precision": {"FP16ApexMixedPrecision": "colossalai.compat._apex"},
    "colossalai.communication": {
        "recv_backward": "colossalai.compat._p2p",
        "recv_forward": "colossalai.compat._p2p",
        "send_backward": "colossalai.compat._p2p",
        "send_backward_recv_backward": "colossalai.compat._p2p",
        "send_backward_recv_forward": "colossalai.compat._p2p",
        "send_forward": "colossalai.compat._p2p",
        "send_forward_backward_recv_forward_backward": "colossalai.compat._p2p",
        "send_forward_recv_backward": "colossalai.compat._p2p",
        "send_forward_recv_forward": "colossalai.compat._p2p",
    },
    "colossalai.nn.layer.moe": {
        "load_moe_model": "colossalai.runtime",
        "save_moe_model": "colossalai.runtime",
    },
    "colossalai.nn.parallel": {
        "GeminiDDP": "colossalai.compat._gemini_wrappers",
        "ZeroDDP": "colossalai.compat._gemini_wrappers",
        "zero_model_wrapper": "colossalai.compat._zero_wrappers",
        "zero_optim_wrapper": "colossalai.compat._zero_wrappers",
    },
    "colossalai.zero": {
        "GeminiAdamOptimizer": "colossalai.compat._gemini_wrappers",
        "GeminiDDP": "colossalai.compat._gemini_wrappers",
        "ZeroDDP": "colossalai.compat._gemini_wrappers",
        "ZeroOptimizer": "colossalai.compat._gemini_wrappers",
        "zero_model_wrapper": "colossalai.compat._zero_wrappers",
        "zero_optim_wrapper": "colossalai.compat._zero_wrappers",
    },
    "colossalai.zero.gemini": {
        "ChunkManager": "colossalai.compat.chunk",
        "GeminiAdamOptimizer": "colossalai.compat._gemini_wrappers",
        "GeminiDDP": "colossalai.compat._gemini_wrappers",
        "GeminiManager": "colossalai.compat.chunk",
        "ZeroDDP": "colossalai.compat._gemini_wrappers",
        "ZeroOptimizer": "colossalai.compat._gemini_wrappers",
        "get_static_torch_model": "colossalai.compat._gemini_wrappers",
    },
}
"""Documented names of a package whose home is a package that imports it, imported at the first access."""

SHARED_MEMORY = "shared_memory"
"""Name of the torch backend whose ranks communicate through the memory of their machine."""


class AliasFinder(MetaPathFinder):
    """Finds the modules of a table under their other names, and extends foreign modules at their import.

    Args:
        aliases: From alias to home.
        not_landed: Error messages for modules, or names in modules, that do not exist yet.
        after_import: From the name of a module to a function that is called with it right after its import.
    """

    def __init__(
        self,
        aliases: Mapping[str, str],
        not_landed: Mapping[str, str] | None = None,
        after_import: Mapping[str, Callable[[ModuleType], None]] | None = None,
    ) -> None:
        self.aliases = _also_below_homes(aliases, aliases)
        self.not_landed = _also_below_homes(not_landed or {}, aliases)
        self.after_import = after_import or {}
        self._packages = tuple({f"{alias.partition('.')[0]}." for alias in aliases})

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec whose loader returns the home module, None for a name that is not an alias.

        For a module of `after_import`, return its own spec, whose loader calls the function as well.

        Raises:
            ImportError: `fullname` does not exist yet.
        """
        if fullname in self.after_import:
            return self._extended(fullname, path, target)
        if not fullname.startswith(self._packages):  # fast path: called for every import
            return None
        if fullname in self.not_landed:
            # Not a ModuleNotFoundError: `from a import b` would replace it by "cannot import name".
            raise ImportError(self.not_landed[fullname], name=fullname)
        home = _home(fullname, self.aliases)
        return None if home is None else ModuleSpec(fullname, _HomeLoader(home))

    def _extended(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        """Return the spec of the finders after this one; its loader calls the function of `after_import`."""
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            execute, extend = spec.loader.exec_module, self.after_import[fullname]

            def execute_and_extend(module: ModuleType) -> None:
                execute(module)
                extend(module)

            spec.loader.exec_module = execute_and_extend  # type: ignore[method-assign]
        return spec


class _HomeLoader(Loader):
    """Loader of an alias that imports the home and returns that module."""

    def __init__(self, home: str) -> None:
        self._home = home
        self._home_spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._home)
        self._home_spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The home has run already. But after create_module the import machinery has set its spec to the
        # alias's; with that, importlib.reload and the submodule lookup would use the alias instead of the
        # module.
        module.__spec__ = self._home_spec


def _home(name: str, aliases: Mapping[str, str]) -> str | None:
    """Look up a module, or the nearest package above it, in the table."""
    above, below = name, ""
    while above:
        if above in aliases:
            return aliases[above] + below
        above, dot, last = above.rpartition(".")
        below = dot + last + below
    return None


def _also_below_homes(table: Mapping[str, str], aliases: Mapping[str, str]) -> dict[str, str]:
    """Return a table with each name below an alias also spelled below the home of that alias.

    `from a import b` looks for the module `b` below the `__name__` of the module `a`, which is its home's.
    """
    found = dict(table)
    for name, value in table.items():
        above, _, last = name.rpartition(".")
        home = _home(above, aliases)
        if home is not None:
            found[f"{home}.{last}"] = value
    return found


def _register_shared_memory(distributed: ModuleType) -> None:
    """Register the backend in `torch.distributed.distributed_c10d`, if this torch can communicate."""
    backends = getattr(distributed, "Backend", None)
    if backends is not None:
        backends.register_backend(SHARED_MEMORY, _make_group, extended_api=True, devices=["cpu"])


def _make_group(options: Any, backend_options: Any = None) -> Any:
    """Make the process group that torch requests; its modules are imported at the first call."""
    return find_name("colossalai", JOB_PARTS, "make_group")(options, backend_options)


def _install(finder: AliasFinder) -> None:
    """Insert the finder before the file finders; once, even if this module is reloaded."""
    key = (AliasFinder.__module__, AliasFinder.__qualname__)
    sys.meta_path[:] = [f for f in sys.meta_path if (type(f).__module__, type(f).__qualname__) != key]
    sys.meta_path.insert(0, finder)
    for name, extend in finder.after_import.items():
        if name in sys.modules:
            extend(sys.modules[name])


_install(AliasFinder(ALIASES, NOT_LANDED, {"torch.distributed.distributed_c10d": _register_shared_memory}))
