"""Classes by the values and the colors of masks, as the masks or the job say."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from razorctl.config.job import Job
from razorctl.errors import DataError, UsageError
from razorctl.models.masks import mask_labels
from razorctl.training import evaluation_rows
from tests.data.own.test_masks import job, load, mask, pairs
from tests.own import photos, refuses

RED, GREEN, BLACK = (255, 0, 0), (0, 128, 0), (0, 0, 0)
TWO = "000000=ground,ff0000=car,008000=car"


def masks_of(*values, mode="L", folder="d"):
    pairs(folder)
    for i in range(6):
        mask(f"{folder}/masks/{i}.png", *values, mode=mode)


def colored(*colors, kind="RGB", folder="d"):
    """Masks whose columns have these colors; of a palette, the i-th file counts them from i on."""
    pairs(folder)
    for i in range(6):
        pixels = np.tile(np.uint8(colors), (9, 12 // len(colors), 1))
        image = Image.fromarray(pixels)
        if kind == "P":
            every = [*dict.fromkeys(colors)]
            every = every[i % 2 :] + every[: i % 2]
            image = Image.fromarray(
                np.uint8([[every.index(tuple(map(int, c))) for c in r] for r in pixels])
            )
            image.putpalette([byte for color in every for byte in color])
        image.save(f"{folder}/masks/{i}.png")


def labels_of(splits):
    row = splits.train[0]
    return mask_labels(row["mask"], row.get("mask_classes", ""))[0].tolist()


@pytest.mark.parametrize(
    ("values", "classes", "labels", "said"),
    [
        ([0, 1, 2, 255], ("0", "1", "2"), [0, 1, 2, -100], None),
        ([0, 128, 255], ("0", "128"), [0, 1, -100], "2 values, 0, 128: each is a class, and 255"),
        ([0, 255], ("0", "255"), [0, 1], "2 values, 0, 255: each is a class; "),
        ([0, 254], ("0", "254"), [0, 1], "2 values, 0, 254: each is a class; "),
        ([0, 85, 170], ("0", "85", "170"), [0, 1, 2], "3 values, 0, 85, 170: each"),
        ([1, 2, 3], ("1", "2", "3"), [0, 1, 2], "3 values, 1, 2, 3: each"),
        ([*range(7), 9], (*map(str, range(7)), "9"), [*range(8)], "8 values, 0, 1, 2, 3, 4, ..."),
    ],
)
def test_values_that_no_mask_has_are_no_classes(values, classes, labels, said):
    masks_of(*values)
    splits = load()
    assert splits.classes == classes
    assert labels_of(splits)[: len(values)] == labels
    notes = [note for note in splits.notes if note.startswith("the masks of d have")]
    assert len(notes) == (said is not None)
    assert said is None or said in notes[0]


@pytest.mark.parametrize(
    ("said", "classes", "labels"),
    [
        ("0,128,255", ("0", "128", "255"), [0, 1, 2]),
        ("0=ground, 128=car", ("ground", "car"), [0, 1, -100]),
        ("0-128", tuple(map(str, range(129))), [0, 128, -100]),
        ("0=a,128=b,255=a", ("a", "b"), [0, 1, 0]),
        ("0=ignore,128=b,255=a", ("b", "a"), [-100, 0, 1]),
    ],
)
def test_values_are_what_the_job_says(said, classes, labels):
    masks_of(0, 128, 255)
    splits = load(mask_values=said)
    assert (splits.classes, labels_of(splits)[:3]) == (classes, labels)
    assert not [note for note in splits.notes if "values" in note]


@pytest.mark.parametrize("kind", ["RGB", "P"])
def test_colors_are_what_the_job_says(kind):
    colored(BLACK, RED, GREEN, kind=kind)
    splits = load(mask_colors=TWO)
    assert splits.classes == ("ground", "car")
    assert labels_of(splits)[:3] == [0, 1, 1]
    assert load(mask_colors="#000000=ignore,#ff0000,#008000").classes == ("#ff0000", "#008000")
    with pytest.raises(DataError, match=r"images/0.jpg.*mask: the color #ff0000, which is none of"):
        load(mask_colors="000000,008000")


@pytest.mark.parametrize(("mode", "white"), [("L", "010101"), ("1", "ffffff")])
def test_gray_masks_have_colors(mode, white):
    masks_of(0, 1, mode=mode)
    assert labels_of(load(mask_colors=f"000000,{white}"))[:2] == [0, 1]


def test_colors_that_masks_of_16_bits_do_not_have():
    masks_of(0, 1, mode="I;16")
    with pytest.raises(DataError, match="values are not colors: give them with --mask-values"):
        load(mask_colors="000000,010101")


def test_palettes_that_differ_are_refused():
    colored(BLACK, RED, kind="P")
    for names in (False, True):
        if names:
            Path("d/classes.txt").write_text("a\nb\n")
        with pytest.raises(DataError, match=r"of images/0.jpg and images/1.jpg .* 0 is #000000 in"):
            load()
    Path("d/classes.txt").unlink()
    assert load(mask_values="0,1").classes == ("0", "1")


def test_two_names_and_the_values_0_and_255():
    masks_of(0, 255)
    Path("d/classes.txt").write_text("ground\ncar\n")
    with pytest.raises(DataError, match=r"only the values 0 and 255, .*--mask-values 0,255"):
        load()
    splits = load(mask_values="0,255")
    assert (splits.classes, labels_of(splits)[:2]) == (("ground", "car"), [0, 1])
    with pytest.raises(
        DataError, match="the names of 2 classes, and values or colors of masks for 3"
    ):
        load(mask_values="0,1,255")
    masks_of(0, 1, 255)  # a third value says that 255 is ignored
    assert labels_of(load())[:3] == [0, 1, -100]


def test_a_value_that_no_training_mask_has():
    for split, values in (("train", (0, 128)), ("test", (0, 64))):
        pairs("d", split=split)
        for i in range(6):
            mask(f"d/{split}/masks/{i}.png", *values)
    with pytest.raises(DataError, match=r"test/images/0.jpg.*mask: the value 64, which is none of"):
        load()


@pytest.mark.parametrize(
    "said",
    ["0", "0,0", "0,x", "0,-1", "2-1,3", "0-1=a,2", "0,1=ignore", "", "0,,1", "0-5000", "0;1"],
)
def test_values_that_are_no_classes_are_refused_at_once(said):
    with pytest.raises(UsageError, match=r"^mask values "):
        Job("any", "d", mask_values=said)


@pytest.mark.parametrize("said", ["000000", "000000,red", "#00,#11", "000000,000000"])
def test_colors_that_are_none_are_refused_at_once(said):
    with pytest.raises(UsageError, match=r"^mask colors have|^mask colors '"):
        Job("any", "d", mask_colors=said)


def test_other_masks_are_read_by_the_values_that_a_run_was_trained_on():
    masks_of(0, 200)
    given = Job("any", "d", task="segmentation"), ["0", "128", "200"], lambda _: None
    rows = evaluation_rows._evaluated(given[0], *given).rows
    assert {rows[0]["mask_classes"]} == {"0=0,128=1,200=2,255=ignore"}
    with pytest.raises(DataError, match="d has other classes than the run"):
        evaluation_rows._evaluated(given[0], given[0], ["a", "b"], given[2])


def test_masks_that_are_not_there():
    photos(Path("p"))
    refuses(UsageError, "p has no masks; leave --mask-values", "resnet18", "p", mask_values="0,1")
    with pytest.raises(UsageError, match="values or colors; give one"):
        job("d", mask_values="0,1", mask_colors=TWO)
