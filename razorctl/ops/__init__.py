"""Functions from tensors to tensors. Each file defines ops by bodies of PyTorch operations.

The kernels of an op are in the files of the same name in `cpu` and `triton`.
"""

from importlib import import_module
from pkgutil import iter_modules

from razorctl.ops import kernels

# All ops are imported before any kernel, since kernels use the ops and kernels of other files.
_FILES = [f"{__name__}.{file.name}" for file in iter_modules(__path__) if not file.ispkg]
for _file in _FILES:
    import_module(_file)
for _file in _FILES:
    kernels.attach(_file)
