"""Recipe: all that pruning needs; and the named methods a recipe can choose."""

import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

import tomli_w

from razorctl.errors import UsageError
from razorctl.registry import find, unknown

Attention = Literal["auto", "stored", "flash", "sparse-flash"]
Joint = Literal["weights", "branches"]


@dataclass(frozen=True)
class Method:
    """A named set of rules: `rules` maps a layer kind to a name in `rules.RULES`.

    A kind that is not named stays stock. `unbiased` is what `Recipe.unbiased=None` means.
    """

    name: str
    summary: str
    source: str
    rules: Mapping[str, str]
    unbiased: bool = False


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method("full", "every activation dense and exact", "baseline", {}),
        Method(
            "backrazor",
            "the largest elements of each input",
            "Back Razor, NeurIPS 2022",
            {"linear": "topk"},
        ),
        Method(
            "prebackrazor-",
            "the columns of largest norm",
            "Sheared Backpropagation, CVPR 2024, Tab. 4",
            {"linear": "columns-norm"},
        ),
        Method(
            "prebackrazor",
            "columns drawn before the forward pass by a bandit",
            "Sheared Backpropagation, CVPR 2024, Alg. 1 and 2",
            {"linear": "columns-bandit"},
        ),
    )
}
DEFAULT_METHOD = "prebackrazor"


@dataclass(frozen=True)
class Recipe:
    """Method, ratio, joint budget, attention backend and seed. Raises UsageError if unsound.

    ratio: share of an activation that is pruned, in [0, 1).
    joint_budget: share of parameter blocks that get a gradient in a step, in (0, 1].
    joint: what a block is; `weights` are the weight tensors of the pruned layers.
    attention: attention backend.
    unbiased: scale kept gradients by 1 / p; None is the method's measured default.
    seed: of the draws of parameter blocks; columns are drawn from torch's default generator.
    """

    method: str = DEFAULT_METHOD
    ratio: float = 0.9
    joint_budget: float = 1.0
    joint: Joint = "weights"
    attention: Attention = "auto"
    unbiased: bool | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        find("method", str(self.method), METHODS)
        if not (isinstance(self.ratio, int | float) and 0 <= self.ratio < 1):
            raise UsageError(f"ratio {self.ratio!r} is outside [0, 1); 0.9 prunes nine tenths.")
        if not (isinstance(self.joint_budget, int | float) and 0 < self.joint_budget <= 1):
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
    def scaled(self) -> bool:
        """Whether kept gradients are scaled by 1 / p."""
        return METHODS[self.method].unbiased if self.unbiased is None else self.unbiased

    def to_toml(self) -> str:
        """TOML of every field that is set."""
        return tomli_w.dumps({k: v for k, v in asdict(self).items() if v is not None})

    @classmethod
    def from_toml(cls, text: str) -> "Recipe":
        """The recipe that `to_toml` wrote; raises UsageError for anything else."""
        try:
            values: dict[str, Any] = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise UsageError(f"the recipe is not TOML: {error}.") from None
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                raise unknown("recipe field", name, known)
        return cls(**values)
