"""Autograd functions of a user, which lazy tensors go through."""

import torch


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, dy):
        return dy * 2


class Cubed(torch.autograd.Function):
    """In place."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.detach().clone())
        ctx.mark_dirty(x)
        return x.pow_(3)

    @staticmethod
    def backward(ctx, dy):
        return 3 * ctx.saved_tensors[0] ** 2 * dy
