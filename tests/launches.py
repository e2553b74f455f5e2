"""The launches of the default jobs on cards, recorded from their steps."""

from dataclasses import replace
from functools import cache

from razorctl.config.job import Job
from razorctl.config.recipe import Recipe
from razorctl.ops.triton.gemm_tiles import scaled_gemm_kernel
from razorctl.ops.triton.recorded import Card, Launch, distinct
from razorctl.ops.triton.variants import DTYPES, Variant
from razorctl.planning import gpus, job_trace
from tests.models import few_blocks, registered
from tests.planning.test_gpus import CHIPS

CARDS = (75, 80, 86, 89, 90, 100, 120)  # compute capabilities of the presets
JOBS = {  # model, rows, recipe
    "vit": ("vit-b16", 32, Recipe("razor", 0.9)),
    "vit in int8": ("vit-b16", 32, Recipe("razor", 0.5, int8_forward=True)),
    "vit of the papers": ("vit-b16", 32, Recipe("prebackrazor++", 0.9)),
    "bert": ("bert-base", 32, Recipe("razor", 0.9)),
    "decoder": ("smollm2-135m", 4, Recipe("razor", 0.9)),
    "cnn": ("timm:resnet18", 32, Recipe("razor", 0.5)),
}


PRODUCTS = 2  # that each card compiles; --every-variant compiles all


@cache
def launched(name: str) -> dict[int, list[Launch]]:
    """Card -> the launches of a step of one of JOBS, in bf16, on Turing in fp16."""
    model, rows, recipe = JOBS[name]
    by_card: dict[int, list[Launch]] = {}
    with registered(few_blocks(model, 1)):  # a second one launches the same
        for cards, precision in (((75,), "fp16"), (CARDS[1:], "bf16")):
            task = "causal-lm" if name == "decoder" else None
            job = Job(model, "random", batch_size=rows, precision=precision, task=task)
            job = job.resolved({"learning_rate": 1e-3, "weight_decay": 0.0}, 100)
            launches = job_trace.launches(job, recipe, 100, *map(Card, cards))
            by_card |= {card.capability: launches[card] for card in launches}
    return by_card


THIRSTIEST = "h100-80gb"  # the preset that needs most bytes for each multiprocessor


@cache
def default_job(name: str) -> list[Launch]:
    """The launches of the default job on a card, without those that only find a fastest way."""
    gpu, (processors, *_) = gpus.load(name), CHIPS[name]
    precision = "bf16" if "bf16" in gpu.rates else "fp16"
    job = Job("vit-b16", "cifar100", batch_size=128, precision=precision)
    job = job.resolved({"learning_rate": 1e-3, "weight_decay": 0.0}, 50_000)
    card = Card(capability_of(name), processors)
    with registered(few_blocks("vit-b16", 1)):
        launches = job_trace.launches(job, Recipe("razor", 0.9), 100, card)[card]
    return [launch for launch in launches if not launch.trial]


def capability_of(name: str) -> int:
    return int(gpus.load(name).compute_capability.replace(".", ""))


def compilations(card: int, every_kernel: bool) -> list[Variant]:
    """The variants of a card, so that the cards together compile all that JOBS compile for any.

    Products have tiles and instructions of the card, so each card compiles the most demanding; each
    other variant is compiled for one card, unless `default_job` launches it, which is compiled
    elsewhere. `every_kernel` adds the most demanding variant of each kernel.
    """
    variants = demanding(card)
    products = [variant for variant in variants if variant.kernel is scaled_gemm_kernel]
    others = [variant for variant in variants if variant.kernel is not scaled_gemm_kernel]
    most = {variant.kernel.__name__: variant for variant in others} if every_kernel else {}
    elsewhere = {alike(launch.variant) for launch in default_job(THIRSTIEST)}
    left = [variant for variant in others if alike(variant) not in elsewhere]
    parts = *products[-PRODUCTS:], *left[CARDS.index(card) :: len(CARDS)], *most.values()
    return list({variant.key: variant for variant in parts}.values())


def demanding(card: int) -> list[Variant]:
    """The variants that JOBS compile for a card, without those surely less demanding than another.

    Of launches that differ only in which numbers are multiples of 16, one with fewest multiples is
    left; of products in the same tiles one with most operands and bytes, and of those that make
    copies one with most sums of a thread. The most demanding are last.
    """
    every = distinct(launch for name in JOBS for launch in launched(name)[card])
    most: dict[object, Variant] = {}
    for variant in sorted(every, key=lambda variant: (_demand(variant), alike(variant))):
        key: tuple[object, ...] = variant.key[0], variant.key[2], variant.key[4]
        if "zero_point" in variant.signature and variant.kernel is scaled_gemm_kernel:
            key = key[0], "copy"
        elif variant.kernel is scaled_gemm_kernel:
            sizes = (variant.constexprs[name] for name in ("BM", "BN", "BK"))
            key = key[0], *sizes, "terms_each" in variant.signature, key[2]
        else:
            key = *key, variant.key[1]
        most[key] = variant
    return sorted(most.values(), key=lambda variant: (_demand(variant), alike(variant)))


def alike(variant: Variant) -> str:
    """A key that is equal for variants in Turing's 16 bits and in those of other cards."""
    constexprs = {name: value for name, value in variant.constexprs.items() if name != "LIMIT"}
    return str(replace(variant, constexprs=constexprs).key).replace("fp16", "bf16")


def _demand(variant: Variant) -> tuple[int, int, int, int]:
    """The number of pointers, bytes of their elements, and arguments that are not aligned.

    The last is the number of sums that a thread of a product has.
    """
    pointers = [kind[1:] for kind in variant.signature.values() if kind[0] == "*"]
    sizes = (DTYPES[kind].itemsize for kind in pointers if kind in DTYPES)
    sums = variant.constexprs.get("BM", 0) * variant.constexprs.get("BN", 0) // variant.num_warps
    return len(pointers), sum(sizes), len(variant.unaligned), sums
