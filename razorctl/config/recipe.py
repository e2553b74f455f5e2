"""Recipe: the settings of pruning."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from razorctl.config.settings import check_seed, check_types
from razorctl.errors import UsageError
from razorctl.methods import (
    CLOSE,
    DEFAULT_METHOD,
    EXACT,
    HEAD,
    METHODS,
    WEIGHTS,
    Attention,
    Family,
    Part,
)
from razorctl.registry import find, unknown
from razorctl.rules.allocation import Names, allocate, width

Joint = Literal["weights", "branches"]
LOOSE = 0.5  # up to this ratio a model can meet it while window attention stays stock


def _same_for_all_widths(rules: Mapping[str, str]) -> dict[str, Names]:
    """The rules of a method, for activations of every width."""
    return {kind: Names(name, name) for kind, name in rules.items()}


@dataclass(frozen=True)
class Recipe:
    """Method, ratio, joint budget, attention backend, options for any method, and seed.

    Raises UsageError for invalid values.

    Args:
        method: a name in `methods.METHODS`.
        ratio: share of an activation that is pruned, in [0, 1). For `razor` it sets a byte budget:
            at most 1 - ratio of the saved bytes of `full`. `sparsify` meets the budget on models
            like the measured ones, `sparsify_within` on any model.
        joint_budget: share of parameter blocks that get a gradient in a step, in (0, 1].
        joint: the kind of blocks. `weights`: a weight tensor of a pruned layer. `branches`: a
            residual branch, with any method; steps that do not sample it skip its whole backward
            pass. Sampling half of the branches cost no accuracy in text encoders, and much on
            images.
        attention: `stored` stores q, k, v and the probabilities by the method's rule; `flash`
            stores q, k, v dense; `sparse-flash` stores them by the method's rule and recomputes
            attention in the backward pass; `auto` is the method's backend, or the model's if the
            method has none.
        unbiased: scale the gradients of sampled columns and blocks by 1 / p; None is no.
        mean_correction: store the mean of each column exactly and prune only the rest.
        int8_weight_grad, int8_input_grad: run the weight gradient and the input gradient of linear
            layers in int8; None is the method's default.
        int8_forward: also run the forward pass of linear layers in int8 in training steps, which
            makes it approximate. The loss of accuracy was within the spread of seeds.
        activation_checkpointing: run the model's own activation checkpointing with the method. The
            byte budget of `razor` is met with and without it.
        lora: train only LoRA adapters and the classifier, with a method that trains all weights.
        lora_rank, lora_alpha: adapters are scaled by alpha / rank; an alpha of None is 2 * rank.
        lora_targets: names of the linear layers to adapt, whole or from a dot on, with * and commas
            (`q_proj,v_proj`, `*.attn.qkv`); None is all but the classifier or the head.
        seed: of the draws of parameter blocks. Draws of columns use torch's generator.
    """

    method: str = DEFAULT_METHOD
    ratio: float = 0.9
    joint_budget: float = 1.0
    joint: Joint = "weights"
    attention: Attention = "auto"
    unbiased: bool | None = None
    mean_correction: bool = False
    int8_weight_grad: bool | None = None
    int8_input_grad: bool | None = None
    int8_forward: bool = False
    activation_checkpointing: bool = False
    lora: bool = False
    lora_rank: int = 8
    lora_alpha: float | None = None
    lora_targets: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_types(self)
        check_seed(self.seed)
        find("method", self.method, METHODS)
        if not 0 <= self.ratio < 1:
            raise UsageError(f"ratio {self.ratio!r} is outside [0, 1); give one such as 0.9.")
        if not 0 < self.joint_budget <= 1:
            raise UsageError(
                f"joint budget {self.joint_budget!r} is outside (0, 1]; "
                "give 1 for a gradient of every block in every step."
            )
        if METHODS[self.method].torchao and self.joint_budget < 1 and self.joint == "weights":
            raise UsageError(
                f"{self.method} has layers of torchao, whose weights a joint budget cannot sample; "
                "set joint to 'branches', or joint_budget to 1."
            )
        if self.lora and METHODS[self.method].part not in ("", "adapters"):
            raise UsageError(
                f"{self.method} trains another part of the model than adapters; leave lora out, or "
                "choose another method."
            )
        if self.lora_rank < 1 or not (self.lora_alpha is None or 0 < self.lora_alpha < math.inf):
            raise UsageError(
                f"lora rank {self.lora_rank} or alpha {self.lora_alpha} is not above 0; give 8 and "
                "16, or such."
            )
        if self.joint_budget < 1 and self.part:
            raise UsageError(
                f"{'lora' if self.lora else self.method} freezes the weights that a joint budget "
                "draws; set joint_budget to 1."
            )
        for name, value, choices in (
            ("joint", self.joint, get_args(Joint)),
            ("attention", self.attention, get_args(Attention)),
        ):
            if value not in choices:
                raise unknown(name, str(value), choices)
        _ = self.rules  # raises UsageError for a ratio that cannot be met

    @property
    def part(self) -> Part:
        """The part of the model that is trained instead of all weights, as `Method.part`."""
        return "adapters" if self.lora else METHODS[self.method].part

    @property
    def checkpoints(self) -> bool:
        """Whether the model's own activation checkpointing is switched on."""
        return self.activation_checkpointing or METHODS[self.method].checkpoints

    @property
    def has_effect(self) -> bool:
        """Whether the method changes anything: at ratio 0 only one that ignores the ratio does."""
        return self.ratio > 0 or METHODS[self.method].ratio == "nothing"

    @property
    def has_byte_budget(self) -> bool:
        """Whether the ratio sets a byte budget."""
        return METHODS[self.method].ratio == "bytes" and self.has_effect

    @property
    def approximates(self) -> bool:
        """Whether the gradient differs from the gradient of full fine-tuning."""
        method = METHODS[self.method]
        pruned = self.has_effect and method.approximates
        return pruned or bool(self.part) or self.joint_budget < 1

    def cosine(self, precision: str, family: Family) -> float | None:
        """The measured cosine between the whole gradient and the exact one, at a `Job.precision`.

        It is relative to the cosine of `full`, so that rounding to 16 bits itself does not count.
        It is the least of the measured models of a family, at the nearest measured ratio that is
        not smaller. 1 if the method is exact; None if it was not measured or is close nowhere.
        """
        if not self.approximates and not self.int8_forward:
            return 1.0
        if self.part or self.joint_budget < 1 or self.int8_forward:
            return None
        measured = METHODS[self.method].cosines.get(family, {}).get(width(precision), {})
        return measured.get(min((r for r in measured if r >= self.ratio), default=-1.0))

    def close(self, precision: str, family: Family) -> bool:
        """Whether the gradient is exact, or was measured to be close to it at a precision."""
        cosine = self.cosine(precision, family)
        return cosine is not None and cosine >= CLOSE

    @property
    def rules(self) -> Mapping[str, Names]:
        """Layer kind -> names of its rules, without the kinds that stay stock."""
        method = METHODS[self.method]
        rules = _same_for_all_widths(HEAD if self.lora or self.activation_checkpointing else {})
        if self.has_effect:
            if method.ratio == "bytes":
                rules |= {**self.allocated, **_same_for_all_widths(EXACT)}
            rules |= _same_for_all_widths(method.rules)
        drawn = self.joint_budget < 1 and self.joint == "weights"
        if drawn and not set(WEIGHTS) <= set(rules):
            rules = _same_for_all_widths(dict.fromkeys(WEIGHTS, "dense")) | rules
        return rules

    @property
    def allocated(self) -> Mapping[str, Names]:
        """Layer kind -> names of the rules for the ratio of a byte budget."""
        return allocate(self.ratio)

    @property
    def runs_again(self) -> bool:
        """Whether attention that is recognized only by its code is recomputed."""
        recomputes = self.backend == "sparse-flash" and "attention" in self.rules
        return recomputes and not self.is_loose

    @property
    def is_loose(self) -> bool:
        """Whether the byte budget allows such attention to stay stock, which is faster."""
        return self.has_byte_budget and self.ratio <= LOOSE

    @property
    def prunes(self) -> bool:
        """Whether any layer kind has a rule that makes its gradient inexact, or is drawn."""
        return not set(self.rules) <= set(EXACT)

    @property
    def backend(self) -> Attention:
        """The attention backend; `auto` becomes the method's backend."""
        if self.attention == "auto" and self.has_effect:
            return METHODS[self.method].attention
        return self.attention

    @property
    def scaled(self) -> bool:
        """Whether the gradients of drawn columns and blocks are scaled by 1 / p."""
        return bool(self.unbiased)

    @property
    def int8(self) -> tuple[bool, bool, bool]:
        """Whether the weight gradient, the input gradient and the forward pass run in int8."""
        default = self.has_effect and METHODS[self.method].int8
        chosen = (self.int8_weight_grad, self.int8_input_grad)
        weight, inputs = (default if flag is None else flag for flag in chosen)
        return weight, inputs, self.int8_forward
