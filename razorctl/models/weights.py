"""Compares stored weights with a model's config, by the headers of their files."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

from razorctl.errors import DataError, reason_of
from razorctl.system import documents
from razorctl.system.atomic import atomic_file

Shapes = Mapping[str, tuple[int, ...]]
# A setting that may be a number of layers, with a value of a thousand or more.
LAYERS = re.compile(r'"(\w*(?:layer|block|depth)s?)": ?\[?[\d, ]*?(\d{4,})')
COPY = "razorctl-folder-"  # prefix of the names of copied folders
SECONDS = 10  # for finding the setting at fault


def shapes(folder: Path, files: str) -> Shapes:
    """Name -> shape of the weights in the files that match a pattern."""
    from safetensors import safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    for file in folder.glob(files):
        with safe_open(file, "numpy") as opened:
            names: list[str] = opened.keys()
            shapes |= {name: (*opened.get_slice(name).get_shape(),) for name in names}
    return shapes


def check_layers(file: Path, config: Any) -> None:
    """Raises DataError if a config has more layers than weights, so that building would not end."""
    for name, number in LAYERS.findall(documents.text(config)):
        if int(number) > (count := len(shapes(file.parent, "*.safetensors"))):
            raise DataError(f"{file} has {name} = {number}, and {count:,} weights; correct that.")


def check_lists(model: Any, stored: Shapes) -> None:
    """Raises ValueError if a model has fewer or more layers than the stored weights.

    Layers whose weights are all tied to others need not be stored.
    """
    prefix, state = f"{model.base_model_prefix}.", model.state_dict()
    own = state.keys() - model.all_tied_weights_keys.keys()
    there, here, needed = (
        {name.removeprefix(prefix) for name in names} for names in (stored, state, own)
    )
    for name, module in model.named_modules():
        if type(module).__name__ == "ModuleList":
            inside = re.compile(re.escape(f"{name.removeprefix(prefix)}.") + r"(\d+)\.")
            has, wants, needs = (
                {m[1] for n in ns if (m := inside.match(n))} for ns in (there, here, needed)
            )
            if has and not needs <= has <= wants:
                raise ValueError(
                    f"{name} has [{len(has)}] layers in its weights, and [{len(wants)}] by its "
                    "config"
                )


def unused(
    model: Any, stored: Shapes, names: Iterable[str], fresh: tuple[str, ...], same_head: bool
) -> set[str]:
    """The modules of the stored weights `names` that a model lacks.

    Poolers, other heads and masks do not count. Raises ValueError for a weight of a layer in the
    body.

    fresh: prefixes of new weights. same_head: whether the model has the stored head's class.
    """
    modules, body = {name for name, _ in model.named_modules()}, f"{model.base_model_prefix}."
    whole = body[:-1] not in modules or any(name.startswith(body) for name in stored)
    left = set()
    for name in sorted(names):
        inside = place = name if whole else body + name
        while inside not in modules:
            inside = inside.rpartition(".")[0]
        head = f"{inside}.".startswith(fresh)
        if body[:-1] in modules:
            head = not place.startswith(body)
        if (
            "pooler" in name
            or stored.get(name, (0,))[:2] in ((), (1, 1))
            or (head and not same_head)
        ):
            continue
        if not head and inside not in ("", body[:-1]):
            raise ValueError(f"{name} is among its weights, and not in the model of its config")
        left.add(name.rpartition(".")[0] or name)
    return left


def differ(folder: Path, files: str, names: Sequence[str]) -> bool:
    """Whether any of these stored weights differs from the first."""
    import torch
    from safetensors import safe_open

    tensors = []
    for file in folder.glob(files):
        with safe_open(file, "pt") as opened:
            tensors += [opened.get_tensor(name) for name in {*names} & {*opened.keys()}]
    return any(not torch.equal(tensors[0], other) for other in tensors[1:])


def blamed(folder: Path, attempt: Callable[[str], object], error: BaseException) -> str | None:
    """The setting in a folder's files that makes an attempt fail, as "SETTING in FILE".

    Tries other values until the attempt succeeds: values that make the sizes in `error` agree, and
    the default. None if no value helps within SECONDS.
    """
    end, reason = monotonic() + SECONDS, reason_of(error)
    sizes = [re.findall(r"\d+", size) for size in re.findall(r"\[([\d, ]+)\]", reason)[:2]]
    pairs = {(int(a), int(b)) for a, b in zip(*sizes, strict=False) if a != b} if sizes else ()
    changes = [
        (setting == "architectures", setting not in reason, file.name, setting, changed)
        for file in folder.glob("*config.json")
        for setting, changed in _changes(documents.read_foreign(file), pairs)
    ]
    for *_, name, setting, changed in sorted(changes, key=itemgetter(0, 1)):
        with TemporaryDirectory(prefix=COPY) as copy, suppress(Exception):
            for file in folder.iterdir():
                if file.name != name:
                    Path(copy, file.name).symlink_to(file.resolve())
            with atomic_file(Path(copy, name)) as new:
                new.write_text(documents.text(changed))
            attempt(copy)
            return f"{setting} in {folder / name}"
        if monotonic() > end:
            break
    return None


def _changes(
    settings: Mapping[str, Any], pairs: Iterable[tuple[int, int]]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The settings without one of them, or with one scaled by a pair of sizes, and its name."""
    for name, value in settings.items():
        if isinstance(value, dict):
            inner = _changes(value, pairs)
            yield from ((f"{name}.{one}", {**settings, name: new}) for one, new in inner)
        for wanted, size in pairs if type(value) is int else ():
            if value == size or (size and value and not value * wanted % size):
                new = wanted if value == size else value * wanted // size
                yield name, {**settings, name: new}
        if not pairs or type(value) is not int:
            yield name, {key: settings[key] for key in settings if key != name}
