import torch
import torch.nn.functional as F

from razorctl.ops.batch_norm import batch_norm_grad
from razorctl.ops.images import quantize_images
from razorctl.ops.op import FewBitCopy


def test_gradients_at_what_was_copied_are_those_of_stock(device):
    x, dy = torch.randn(2, 3, 5, 7, 9, device=device).unbind()
    weight = torch.randn(5, device=device).requires_grad_()
    bias = torch.zeros(5, device=device).requires_grad_()
    std, mean = torch.std_mean(x, (0, 2, 3), correction=0, keepdim=True)
    copy = FewBitCopy(*quantize_images((x - mean) / std, 8, 16), 8, 16)
    got = batch_norm_grad(dy, copy, weight.detach(), 1 / std.view(-1))
    leaf = x.clone().requires_grad_()
    F.batch_norm(leaf, None, None, weight, bias, True, eps=1e-9).backward(dy)
    for gradient, want in zip(got, (leaf.grad, weight.grad, bias.grad), strict=True):
        assert (gradient - want).norm() < 0.01 * want.norm()
