"""Recipe: all that pruning needs; and the named methods a recipe can choose."""

import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from razorctl.errors import UsageError
from razorctl.registry import find, unknown
from razorctl.settings import check_types

Attention = Literal["auto", "stored", "flash", "sparse-flash"]
Joint = Literal["weights", "branches"]
WEIGHTS = ("linear", "conv")  # the layer kinds whose weights a joint budget draws


@dataclass(frozen=True)
class Method:
    """A named set of rules: `rules` maps a layer kind to a name in `rules.RULES`.

    A kind that is not named stays stock. attention: the backend that `Recipe.attention="auto"`
    means; "auto" leaves the model's own. unbiased: what `Recipe.unbiased=None` means.
    checkpoints: whether the model's own activation checkpointing is switched on.
    """

    name: str
    summary: str
    source: str
    rules: Mapping[str, str]
    attention: Attention = "auto"
    unbiased: bool = False
    checkpoints: bool = False


def _paper_rules(weights: str) -> dict[str, str]:
    """The rules that Back Razor and all that follow it share, but for the layers with weights."""
    return {
        "linear": weights,
        "conv": weights,
        "norm": "topk",
        "scale": "topk",
        "attention": "topk",
        "activation": "half",
        "dropout": "dense",  # its mask is kept exactly, in bits
    }


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method("full", "every activation dense and exact", "baseline", {}),
        Method(
            "checkpoint",
            "the model's own activation checkpointing, exact",
            "baseline",
            {},
            checkpoints=True,
        ),
        Method(
            "backrazor",
            "the largest elements of each input",
            "Back Razor, NeurIPS 2022",
            _paper_rules("topk"),
            attention="stored",
        ),
        Method(
            "prebackrazor-",
            "the columns of largest norm",
            "Sheared Backpropagation, CVPR 2024, Tab. 4",
            _paper_rules("columns-norm"),
            attention="stored",
        ),
        Method(
            "prebackrazor",
            "columns drawn before the forward pass by a bandit",
            "Sheared Backpropagation, CVPR 2024, Alg. 1 and 2",
            _paper_rules("columns-bandit"),
            attention="stored",
        ),
        Method(
            "prebackrazor++",
            "as prebackrazor, with fused attention of pruned q, k, v",
            "Sheared Backpropagation, CVPR 2024, Tab. 1 and 2",
            _paper_rules("columns-bandit"),
            attention="sparse-flash",
        ),
    )
}
DEFAULT_METHOD = "prebackrazor++"


@dataclass(frozen=True)
class Recipe:
    """Method, ratio, joint budget, attention backend and seed. Raises UsageError if unsound.

    ratio: share of an activation that is pruned, in [0, 1).
    joint_budget: share of parameter blocks that get a gradient in a step, in (0, 1].
    joint: what a block is; `weights` are the weight tensors of the pruned layers.
    attention: `stored` keeps the probabilities, pruned by the method; `flash` keeps q, k, v
        dense; `sparse-flash` prunes them and runs attention again in the backward pass; `auto` is
        the method's own, and for a method that prunes nothing the model's.
    unbiased: scale kept gradients by 1 / p; None is the method's measured default.
    mean_correction: keep the mean of each column exactly and prune only what is left.
    seed: of the draws of parameter blocks; those of columns start where torch's generator says.
    """

    method: str = DEFAULT_METHOD
    ratio: float = 0.9
    joint_budget: float = 1.0
    joint: Joint = "weights"
    attention: Attention = "auto"
    unbiased: bool | None = None
    mean_correction: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        check_types(self)
        find("method", self.method, METHODS)
        if not 0 <= self.ratio < 1:
            raise UsageError(f"ratio {self.ratio!r} is outside [0, 1); 0.9 prunes nine tenths.")
        if not 0 < self.joint_budget <= 1:
            raise UsageError(
                f"joint budget {self.joint_budget!r} is outside (0, 1]; "
                "at 1 every weight gets a gradient in every step."
            )
        for name, value, choices in (
            ("joint", self.joint, get_args(Joint)),
            ("attention", self.attention, get_args(Attention)),
        ):
            if value not in choices:
                raise unknown(name, str(value), choices)

    @property
    def rules(self) -> Mapping[str, str]:
        """Layer kind -> name of its rule, for the kinds that are not to stay stock."""
        # At ratio 0 nothing is pruned, so nothing is packed or drawn either.
        rules = METHODS[self.method].rules if self.ratio > 0 else {}
        if self.joint_budget < 1 and not rules:
            rules = dict.fromkeys(WEIGHTS, "dense")
        return rules

    @property
    def backend(self) -> Attention:
        """The attention backend, with the method's own for `auto`."""
        if self.attention == "auto" and self.ratio > 0:
            return METHODS[self.method].attention
        return self.attention

    @property
    def scaled(self) -> bool:
        """Whether kept gradients are scaled by 1 / p."""
        return METHODS[self.method].unbiased if self.unbiased is None else self.unbiased

    def to_toml(self) -> str:
        """TOML of every field that is set."""
        import tomli_w  # reading needs none

        return tomli_w.dumps({k: v for k, v in asdict(self).items() if v is not None})

    @classmethod
    def from_toml(cls, text: str) -> "Recipe":
        """The recipe that `to_toml` wrote; raises UsageError for anything else."""
        try:
            values: dict[str, Any] = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise UsageError(f"the recipe is not TOML, mend it: {error}.") from None
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                raise unknown("recipe field", name, known)
        return cls(**values)
