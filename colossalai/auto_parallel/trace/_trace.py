"""The trace of a model: its operations with the shapes of their tensors, and the module of each.

`torch.export` runs the user's model on fake tensors and records the high-level operations (`linear`,
`layer_norm`, `scaled_dot_product_attention`). The trace is for costs; training runs the user's own model, so
a trace can omit calls without a tensor as a result.

[Note: models without an export]
Such a model (a cache among its outputs, attributes that its forward sets) is run once on fake tensors, and
the operations below autograd are recorded: `addmm` of a transposed weight instead of `linear`. They have the
same products, shapes and saved tensors. One thing is lost: an operation that autograd runs on behalf of a
custom `autograd.Function` counts as one without a backward. Hence `is_exact` is False.
"""

import hashlib
import io
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from functools import cached_property
from operator import getitem
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from colossalai.auto_parallel.trace._fake_run import (
    DataDependentShape,
    FakeCall,
    FakeTwin,
    checked_arguments,
    kept_random_state,
    quiet_attempt,
    record,
    tensors_in,
)
from colossalai.logging import get_dist_logger
from colossalai.runtime import find_blocks


@dataclass(frozen=True)
class TensorMeta:
    """Metadata of a tensor, without its values.

    Attributes:
        shape: Its extents.
        dtype: The type of its elements.
        stride: Steps between elements. None: those of a contiguous tensor.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...] | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return int(torch.Size(self.shape).numel())

    @property
    def num_bytes(self) -> int:
        """Bytes of all elements."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class InputSlot:
    """Placeholder for a tensor among the arguments of an operation.

    Attributes:
        index: Index in the operation's `inputs`.
    """

    index: int


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation of a model.

    Attributes:
        name: Its name, unique in the trace.
        target: The operator, such as "aten.addmm.default".
        module: The full name of the innermost module of the user's model that calls it; "" for the model.
        inputs: Names of its input tensors, each once.
        outputs: Names of its output tensors, including views and tensors changed in place.
        arguments: All arguments by their names in the schema; tensors are `InputSlot`s, lists are tuples.
        is_grad_enabled: False under `torch.no_grad()`.
        autocast: Dtype of the surrounding autocast. None: no autocast.
    """

    name: str
    target: str
    module: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    arguments: tuple[tuple[str, Any], ...] = ()
    is_grad_enabled: bool = True
    autocast: torch.dtype | None = None

    @property
    def scalars(self) -> tuple[Any, ...]:
        """The arguments without tensors, in order."""
        return tuple(value for _, value in self.arguments if not _has_slot(value))

    def argument(self, name: str, default: Any = None) -> Any:
        """Return an argument by its name in the schema, or `default` if the call does not pass it."""
        return dict(self.arguments).get(name, default)


@dataclass(frozen=True, kw_only=True)
class ModelTrace:
    """The operations of one forward of a model.

    Attributes:
        operations: The operations in the order in which they run.
        tensors: All tensors by name.
        inputs: Names of the tensors among the arguments.
        outputs: Names of the tensors that the model returns, in order.
        params: Tensor name to full parameter name; a tied parameter has an entry for each of its names.
        buffers: Tensor name to full buffer name.
        constants: Names of the tensors that the forward has or makes independently of its arguments.
        alias: A tensor to the tensor that owns its storage, for views, in-place results and tied parameters.
        trainable: Names of the parameters and inputs that require a gradient.
        device: The type of device that the operations run on.
        is_exact: False if the model did not export, see [Note: models without an export].
    """

    operations: tuple[Operation, ...]
    tensors: Mapping[str, TensorMeta]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    params: Mapping[str, str]
    buffers: Mapping[str, str]
    constants: tuple[str, ...]
    alias: Mapping[str, str]
    trainable: tuple[str, ...]
    device: str
    is_exact: bool

    @cached_property
    def digest(self) -> str:
        """The sha256 of the trace, the same in every process."""
        text = "\n".join(
            [
                *map(_text, self.operations),
                *(f"{name} {_text(meta)}" for name, meta in self.tensors.items()),
                *(_text(sorted(each.items())) for each in (self.params, self.buffers, self.alias)),
                _text(
                    [self.inputs, self.outputs, self.constants, self.trainable, self.device, self.is_exact]
                ),
            ]
        )
        return hashlib.sha256(text.encode()).hexdigest()

    @cached_property
    def producers(self) -> Mapping[str, Operation]:
        """Operation that makes a tensor, by the name of the tensor."""
        return {name: each for each in self.operations for name in each.outputs}

    @cached_property
    def consumers(self) -> Mapping[str, tuple[Operation, ...]]:
        """Operations that use a tensor, by the name of the tensor; every tensor has an entry."""
        found: dict[str, list[Operation]] = {name: [] for name in self.tensors}
        for each in self.operations:
            for name in each.inputs:
                found[name].append(each)
        return {name: tuple(each) for name, each in found.items()}

    @cached_property
    def outside(self) -> frozenset[str]:
        """Names of the tensors that no operation makes: parameters, buffers, inputs, constants."""
        return frozenset([*self.params, *self.buffers, *self.inputs, *self.constants])

    def storage_of(self, name: str) -> str:
        """Return the tensor that owns the storage of a tensor; usually the tensor itself."""
        return self.alias.get(name, name)

    @cached_property
    def places(self) -> Mapping[str, int]:
        """Index of each operation in the order in which they run."""
        return {each.name: place for place, each in enumerate(self.operations)}

    @cached_property
    def params_of(self) -> Mapping[str, tuple[str, ...]]:
        """Tensors of the direct parameters of a module, by the full name of the module."""
        found: defaultdict[str, list[str]] = defaultdict(list)
        for tensor, full in self.params.items():
            found[full.rpartition(".")[0]].append(tensor)
        return {name: tuple(own) for name, own in found.items()}

    def by_module(self, prefix: str) -> tuple[Operation, ...]:
        """Return the operations of a module and of the modules in it, in order; "" is the whole model."""
        return self._within.get(prefix, ())

    @cached_property
    def _within(self) -> Mapping[str, tuple[Operation, ...]]:
        """Operations of a module and of its submodules, by the name of the module."""
        found: defaultdict[str, list[Operation]] = defaultdict(list)
        for each in self.operations:
            name = each.module
            while name:
                found[name].append(each)
                name = name.rpartition(".")[0]
            found[""].append(each)
        return {name: tuple(own) for name, own in found.items()}


def trace_model(model: nn.Module, meta_args: Mapping[str, Any]) -> ModelTrace:
    """Trace one forward of a model in its current mode, without memory and without changing it.

    A surrounding autocast applies to the trace.

    Recomputation inside the model is ignored: a checkpointed part keeps its activations in the trace.

    Args:
        model: The model, on any device, the meta device included, or lazily built.
        meta_args: Arguments of its forward by name. Only the shapes of tensors are used, so they can be on
            the meta device; other values are passed on unchanged. With labels, the loss is among the outputs.
            `use_cache=False` is added if the forward has this argument.

    Raises:
        ValueError: `meta_args` lacks an argument or has one that the forward does not accept, a shape depends
            on the values of tensors, or the forward fails.
    """
    arguments = checked_arguments(model, meta_args)
    reasons = []
    # Some models run in a trace only if they detect it; see `FakeTwin.run_as_in_training`.
    for runs_as_in_training in (True, False):
        twin = FakeTwin(model, arguments)  # a used twin can have attributes of its first run
        if runs_as_in_training:
            twin.run_as_in_training()
        try:
            with kept_random_state(), quiet_attempt(), torch.enable_grad():
                return _of_export(twin)
        except DataDependentShape:
            if not runs_as_in_training:
                raise
        except Exception as error:
            reasons.append(f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}")
    twin = FakeTwin(model, arguments)
    twin.run_as_in_training()
    with kept_random_state(), quiet_attempt(), torch.enable_grad():
        trace = _of_record(twin)
    get_dist_logger().log_once(
        f"{type(model).__name__} does not export ({reasons[-1]}); its trace is a record of one run on fake "
        "tensors"
    )
    return trace


@dataclass(frozen=True, kw_only=True)
class EqualBlocks:
    """Blocks of a model that run the same operations on tensors of the same shapes.

    Attributes:
        names: Full names of the blocks, in the order of the model.
        operations: Operations of each block; the k-th of one corresponds to the k-th of every other.
    """

    names: tuple[str, ...]
    operations: tuple[tuple[Operation, ...], ...]


def repeated_blocks(trace: ModelTrace, model: nn.Module) -> tuple[EqualBlocks, ...]:
    """Return the groups of a model's blocks (see `runtime.find_blocks`) that are equal except for names.

    Equal blocks have the same operations in the same order, arguments, modules inside the block, shapes,
    dtypes and strides of all tensors, data flow, and trained parameters. Blocks without an equal one, or
    without operations in the trace, are left out.

    Args:
        trace: A trace of the model.
        model: The model.
    """
    names = {part: name for name, part in reversed(list(model.named_modules()))}
    alike: defaultdict[str, list[tuple[str, tuple[Operation, ...]]]] = defaultdict(list)
    for block in find_blocks(model):
        operations = trace.by_module(names[block])
        if operations:
            alike[_block_text(trace, names[block], operations)].append((names[block], operations))
    return tuple(
        EqualBlocks(names=tuple(name for name, _ in group), operations=tuple(each for _, each in group))
        for group in alike.values()
        if len(group) > 1
    )


def places_in_blocks(equal: Sequence[EqualBlocks]) -> dict[str, tuple[int, int]]:
    """Return the kind of block, and the place in the block, of each operation of equal blocks, by name."""
    return {
        operation.name: (kind, place)
        for kind, blocks in enumerate(equal)
        for operations in blocks.operations
        for place, operation in enumerate(operations)
    }


def _block_text(trace: ModelTrace, prefix: str, operations: Sequence[Operation]) -> str:
    """Return a text that is the same for equal blocks: tensors are numbered in the order of their use."""
    numbers: dict[str, int] = {}
    storages: dict[str, int] = {}
    inside = {name for each in operations for name in each.outputs}
    own_names = {each.name for each in operations}
    trainable, outputs = frozenset(trace.trainable), frozenset(trace.outputs)
    lines = []
    for each in operations:
        for name in (*each.inputs, *each.outputs):
            if name not in numbers:
                number = numbers[name] = len(numbers)
                own = trace.params.get(name, trace.buffers.get(name, ""))
                kind = own.removeprefix(f"{prefix}.") if own else "inner" if name in inside else "outer"
                storage = storages.setdefault(trace.storage_of(name), len(storages))
                is_trained = name in trainable
                lines.append(f"{number} {kind} {storage} {is_trained} {_text(trace.tensors[name])}")
        tensors = [[numbers[name] for name in names] for names in (each.inputs, each.outputs)]
        where = each.module.removeprefix(prefix)
        how = f"{_text(each.arguments)} {each.is_grad_enabled} {each.autocast}"
        lines.append(f"{each.target} {where} {tensors} {how}")
    results = sorted(
        numbers[name]
        for name in inside
        if name in outputs or any(each.name not in own_names for each in trace.consumers[name])
    )
    return "\n".join([*lines, str(results)])


class _Builder:
    """Collects the operations and tensors of a trace; calls are added in the order in which they ran."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.tensors: dict[str, TensorMeta] = {}
        self.params: dict[str, str] = {}
        self.buffers: dict[str, str] = {}
        self.constants: list[str] = []
        self.inputs: list[str] = []
        self.trainable: list[str] = []
        self._alias: dict[str, str] = {}
        self._first_on: dict[int, str] = {}  # by the identity of a storage
        self._kept: list[Tensor] = []  # so that no two storages have the same identity

    def add_tensor(self, wanted: str, tensor: Tensor) -> str:
        """Add a tensor and return its name: the wanted one, with a number appended if it is taken."""
        name, number = wanted, 0
        while name in self.tensors:
            number += 1
            name = f"{wanted}__{number}"
        stride = None if tensor.is_contiguous() else tuple(tensor.stride())
        self.tensors[name] = TensorMeta(tuple(tensor.shape), tensor.dtype, stride)
        self._kept.append(tensor)
        first = self._first_on.setdefault(tensor.untyped_storage()._cdata, name)
        if first != name:
            self._alias[name] = first
        return name

    def add_outside(self, wanted: str, tensor: Tensor, kind: str, full_name: str = "") -> str:
        """Add a tensor that no operation makes.

        Args:
            wanted: Its name, as in `add_tensor`.
            tensor: The tensor.
            kind: "param", "buffer", "constant" or "input".
            full_name: Full name of a parameter or buffer.
        """
        name = self.add_tensor(wanted, tensor)
        if kind == "param":
            self.params[name] = full_name
        elif kind == "buffer":
            self.buffers[name] = full_name
        else:
            (self.inputs if kind == "input" else self.constants).append(name)
        if tensor.requires_grad:
            self.trainable.append(name)
        return name

    def add_call(
        self, call: FakeCall, *, name_of: Callable[[Any], str | None], wanted: Sequence[str], **how: Any
    ) -> tuple[str, ...]:
        """Add an operation and return the names of its outputs.

        Args:
            call: The call.
            name_of: Returns the name of an argument that is a tensor, and None for all others.
            wanted: Names for the outputs.
            how: Further fields of the `Operation`.
        """
        inputs: dict[str, int] = {}

        def frozen(value: Any) -> Any:
            if (name := name_of(value)) is not None:
                return InputSlot(inputs.setdefault(name, len(inputs)))
            if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
                return 1  # a result of `.item()`; costs do not depend on it, and a shape is refused earlier
            return tuple(map(frozen, value)) if isinstance(value, list | tuple) else value

        schema = getattr(call.function, "_schema", None)  # a higher-order operator has none
        params = [each.name for each in schema.arguments] if schema else list(map(str, range(len(call.args))))
        named = {**dict(zip(params, call.args, strict=False)), **call.kwargs}
        arguments = tuple((key, frozen(value)) for key, value in named.items())
        # Without a rate, a dropout returns its input itself; on fake tensors, a copy.
        if call.function is torch.ops.aten.dropout.default and not (named["train"] and named["p"]):
            whole = next(iter(inputs))
            self._first_on[call.outputs[0].untyped_storage()._cdata] = self._alias.get(whole, whole)
        outputs = tuple(map(self.add_tensor, wanted, call.outputs))
        self.operations.append(
            Operation(
                name=outputs[0],
                target=str(call.function),
                module=call.module,
                inputs=tuple(inputs),
                outputs=outputs,
                arguments=arguments,
                is_grad_enabled=call.is_grad_enabled,
                **how,
            )
        )
        return outputs

    def trace(self, outputs: Sequence[str], *, device: str, is_exact: bool) -> ModelTrace:
        """Return the trace of all added tensors and operations."""
        return ModelTrace(
            operations=tuple(self.operations),
            tensors=self.tensors,
            inputs=tuple(self.inputs),
            outputs=tuple(outputs),
            params=self.params,
            buffers=self.buffers,
            constants=tuple(self.constants),
            alias=self._alias,
            trainable=tuple(self.trainable),
            device=device,
            is_exact=is_exact,
        )


