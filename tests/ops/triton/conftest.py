"""Triton kernels run in Triton's interpreter here, on CPU tensors; no variable has to be set.

TRITON_INTERPRET=1 would have to be set before triton is first imported, and then nothing in the
process could be compiled. The fixture `interpreted` swaps the jitted functions instead.
"""

import sys
from collections.abc import Callable
from types import ModuleType

import pytest

try:
    import triton
    import triton.experimental.gluon  # the interpreter would import it, when it is too late
    from triton.language import constexpr
    from triton.runtime import interpreter
    from triton.runtime.jit import JITFunction
except ImportError:  # where PyTorch comes without it
    collect_ignore_glob = ["test_*.py"]
else:

    class Interpreted(interpreter.InterpretedFunction):
        """A function whose calls from kernels take back what they patch, or nothing compiles."""

        def __call__(self, *args, **kwargs):
            scope = interpreter._patch_lang(self.fn)
            try:
                return self.rewrite()(*args, **kwargs)
            finally:
                scope.restore()


@pytest.fixture
def interpreted(monkeypatch) -> Callable[[ModuleType], ModuleType]:
    """Makes the kernels of a module, and all that they call, run in the interpreter."""
    # By identity: hashing one looks at all that it calls.
    swapped: dict[int, Interpreted] = {}

    def swap(module: ModuleType) -> ModuleType:
        own = [m for name, m in sys.modules.items() if name.startswith("razorctl.ops.triton")]
        for place in (module, *own, triton.language, triton.language.standard):
            for name, value in list(vars(place).items()):
                if isinstance(value, JITFunction):
                    twin = swapped.setdefault(id(value), Interpreted(value.fn))
                    monkeypatch.setattr(place, name, twin)
                elif isinstance(value, constexpr) and place in (module, *own):
                    monkeypatch.setattr(place, name, value.value)
        return module

    return swap
