"""Hides warnings of libraries about each other that a user can do nothing about."""

import logging
import warnings
from functools import partial

# torch's logger -> words of a warning, about torchao's code and a CUDA toolkit without a card.
LOGGED = {
    "torch.utils._pytree": "is an Enum subclass",
    "torch.utils.cpp_extension": "No CUDA runtime is found",
}
WARNED = (
    r".* does not implement _stable_hash_for_caching",
    r"Metric `\w+` will save all targets and predictions",  # needed by metrics over all rows
    r"Average precision score for one or more classes was `nan`",
    r"No positive samples found in target",
    r"The variance of predictions or target is close to zero",
)


def hush() -> None:
    """Hides the warnings LOGGED and WARNED from now on; may be called again."""
    for name, said in LOGGED.items():
        log = logging.getLogger(name)
        if not log.filters:
            log.addFilter(partial(_else, said))
    for message in WARNED:
        warnings.filterwarnings("ignore", message)


def _else(said: str, record: logging.LogRecord) -> bool:
    return said not in str(record.msg)
