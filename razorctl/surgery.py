"""sparsify and restore: the one call that puts razor layers into a model, and its undoing."""

from torch import nn

from razorctl.errors import UsageError
from razorctl.layers import SWAPS, RazorLayer
from razorctl.recipe import METHODS, Recipe
from razorctl.rules import RULES
from razorctl.sampling import Blocks

STOCK = {razor: stock for stock, razor in SWAPS.items()}


def sparsify(model: nn.Module, recipe: Recipe | None = None) -> tuple[str, ...]:
    """Swaps the layers of `model` that the recipe prunes, in place, by class.

    Parameters, buffers, state dict, hooks and optimizers stay valid; `restore` undoes it. Only
    modules of exactly a stock type are swapped: subclasses may mean something else by it.
    Returns the names of the swapped modules, none for method `full`. Everything is checked before
    the first change. Raises UsageError if the model is sparsified already, if the recipe asks for
    what these layers cannot do, or if nothing in the model can be swapped.
    """
    recipe = recipe or Recipe()
    method = METHODS[recipe.method]
    if any(isinstance(module, RazorLayer) for module in model.modules()):
        raise UsageError("the model is sparsified already; call razorctl.restore(model) first.")
    if recipe.joint != "weights" or recipe.attention != "auto":
        raise UsageError(
            f"joint={recipe.joint!r} with attention={recipe.attention!r} needs layers that no "
            "method swaps yet; leave them at 'weights' and 'auto'."
        )
    if not method.rules:
        if recipe.joint_budget < 1:
            raise UsageError(
                f"method {method.name!r} prunes no layer whose weights could be drawn; "
                "choose another method or joint budget 1."
            )
        return ()
    chosen = {
        name: module
        for name, module in model.named_modules()
        if type(module) in SWAPS and SWAPS[type(module)].kind in method.rules
    }
    if not chosen:
        raise UsageError(
            f"no layer of {type(model).__name__} can be pruned by {method.name!r}, which swaps "
            f"{', '.join(sorted(method.rules))} layers; use method 'full'."
        )
    widths = [SWAPS[type(module)].columns(module) for module in chosen.values()]
    blocks = None
    if recipe.joint_budget < 1:
        blocks = Blocks(widths, recipe.joint_budget, recipe.scaled, recipe.seed)
    rules = []
    for module, width in zip(chosen.values(), widths, strict=True):
        # At ratio 0 nothing is pruned, so nothing is packed or drawn either.
        name = method.rules[SWAPS[type(module)].kind] if recipe.ratio > 0 else "dense"
        rules.append(RULES[name](width, 1 - recipe.ratio, recipe.scaled))

    for block, (module, rule) in enumerate(zip(chosen.values(), rules, strict=True)):
        module.__class__ = SWAPS[type(module)]
        assert isinstance(module, RazorLayer)
        module.rule, module.blocks, module.block = rule, blocks, block
    if blocks is not None:
        blocks.attach(model)
    return tuple(chosen)


def restore(model: nn.Module) -> None:
    """Makes every razor layer of `model` its stock class again, with the same parameters."""
    for module in model.modules():
        if isinstance(module, RazorLayer):
            if module.blocks is not None:
                module.blocks.detach()
            del module.rule, module.blocks, module.block
            module.__class__ = STOCK[type(module)]  # type: ignore[assignment]
