"""The command `predict` with runs of language models and of segmentation."""

import csv
import io
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from PIL import Image
from PIL.ExifTags import Base
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner, Result

from razorctl.cli import chat as cli_chat
from razorctl.cli.app import app
from razorctl.data.own import read
from razorctl.data.own.request import DataRequest
from razorctl.system.documents import size_and_checksum
from razorctl.training.predicting import inference, masks
from tests.cli.commands import assert_ends_with_an_error, razorctl
from tests.own import picture, table
from tests.training.runs import edit_result

RUNS = {
    "text": ("gpt2", "texts.txt"),
    "chat": ("llama", "chats.jsonl"),
    "mask": ("segformer", "shapes"),
}
QUICK = ["--device", "cpu", "--batch-size", "3"]
PROMPTS = ["w1 w2 w3", "w4", "w5 w6 w7 w8 w9 w10 w11", "w12 w13", "w30 w31 w32 w33"]


@pytest.fixture(scope="module")
def trained(kinds, traces, shallow):
    """A folder with a run of each kind, with random weights so that rows differ."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(traces))
        patch.chdir(kinds)
        for out, (model, data) in RUNS.items():
            size = ["--input-size", "32", "--steps", "1", "--method", "full"]
            done = razorctl("finetune", f"./{model}", data, *QUICK, *size, "--out", out)
            assert done.exit_code == 0, done.stderr
            draw = torch.Generator().manual_seed(0)
            weights = load_file(f"{out}/model.safetensors")
            for name, weight in weights.items():
                if weight.ndim > 1:
                    weights[name] = 0.5 * torch.randn(weight.shape, generator=draw)
            save_file(weights, f"{out}/model.safetensors", {"format": "pt"})
            drawn = {"model.safetensors": size_and_checksum(Path(out, "model.safetensors"))}
            edit_result(Path(out), lambda result: result["checksums"].update(drawn))  # noqa: B023
    return kinds


@pytest.fixture(autouse=True)
def here(trained, monkeypatch, tmp_path):
    """Links the runs in the current directory."""
    for run in (*RUNS, "shapes"):
        (tmp_path / run).symlink_to(trained / run)


def rows(result: Result) -> list[dict[str, str]]:
    assert result.exit_code == 0, result.stderr
    return list(csv.DictReader(io.StringIO(result.stdout)))


def greedy(run: str, prompt: list[int], new: int) -> str:
    """A continuation, token by token, without a cache, padding, or `generate`."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(run), AutoTokenizer.from_pretrained(run)
    ids = [*prompt]
    while len(ids) < len(prompt) + new:
        with torch.no_grad():
            best = model(torch.tensor([ids])).logits[0, -1].argmax().item()
        if best == tokenizer.eos_token_id:
            break
        ids.append(best)
    return tokenizer.decode(ids[len(prompt) :], skip_special_tokens=True)


def test_texts_in_padded_batches_are_continued_as_alone():
    Path("a.txt").write_text("\n".join(PROMPTS))
    result = razorctl("predict", "text", "a.txt", *QUICK, "--max-new-tokens", "6")
    found = rows(result)
    assert [(row["file"], row["row"]) for row in found] == [("a.txt", str(i)) for i in range(5)]
    tokenizer = AutoTokenizer.from_pretrained("text")
    expected = [greedy("text", tokenizer(prompt)["input_ids"], 6) for prompt in PROMPTS]
    assert [row["text"].strip() for row in found] == expected
    assert len(set(expected)) > 2
    assert result.stderr == "reading the files ...\n"


def test_conversations_are_answered_and_answers_not_read():
    asked = [[{"role": "user", "content": text}] for text in PROMPTS[:3]]
    asked[0] = [{"role": "system", "content": "w9"}, *asked[0]]
    answered = [*asked[1], {"role": "assistant", "content": "w20"}]
    lines = [json.dumps({"messages": chat}) for chat in (*asked, answered)]
    Path("a.jsonl").write_text("\n".join(lines))
    result = razorctl("predict", "chat", "a.jsonl", *QUICK, "--max-new-tokens", "5", "--json")
    assert result.exit_code == 0, result.stderr
    found = [row["text"] for row in json.loads(result.stdout)["predictions"]]
    tokenizer = AutoTokenizer.from_pretrained("chat")
    written = [" ".join(f"{m['role']} {m['content']}" for m in chat) for chat in asked]
    prompts = [tokenizer(f"{text} assistant")["input_ids"] for text in written]
    expected = [greedy("chat", prompt, 5) for prompt in prompts]
    assert found == [*expected, expected[1]]
    assert len(set(expected)) == 3


def answers(said: list[str], new: int) -> list[str]:
    """The answers to messages, one after the other, without `chat`."""
    tokenizer, text, found = AutoTokenizer.from_pretrained("chat"), "", list[str]()
    for message in said:
        text += f"user {message} assistant"
        found.append(greedy("chat", tokenizer(text)["input_ids"], new))
        text += f" {found[-1]} </s> "
    return found


