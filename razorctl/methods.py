"""Methods by name: a rule for each layer kind, and the defaults of a recipe's settings."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Attention = Literal["auto", "stored", "flash", "sparse-flash"]
WEIGHTS = ("linear", "conv")  # the layer kinds whose weights a joint budget draws
# The layer kinds whose gradient is exact under all methods: masks and positions of maxima are
# stored in bits, and heads compute the gradient of their logits in the forward pass.
EXACT = {"dropout": "dense", "pool": "dense", "head": "dense"}
HEAD = {"head": "dense"}
CLOSE = 0.98  # the least cosine to the exact gradient that is called close
Part = Literal["", "adapters", "bias", "head"]
Family = Literal["attention", "convolution"]  # models with fused attention, and others
FAMILIES: tuple[Family, ...] = ("attention", "convolution")


@dataclass(frozen=True)
class Method:
    """A named set of rules.

    All methods except `full` and torchao's compute the cross-entropy of a language model without
    storing logits, and of a segmentation model without storing upsampled logits. Both are exact. A
    language model's output embeddings are exact too.

    Args:
        name: as in `METHODS`.
        summary: what it does, for `razorctl list`.
        source: the paper or library that it comes from.
        rules: layer kind -> name in `rules.registry.RULES`; layer kinds without a rule stay stock.
        attention: the backend for `Recipe.attention="auto"`; "auto" leaves the model's own.
        int8: the default of `Recipe.int8_weight_grad` and `Recipe.int8_input_grad`.
        checkpoints: whether the model's own activation checkpointing is switched on.
        part: the part that is trained: LoRA `adapters` and the head, every `bias` and the head, or
            the `head` alone; empty if all weights are trained.
        torchao: whether linear layers are torchao's, with int8 GEMMs in both passes.
        ratio: the meaning of `Recipe.ratio`: the `pruned` share; a byte budget (`bytes`), for which
            `rules.allocation` chooses the other rules; or `nothing`.
        skips_outputs: whether linear layers whose output only the loss reads stay stock.
        cosines: family -> width of activations (`rules.allocation.width`) -> ratio -> the cosine
            between the whole gradient and the exact one in single precision, relative to the cosine
            of `full` at this width. It is the least over the tasks with a model of the family that
            can meet the ratio, by scripts/bench/gradients.py. Methods that ignore the ratio have
            the key 1; methods that are close at no ratio have none.
    """

    name: str
    summary: str
    source: str
    rules: Mapping[str, str]
    attention: Attention = "auto"
    int8: bool = False
    checkpoints: bool = False
    part: Part = ""
    torchao: bool = False
    ratio: Literal["pruned", "bytes", "nothing"] = "pruned"
    skips_outputs: bool = False
    cosines: Mapping[Family, Mapping[str, Mapping[float, float]]] = field(default_factory=dict)

    @property
    def prunes(self) -> bool:
        """Whether it stores approximate activations in some layer kinds."""
        return not set(self.rules) <= set(EXACT) or self.ratio == "bytes"

    @property
    def approximates(self) -> bool:
        """Whether some layer kinds store or compute an approximation."""
        return self.prunes or self.torchao

    def close_up_to(self, family: Family, width: str) -> float:
        """The ratio up to which all measured cosines are at least CLOSE; 0 if there is none."""
        measured = self.cosines.get(family, {}).get(width, {})
        far = min((ratio for ratio, cosine in measured.items() if cosine < CLOSE), default=2.0)
        return max((ratio for ratio in measured if ratio < far), default=0.0)

    @property
    def has_ratio(self) -> bool:
        """Whether `Recipe.ratio` has a meaning for this method."""
        return self.prunes and self.ratio != "nothing"


def _paper_rules(weights: str) -> dict[str, str]:
    """The rules of the paper methods, with the rule `weights` for linear and conv layers."""
    return {
        "linear": weights,
        "conv": weights,
        "norm": "topk",
        "channel-norm": "topk",
        "scale": "topk",
        "attention": "topk",
        "activation": "half",
        **EXACT,
    }


def _one_rule(rule: str) -> dict[str, str]:
    kinds = ("linear", "conv", "norm", "channel-norm", "scale", "attention", "activation")
    return dict.fromkeys(kinds, rule) | EXACT


def _without_ratio(cosine: float) -> dict[Family, dict[str, dict[float, float]]]:
    """`Method.cosines` for a method that ignores the ratio: the same for all models."""
    return {family: {width: {1: cosine} for width in ("wide", "narrow")} for family in FAMILIES}


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method("full", "full fine-tuning: stores every activation exactly", "baseline", {}),
        Method(
            "checkpoint",
            "checkpoints activations of each block; exact; best if optimizer state fills memory",
            "baseline",
            HEAD,
            checkpoints=True,
        ),
        Method(
            "lora",
            "trains rank-8 adapters of linear layers, and the classifier; other weights are frozen",
            "LoRA, ICLR 2022, through PEFT",
            HEAD,
            part="adapters",
        ),
        Method(
            "bias",
            "trains biases and the classifier; other weights are frozen",
            "TinyTL, NeurIPS 2020; BitFit, 2021",
            HEAD,
            part="bias",
        ),
        Method(
            "head",
            "trains only the classifier (linear probe)",
            "baseline",
            HEAD,
            part="head",
        ),
        Method(
            "torchao-int8",
            "runs all GEMMs of linear layers in int8, also forward; stores as much as full",
            "torchao's int8 mixed-precision training",
            {},
            torchao=True,
            ratio="nothing",
        ),
        Method(
            "backrazor",
            "stores the elements of largest magnitude of each layer input",
            "Back Razor, NeurIPS 2022",
            _paper_rules("topk"),
            attention="stored",
        ),
        Method(
            "prebackrazor-",
            "stores the columns of largest norm of each layer input",
            "Sheared Backpropagation, CVPR 2024, Tab. 4",
            _paper_rules("columns-norm"),
            attention="stored",
        ),
        Method(
            "prebackrazor",
            "stores columns of each layer input, sampled by a bandit before the forward pass",
            "Sheared Backpropagation, CVPR 2024, Alg. 1 and 2",
            _paper_rules("columns-bandit"),
            attention="stored",
        ),
        Method(
            "prebackrazor++",
            "like prebackrazor; recomputes fused attention from pruned q, k, v",
            "Sheared Backpropagation, CVPR 2024, Tab. 1 and 2",
            _paper_rules("columns-bandit"),
            attention="sparse-flash",
        ),
        Method(
            "half",
            "stores every layer input in half precision",
            "a mixed-precision copy, in single-precision training",
            _one_rule("half"),
            attention="sparse-flash",
            ratio="nothing",
            skips_outputs=True,
            cosines=_without_ratio(1.0),
        ),
        Method(
            "int8",
            "stores every layer input in 8 bits; runs backward GEMMs in int8",
            "like Mesa (2021), with a scale for each column",
            _one_rule("8-bit"),
            attention="sparse-flash",
            int8=True,
            ratio="nothing",
            skips_outputs=True,
            cosines=_without_ratio(0.999),
        ),
        Method(
            "int2",
            "stores every layer input in 2 bits, rounded stochastically",
            "like ActNN (2021), with a scale for each column",
            _one_rule("2-bit-stochastic"),
            attention="sparse-flash",
            ratio="nothing",
            skips_outputs=True,
        ),
        Method(
            "razor",
            "stores a few layer inputs in a few bits, within the ratio, and recomputes the others",
            "razorctl",
            HEAD,
            attention="sparse-flash",
            int8=True,
            ratio="bytes",
            skips_outputs=True,
            cosines={
                "attention": {
                    "wide": {
                        0.5: 0.999,
                        0.75: 0.999,
                        0.8: 0.999,
                        0.85: 0.9989,
                        0.9: 0.9989,
                        0.95: 0.9989,
                        0.97: 0.9984,
                        0.98: 0.9961,
                    },
                    "narrow": {
                        0.5: 0.9992,
                        0.75: 0.9992,
                        0.8: 0.9992,
                        0.85: 0.9992,
                        0.9: 0.9984,
                        0.95: 0.9989,
                        0.97: 0.9982,
                        0.98: 0.9888,
                    },
                },
                "convolution": {
                    "wide": {
                        0.5: 0.9999,
                        0.75: 0.9999,
                        0.8: 0.9999,
                        0.85: 0.9999,
                        0.9: 0.9947,
                        0.95: 0.9859,
                        0.97: 0.9866,
                        0.98: 0.9387,
                    },
                    "narrow": {
                        0.5: 1,
                        0.75: 1,
                        0.8: 1,
                        0.85: 1,
                        0.9: 1,
                        0.95: 0.9857,
                        0.97: 0.935,
                        0.98: 0.6266,
                    },
                },
            },
        ),
    )
}
DEFAULT_METHOD = "razor"
