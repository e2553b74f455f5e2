"""Residual connections whose sum is recomputed, in blocks without a norm before the branch.

x -- f -- x + f -- norm     x + f is recomputed from the copy of x that f stores, and from f
"""

from torch import Tensor, nn

from razorctl.layers.autocast import compute_dtype
from razorctl.layers.base import RazorLayer
from razorctl.layers.shared_copies import layouts
from razorctl.rules.base import Rule
from razorctl.rules.derived import Derived
from razorctl.rules.derived_norms import DerivedSum


def added(layer: RazorLayer, x: Tensor, f: Tensor) -> Tensor:
    """x + f in the forward of `layer`; derived from a copy of x if f is derived."""
    y = x + f
    memo = layer.memo
    if memo is None or not memo.derives:
        return y
    copy = memo.find(x, layouts.of_rows(compute_dtype(x)), layer)
    branch = memo.derived((f,), layer)
    # At most one sum in a row is recomputed: with a derived x this would be the second.
    if branch and copy is not None and copy.elementwise and not isinstance(copy, Derived):
        memo.derive(y, DerivedSum(y.shape, y.dtype, (copy, *branch)))
    return y


class Adding(RazorLayer):
    """Base of modules that add a branch to a stream without a norm before the branch."""

    kind = "norm"

    @classmethod
    def fits(cls, module: nn.Module, rule: Rule) -> bool:
        return rule.again

    def added(self, x: Tensor, f: Tensor) -> Tensor:
        """x + f, derived from a copy of x if f is derived."""
        return added(self, x, f)
