"""Rows by class, tokens and the padding token of a pretrained classifier are kept."""

import json
import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import transformers
from datasets import Dataset
from safetensors.torch import load_file
from timm.models import save_for_hf
from tokenizers.processors import TemplateProcessing

from razorctl import models
from razorctl.errors import UsageError
from razorctl.models import kept_head
from razorctl.models.tokens import single_texts, token_blocks
from tests.cli.commands import razorctl
from tests.cli.kinds import HIDDEN, WORDS, tokenizer

ENCODER = {"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}


@pytest.fixture(autouse=True)
def _inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def encoder(names: Sequence[str]) -> None:
    """Writes a BERT that knows classes of these names to ./m."""
    torch.manual_seed(0)
    words = tokenizer(**ENCODER)
    config = transformers.BertConfig(
        **HIDDEN, vocab_size=len(words), num_attention_heads=2, max_position_embeddings=64
    )
    config.id2label = dict(enumerate(names))
    config.label2id = {name: number for number, name in enumerate(names)}
    transformers.BertForSequenceClassification(config).save_pretrained("m")
    words.save_pretrained("m")


def of_timm(names: Sequence[str]) -> None:
    torch.manual_seed(0)
    model = timm.create_model("test_vit", num_classes=len(names))
    save_for_hf(model, "m", model_config={"label_names": list(names)}, safe_serialization=True)


WRITERS: dict[str, tuple[Callable[[Sequence[str]], None], str]] = {
    "transformers": (encoder, "classifier"),
    "timm": (of_timm, "head"),
}
# Classes of the stored head, those of the run -> the stored row of each, and what is said.
KEPT: list[tuple[list[str], list[str], list[int | None], str]] = [
    (["pos", "neg"], ["neg", "pos"], [1, 0], "keeps the rows of neg, pos"),
    (["Pos", "NEG"], ["neg", "pos"], [1, 0], "keeps the rows of neg, pos"),
    (["a", "A", "b"], ["A", "a", "B"], [1, 0, 2], "keeps the rows of A, a, B"),
    (["a", "A", "b"], ["b", "c"], [2, None], "keeps the rows of b; the rows of c are new"),
    (["a", "b", "c"], ["c", "a"], [2, 0], "keeps the rows of c, a"),
    (["a", "b"], ["a", "b", "x", "y"], [0, 1, None, None], "the rows of x, y are new"),
    (["a", "b"], ["b", "x"], [1, None], "keeps the rows of b; the rows of x are new"),
    (["a", "b"], ["x", "y"], [None, None], "is new; it is trained from random weights"),
]


@pytest.mark.parametrize("number", range(len(KEPT)))
@pytest.mark.parametrize("library", WRITERS)
def test_rows_of_a_head_go_by_the_names_of_classes(
    library: str, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    write, layer = WRITERS[library]
    stored, classes, rows, said = KEPT[number]
    write(stored)
    family = models.find("./m")
    head = kept_head.read(family.files(True))
    assert head is not None
    assert head.names == tuple(stored)
    with models.told_before():
        model = family.build(len(classes), None)
    head.put(model, classes, "m")
    for name in (f"{layer}.weight", f"{layer}.bias"):
        before, now = load_file("m/model.safetensors")[name], model.state_dict()[name]
        for place, row in enumerate(rows):
            if row is not None:
                assert torch.equal(now[place], before[row])
            else:
                assert not any(torch.equal(now[place], other) for other in before if other.any())
    lines = [
        record.getMessage() for record in caplog.records if "classifier" in record.getMessage()
    ]
    assert len(lines) == 1
    assert lines[0].endswith(said)


def test_a_head_that_the_model_has_not_is_new(caplog: pytest.LogCaptureFixture) -> None:
    head = kept_head.KeptHead(("a", "b"), {"other.weight": torch.ones(2, 4)})
    model = torch.nn.Sequential(torch.nn.Linear(4, 2))
    head.put(model, ["a", "b"], "m")
    (line,) = (record.getMessage() for record in caplog.records)
    assert line == "the classifier of m is new; it is trained from random weights"


# Classes of the stored head that have no names, those of the run -> as in KEPT.
UNNAMED: list[tuple[list[str], list[str], list[int | None], str]] = [
    (["LABEL_0", "LABEL_1"], ["b", "a"], [0, 1], "keeps the rows of b (LABEL_0), a (LABEL_1)"),
    (["LABEL_0", "LABEL_1", "LABEL_2"], ["a", "b"], [None, None], "from random weights"),
    (["0", "1"], ["a", "b"], [0, 1], "keeps the rows of a (0), b (1)"),
    (["0", "1"], ["1", "2"], [1, None], "keeps the rows of 1; the rows of 2 are new"),
    (["0", "1"], ["0", "1"], [0, 1], "keeps the rows of 0, 1"),
]


@pytest.mark.parametrize("number", range(len(UNNAMED)))
def test_classes_without_names_keep_their_order(
    number: int, caplog: pytest.LogCaptureFixture
) -> None:
    stored, classes, rows, said = UNNAMED[number]
    encoder(stored)
    head = kept_head.read(models.find("./m").files(True))
    assert head is not None
    assert head.rows(classes) == rows
    with models.told_before():
        model = models.find("./m").build(len(classes), None)
    head.put(model, classes, "m")
    assert caplog.records[-1].getMessage().endswith(said)


def test_a_run_goes_on_with_the_classes_it_had() -> None:
    encoder(["cat", "dog"])
    rows = [f"w{2 * n % 40},{('dog', 'cat', 'zebra')[n % 3]}" for n in range(30)]
    Path("a.csv").write_text("\n".join(["text,label", *rows]))
    words = ("./m", "a.csv", "--steps", "1", "--lr", "1e-12", "--batch-size", "4", "--out", "run")
    result = razorctl("finetune", *words, "--device", "cpu")
    assert result.exit_code == 0, result.stderr
    before, now = (load_file(f"{at}/model.safetensors") for at in ("m", "run"))
    torch.testing.assert_close(now["classifier.weight"][:2], before["classifier.weight"])


def decoder(**changes: Any) -> None:
    """Writes a GPT-2 and its tokenizer, with these settings, to ./m."""
    torch.manual_seed(0)
    words = tokenizer(eos_token="</s>")
    sizes = {"n_embd": 24, "n_layer": 2, "n_head": 2, "n_positions": 64}
    ends = {"bos_token_id": 2, "eos_token_id": 2, **changes.pop("config", {})}
    config = transformers.GPT2Config(vocab_size=len(words), **sizes, **ends)
    transformers.GPT2LMHeadModel(config).save_pretrained("m")
    if changes.pop("unpadded", False):
        words.pad_token = None
    words.add_special_tokens(changes.pop("added", {}))
    for name, value in changes.items():
        setattr(words, name, value)
    words.save_pretrained("m")


PADDING: dict[str, dict[str, Any]] = {
    "as in the config": {"config": {"pad_token_id": 0}},
    "none in the config": {},
    "another in the config": {"config": {"pad_token_id": 5}},
    "none in the tokenizer": {"unpadded": True},
    "on the left": {"padding_side": "left"},
    "the unknown token": {"pad_token": "[UNK]"},
    "a new token": {"added": {"pad_token": "<new>"}},
}


@pytest.mark.parametrize("case", PADDING)
def test_the_label_of_a_row_does_not_depend_on_its_batch(case: str) -> None:
    decoder(**PADDING[case])
    family = models.find("./m", "classification")
    with models.told_before():
        model = family.build(3, None).eval()
    draw = random.Random(0)
    texts = [" ".join(draw.choices(WORDS, k=1 + n % 30)) for n in range(60)]

    def logits(net: Any, read: Callable[[Any], Any], rows: list[str]) -> torch.Tensor:
        inputs = read({"text": rows, "label": [0] * len(rows)})["inputs"]
        batch = {name: torch.stack([each[name] for each in inputs]) for name in inputs[0]}
        with torch.no_grad():
            return family.logits(net, batch)

    read = family.transform(model, None)
    alone = torch.cat([logits(model, read, [text]) for text in texts])
    torch.testing.assert_close(logits(model, read, texts), alone, rtol=1e-4, atol=1e-5)
    family.save(model, ["a", "b", "c"], None, Path("run"))
    kept, read = family.load(Path("run"), None)
    torch.testing.assert_close(logits(kept.eval(), read, texts), alone, rtol=1e-4, atol=1e-5)
    pipe = transformers.pipeline("text-classification", "run", top_k=None, device="cpu")
    for text, row in zip(texts, alone.softmax(-1), strict=True):
        scores = {each["label"]: each["score"] for each in pipe([text])[0]}
        assert [scores[name] for name in "abc"] == pytest.approx(row.tolist(), abs=1e-4)


@pytest.mark.parametrize("task", ["classification", "causal-lm"])
def test_an_embedding_grows_with_its_tokenizer(task: str, caplog: pytest.LogCaptureFixture) -> None:
    decoder(added={"additional_special_tokens": ["<tool>", "<note>"]})
    family, rows = models.find("./m", task), len(tokenizer(eos_token="</s>"))
    model = family.build(0 if task == "causal-lm" else 2, None)
    weight = model.get_input_embeddings().weight
    assert len(weight) == rows + 2 == model.config.vocab_size
    torch.testing.assert_close(weight[rows], weight[:rows].mean(0))
    said = [record.getMessage() for record in caplog.records]
    assert any("gets 2 rows for new tokens of its tokenizer" in line for line in said)
    bare = family.bare(2, None)
    assert len(bare.get_input_embeddings().weight) == rows + 2
    family.save(model, [], None, Path("run"))
    assert json.loads(Path("run/config.json").read_text())["vocab_size"] == rows + 2


@pytest.mark.parametrize("make", [token_blocks, single_texts])
def test_texts_with_the_frame_of_their_template_have_it_once(make: Callable[..., Dataset]) -> None:
    words = tokenizer(eos_token="</s>", bos_token="<s>")
    begin, end = words.bos_token_id, words.eos_token_id
    words.backend_tokenizer.post_processor = TemplateProcessing("<s> $A", None, [("<s>", begin)])
    words.save_pretrained("m")
    framed = transformers.AutoTokenizer.from_pretrained("m")
    bare = ["w1 w2 w3", "w4", "w5 w6"]
    for frame in ("{}", "<s>{}", "{}</s>", "<s>{}</s>", "<s> {} </s>"):
        rows = Dataset.from_dict({"text": [frame.format(text) for text in bare]})
        ids = [i for block in make(rows, framed, 3)["input_ids"] for i in block]
        want = Dataset.from_dict({"text": bare})
        assert ids == [i for block in make(want, framed, 3)["input_ids"] for i in block]
        assert (end, end) not in pairwise(ids)
        assert (begin, begin) not in pairwise(ids)


def test_a_classifier_reads_a_frame_once() -> None:
    encoder(["a", "b"])
    words = transformers.AutoTokenizer.from_pretrained("m")
    ends = [(name, words.convert_tokens_to_ids(name)) for name in ("[CLS]", "[SEP]")]
    words.backend_tokenizer.post_processor = TemplateProcessing("[CLS] $A [SEP]", None, ends)
    words.save_pretrained("m")
    family = models.find("./m")
    read = family.transform(family.build(2, None), None)
    one, other = (
        read({"text": [text], "label": [0]})["inputs"][0]["input_ids"].tolist()
        for text in ("w1 w2", "[CLS]w1 w2[SEP]")
    )
    assert one == other


@pytest.mark.parametrize(("name", "sizes"), [("test_resnet", (None, 96)), ("test_vit", (None, 64))])
def test_a_segmenter_with_a_backbone_of_timm_is_trained_on(
    name: str, sizes: tuple[int, ...]
) -> None:
    """Its head is a new one for other classes; a ViT keeps its image size."""
    first = models.find(f"timm:{name}", "segmentation")
    model = first.bare(3, 64)
    Path("m").mkdir()
    first.save(model, ["a", "b", "c"], 64, Path("m"))
    further = models.find("m")
    assert further.task == "segmentation"
    for classes, size in ((3, sizes[0]), (2, sizes[1])):
        own = further.build(classes, size)
        for weight, stored in model.state_dict().items():
            kept = torch.equal(own.state_dict()[weight], stored)
            assert kept == (classes == 3 or not weight.startswith("classifier."))
        images = further.example(own, 1, size)
        assert further.logits(own, images).shape == (1, classes, *images.shape[2:])
        assert images.shape[2] == (size or 64)
    head = kept_head.read(further.files(True))
    assert head is not None
    assert head.names == ("a", "b", "c")
    if name == "test_vit":
        with pytest.raises(UsageError, match="takes images of 64 pixels alone"):
            further.build(3, 96)
