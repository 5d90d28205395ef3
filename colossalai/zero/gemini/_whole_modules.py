"""Whole modules: modules that all ranks gather at their entry, so that ranks can differ inside.

[Note: where ranks differ]
Gathers and means are collectives, so all ranks have to start them in one order. In a mixture of experts the
data decide which parameters a rank uses, and when. A *whole module* is a region of the forward, and a region
of the backward, in which nothing is sent:

- At the entry of its forward all chunks of its parameters are gathered, in their order, and pinned until its
  exit. A use inside changes nothing, not even which chunk was used last.
- `_Exit` is applied to its outputs, `_Entry` to its parameters. A backward gathers in `_Exit`, and releases
  in `_Entry`. Both run on every rank: an output requires a gradient even if no expert had a token, and a
  number that `_Exit` takes from `_Entry` joins the two.
- `_Entry` returns the gradients of all its parameters at once, `None` for unused ones. So they arrive at the
  same point of the backward on all ranks, and the means of their chunks start there, in the order of the
  reducer. Missing gradients count as zero.
- `_Entry` leads to the inputs as well, with no gradient of its own: the modules before it are in the
  backward of all ranks, too.
- A module within a checkpointed region is recomputed as soon as `_Exit` unpacks its saved number. It saves
  the number for that: the order in which other saved tensors are unpacked depends on the data.

Values of inputs do not pass through `_Entry`, so that writing into them works as ever. The engine runs nodes
that are ready in the reverse order in which they were made, so `_Entry` comes after all that was made inside.
"""

from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn

from colossalai.tensor import map_tensors, nested_tensors
from colossalai.zero._reducer import ShardedReducer
from colossalai.zero.gemini._cache import is_in_backward
from colossalai.zero.gemini._chunk import Chunk
from colossalai.zero.gemini._hooks import ModelHooks, handle_of

ModuleChoice = str | type[nn.Module]


def check_choices(choices: Collection[ModuleChoice]) -> tuple[ModuleChoice, ...]:
    """Return names and classes of modules as a tuple.

    Raises:
        ValueError: `choices` is not a list of names and classes of modules.
    """
    if isinstance(choices, str | type | nn.Module) or not isinstance(choices, Collection):
        raise ValueError(
            f"whole_modules is {choices!r:.80}; it must be a list of names of modules, or of their classes, "
            "such as ['layers.0.experts'] or [MixtralSparseMoeBlock]"
        )
    for choice in choices:
        if not isinstance(choice, str) and not (isinstance(choice, type) and issubclass(choice, nn.Module)):
            raise ValueError(
                f"whole_modules has {choice!r:.80}; an entry must be the name of a module as in "
                "model.named_modules(), or a class of modules"
            )
    return tuple(choices)


def find_modules(model: nn.Module, choices: Sequence[ModuleChoice]) -> dict[nn.Module, str]:
    """Return the chosen modules with their names, in the order of the model.

    Raises:
        ValueError: An entry of `choices` matches no module that is called and has parameters.
    """
    known = dict(model.named_modules(remove_duplicate=False))
    found: set[nn.Module] = set()
    for choice in choices:
        if isinstance(choice, str):
            if choice not in known:
                near = get_close_matches(choice, known, n=3) or [name for name in known if name][:20]
                raise ValueError(
                    f"whole_modules names {choice!r}, and the model has no such module; it has "
                    f"{', '.join(map(repr, near))}"
                )
            matches, what = [known[choice]], f"{choice!r}, a {type(known[choice]).__name__}"
        else:
            matches = [module for module in model.modules() if isinstance(module, choice)]
            what = choice.__name__
            if not matches:
                kinds = sorted({type(module).__name__ for module in model.modules()})[:20]
                raise ValueError(
                    f"whole_modules has the class {what}, and the model has no module of it; it has modules "
                    f"of {', '.join(kinds)}"
                )
        if all(type(module).forward is nn.Module.forward for module in matches):
            raise ValueError(
                f"whole_modules has {what}, which is never called itself, so nobody enters it: take the "
                "module that holds it"
            )
        useful = [module for module in matches if next(module.parameters(), None) is not None]
        if not useful:
            raise ValueError(f"whole_modules has {what}, which has no parameters to gather: leave it out")
        found.update(useful)
    return {module: name for name, module in model.named_modules() if module in found}


class _Passage:
    """One run of a whole module, shared by its `_Entry` and its `_Exit`.

    Args:
        whole: The whole modules.
        module: The module.
        chunks: Those of the module.
        trained: The parameters of the module that get gradients.

    Attributes:
        module: As given.
        chunks: As given.
        trained: As given.
        number: The result of `_Entry` for `_Exit`. None: there is no backward.
    """

    def __init__(
        self,
        whole: "WholeModules",
        module: nn.Module,
        chunks: Sequence[Chunk],
        trained: Sequence[nn.Parameter],
    ) -> None:
        self.module = module
        self.chunks = chunks
        self.trained = trained
        self.number: torch.Tensor | None = None
        self._whole = whole
        self._is_held = False  # by a backward that is in it

    def begin_backward(self) -> None:
        """Gather the chunks of the module for the backward; collective."""
        if not self._is_held:
            self._is_held = True
            self._whole.hold(self)

    def end_backward(self) -> None:
        """Release the chunks, at the latest when the whole backward ends: it can stop before `_Entry`."""
        if self._is_held:
            self._is_held = False
            self._whole.release(self)


