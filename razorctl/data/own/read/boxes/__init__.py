"""Images with boxes of objects: a folder or a file of COCO, YOLO or Pascal VOC."""

from collections.abc import Callable, Sequence
from pathlib import Path

from razorctl.data.own.raw import RawRows
from razorctl.data.own.read import refused
from razorctl.data.own.read.boxes import coco, voc, yolo
from razorctl.data.own.read.folder import Folder
from razorctl.data.own.read.recognition import for_other_models
from razorctl.data.own.read.refused import SPLITS, FolderKind
from razorctl.data.own.request import DataRequest
from razorctl.system.folders import spelled

Reader = Callable[[DataRequest, Folder, Path, bool], RawRows]
GIVE_MASKS = "give folders images and masks, or a folder of images for each class"
LINE = rb"\A(\xef\xbb\xbf)?\s*\d+(\.0+)?(\s+[\d.eE+-]+){4,}\s*(\n|\Z)"  # of YOLO
# The files that show each kind, and its reader. Files of the first two kinds may be named alone.
KINDS: Sequence[tuple[FolderKind, Reader]] = (
    (FolderKind("boxes of objects (COCO)", r".*\.(?i:json)", GIVE_MASKS, coco.SIGNS), coco.rows),
    (FolderKind("boxes of objects (YOLO)", r"([^/]*/)?[^/]*\.(?i:ya?ml)", GIVE_MASKS, yolo.SIGNS),
     yolo.rows),
    (FolderKind("boxes of objects (YOLO)",
                rf"((.*/)?(?i:labels)/.*|((.*/)?(?i:{SPLITS})/)?)[^/]*\.(?i:txt)", GIVE_MASKS,
                (LINE,), beside=True), yolo.rows),
    (FolderKind("boxes of objects (Pascal VOC)",
                rf"(.*/)?(?i:(annotations?|labels|xmls?|{SPLITS})/[^/]*\.xml)", GIVE_MASKS,
                (rb"<bndbox>",)), voc.rows),
    (FolderKind("boxes of objects (Pascal VOC)", r"[^/]*\.(?i:xml)", GIVE_MASKS, (rb"<bndbox>",),
                beside=True), voc.rows),
)  # fmt: skip


def of_folder(request: DataRequest, folder: Folder) -> RawRows | None:
    """The rows of a folder that has boxes; None for other folders.

    Raises what the readers raise, and UsageError if the model finds no objects.
    """
    top = folder.top.absolute()
    folder = Folder(top, {top / h.relative_to(folder.top): of for h, of in folder.inside.items()})
    for kind, reader in KINDS:
        if (sign := refused.sign(kind, folder)) is not None:
            _check_model(request, kind, sign.relative_to(top))
            return reader(request, folder, sign, False)
    return None


def of_file(request: DataRequest, file: Path) -> RawRows | None:
    """The rows of a JSON file of COCO, or of a data.yaml of YOLO; None for others.

    The data are in the folder of the file, or in the one around it if it is called annotations.
    Raises as `of_folder`.
    """
    if file.suffix.casefold() not in (".json", *yolo.YAML) or file.is_dir():
        return None
    file = file.absolute()
    for kind, reader in KINDS[:2]:
        if refused.has(file, kind.content):
            _check_model(request, kind, Path(file.name))
            inside = file.parent.name.casefold() in coco.FOLDERS
            top = file.parent.parent if inside else file.parent
            # A JSON file may lie in any folder, such as a home, which is not walked.
            folder = Folder(top, {}) if reader is coco.rows else Folder.walked(top)
            return reader(request, folder, file, True)
    return None


def _check_model(request: DataRequest, kind: FolderKind, sign: Path) -> None:
    if "detection" not in request.tasks:
        what = f"{kind.what}, by {spelled(str(sign))}"
        raise for_other_models(request, what, "detection", kind.mend)