@dataclass(frozen=True)
class _TraceName:
    """Placeholder for a tensor in the arguments of an exported node.

    Attributes:
        name: Its name in the trace.
    """

    name: str


def _of_export(twin: FakeTwin) -> ModelTrace:
    from torch.export import export
    from torch.export.graph_signature import InputKind, OutputKind

    said, dumped = io.StringIO(), ""
    try:
        with redirect_stderr(said):
            program = export(twin.model, (), twin.arguments, strict=False)
    except Exception as error:
        if hasattr(error, "partial_fx_graph"):
            dumped = f"{error.partial_fx_graph}\n"  # torch prints it
        raise
    finally:
        sys.stderr.write(said.getvalue().replace(dumped, "") if dumped else said.getvalue())
    builder = _Builder()
    reader = _GraphReader(builder, twin.model)
    nodes = iter(program.graph.nodes)
    kinds = {InputKind.PARAMETER: "param", InputKind.BUFFER: "buffer", InputKind.USER_INPUT: "input"}
    for spec, node in zip(program.graph_signature.input_specs, nodes, strict=False):
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            reader.values[node] = value
            continue
        kind = kinds.get(spec.kind, "constant")
        reader.values[node] = _TraceName(builder.add_outside(node.name, value, kind, str(spec.target)))
    type_ = twin.device.type
    autocast = torch.get_autocast_dtype(type_) if torch.is_autocast_enabled(type_) else None
    results = reader.read(program.graph_module, is_grad_enabled=True, autocast=autocast)
    specs = program.graph_signature.output_specs
    outputs = [
        result.name
        for spec, result in zip(specs, results, strict=True)
        if spec.kind is OutputKind.USER_OUTPUT and isinstance(result, _TraceName)
    ]
    return builder.trace(outputs, device=type_, is_exact=True)


