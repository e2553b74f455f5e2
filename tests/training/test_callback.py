"""Training inside transformers.Trainer."""

from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.data import Dataset, IterableDataset
from transformers import (
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)

import razorctl
from razorctl.errors import UsageError
from razorctl.layers.heads.token_logits import Logits
from razorctl.surgery.sparsify import sparsified
from tests.models import bert, llama

ROWS = 16
HALF = razorctl.Recipe("razor", 0.5)


def row(number):
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(0, 40, (12,), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": number % 2}


class Numbered(Dataset):
    def __len__(self):
        return ROWS

    def __getitem__(self, number):
        return row(number)


class Streamed(IterableDataset):
    def __iter__(self):
        return map(row, range(ROWS))


def train(out, rows, *callbacks, build=bert, **settings):
    torch.manual_seed(0)
    model = build()
    arguments = TrainingArguments(
        str(out),
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        use_cpu=True,
        report_to=[],
        logging_steps=1,
        disable_tqdm=True,
        **{"max_steps": 4, "save_strategy": "no"} | settings,
    )
    trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[*callbacks])
    trainer.train()
    return trainer


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_it_trains_and_gives_the_stock_model_back(tmp_path):
    full = train(tmp_path / "full", Numbered())
    callback = razorctl.RazorCallback(HALF)
    razor = train(tmp_path / "razor", Numbered(), callback, save_strategy="steps", save_steps=4)
    assert callback.saved_bytes <= 0.5 * callback.full_saved_bytes
    assert {type(module) for module in razor.model.modules()} == {
        type(module) for module in full.model.modules()
    }
    # The first loss is of an exact forward pass, with the same rows and dropout masks.
    assert losses(razor)[0] == losses(full)[0]
    torch.testing.assert_close(
        torch.tensor(losses(razor)), torch.tensor(losses(full)), atol=0.02, rtol=0
    )
    saved = load_file(tmp_path / "razor" / "checkpoint-4" / "model.safetensors")
    assert saved.keys() == full.model.state_dict().keys()
    BertForSequenceClassification.from_pretrained(tmp_path / "razor" / "checkpoint-4")


def test_a_decoder_learns_labels_whose_logits_nothing_computes(tmp_path):
    class Tokens(Numbered):
        def __getitem__(self, number):
            ids = row(number)["input_ids"]
            return {"input_ids": ids, "labels": ids}

    full = train(tmp_path / "full", Tokens(), build=llama)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Logits, "values", lambda self: pytest.fail("logits were computed"))
        razor = train(tmp_path / "razor", Tokens(), razorctl.RazorCallback(HALF), build=llama)
    assert losses(razor)[0] == pytest.approx(losses(full)[0], rel=1e-5)
    torch.testing.assert_close(
        torch.tensor(losses(razor)), torch.tensor(losses(full)), atol=0.02, rtol=0
    )


def test_it_trains_what_the_trainer_compiles(tmp_path):
    build = partial(bert, dropout=0.0, num_hidden_layers=1)
    settings = {"torch_compile": True, "torch_compile_backend": "eager", "max_steps": 2}
    torch.compiler.reset()
    counters.clear()
    compiled = train(tmp_path, Numbered(), razorctl.RazorCallback(HALF), build=build, **settings)
    assert counters["stats"]["unique_graphs"]
    assert not counters["graph_break"]
    eager = train(tmp_path, Numbered(), razorctl.RazorCallback(HALF), build=build, max_steps=2)
    assert losses(compiled) == pytest.approx(losses(eager), abs=1e-4)


def test_logs_have_the_bytes(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "transformers.trainer_callback.PrinterCallback.on_log",
        lambda self, args, state, control, logs=None, **_: seen.append(dict(logs)),
    )
    callback = razorctl.RazorCallback(HALF)
    train(tmp_path, Numbered(), callback, max_steps=1)
    assert seen[0]["saved_bytes"] == callback.saved_bytes
    assert seen[0]["full_saved_bytes"] == callback.full_saved_bytes


