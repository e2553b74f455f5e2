"""Files with a token on each line: which columns are the tokens and the tags."""

from pathlib import Path

import pytest

from razorctl import data
from razorctl.config.job import Job
from razorctl.data.own import whole
from razorctl.errors import UsageError
from tests.own import refuses

WORDS = [[f"word{(3 * i + j) % 17}" for j in range(2 + i % 4)] for i in range(12)]
ENTITIES = [["B-PER", "I-PER", "O", "B-LOC", "O"][: len(own)] for own in WORDS]
PARTS = [["NN", "VB", "NN", "IN", "VB"][: len(own)] for own in WORDS]
CHUNKS = [["B-NP", "B-VP", "I-VP", "B-PP", "O"][: len(own)] for own in WORDS]


def written(name, form, before=""):
    """A file of sentences whose lines have a form."""
    every = zip(WORDS, ENTITIES, PARTS, CHUNKS, strict=True)
    sentences = [
        before
        + "\n".join(
            form.format(n=j + 1, z=j, s=i, w=w, e=e, p=p, c=c)
            for j, (w, e, p, c) in enumerate(zip(*own, strict=True))
        )
        for i, own in enumerate(every)
    ]
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_text("\n\n".join(sentences) + "\n")
    return name


def read(name, **settings):
    """The tokens and the tags of all rows."""
    source = data.source_of(Job("bert-base", name, **settings))
    assert source.task == "token-classification"
    splits = source.load()
    return {
        (*row["tokens"],): [splits.classes[tag] if tag >= 0 else None for tag in row["label"]]
        for part in splits.parts.values()
        for row in part
    }


def pairs(tags):
    return {(*words,): own for words, own in zip(WORDS, tags, strict=True)}


UNIVERSAL = "{n}\t{w}\tlemma\t{p}\tX\t_\t0\troot\t_\tSpaceAfter=No"
FORMS = {
    "a number, and two columns after the tag": ("a.iob2", "{n}\t{w}\t{e}\t-\tanna", "# id = 1\n"),
    "a number from 0 on": ("a.conll", "{z} {w} {e}", ""),
    "the tag first": ("a.conll", "{e}\t{w}", ""),
    "the tag between": ("a.bio", "{w} {e} {p}", ""),
    "the number of the sentence": ("a.conll", "{s} {w} {e}", ""),
    "offsets": ("a.conll", "{z}7 {z}9 {w} {e}", ""),
    "the part of speech first": ("a.conll", "{p} {w} {e}", ""),
    "a column of O": ("a.conll", "{n} {w} {e} O", ""),
    "chunks beside entities": ("a.txt", "{w} {p} {c} {e}", "-DOCSTART- -X- -X- O\n\n"),
    "addresses before sentences": ("a.tsv", "{n}\t{w}\t{e}", "#\thttp://a.b/c [2009-10-17]\n"),
    "CoNLL-U Plus": ("a.conllu", "{n}\t{w}\t{e}", "# text = a b\n"),
    "comments of words": ("a.conll", "{w}\t{e}", "# newdoc\n# text = a b\n"),
}
OF_PARTS = {
    "CoNLL-U": ("a.conllu", UNIVERSAL, "1-2\twordword\t_\t_\t_\t_\t_\t_\t_\t_\n"),
    "CoNLL-U in a text file": ("a.txt", UNIVERSAL, "# sent_id = 7\n"),
    "the tag first": ("a.conll", "{p} {w}", ""),
    "the tag last": ("a.conll", "{w} {p}", ""),
    "a lemma last": ("a.conll", "{w} {p} {w}", ""),
    "numbers of sentences and words": ("a.conll", "{s} {n} {w} {p}", ""),
}


@pytest.mark.parametrize("case", FORMS)
def test_entities(case):
    assert read(written(*FORMS[case])) == pairs(ENTITIES)


HEADERS = {
    "a header": ("a.conll", "{w}\t{e}", "Token\tTag\n"),
    "one apart": ("a.conll", "{w} {p} {e}", "word pos ner\n\n"),
    "one of numbers": ("a.bio", "{n} {w} {e}", "ID Form Ner\n"),
    "one in a text file": ("a.txt", "{w} {e}", "token label\n"),
    "one of parts": ("a.conll", "{w} {p}", "Form UPOS\n"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_header_is_no_token(case):
    name, form, header = HEADERS[case]
    written(name, form)
    Path(name).write_text(header + Path(name).read_text())
    assert read(name) == pairs(PARTS if "UPOS" in header else ENTITIES)


@pytest.mark.parametrize("case", OF_PARTS)
def test_parts_of_speech(case):
    assert read(written(*OF_PARTS[case])) == pairs(PARTS)


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ("{n} {w} {e} {e}", "that may be the tag, 3, 4, of 2 (word0, word1, word3, ...)"),
        ("{w} {p} {c}x", "that may be the tag, 2, 3, of 1 (word0"),
    ],
)
def test_several_columns_of_tags(form, said):
    name = written("a.conll", form)
    with pytest.raises(UsageError) as error:
        data.source_of(Job("bert-base", name))
    assert said in str(error.value)
    assert str(error.value).endswith("; choose with --label-column.")


def test_a_column_of_tags_that_is_given():
    written("a.conll", "{n} {w} {e} {c}-2")
    assert read("a.conll", label_column="3") == pairs(ENTITIES)
    written("a.conll", "{w} {w}s {p} {e}")
    stems = {tuple(f"{word}s" for word in own): tags for own, tags in pairs(PARTS).items()}
    assert read("a.conll", text_column="2", label_column="3") == stems


@pytest.mark.parametrize("name", ["a.txt", "d/train.txt"])
def test_a_task_settles_text_files(name):
    written(name, "{w} {p}")
    top = name.partition("/")[0]
    refuses(UsageError, "looks like tokens with a tag each; choose with --task", "bert-base", top)
    assert read(top, task="token-classification") == pairs(PARTS)
    assert data.source_of(Job("bert-base", top, task="masked-lm")).task == "masked-lm"


def test_a_run_tags_files_without_tags():
    """The numbers before tokens are none, also where nothing else is there."""
    job = Job("bert-base", written("a.conll", "{n} {w} {e}"), task="token-classification")
    for form in ("{n} {w} {e}", "{n} {w}", "{w}"):
        (part,), _ = whole.unlabeled([written("b.conll", form)], job, "text", trained=job)
        assert part.data["tokens"][:] == WORDS