def chatting(*words: str, said: list[str]) -> Result:
    lines = "".join(f"{line}\n" for line in said)
    return CliRunner().invoke(app, ["chat", *words, "--device", "cpu"], input=lines)


def test_a_chat_of_lines_knows_what_was_said():
    said = [PROMPTS[0], "", PROMPTS[1], PROMPTS[0]]
    result = chatting("chat", "--max-new-tokens", "4", said=said)
    assert result.exit_code == 0, result.stderr
    expected = answers([said[0], *said[2:]], 4)
    assert [line.strip() for line in result.stdout.splitlines()] == expected
    assert expected[0] != expected[2]
    assert result.stderr == "loading chat ...\n"


def test_a_chat_without_a_template_continues_the_text():
    shutil.copytree(Path("text").resolve(), "plain")
    Path("plain/chat_template.jinja").unlink()
    edit_result(Path("plain"), lambda result: result["checksums"].pop("chat_template.jinja"))
    result = chatting("plain", "--max-new-tokens", "4", said=PROMPTS[:2])
    assert "has no chat template; texts are continued as they are." in result.stderr
    tokenizer, text, expected = AutoTokenizer.from_pretrained("plain"), "", []
    for prompt in PROMPTS[:2]:
        text += f" {prompt}"
        expected.append(greedy("plain", tokenizer(text)["input_ids"], 4))
        text += f" {expected[-1]}"
    assert [line.strip() for line in result.stdout.splitlines()] == expected


def test_a_typed_chat_stops_an_answer_and_ends(monkeypatch, capsys):
    late = KeyboardInterrupt()  # between two answers
    typed = iter([*PROMPTS[:2], " ", late, "w9 " * 80, PROMPTS[2], "/exit"])
    written = list[str]()

    def read(_: str) -> str:
        if (line := next(typed)) is late:
            raise late
        return line

    def write(piece: str) -> None:
        written.append(piece)
        if len([each for each in written if each.strip()]) == 2:
            raise KeyboardInterrupt  # after the second piece of the first answer

    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("builtins.input", read)
    stream = SimpleNamespace(write=write, flush=lambda: None)
    monkeypatch.setattr(cli_chat, "data_stream", lambda: stream)
    cli_chat.chat(Path("chat"), max_new_tokens=6, device="cpu")
    assert next(typed, None) is None
    stopped, (answer, last, _) = "".join(written[:2]), "".join(written[2:]).split("\n")
    tokenizer = AutoTokenizer.from_pretrained("chat")
    text = f"user {PROMPTS[0]} assistant {stopped} </s> user {PROMPTS[1]} assistant"
    assert answer.strip() == greedy("chat", tokenizer(text)["input_ids"], 6)
    text += f" {answer} </s> user {PROMPTS[2]} assistant"
    assert last.strip() == greedy("chat", tokenizer(text)["input_ids"], 6)
    assert "error: the text has 82 tokens, and with 6 new ones" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said", "code", "sentence"),
    [
        (["mask"], "w1", 2, "mask is for segmentation, and chat needs a run for causal-lm"),
        (["none"], "w1", 2, "none does not exist"),
        (["chat"], "w9 " * 80, 5, "the text has 82 tokens, and with 64 new ones"),
        (["chat", "--weights", "worst"], "w1", 2, "unknown weights 'worst'"),
    ],
)
def test_a_chat_that_cannot_be_is_one_sentence(words, said, code, sentence):
    result = chatting(*words, said=[said])
    assert_ends_with_an_error(result, sentence)
    assert (result.exit_code, result.stdout) == (code, "")


def test_what_is_drawn_depends_on_seed_and_row_alone():
    table(Path("a.csv"), [f"{text},x" for text in ["w1 w2", *PROMPTS[:2], "w1 w2"]], "text,n")
    draw = ["predict", "text", "a.csv", "--device", "cpu", "--temperature", "2"]

    def drawn(*flags: str) -> list[str]:
        return [row["text"] for row in rows(razorctl(*draw, *flags, "--max-new-tokens", "8"))]

    first = drawn("--batch-size", "1")
    assert drawn("--batch-size", "3", "--seed", "0") == first
    assert first[0] != first[3]
    assert all(a != b for a, b in zip(first, drawn("--seed", "1"), strict=True))


