"""The schemes of tensor parallelism as data: which axes cut x, w and y, which operand moves over which axis.

With x (batch, in), w (in, out) and y = x w (batch, out):

| scheme | x cut by | w cut by | y cut by | moves |
| --- | --- | --- | --- | --- |
| 1d column (1909.08053) | | , tp | , tp | |
| 1d row | , tp | tp, | | y summed over tp |
| 2d (2104.05343) | col, row | col, row | col, row | panels of x over row and of w over col |
| 2.5d (2105.14500) | dep col, row | col, row | dep col, row | as 2d, w shared over dep |
| 3d (2105.14450) | wgt inp, out | out, inp wgt | wgt out, inp | x gathered over inp, w over wgt, y scattered
over out |

After a 3d layer the roles of `inp` and `out` are exchanged, after a 1d column layer comes a row layer: the
scheme of a layer follows from the cut of its input.
"""

from dataclasses import dataclass

Axes = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Cut of an activation (batch, ..., features).

    Attributes:
        batch: Axes that cut dimension 0, the coarsest cut first.
        features: Axes that cut the last dimension.
    """

    batch: Axes = ()
    features: Axes = ()


@dataclass(frozen=True, kw_only=True)
class LinearScheme:
    """Cuts and collectives of a linear layer over a mesh.

    Attributes:
        x: Cut of the input.
        y: Cut of the output.
        w_in: Axes that cut the weight along the input features, the coarsest cut first.
        w_out: Axes that cut it along the output features.
        copy_x: Axes along which the input is the same and used differently: its gradient is summed over them.
        copy_w: The same for the weight.
        gather_x: Axes over which the input is gathered.
        gather_w: Axes over which the weight is gathered.
        reduce_y: Axes over which the product is summed.
        scatter_y: Axes over which it is summed and cut, along the dimension that they cut of y.
    """

    x: Cut = Cut()
    y: Cut = Cut()
    w_in: Axes = ()
    w_out: Axes = ()
    copy_x: Axes = ()
    copy_w: Axes = ()
    gather_x: Axes = ()
    gather_w: Axes = ()
    reduce_y: Axes = ()
    scatter_y: Axes = ()

    @property
    def contracts_in_panels(self) -> bool:
        """Whether both operands are gathered along the contracted dimension: it can be done in panels."""
        return self.gather_x == self.x.features != () and self.gather_w == self.w_in

    @property
    def yields_in_panels(self) -> bool:
        """Whether the weight is gathered and y scattered along the output: the other product in panels."""
        return self.scatter_y == self.y.features != () and self.gather_w == self.w_out


def _grid_cut(layers: Axes) -> Cut:
    return Cut(batch=(*layers, "col"), features=("row",))


def _grid(*, layers: Axes) -> LinearScheme:
    """2D, and 2.5D as layers of it."""
    cut = _grid_cut(layers)
    return LinearScheme(
        x=cut, y=cut, w_in=("col",), w_out=("row",), copy_w=layers, gather_x=("row",), gather_w=("col",)
    )


def _cube(*, inp: str, out: str) -> LinearScheme:
    """3D; `inp` and `out` change places from layer to layer."""
    return LinearScheme(
        x=Cut(batch=("wgt", inp), features=(out,)),
        y=Cut(batch=("wgt", out), features=(inp,)),
        w_in=(out,),
        w_out=(inp, "wgt"),
        gather_x=(inp,),
        gather_w=("wgt",),
        scatter_y=(out,),
    )


REPLICATED = LinearScheme()
COLUMN = LinearScheme(y=Cut(features=("tp",)), w_out=("tp",), copy_x=("tp",))
ROW = LinearScheme(x=Cut(features=("tp",)), w_in=("tp",), reduce_y=("tp",))

LINEAR_SCHEMES: dict[str | None, tuple[LinearScheme, ...]] = {
    None: (REPLICATED,),
    "1d": (COLUMN, ROW),
    "2d": (_grid(layers=()),),
    "2.5d": (_grid(layers=("dep",)),),
    "3d": (_cube(inp="inp", out="out"), _cube(inp="out", out="inp")),
    "dap": (REPLICATED,),  # only activations of axial layers are cut, within these layers
}
"""The linear schemes of each tensor mode; the first one takes the input of a model."""


def first_cut(mode: str | None) -> Cut:
    """Return how the input of a model of a tensor mode is cut."""
    return LINEAR_SCHEMES[mode][0].x


def _grid_head(*, layers: Axes) -> LinearScheme:
    """The 2D product with a transposed weight, whose storage is the embedding's."""
    cut = _grid_cut(layers)
    return LinearScheme(
        x=cut, y=cut, w_in=("row",), w_out=("col",), copy_w=layers, gather_w=("col",), scatter_y=("row",)
    )


HEAD_SCHEMES: dict[str | None, tuple[LinearScheme, ...]] = LINEAR_SCHEMES | {
    "1d": (COLUMN,),
    "2d": (_grid_head(layers=()),),
    "2.5d": (_grid_head(layers=("dep",)),),
}
"""The schemes of a vocabulary-parallel classifier; its weight, (vocabulary, hidden), is cut as embeddings."""


def head_scheme(mode: str | None, x: Cut, *, vocab_parallel: bool) -> LinearScheme:
    """Return the scheme of a classifier whose input is cut like `x`.

    Args:
        mode: The tensor mode.
        x: Cut of the input.
        vocab_parallel: Whether the classes are cut; otherwise every rank gets all classes of its part of the
            batch.

    Raises:
        ValueError: The mode has no scheme of a classifier whose input is cut like `x`.
    """
    if not vocab_parallel:
        return LinearScheme(x=x, y=Cut(batch=x.batch), w_in=x.features, copy_w=x.batch, reduce_y=x.features)
    return _of_input(HEAD_SCHEMES[mode], x, what=f"a vocabulary-parallel classifier of mode {mode!r}")


def linear_scheme(mode: str | None, x: Cut) -> LinearScheme:
    """Return the scheme of a mode whose input is cut like `x`.

    Raises:
        ValueError: The mode has no scheme whose input is cut like `x`.
    """
    return _of_input(LINEAR_SCHEMES[mode], x, what=f"a linear layer of mode {mode!r}")


def _of_input(schemes: tuple[LinearScheme, ...], x: Cut, *, what: str) -> LinearScheme:
    for scheme in schemes:
        if scheme.x == x:
            return scheme
    raise ValueError(f"{what} does not take an input cut as {x}")
