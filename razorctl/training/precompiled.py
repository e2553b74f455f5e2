"""Compiles the kernels of a run in threads before the first step, which compiles one by one."""

import logging
import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch

from razorctl import units
from razorctl.config.job import Job
from razorctl.config.recipe import Recipe
from razorctl.errors import first_line
from razorctl.memory.trace_cache import Cache
from razorctl.ops import kernels
from razorctl.planning import job_trace
from razorctl.planning.cached_traces import trace_key

log = logging.getLogger(__name__)


def precompile(
    job: Job,
    recipe: Recipe,
    classes: int,
    device: torch.device,
    progress: Callable[[str], None] = lambda _: None,
) -> None:
    """Compiles the kernels that a step of a resolved job launches on a CUDA card.

    The step is traced as in `plan`, and its launches are recorded. Triton stores its kernels on
    disk, so this is done once for a job and a kind of card; other kernels are compiled at their
    launch. If the trace fails, there is a warning, and training goes on. A kernel that does not
    compile is left to its op. Does nothing on other devices than CUDA.

    progress: called with the number of kernels.
    """
    if device.type != "cuda" or not kernels.fused(device) or find_spec("triton") is None:
        return
    try:
        import triton

        from razorctl.ops.triton.compiled import compile_all
        from razorctl.ops.triton.recorded import Card, distinct

        card, cache = Card.of(device), Cache()
        key: list[Any] = ["compiled", triton.__version__, *card, *trace_key(job, recipe, classes)]
        if cache.get(*key):
            return
        launches = job_trace.launches(job, recipe, classes, card, device=device)[card]
        variants, threads = distinct(launches), os.cpu_count() or 1
        if variants:
            progress(f"compiling {units.count(len(variants), 'kernel')}")
            try:
                compile_all(variants, card.capability, threads)
            except Exception as error:
                log.info("a kernel is not compiled before the first step: %s", error)
                return
        cache.put(len(variants), *key)
    except Exception as error:
        log.warning(
            "kernels are compiled in the first step, and not all before it: %s", first_line(error)
        )
