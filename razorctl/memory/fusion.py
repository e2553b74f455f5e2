"""The kernels of a traced step after `torch.compile`, which fuses operations between products.

At best all operations between two products are one kernel, which reads and writes each tensor once,
and writes none that nothing reads later. Inductor does not fuse sums over rows with what works on
whole rows, so these may read their operands again.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from razorctl.memory.fake_mode import storage_key
from razorctl.memory.operations import bytes_of, tensors
from razorctl.memory.trace_cache import FUSED, KernelWork


class Fusion:
    """Counts the kernels of a compiled step, from the operations of a step that is not.

    kernels: how often each runs, up to the last product.
    """

    def __init__(self) -> None:
        self.kernels: Counter[KernelWork] = Counter()
        self._bytes = self._again = 0
        self._inside = set[int]()  # storages that the operations since the last product touched
        self._unread: dict[int, int] = {}  # storages that may never be written -> their bytes

    def note(
        self, args: Iterable[Any], result: Any, kernels: Mapping[KernelWork, int], alone: bool
    ) -> None:
        """Notes an operation with its kernels; alone: whether it is not compiled."""
        read, written = tensors(args), tensors((result,))
        if alone or any(kernel.operations or kernel.own for kernel in kernels):
            for tensor in read:
                self._bytes += self._unread.pop(storage_key(tensor), 0)
            self.end()
            self.kernels.update(kernels)
        elif kernels:
            sums = [kernel.bytes for kernel in kernels if kernel.reduces]
            if sums and (len(kernels) > 1 or 2 * sum(map(bytes_of, written)) < sums[-1]):
                self._again += sums[-1]
            for tensor in read:
                self._read(tensor)
            for tensor in written:
                if storage_key(tensor) not in self._inside:
                    self._inside.add(storage_key(tensor))
                    self._unread[storage_key(tensor)] = bytes_of(tensor)

    def forget(self, key: int) -> None:
        """Forgets a storage that is freed."""
        self._inside.discard(key)
        self._unread.pop(key, None)

    def end(self) -> None:
        """Ends a kernel of fused operations."""
        if self._bytes:
            self.kernels[KernelWork("fp32", 0, self._bytes, written=self._again, op=FUSED)] += 1
        self._bytes = self._again = 0
        self._inside.clear()

    def _read(self, tensor: Tensor) -> None:
        """A tensor from outside is read once, and written before if it was not."""
        key = storage_key(tensor)
        if key not in self._inside:
            self._inside.add(key)
            self._bytes += bytes_of(tensor) + self._unread.pop(key, 0)