class _Entry(torch.autograd.Function):
    """The values of a module's parameters, and a number that leads from its outputs to here."""

    @staticmethod
    def forward(ctx: Any, run: _Passage, anchor: torch.Tensor, *tensors: torch.Tensor) -> Any:
        ctx.run = run
        ctx.num_inputs = len(tensors) - len(run.trained)
        ctx.set_materialize_grads(False)  # None: the parameter was not used
        return (anchor.detach(), *(handle_of(param).view() for param in run.trained))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        ctx.run.end_backward()
        return (None, None, *grads[1:], *[None] * ctx.num_inputs)


class _Exit(torch.autograd.Function):
    """The outputs of a module, which are connected to its `_Entry` in any case."""

    @staticmethod
    def forward(ctx: Any, run: _Passage, number: torch.Tensor, *outputs: torch.Tensor) -> Any:
        ctx.run = run
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(number)
        return tuple(output.detach() for output in outputs)  # no views: these may be written into

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        if torch.is_grad_enabled():  # the second backward would enter the module without `_Exit`
            raise RuntimeError(
                "create_graph=True, and the model has whole_modules, which have one backward: leave one out"
            )
        ctx.saved_tensors  # noqa: B018 - a recomputation happens here; see [Note: where ranks differ]
        ctx.run.begin_backward()
        return (None, None, *grads)


class WholeModules:
    """The whole modules of a model in chunks; see [Note: where ranks differ].

    Args:
        modules: The modules, with their names.
        hooks: The hooks of the model.
        reducer: The reducer of their gradients.
    """

    def __init__(self, modules: Mapping[nn.Module, str], hooks: ModelHooks, reducer: ShardedReducer) -> None:
        self._names = dict(modules)
        self._hooks = hooks
        self._cache = hooks.cache
        self._reducer = reducer
        self._chunks: dict[nn.Module, list[Chunk]] = {}
        self._open: list[_Passage] = []  # those whose forward is running
        self._held: list[_Passage] = []
        # Autograd keeps `_Entry` even where nothing in a module is trained.
        device = next((param.device for module in modules for param in module.parameters()), None)
        self._anchor = torch.zeros((), device=device, requires_grad=True)
        for module in modules:
            own = {handle_of(param).chunk for param in module.parameters()}
            self._chunks[module] = sorted(own, key=lambda chunk: chunk.number)
            module.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True)
            module.register_forward_hook(self._leave, always_call=True)
        if modules:
            reducer.await_nodes()

    def __deepcopy__(self, memo: dict[int, Any]) -> "WholeModules":
        """Return `self`: hooks of a copy refer to this object, and its modules are not among `modules`."""
        return self

    def hold(self, run: _Passage) -> None:
        """Gather the chunks of a run whose backward begins; later gradients are averaged after it."""
        self._reducer.hold()  # no mean starts inside: ranks can differ there
        self._cache.hold(run.chunks)  # gathers, in the order of chunk numbers on all ranks
        self._held.append(run)
        # Private, and what DDP and FSDP of torch use: called when this backward ends.
        torch.autograd.Variable._execution_engine.queue_callback(run.end_backward)

    def release(self, run: _Passage) -> None:
        """Release the chunks of a run whose backward has ended, and start the means that waited."""
        self._held.remove(run)
        self._cache.release(run.chunks)
        self._reducer.release()

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        chunks = self._chunks.get(module)
        if chunks is None:  # a module of a copy of the model
            return
        if not is_in_backward():
            for run in self._held[::-1]:  # left by a backward that failed
                run.end_backward()
        self._cache.hold(chunks)  # gathers, in the order of chunk numbers on all ranks
        trained = [param for param in dict.fromkeys(module.parameters()) if param.requires_grad]
        run = _Passage(self, module, chunks, trained)
        views: dict[nn.Parameter, torch.Tensor] = {}
        inputs = [tensor for tensor in nested_tensors((args, kwargs)) if tensor.requires_grad]
        if torch.is_grad_enabled() and (trained or inputs):
            outer = [self._hooks.view_in_module(param) for param in trained]
            params = [param if view is None else view for param, view in zip(trained, outer, strict=True)]
            run.number, *values = _Entry.apply(run, self._anchor, *params, *inputs)
            views = dict(zip(trained, values, strict=True))
        self._hooks.open_views.append(views)
        self._open.append(run)

    def _leave(self, module: nn.Module, _: Any, output: Any) -> Any:
        if not self._open or self._open[-1].module is not module:
            return None
        run = self._open.pop()
        self._hooks.open_views.pop()
        try:
            if run.number is None or output is None:  # None as well where the forward has failed
                return None
            return self._behind_exit(run, output)
        finally:
            self._cache.release(run.chunks)

    def _behind_exit(self, run: _Passage, output: Any) -> Any:
        """Return the output of a module, with its tensors behind an `_Exit`.

        Raises:
            RuntimeError: `output` has no tensor in it.
        """
        tensors = list(nested_tensors(output))
        if not tensors:
            raise RuntimeError(
                f"{self._names[run.module]!r}, one of whole_modules, returned a {type(output).__name__} "
                "in which no tensor is seen, so its backward is not: return tensors, or tuples, lists, dicts "
                "or dataclasses of them"
            )
        floating = {
            id(tensor): tensor for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()
        }
        if not floating:
            return None
        behind = _Exit.apply(run, run.number, *floating.values())
        found = dict(zip(floating, behind, strict=True))
        return map_tensors(lambda tensor: found.get(id(tensor), tensor), output)
