"""A loop of accelerate: sparsify, then prepare."""

import timm
import torch
from accelerate import Accelerator

import razorctl

accelerator = Accelerator()
model = timm.create_model("vit_tiny_patch16_224", img_size=96, num_classes=10)
images, labels = torch.randn(10, 3, 96, 96), torch.arange(10)
full = razorctl.saved_bytes(model, images)
razorctl.sparsify(model)
print(f"stored for backward: {razorctl.saved_bytes(model, images) / full:.1%} of full fine-tuning")
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-4))
for step in range(3):
    loss = torch.nn.functional.cross_entropy(model(images), labels)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.2f}")
razorctl.restore(model)
