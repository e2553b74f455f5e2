"""The output layers of a model: linear layers whose output only the loss reads.

The search follows the graph of a forward pass back from its outputs, through elementwise functions,
losses, indexing and sums, to the first readers. A reader is a node that multiplies by weights or
normalizes. A linear layer among the first readers is an output layer, unless another reader reads
its output. A learned temperature is no reader. A norm after a linear layer is one. If the output
is the product of two projections, as in CLIP, neither is an output layer.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves

from razorctl.layers.base import stock_type
from razorctl.layers.by_type import linear_types

MARK = "razor_outputs"  # attribute of a sparsified model with its `Exact`
PRODUCT = re.compile(r"^(Linear\w*|\w*[mM][mv])Backward")
# Nodes that are readers even with frozen parameters, which the graph does not contain.
READER = re.compile(
    rf"{PRODUCT.pattern}|^(Mkldnn\w*|\w*Conv\w*|\w*Attention\w*|\w*Flash\w*|Embedding\w*)Backward"
    r"|(Layer|Batch|Group|Rms)Norm|(Norm|Linear|Stored|Weighted|Scale)Function|Checkpoint|Compiled"
)
SUM = re.compile("^(Add|Sub)Backward")  # such as adding a bias or positions
VIEW = re.compile(
    r"^(T|ToCopy|View|UnsafeView|ReshapeAlias|Expand|Transpose|Permute|Unsqueeze|Squeeze|Clone|Alias"
    r"|Slice|Select|Split\w*|AsStrided)Backward"
)


class Outputs(NamedTuple):
    """The names of the output layers in a graph; every: whether there can be no other."""

    names: frozenset[str]
    every: bool


def find(model: nn.Module, outputs: Any) -> Outputs:
    """Finds the output layers of a model in the graph of `outputs`, a forward pass's results."""
    types = linear_types()
    linear = {module: name for name, module in model.named_modules() if stock_type(module) in types}
    owners: dict[int, set[str]] = {id(p): set() for p in model.parameters()}
    for module, name in linear.items():
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)].add(name)

    first, deeper, seen = set[str](), set[str](), set[tuple[Node, bool]]()
    places = [(t.grad_fn, False) for t in _tensors(outputs) if t.grad_fn is not None]
    every = bool(places)
    while places:
        node, deep = place = places.pop()
        if place in seen:
            continue
        seen.add(place)
        names = _read(node, linear, owners)
        if names is not None:
            every &= deep or "" not in names
            (deeper if deep else first).update(names)
        below = deep or names is not None
        places += [(edge, below) for edge, _ in node.next_functions if edge is not None]
    return Outputs(frozenset(first - deeper - {""}), every)


def unseen(model: nn.Module) -> list[Any]:
    """The notes in `model` whose model has had no first pass yet."""
    notes = (vars(module).get(MARK) for module in model.modules())
    return [note for note in notes if note is not None and note.found is None]


def _read(
    node: Node, linear: Mapping[nn.Module, str], owners: Mapping[int, set[str]]
) -> set[str] | None:
    """The names of the linear layers whose product a node is; None if it is no reader.

    Empty for another reader, {""} for an unknown one. linear: module -> name. owners: id of a
    parameter -> the names of its layers.
    """
    name, layer = node.name(), getattr(node, "layer", None)
    if name.startswith("LinearFunction") and layer is not None and layer in linear:
        return {linear[layer]}
    parameters = [] if SUM.match(name) else [*_parameters(node, owners)]
    if not (parameters or READER.search(name)):
        return None
    named = [names for p in parameters if (names := owners.get(id(p)))]
    product = PRODUCT.match(name) or isinstance(node, BackwardCFunction)
    if named and product and not name.startswith("Embedding"):  # which may share a weight
        return set.intersection(*named) or {""}  # of several layers the last is unknown
    known = all(id(p) in owners for p in parameters) and (parameters or layer is not None)
    return set() if known else {""}


def _parameters(node: Node, owners: Mapping[int, set[str]]) -> Iterator[Tensor]:
    """The parameters that a node uses directly, except single numbers such as a temperature."""
    for edge, _ in node.next_functions:
        while edge is not None and VIEW.match(edge.name()):
            edge = edge.next_functions[0][0]
        leaf: Tensor | None = getattr(edge, "variable", None)
        if leaf is not None and (leaf.numel() > 1 or owners.get(id(leaf))):
            yield leaf


def _tensors(outputs: Any) -> Iterator[Tensor]:
    """The tensors in a result, including those in attributes of its objects."""
    for leaf in tree_leaves(outputs):
        held = [leaf] if isinstance(leaf, Tensor) else tree_leaves(getattr(leaf, "__dict__", {}))
        yield from (tensor for tensor in held if isinstance(tensor, Tensor))
