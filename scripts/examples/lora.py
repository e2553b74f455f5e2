"""LoRA of PEFT, whose adapters store small copies of inputs: get_peft_model, then sparsify."""

import timm
import torch
from peft import LoraConfig, get_peft_model

import razorctl

vit = timm.create_model("vit_tiny_patch16_224", img_size=96, num_classes=10)
model = get_peft_model(vit, LoraConfig(target_modules=r".*(qkv|fc\d)", modules_to_save=["head"]))
images, labels = torch.randn(10, 3, 96, 96), torch.arange(10)
full = razorctl.saved_bytes(model, images)
razorctl.sparsify(model)
print(f"stored for backward: {razorctl.saved_bytes(model, images) / full:.1%} of LoRA alone")
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(3):
    loss = torch.nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.2f}")
razorctl.restore(model)
model.save_pretrained("adapter")
