"""The worst of many parameters: what the cosine of a whole gradient or update hides.

q, k and v of a fused projection are parameters apart. Biases of keys are left out, since their
exact gradient is zero: a softmax does not see what is added to all logits of a query.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor

LEAST = 1e-3  # of the whole's norm: a smaller vector may be rounding alone
# Projections of q, k and v, by part of the name, and the axis on which these lie side by side.
FUSED = {"qkv.": 0, "in_proj_": 0, "c_attn.": -1}
KEYS = ("[k]", "key.bias", "k_proj.bias", "k_lin.bias", ".k.bias")


def parts(vectors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Each parameter's vector by name, flat; those of fused projections as [q], [k] and [v]."""
    for name, vector in vectors.items():
        axis = next((axis for part, axis in FUSED.items() if part in name), None)
        names, vectors_of = [name], (vector,)
        if axis is not None and vector.shape[axis] % 3 == 0:
            names, vectors_of = [f"{name}[{part}]" for part in "qkv"], vector.chunk(3, axis)
        for each, part in zip(names, vectors_of, strict=True):
            if not (each.endswith(KEYS) and part.dim() == 1):
                yield each, part.flatten().double()


def worst(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> dict[str, Any]:
    """The parameter of the lowest cosine: its name, cosine, relative error and differing signs.

    Of those with LEAST of the norm; signs: the share of elements whose signs differ.
    """
    exact, near = dict(parts(want)), dict(parts(got))
    whole = sum(vector.norm().item() ** 2 for vector in exact.values()) ** 0.5
    cosines = {
        name: F.cosine_similarity(near[name], vector, 0).item()
        for name, vector in exact.items()
        if name in near and vector.norm() > LEAST * whole
    }
    if not cosines:
        return {}
    name = min(cosines, key=cosines.__getitem__)
    vector, other = exact[name], near[name]
    return {
        "parameter": name,
        "cosine": cosines[name],
        "relative_error": ((other - vector).norm() / vector.norm()).item(),
        "signs": (other.sign() != vector.sign()).double().mean().item(),
    }
