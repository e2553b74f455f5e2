"""Ops whose kernels are called by Python alone, where PyTorch's dispatcher would add nothing.

The dispatcher takes the host ten microseconds a call of an op of `torch.library.custom_op`, as long
as all else that the call takes. It is needed where anything but the kernel wants to know of a call:
compilers, autograd, modes such as those that trace memory, subclasses of tensors, and profilers.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _AutoDispatchBelowAutograd, _len_torch_dispatch_stack
from torch._C._autograd import _profiler_enabled
from torch._C._functorch import peek_interpreter_stack
from torch._library.custom_ops import CustomOpDef

# Types of arguments that nothing but a kernel takes part in.
PLAIN = frozenset(
    (Tensor, nn.Parameter, int, float, bool, str, list, torch.dtype, torch.device, type(None))
)


class Direct(CustomOpDef):
    """An op whose kernels are called directly where `alone` says so; made by `direct`.

    kernels: kind of device -> its kernel, which takes the arguments of the op.
    """

    kernels: dict[str, Callable[..., Any]]

    def register_kernel(self, device_types: Any, fn: Any = None, /) -> Any:
        """Registers the kernel of one kind of device, as `CustomOpDef` does."""
        if fn is None:
            return lambda fn: self.register_kernel(device_types, fn)
        # torch wraps what is registered; that of another device may be registered for this one too.
        known = {made: self.kernels[kind] for kind, made in self._backend_fns.items() if kind}
        self.kernels[device_types] = known.get(fn, fn)
        return super().register_kernel(device_types, fn)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and not kwargs and alone(args):
            kernel = self.kernels.get(_device(args[0]))
            if kernel is not None:
                with _AutoDispatchBelowAutograd():  # so that no result is a view, as after dispatch
                    return kernel(*args)
        return self._opoverload(*args, **kwargs)


def alone(args: tuple[Any, ...]) -> bool:
    """Whether nothing but a kernel would take part in a call with these arguments now."""
    return not (
        torch.is_grad_enabled()
        or _len_torch_dispatch_stack()
        or _profiler_enabled()
        or peek_interpreter_stack() is not None
    ) and PLAIN.issuperset(map(type, args))


def _device(x: Tensor) -> str:
    """The kind of device of x; this is faster than `x.device.type`."""
    return "cuda" if x.is_cuda else "cpu" if x.is_cpu else x.device.type


def direct(op: CustomOpDef) -> None:
    """Makes `op` one whose kernels, registered from now on, are called directly."""
    if type(op) is CustomOpDef:
        op.__class__ = Direct
        vars(op)["kernels"] = {}
