"""The tensor modes that the tests of layers, losses and metrics run in, and slices of whole tensors."""

from contextlib import contextmanager

import torch

import colossalai
from colossalai.core import global_context as gpc
from colossalai.tensor import cut_dims, spec_of
from tests.harness.fake_job import fake_job
from tests.parity.table import MODES
from tests.ranks import run_ranks
from tests.turns import in_turn

SUFFIXES = {"1d": "1D", "2d": "2D", "2.5d": "2p5D", "3d": "3D"}
TOLERANCE = 1e-12  # float64, in which everything is computed


def launch(name):
    """Launch this rank in a mode, in float64; return the mode."""
    torch.set_default_dtype(torch.float64)
    colossalai.launch_from_torch({"parallel": {"tensor": MODES[name]}}, verbose=False)
    return gpc.tensor_mode


@contextmanager
def in_one_process(name, rank=0):
    """Let this process be a rank in a mode whose others are not there; yield the mode."""
    with fake_job({"parallel": {"tensor": MODES[name]}}, MODES[name]["size"], rank):
        yield gpc.tensor_mode


def run_in_turn(num_ranks, name, *functions):
    """Run functions one after the other, and return for each what the ranks returned.

    To start eight ranks takes longer than most of what they do here, so they are started once.
    """
    calls = [(function, name) for function in functions]
    return zip(*run_ranks(in_turn, num_ranks, calls), strict=True)


def slice_like(tensor, cut, *, feature_dim=-1):
    """Return this rank's slice of a whole activation."""
    dims = [()] * tensor.dim()
    dims[0] = cut.batch
    if cut.features:
        dims[feature_dim] = cut.features
    return cut_dims(tensor.shape, dims, gpc.mesh).cut(tensor)


def whole(param, tensor):
    """Return what all ranks together hold of a parameter or of its gradient, as torch stores it."""
    spec = spec_of(param)
    return tensor.detach() if spec is None else spec.whole(tensor.detach())


def distance(a, b):
    """Return the largest difference of two tensors of one shape."""
    assert a.shape == b.shape, f"{tuple(a.shape)} and {tuple(b.shape)}"
    return (a - b).abs().max().item()


def gradient_errors(layer, twin):
    """Return the distance of each gathered gradient from that of the torch layer, by name."""
    names = dict(layer.named_parameters())
    assert names.keys() == dict(twin.named_parameters()).keys()
    return {name: distance(whole(p, p.grad), twin.get_parameter(name).grad) for name, p in names.items()}


def same_start(layer, twin):
    """Require that both start from the same global values."""
    for name, param in twin.named_parameters():
        own = layer.get_parameter(name)
        assert torch.equal(whole(own, own), param), name


def compare(layer, twin, x_whole, *, y_cut, x_cut=None, feature_dim=-1):
    """Return the distances of output and gradients from those of torch, by name, from the same start.

    Args:
        layer: The layer in a mode.
        twin: The layers of torch, whose parameters have the same names.
        x_whole: The input of all ranks.
        y_cut: How the output is cut.
        x_cut: How the input is cut. None: a layer of ids or images is given all of it, and cuts it itself.
        feature_dim: The dimension of the features in the output.
    """
    same_start(layer, twin)
    x, x_twin = x_whole, x_whole.clone()
    if x_cut is not None:
        x, x_twin = slice_like(x_whole, x_cut).requires_grad_(), x_twin.requires_grad_()
    y, y_twin = layer(x), twin(x_twin)
    dy = torch.randn(y_twin.shape, generator=torch.Generator().manual_seed(9))
    y_twin.backward(dy)
    y.backward(slice_like(dy, y_cut, feature_dim=feature_dim))
    errors = {"y": distance(y, slice_like(y_twin, y_cut, feature_dim=feature_dim))}
    if x_cut is not None:
        errors["dx"] = distance(x.grad, slice_like(x_twin.grad, x_cut))
    return errors | gradient_errors(layer, twin)


def by_case(cases):
    """Return the errors of several cases, by name of the error and of the case."""
    return {f"{what} of {case}": error for case, errors in cases.items() for what, error in errors.items()}


def assert_small(reports):
    """Require of every rank's errors, by name, that they are small."""
    for rank, report in enumerate(reports):
        for name, error in report.items():
            assert error < TOLERANCE, f"rank {rank}: {name} is off by {error}"