class _GraphReader:
    """Reads operations from exported graphs; operations of regions are inlined.

    Args:
        builder: Collects them.
        model: The exported model.
    """

    def __init__(self, builder: _Builder, model: nn.Module) -> None:
        self.values: dict[Any, Any] = {}  # by node: a `_TraceName`, a list of them, or another value
        self._builder = builder
        self._model_name = type(model).__name__
        first = {part: name for name, part in model.named_modules()}
        self._first_names: dict[str, str] = {
            name: first[part] for name, part in model.named_modules(remove_duplicate=False)
        }

    def read(self, graph_module: Any, *, is_grad_enabled: bool, autocast: torch.dtype | None) -> list[Any]:
        """Read a graph whose placeholders have values; return the values of its outputs."""
        how = {"is_grad_enabled": is_grad_enabled, "autocast": autocast}
        for node in graph_module.graph.nodes:
            if node.op == "get_attr":
                self.values[node] = getattr(graph_module, node.target)
            elif node.op == "output":
                return tree_leaves(self._filled(node.args))
            elif node.op == "call_function":
                self._call(node, how)
        raise AssertionError("a graph ends with its output")

    def _filled(self, arguments: Any) -> Any:
        return torch.fx.node.map_arg(arguments, lambda node: self.values[node])

    def _call(self, node: Any, how: dict[str, Any]) -> None:
        args, kwargs = self._filled(node.args), self._filled(node.kwargs)
        name = getattr(node.target, "__name__", "")
        if node.target is getitem:
            self.values[node] = args[0][args[1]]
        elif name == "wrap_with_set_grad_enabled":
            enabled, region, *rest = args
            self.values[node] = self._region(region, rest, {**how, "is_grad_enabled": enabled})
        elif name == "wrap_with_autocast":
            _, dtype, enabled, _, region, *rest = args
            self.values[node] = self._region(region, rest, {**how, "autocast": dtype if enabled else None})
        else:
            self._operation(node, args, kwargs, how)

    def _region(self, region: Any, arguments: Sequence[Any], how: dict[str, Any]) -> list[Any]:
        placeholders = (node for node in region.graph.nodes if node.op == "placeholder")
        self.values.update(zip(placeholders, arguments, strict=True))
        return self.read(region, **how)

    def _operation(self, node: Any, args: Any, kwargs: Any, how: dict[str, Any]) -> None:
        value = node.meta.get("val")
        leaves = tree_leaves(value)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if not tensors:  # an assertion of export
            self.values[node] = value
            return
        if not all(type(extent) is int for tensor in tensors for extent in tensor.shape):
            raise DataDependentShape(str(node.target), self._module_of(node), self._model_name)
        wanted = [node.name] if isinstance(value, Tensor) else self._names_of_parts(node, len(tensors))
        outputs = self._builder.add_call(
            FakeCall(
                function=node.target,
                args=args,
                kwargs=kwargs,
                outputs=tuple(tensors),
                module=self._module_of(node),
                is_grad_enabled=how["is_grad_enabled"],
            ),
            name_of=lambda value: value.name if isinstance(value, _TraceName) else None,
            wanted=wanted,
            autocast=how["autocast"],
        )
        named = iter(outputs)
        parts = [_TraceName(next(named)) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.values[node] = parts[0] if isinstance(value, Tensor) else parts

    def _module_of(self, node: Any) -> str:
        """Return the full name of the innermost module, the first of its names.

        A second call of a module is marked by "@1".
        """
        stack = list((node.meta.get("nn_module_stack") or {}).values())
        name: str = re.sub(r"@\d+", "", stack[-1][0]) if stack else ""
        return self._first_names.get(name, name)

    def _names_of_parts(self, node: Any, num_parts: int) -> list[str]:
        """Name each of several outputs like the node that uses it."""
        taken = {user.args[1]: user.name for user in reversed(list(node.users)) if user.target is getitem}
        return [taken.get(number, f"{node.name}_part_{number}") for number in range(num_parts)]


def _of_record(twin: FakeTwin) -> ModelTrace:
    """See [Note: models without an export]."""
    builder = _Builder()
    names = _outside_names(builder, twin)
    recorder, result = record(twin)

    def name_of(value: Any) -> str | None:
        if not isinstance(value, Tensor):
            return None
        if id(value) not in names:  # an attribute of the model, or a tensor with known values
            names[id(value)] = builder.add_outside("c_constant", value, "constant")
        return names[id(value)]

    for call in recorder.calls:
        is_detach = call.function is torch.ops.aten.detach.default
        if is_detach and call.outputs[0].requires_grad:  # autograd's own, of a view: the same tensor
            names[id(call.outputs[0])] = name_of(call.args[0]) or ""
        elif call.outputs:
            stem = call.function._schema.name.rpartition("::")[2]
            outputs = builder.add_call(call, name_of=name_of, wanted=[stem] * len(call.outputs))
            names.update({id(tensor): name for tensor, name in zip(call.outputs, outputs, strict=True)})
    returned = [name for tensor in tensors_in(result) if (name := name_of(tensor)) is not None]
    return builder.trace(returned, device=twin.device.type, is_exact=False)


def _outside_names(builder: _Builder, twin: FakeTwin) -> dict[int, str]:
    """Add parameters, buffers and arguments; return their names by identity."""
    names = {}
    for kind, named in (
        ("param", twin.model.named_parameters(remove_duplicate=False)),
        ("buffer", twin.model.named_buffers(remove_duplicate=False)),
    ):
        for full_name, tensor in named:
            flat = f"{kind[0]}_{full_name.replace('.', '_')}"
            names[id(tensor)] = builder.add_outside(flat, tensor, kind, full_name)
    for name, value in twin.arguments.items():
        for leaf in tree_leaves(value):
            if isinstance(leaf, Tensor):
                names[id(leaf)] = builder.add_outside(name, leaf, "input")
    return names


def _has_slot(value: Any) -> bool:
    return isinstance(value, InputSlot) or (isinstance(value, tuple) and any(map(_has_slot, value)))


def _text(value: Any) -> str:
    """Return a text of a value that is the same in every process."""
    return repr(value)