def test_checkpointing_of_the_trainer_and_closures_in_the_model(tmp_path, caplog):
    def closed():
        model = bert()
        stock = model.bert.forward  # as trainers wrap a forward
        model.bert.forward = lambda *args, **kwargs: stock(*args, **kwargs)
        return model

    plain, callback = razorctl.RazorCallback(HALF), razorctl.RazorCallback(HALF)
    train(tmp_path / "plain", Numbered(), plain)
    train(tmp_path, Numbered(), callback, build=closed, gradient_checkpointing=True)
    assert callback.saved_bytes < plain.saved_bytes
    assert callback.full_saved_bytes == plain.full_saved_bytes
    assert "gradient_checkpointing=False" in caplog.text


def test_a_batch_that_the_trainer_computes_with_first(tmp_path, caplog):
    class Pairs(Trainer):
        def compute_loss(self, model, inputs, **_):
            return model(**inputs["pair"]).loss

    class Paired(Numbered):
        def __getitem__(self, number):
            return {"pair": row(number)}

    callback = razorctl.RazorCallback(HALF)
    arguments = TrainingArguments(
        str(tmp_path),
        max_steps=2,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        remove_unused_columns=False,
    )

    def collate(rows):
        return {"pair": default_data_collator([row["pair"] for row in rows])}

    settings = {"train_dataset": Paired(), "data_collator": collate, "callbacks": [callback]}
    trainer = Pairs(bert(), arguments, **settings)
    trainer.train()
    kept, full = callback.saved_bytes, callback.full_saved_bytes
    assert 0 < kept <= HALF.ratio * full
    assert (
        "the first batch cannot determine the byte budget, as it raises ValueError" in caplog.text
    )
    assert not sparsified(trainer.model)
    assert not trainer.model._forward_pre_hooks


def test_streamed_rows_and_a_second_training(tmp_path):
    callback = razorctl.RazorCallback(HALF)
    trainer = train(tmp_path, Streamed(), callback)
    assert callback.saved_bytes is None
    assert len(losses(trainer)) == 4
    trainer.train()


class Ending(TrainerCallback):
    """Raises in the middle of training, after a step."""

    error = None

    def on_step_end(self, *_, **__):
        if self.error is not None:
            raise self.error


class Stepping(Trainer):
    """A trainer of one's own whose step raises."""

    error = None

    def training_step(self, *args, **kwargs):
        if self.error is not None and self.state.global_step:
            raise self.error
        return super().training_step(*args, **kwargs)


@pytest.mark.parametrize(
    ("where", "error"), [("step", RuntimeError), ("between", KeyboardInterrupt)]
)
def test_the_model_is_stock_again_when_training_raises(where, error, tmp_path):
    callback, ending = razorctl.RazorCallback(HALF), Ending()
    torch.manual_seed(0)
    arguments = TrainingArguments(
        str(tmp_path), max_steps=2, use_cpu=True, report_to=[], save_strategy="no"
    )
    trainer = Stepping(bert(), arguments, train_dataset=Numbered(), callbacks=[callback, ending])
    raising = trainer if where == "step" else ending
    raising.error = error("stop")
    with pytest.raises(error, match="stop") as caught:
        trainer.train()
    assert not sparsified(trainer.model)
    assert razorctl.recipe_of(trainer.model) is None
    assert type(trainer.model.classifier) is nn.Linear
    del caught
    raising.error = None
    trainer.train()  # again, with the same callback
    assert trainer.state.global_step == 2
    assert not sparsified(trainer.model)


def test_a_ratio_that_cannot_be_met_is_refused(tmp_path):
    model, recipe = bert(), razorctl.Recipe("razor", 0.97, activation_checkpointing=True)
    with pytest.raises(UsageError, match="leave activation checkpointing out"):
        train(tmp_path, Numbered(), razorctl.RazorCallback(recipe), build=lambda: model)
    assert not sparsified(model)
