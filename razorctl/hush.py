"""Warnings of libraries about each other, which nobody who uses them can mend, are not shown."""

import logging
import warnings

# Loggers of torch -> what they say of torchao's code, and of a CUDA toolkit without a card.
LOGGED = {
    "torch.utils._pytree": "is an Enum subclass",
    "torch.utils.cpp_extension": "No CUDA runtime is found",
}
WARNED = (r".* does not implement _stable_hash_for_caching",)


def hush() -> None:
    """Shows none of these from now on; may be called again."""
    for name, said in LOGGED.items():
        log = logging.getLogger(name)
        if not log.filters:
            log.addFilter(lambda record, said=said: said not in str(record.msg))
    for message in WARNED:
        warnings.filterwarnings("ignore", message)
