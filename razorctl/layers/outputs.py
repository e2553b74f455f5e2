"""The output layers of a model: the linear layers whose output nothing but the loss reads.

They are found in the graph of a forward pass. From the model's outputs it leads back through
elementwise functions, losses, choices and sums to the first nodes that mix values by weights or
normalize them: the readers. A linear layer that is such a reader, and that no other reader reads,
is an output layer. So a learned temperature lies between, a norm after a linear layer reads it, and
of two projections whose product is the output, as in CLIP, none is an output layer.
"""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves

from razorctl.layers.base import stock_type
from razorctl.layers.registry import linear_types

PRODUCT = re.compile(r"^(Linear\w*|\w*[mM][mv])Backward")
# Nodes that are readers whether or not they have parameters, since those may be frozen.
READER = re.compile(
    rf"{PRODUCT.pattern}|^(Mkldnn\w*|\w*Conv\w*|\w*Attention\w*|\w*Flash\w*|Embedding\w*)Backward"
    r"|(Layer|Batch|Group|Rms)Norm|NormFunction|LinearFunction|(Stored|Weighted|Scale)Function"
)
OPAQUE = re.compile("Checkpoint|Compiled")  # a model's part in one node
SUM = re.compile("^(Add|Sub)Backward")  # with a bias or with positions
VIEW = re.compile(
    r"^(T|ToCopy|View|UnsafeView|ReshapeAlias|Expand|Transpose|Permute|Unsqueeze|Squeeze|Clone|Alias"
    r"|Slice|Select|Split\w*|AsStrided)Backward"
)
MARK = "razor_outputs"  # where a sparsified model has what is known of its output layers


class Outputs(NamedTuple):
    """The names of the output layers that a graph shows; every: whether they are all there are."""

    names: frozenset[str]
    every: bool


class Read(NamedTuple):
    """The linear layers whose product a node is; known: whether it hides none."""

    names: frozenset[str] = frozenset()
    known: bool = True


class _Graph:
    """The graph of a forward pass of `model`, stock or sparsified."""

    def __init__(self, model: nn.Module) -> None:
        types = linear_types()
        self.linear = {m: name for name, m in model.named_modules() if stock_type(m) in types}
        self.owners: dict[int, set[str]] = {id(p): set() for p in model.parameters()}
        for module, name in self.linear.items():
            for parameter in module.parameters(recurse=False):
                self.owners[id(parameter)].add(name)

    def reader(self, node: Node) -> Read | None:
        """The reader that a node is; None if it is none."""
        name, layer = node.name(), getattr(node, "layer", None)
        if OPAQUE.search(name):
            return Read(known=False)
        if name.startswith("LinearFunction") and layer in self.linear:
            return Read(frozenset({self.linear[layer]}))
        parameters = [] if SUM.match(name) else [*self._parameters(node)]
        if not (parameters or READER.search(name)):
            return None
        owners = [names for p in parameters if (names := self.owners.get(id(p)))]
        if owners and (PRODUCT.match(name) or isinstance(node, BackwardCFunction)):
            shared = frozenset(set.intersection(*owners))
            return Read(shared, bool(shared))  # a node of several layers hides which is the last
        known = all(id(p) in self.owners for p in parameters)
        return Read(known=known and bool(parameters or layer))

    def _parameters(self, node: Node) -> Iterator[Tensor]:
        """The parameters that a node uses itself, without single numbers such as a temperature."""
        for edge in _edges(node):
            while VIEW.match(edge.name()) and edge.next_functions[0][0] is not None:
                edge = edge.next_functions[0][0]
            leaf: Tensor | None = getattr(edge, "variable", None)
            if leaf is not None and (leaf.numel() > 1 or self.owners.get(id(leaf))):
                yield leaf


def find(model: nn.Module, outputs: Any) -> Outputs:
    """The output layers of a model by what a forward pass of it returned, with its graph."""
    graph, names = _Graph(model), set[str]()
    nodes = [t.grad_fn for t in _tensors(outputs) if t.grad_fn is not None]
    every, below, seen = bool(nodes), list[Node](), set[Node]()
    for node in _walk(nodes, seen):
        reader = graph.reader(node)
        if reader is None:
            nodes += _edges(node)
        else:
            names |= reader.names
            every &= reader.known
            below += _edges(node)
    for node in _walk(below, set()):
        reader = graph.reader(node)
        names -= reader.names if reader else set()
        below += _edges(node)
    return Outputs(frozenset(names), every)


def unseen(model: nn.Module) -> list[Any]:
    """What is noted of models in `model` whose first pass is to show their output layers."""
    notes = (vars(module).get(MARK) for module in model.modules())
    return [note for note in notes if note is not None and note.found is None]


def _walk(nodes: list[Node], seen: set[Node]) -> Iterator[Node]:
    """The nodes of a list to which more are added meanwhile, each once."""
    while nodes:
        node = nodes.pop()
        if node not in seen:
            seen.add(node)
            yield node


def _edges(node: Node) -> list[Node]:
    return [edge for edge, _ in node.next_functions if edge is not None]


def _tensors(outputs: Any) -> Iterator[Tensor]:
    """The tensors of a result, which may be of a class of its own that holds them."""
    for leaf in tree_leaves(outputs):
        held = [leaf] if isinstance(leaf, Tensor) else tree_leaves(getattr(leaf, "__dict__", {}))
        yield from (tensor for tensor in held if isinstance(tensor, Tensor))