def test_masks_are_of_the_size_of_images_and_read_back(monkeypatch):
    draw = np.random.default_rng(0)
    image = Image.fromarray(draw.integers(0, 255, (3, 4, 3), np.uint8))
    turned = Image.Exif()
    turned[Base.Orientation] = 6
    for name, size, exif in (("x.png", (34, 21), None), ("b/y.png", (7, 50), turned)):
        file = picture(Path("top/images") / name)
        image.resize(size, Image.Resampling.NEAREST).save(file, exif=exif)
    monkeypatch.setattr(masks, "ROOM", 1)  # one class at a time
    result = razorctl("predict", "mask", "top/images", *QUICK, "--out", "top/masks")
    found = rows(result)
    assert [(row["file"], row["mask"]) for row in found] == [
        ("top/images/x.png", "top/masks/x.png"),
        ("top/images/b/y.png", "top/masks/b/y.png"),
    ]
    run = inference.load("mask", device="cpu")
    for row in found:
        mask = Image.open(row["mask"])
        values = np.asarray(mask)
        shown = Image.open(row["file"])
        shown = shown.transpose(Image.Transpose.ROTATE_270) if "y" in row["file"] else shown
        inputs = run.transform({"image": [shown]})["inputs"][0][None]
        with torch.no_grad():
            logits = F.interpolate(run.model(inputs).logits, inputs.shape[-2:], mode="bilinear")
        expected = F.interpolate(logits, shown.size[::-1], mode="bilinear")[0].argmax(0).numpy()
        assert mask.mode == "P"
        np.testing.assert_array_equal(values, expected)
        assert len(np.unique(values)) > 1
        counts = np.bincount(values.ravel())
        assert row["label"] == run.classes[counts.argmax()]
        assert float(row["share"]) == pytest.approx(counts.max() / values.size, abs=1e-5)
    raw = read.raw(DataRequest("top", "mask", task="segmentation"))
    assert raw.class_names == run.classes
    assert len(raw.splits["train"]) == 2
    assert not any(raw.splits["train"]["fault"])


def test_what_was_trained_on_is_predicted_as_it_is():
    found = rows(razorctl("predict", "mask", "shapes", *QUICK, "--out", "m"))
    names = [f"train/{i}" for i in range(8)] + [f"validation/{i}" for i in range(4)]
    assert [row["mask"] for row in found] == sorted(f"m/{name}.png" for name in names)
    assert {Path(row["file"]).parent.name for row in found} == {"images"}
    Path("a.txt").write_text("w1 w2\n\n\nw3\n")
    found = rows(razorctl("predict", "text", "a.txt", *QUICK, "--max-new-tokens", "2"))
    assert [row["row"] for row in found] == ["0", "3"]


def test_masks_of_tables_are_named_by_their_images():
    for name in ("a", "b"):
        picture(Path(f"data/{name}/x.png"))
    table(Path("data/t.csv"), ["a/x.png", "b/x.png"], "image")
    inside = {"bytes": Path("data/a/x.png").read_bytes(), "path": "x.png"}
    Dataset.from_dict({"image": [inside]}).to_parquet("data/p.parquet")
    files = ["data/t.csv", "data/p.parquet"]
    found = rows(razorctl("predict", "mask", *files, *QUICK, "--out", "m"))
    places = [("0", "m/a/x.png"), ("1", "m/b/x.png"), ("0", "m/p-0.png")]
    assert [(row["row"], row["mask"]) for row in found] == places
    assert Path("m/classes.txt").read_text() == "0\n1\n"


BAD = {
    "text long.txt": (5, "line 1 has 60 tokens, and with 64 new ones"),
    "text long.txt --max-new-tokens 9": (5, "64; shorten it, or give --max-new-tokens at most 4."),
    "text longer.txt --max-new-tokens 9": (5, "is more than the model's 64; shorten it."),
    "text none.txt": (2, "none.txt does not exist; name files that do."),
    "text -": (5, "stdin is not UTF-8; convert it."),
    "text a.txt --top 2": (2, "--top is for classification, and text is for causal-lm; leave it"),
    "chat asked.jsonl": (5, "asked.jsonl has 1 bad row: asked.jsonl, line 1 (no question)"),
    "mask x.png": (2, "mask predicts masks; name a new directory for them with --out."),
    "mask x.png --out m --seed 1": (2, "--seed is for causal-lm, and mask is for segmentation"),
    "mask x.png d/x.jpg --out m": (2, "of x.png and of d/x.jpg would both be x.png; name the"),
    "words a.txt": (2, "words is for masked-lm, which continues no texts; fill masks"),
}


@pytest.mark.parametrize("words", BAD)
def test_bad_input_is_one_sentence_and_the_exit_code(words, trained):
    Path("long.txt").write_text(" ".join(["w1"] * 60))
    Path("longer.txt").write_text(" ".join(["w1"] * 65))
    Path("a.txt").write_text("w1\n")
    Path("asked.jsonl").write_text('{"messages": [{"role": "system", "content": "w1"}]}')
    picture(Path("x.png"))
    picture(Path("d/x.jpg"))
    Path("words").mkdir()
    for name in ("config.toml", "result.json"):
        shutil.copy(trained / "text" / name, "words")
    edit_result(Path("words"), lambda result: result["job"].update(task="masked-lm"))
    before = sorted(Path().iterdir())
    code, sentence = BAD[words]
    command = ["predict", *words.split(), "--device", "cpu"]
    found = CliRunner().invoke(app, command, input="é".encode("latin1"))
    assert found.exit_code == code, found.output
    assert_ends_with_an_error(found, sentence)
    assert (found.stdout, sorted(Path().iterdir())) == ("", before)
