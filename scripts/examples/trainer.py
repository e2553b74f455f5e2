"""transformers.Trainer, with a callback that sparsifies and restores."""

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import razorctl

config = BertConfig(vocab_size=1000, hidden_size=128, num_hidden_layers=2, num_attention_heads=2)
model = BertForSequenceClassification(config)
texts = torch.randint(1000, (16, 32))
rows = [{"input_ids": text, "labels": number % 2} for number, text in enumerate(texts)]
razor = razorctl.RazorCallback(razorctl.Recipe("razor", ratio=0.9))
arguments = TrainingArguments("bert", num_train_epochs=4, learning_rate=1e-3)
Trainer(model, arguments, train_dataset=rows, callbacks=[razor]).train()
print(f"stored for backward: {razor.saved_bytes / razor.full_saved_bytes:.1%} of full fine-tuning")
