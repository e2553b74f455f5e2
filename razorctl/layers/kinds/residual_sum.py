"""Residual connections whose sum is made again, for blocks without a norm before a branch.

x -- f -- x + f -- norm     x + f comes from a copy of x, which f keeps, and from f
"""

from torch import Tensor, nn

from razorctl.layers.autocast import compute_dtype
from razorctl.layers.base import RazorLayer
from razorctl.layers.shared_copies import layouts
from razorctl.rules.base import Rule
from razorctl.rules.derived import Derived
from razorctl.rules.derived_norms import DerivedSum


def added(layer: RazorLayer, x: Tensor, f: Tensor) -> Tensor:
    """x + f in the forward of `layer`, as it can be made again from a copy of x."""
    y = x + f
    memo = layer.memo
    if memo is None or not memo.derives:
        return y
    copy = memo.find(x, layouts.of_rows(compute_dtype(x)), layer)
    branch = memo.derived((f,), layer)
    # One sum of two is made again: of a derived x this would be the second in a row.
    if branch and copy is not None and copy.elementwise and not isinstance(copy, Derived):
        memo.derive(y, DerivedSum(y.shape, y.dtype, (copy, *branch)))
    return y


class Adding(RazorLayer):
    """Base of modules that add a branch to a stream which no norm has normalized before."""

    kind = "norm"

    @classmethod
    def fits(cls, module: nn.Module, rule: Rule) -> bool:
        return rule.again

    def added(self, x: Tensor, f: Tensor) -> Tensor:
        """x + f, as it can be made again from a copy of x."""
        return added(self, x, f)
