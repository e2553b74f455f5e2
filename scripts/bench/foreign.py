"""Checks `razor` on models that nobody fitted it to: bytes, forward pass, gradients, `restore`.

    .venv/bin/python scripts/bench/foreign.py [--libraries LIBRARY ...] [--models MODEL ...] [--add]

The models are every class of transformers without a head that can be built small, the smallest
model of each file of timm, layers of torch, models of torchvision, and adapters of PEFT, all of
random weights. A row has the share of full's bytes that a step stores at ratio 0.9 by `sparsify`
and by `sparsify_within`, or the refusal of the latter; the cosines of the whole gradient and of the
worst parameter's to the stock model's at the same precision; and the same under bf16 autocast, with
the cosine of the stock gradient there to that in fp32. A model has a fault if its forward pass is
not stock's to the bit, a gradient is missing or not finite, or a cosine is low: below 0.98 at 0.9
and 0.999 at 0.5, in bf16 below 0.98 by more than twice what bf16 takes from the stock model's; the
worst parameter may lack WORST times as much of 1. Each model runs in a process of its own. The
script writes results/foreign.json and exits with 1 if a model has a fault. It needs the `bench`
extra and takes an hour on one core.
"""

import copy
import inspect
import json
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import architectures
import peft
import torch
import torchvision
import transformers
from passes import Pass, cosine, equal, guarded, redrawn, run, undropped, worst
from record import device_name, head, options, reason, write
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from razorctl import Recipe, restore, sparsify
from razorctl.errors import UsageError
from razorctl.surgery.byte_budget import sparsify_within

RATIO, LOOSE = 0.9, 0.5
COSINES = {RATIO: 0.98, LOOSE: 0.999}
REPEATED = 1 - 1e-9  # cosine of two passes of the stock model
WORST = 5  # times what the whole gradient may lack of a cosine of 1, which the worst parameter may
ROUNDINGS = 2  # cosines that two passes in bf16 may differ by, of that of one to fp32
STOCK_SECONDS, SECONDS = 10, 90  # of a core, that a stock model may take, and then its check
BF16 = torch.bfloat16
Made = tuple[nn.Module, Any]  # a model in train mode, and its inputs
WIDTH, HEADS, LAYERS, TOKENS, VOCABULARY, PIXELS, ROWS = 64, 4, 4, 64, 120, 64, 4
LARGEST = 20_000_000  # parameters
# The values of settings by all the names that classes give them, and settings that only a kind of
# model itself can know, of which an empty one is None.
SMALL = {
    name: value
    for value, names in architectures.MODELS["transformers"]["small"]
    for name in names.split()
}
OWN: dict[str, dict[str, Any]] = {
    kind: {name: None if value == "" else value for name, value in settings.items()}
    for kinds, settings in architectures.MODELS["transformers"]["own"].items()
    for kind in kinds.split()
}
SPECIAL = ("pad", "bos", "eos", "sep", "cls", "decoder_start")  # tokens
# Lists of the channels of stages.
CHANNELS = ("hidden_sizes", "encoder_in_channels", "decoder_in_channels", "stage_out_channels")
# Inputs that are embeddings.
EMBEDDED = ("hidden_states", "inputs_embeds", "inputs", "input_values", "decoder_input_values")


class Stack(nn.Module):
    """Four layers of torch, one after another, on [4, 64, 64]; of a tuple the first goes on."""

    def __init__(self, layer: Callable[[], nn.Module], calls: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(4))
        self.calls = calls

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            y = layer(*[x] * self.calls)
            x = y[0] if isinstance(y, tuple) else y
        return x


BLOCK = partial(nn.TransformerEncoderLayer, 64, 4, 128, 0.0, batch_first=True)
TORCH: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "TransformerEncoderLayer": (BLOCK, 1),
    "TransformerEncoderLayer, norm first": (partial(BLOCK, norm_first=True), 1),
    "TransformerDecoderLayer": (
        *(partial(nn.TransformerDecoderLayer, 64, 4, 128, 0.0, batch_first=True), 2),
    ),
    "MultiheadAttention": (lambda: nn.MultiheadAttention(64, 4, batch_first=True), 3),
    "LSTM": (lambda: nn.LSTM(64, 64, batch_first=True), 1),
    "GRU": (lambda: nn.GRU(64, 64, batch_first=True), 1),
    "Bilinear": (lambda: nn.Bilinear(64, 64, 64), 2),
    "Conv1d": (lambda: nn.Sequential(nn.Conv1d(64, 64, 3, padding=1), nn.GELU()), 1),
    "Linear, Softplus": (lambda: nn.Sequential(nn.Linear(64, 64), nn.Softplus()), 1),
}
TORCHVISION = (
    *("vit_b_16", "swin_t", "swin_v2_t", "maxvit_t", "convnext_tiny", "resnet18", "densenet121"),
    *("efficientnet_b0", "mobilenet_v3_small", "regnet_y_400mf", "shufflenet_v2_x0_5", "vgg11"),
)
SIDES = {"maxvit_t": 224}  # pixels
OPTIONS = {"vit_b_16": {"image_size": 96}}
ADAPTED = ["q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"]
NORMS = ["input_layernorm", "post_attention_layernorm"]
ADAPTERS: dict[str, dict[str, Any]] = architectures.MODELS["peft"]


class SizeError(ValueError):
    """A model that stays large in small settings."""


class InputsError(ValueError):
    """A model that runs with none of the inputs that are known."""


def settings(config: PreTrainedConfig) -> dict[str, Any]:
    """The settings of a config that make its model small; those of configs inside are whole."""
    small: dict[str, Any] = {}
    for name, value in config.to_dict().items():
        if name in SMALL and isinstance(value, int | float) and not isinstance(value, bool):
            small[name] = SMALL[name]
        if isinstance(value, list | tuple) and value:
            if name == "image_size":
                small[name] = [PIXELS] * len(value)
            elif name == "depths":
                small[name] = [min(depth, 2) for depth in value]
            elif name in CHANNELS and max(value) >= 2048:
                small[name] = [size // 32 for size in value]
    if "kv_lora_rank" in small:  # every head has its own keys
        small["num_key_value_heads"] = HEADS
    for token in SPECIAL:
        name = f"{token}_token_id"
        if isinstance(at := getattr(config, name, None), int) and at >= VOCABULARY:
            small[name] = 1
    for name, inner in vars(config).items():
        if isinstance(inner, PreTrainedConfig):
            small[name] = type(inner)(**settings(inner)).to_dict()
    return small | OWN.get(config.model_type, {})


def small(kind: str) -> nn.Module:
    """A small model in train mode, of random weights, of which none begins at zero.

    Layer scales that begin near zero would let no gradient pass. Raises what the class raises, and
    SizeError if the model is large all the same. kind: of transformers' table of models, as "t5".
    """
    usual = CONFIG_MAPPING[kind]()
    config = type(usual)(**settings(usual))
    config.use_cache = False
    config.apply_spec_augment = False  # it draws by NumPy
    names = MODEL_MAPPING_NAMES[kind]
    make = getattr(transformers, names if isinstance(names, str) else names[0])
    with suppress(NotImplementedError, RuntimeError), torch.device("meta"):  # some read values
        _check_size(make(copy.deepcopy(config)))
    torch.manual_seed(0)
    model: nn.Module = make(config)
    _check_size(model)
    return redrawn(model)


def _check_size(model: nn.Module) -> None:
    if (count := sum(p.numel() for p in model.parameters())) > LARGEST:
        raise SizeError(f"{count / 1e6:.0f} million parameters")


def inputs_of(model: nn.Module) -> dict[str, Tensor]:
    """Random inputs with which a model that `small` has made runs: as few as that takes.

    They are its main one with the tokens of a decoder, or all that are known and it has an argument
    for. Raises InputsError with the error of the first try.
    """
    takes = inspect.signature(model.forward).parameters.keys()
    main: Any = model.main_input_name
    errors: list[Exception] = []
    for known in _known(model):
        made = {name: x for name, x in known.items() if name in takes}
        for names in ((main, "decoder_input_ids"), tuple(made)):
            few = {name: made[name] for name in names if name in made}
            try:
                with torch.no_grad():
                    model(**few)
            except Exception as failed:
                errors.append(failed)
            else:
                return few
    raise InputsError(f"{main}, {reason(errors[0])}") from errors[0]


def _known(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Random inputs by name, in the shapes that most classes take, and then in others."""
    generator = torch.Generator().manual_seed(1)
    config: Any = model.config
    vision = getattr(config, "vision_config", None) or config
    size, channels = getattr(vision, "image_size", None), getattr(vision, "num_channels", 3)
    height, width = size if isinstance(size, list | tuple) else (size or PIXELS,) * 2
    bins = _setting(config, "num_mel_bins feature_projection_input_dim feature_size", 80)
    frames = getattr(vision, "num_frames", None) or 4
    patch = channels * _setting(vision, "patch_size", 8) ** 2
    patches = patch * _setting(vision, "temporal_patch_size", 1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def tokens(most: int, *more: int) -> Tensor:
        return torch.randint(3, most, (ROWS, TOKENS, *more), generator=generator)

    text = {name: tokens(VOCABULARY - 20) for name in ("input_ids", "decoder_input_ids")}
    text |= {"bbox": tokens(100, 4).sort(-1).values}
    images, videos = (ROWS, channels, height, width), (2, frames, channels, height, width)
    names = ("pixel_values", "input_values", "input_features")
    usual, other = (images, (ROWS, 8000), (ROWS, bins, 256)), (ROWS, 1, 8000)
    for shapes in (usual, (videos, other, (ROWS, 256, bins))):
        yield text | {n: draw(*shape) for n, shape in zip(names, shapes, strict=True)}
    yield {  # images as rows of patches
        "pixel_values": draw(ROWS, 64, patch),
        "pixel_attention_mask": torch.ones(ROWS, 64, dtype=torch.int64),
        "spatial_shapes": torch.tensor([[8, 8]] * ROWS),
        "hidden_states": draw(ROWS * 64, patches),
        "grid_thw": torch.tensor([[1, 8, 8]] * ROWS),
    }
    embedded = {name: draw(ROWS, TOKENS, WIDTH) for name in EMBEDDED}
    yield {**embedded, "decoder_input_ids": text["decoder_input_ids"]}
    yield {
        **text,
        "pixel_values": draw(ROWS, frames, *images[1:]),
        "visual_feats": draw(ROWS, 36, _setting(config, "visual_feat_dim", WIDTH)),
        "visual_pos": draw(ROWS, 36, 4),
    }
    length = _setting(config, "context_length", TOKENS)
    ahead = _setting(config, "prediction_length", 8)
    past = length + max(getattr(config, "lags_sequence", None) or [0])
    features = _setting(config, "num_time_features", 0)
    for variables in ((), (_setting(config, "num_input_channels", 1),)):
        made = {"past_observed_mask": torch.ones(ROWS, past, *variables)}
        for when, steps in ("past", past), ("future", ahead):
            made[f"{when}_values"] = draw(ROWS, steps, *variables)
            made[f"{when}_time_features"] = draw(ROWS, steps, features)
        yield made


def _setting(config: Any, names: str, default: int) -> int:
    """The first of some settings that a config or one inside it has."""
    inner = [c for c in vars(config).values() if isinstance(c, PreTrainedConfig)]
    for name in names.split():
        for owner in (config, *inner):
            if isinstance(value := getattr(owner, name, None), int):
                return value
    return default


def of_torch(name: str) -> Made:
    torch.manual_seed(0)
    layer, calls = TORCH[name]
    return Stack(layer, calls).train(), torch.randn(4, 64, 64)


def of_torchvision(name: str) -> Made:
    torch.manual_seed(0)
    model = torchvision.models.get_model(name, num_classes=10, **OPTIONS.get(name, {}))
    for module in model.modules():
        if isinstance(module, torchvision.ops.StochasticDepth):
            module.p = 0.0
    size = SIDES.get(name, 96)
    return redrawn(undropped(model)), torch.randn(2, 3, size, size)


def of_peft(name: str) -> Made:
    kind, _, _ = name.partition(",")
    model = small("llama")
    inputs = inputs_of(model)
    options = {"target_modules": ADAPTED} | ADAPTERS[name]
    adapted: nn.Module = peft.get_peft_model(model, getattr(peft, kind)(**options))
    return redrawn(adapted, std=0.02), inputs


def of_transformers(name: str) -> Made:
    return (model := small(name)), inputs_of(model)


def of_timm(name: str) -> Made:
    return (case := architectures.CASES[name]).build(), case.images()


KINDS = CONFIG_MAPPING_NAMES.keys() & MODEL_MAPPING_NAMES
LIBRARIES: dict[str, tuple[Callable[[str], Made], list[str]]] = {
    "torch": (of_torch, list(TORCH)),
    "peft": (of_peft, list(ADAPTERS)),
    "torchvision": (of_torchvision, list(TORCHVISION)),
    "transformers": (of_transformers, sorted(sorted(KINDS), key=len)),
    "timm": (of_timm, list(architectures.CASES)),
}


def faults(got: Pass, want: Pass, least: float) -> list[str]:
    """The faults of a pass of a sparsified model, in words.

    want: of the stock model at the same precision. least: the cosine that it has to reach.
    """
    of_worst = worst(got.gradients, want.gradients)
    every = {
        "the forward pass is not stock's": not equal(got, want),
        "other parameters have gradients": got.gradients.keys() != want.gradients.keys(),
        "a gradient is not finite": not all(g.isfinite().all() for g in got.gradients.values()),
        "the cosine is low": not cosine(got, want) >= least,
        "the worst parameter is off": not of_worst.get("cosine", 1) >= 1 - WORST * (1 - least),
    }
    return [fault for fault, there in every.items() if there]


class Comparison:
    """A row, or the part of one in bf16, of a model compared with its stock pass."""

    def __init__(self, model: nn.Module, inputs: Any, want: Pass, autocast: torch.dtype | None):
        self.model, self.inputs, self.want, self.autocast = model, inputs, want, autocast
        self.row: dict[str, Any] = {"full": want.kept}
        self.faults: list[str] = []

    def plain(self, ratio: float, least: float) -> None:
        """Adds what `sparsify` does; nothing if it knows no layer of the model."""
        with suppress(UsageError):
            self._add(str(ratio), partial(sparsify, self.model, Recipe(ratio=ratio)), least)

    def within(self, least: float) -> None:
        """Adds what `sparsify_within` does, or why it refuses the ratio."""
        more = {"autocast": self.autocast, "full": self.want.kept}
        try:
            way = partial(sparsify_within, self.model, Recipe(ratio=RATIO), self.inputs, **more)
            self._add("within", way, least)
            self.row["refusal"] = None
        except UsageError as refusal:
            self.row |= {"share_within": None, "refusal": str(refusal), "cosine_within": None}
        if (self.row.get("share_within") or 0) > 1 - RATIO:
            self.faults.append("within: it keeps more than it is traced to")

    def _add(self, way: str, change: Callable[[], object], least: float) -> None:
        """Adds a pass of the sparsified model; raises UsageError if it cannot be sparsified."""
        changed = False
        try:
            change()
            changed = True
            got = run(self.model, self.inputs, self.autocast)
            self.row[f"share_{way}"] = got.kept / self.want.kept
            self.row[f"cosine_{way}"] = cosine(got, self.want)
            self.row[f"worst_{way}"] = worst(got.gradients, self.want.gradients)
            self.faults += [f"{way}: {fault}" for fault in faults(got, self.want, least)]
        except Exception as error:
            if isinstance(error, TimeoutError) or (isinstance(error, UsageError) and not changed):
                raise
            self.faults.append(f"{way}: {reason(error)}")
        finally:
            restore(self.model)


class UnsteadyError(ValueError):
    """A stock model whose passes differ, or whose gradients are infinite."""


def repeated(model: nn.Module, inputs: Any, autocast: torch.dtype | None = None) -> Pass:
    """A pass of the stock model; raises UnsteadyError if a second one differs."""
    want, again = run(model, inputs, autocast), run(model, inputs, autocast)
    if not (equal(want, again) and cosine(want, again) > REPEATED):  # NaN too
        raise UnsteadyError("two passes differ, or a gradient is infinite")
    return want


def late(*_: object) -> None:
    raise TimeoutError(f"it takes more than {STOCK_SECONDS} s in full, or {SECONDS} s in all")


def check(make: Callable[[str], Made], name: str) -> dict[str, Any]:
    """A row of the result; `left_out` says why a model could not be made or run."""
    torch.set_num_threads(1)  # here, since its pool of threads would not outlive a fork
    signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, STOCK_SECONDS)
    start = time.process_time()
    try:
        model, inputs = make(name)
        run(model, inputs)  # the first pass of some models chooses an attention
        want = repeated(model, inputs)
    except Exception as error:
        return {"left_out": reason(error)}
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    types = [type(module) for module in model.modules()]
    exact = Comparison(model, inputs, want, None)
    for ratio, least in COSINES.items():
        exact.plain(ratio, least)
    exact.within(COSINES[RATIO])
    bf16, wrong = under_autocast(model, inputs, want)
    wrong = exact.faults + [f"bf16, {fault}" for fault in wrong]
    if types != [type(module) for module in model.modules()]:
        wrong.append("restore left other types")
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        **exact.row,
        "bf16": bf16,
        "faults": wrong,
        "seconds": time.process_time() - start,
    }


def under_autocast(
    model: nn.Module, inputs: Any, exact: Pass
) -> tuple[dict[str, Any] | None, list[str]]:
    """The part of a row in bf16, None if the stock model has no such step; and its faults.

    exact: the stock pass in fp32.
    """
    try:
        want = repeated(model, inputs, BF16)
    except (RuntimeError, UnsteadyError):
        return None, []
    own = cosine(want, exact)
    least = COSINES[RATIO] - ROUNDINGS * (1 - own)
    compared = Comparison(model, inputs, want, BF16)
    compared.plain(RATIO, least)
    compared.within(least)
    return compared.row | {"cosine_full": own}, compared.faults


def main() -> None:
    parser = options(__doc__, "foreign")
    parser.add_argument("--libraries", nargs="+", choices=list(LIBRARIES), default=list(LIBRARIES))
    parser.add_argument("--models", nargs="+", help="by name; default: all")
    more = "keep earlier rows; without --models, run only the rest"
    parser.add_argument("--add", action="store_true", help=more)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    listed = [(library, name) for library, (_, names) in LIBRARIES.items() for name in names]
    earlier = json.loads(args.out.read_text()) if args.add else {"rows": [], "left_out": {}}
    rows = {(row["library"], row["model"]): row for row in earlier["rows"]}
    left_out: dict[str, str] = earlier["left_out"]
    every = [key for key in listed if key[0] in args.libraries]
    if args.models:
        every = [key for key in every if key[1] in args.models]
    elif args.add:  # models that have not run, and then those that have not run in bf16
        new = [key for key in every if key not in rows and " ".join(key) not in left_out]
        every = new + [key for key in every if key in rows and "bf16" not in rows[key]]
    document = {
        **head(f"1 of {device_name()}", "torch", *LIBRARIES),
        "ratio": RATIO,
        "cosines_at_least": {str(ratio): least for ratio, least in COSINES.items()},
        "roundings": ROUNDINGS,
        "listed": {library: len(names) for library, (_, names) in LIBRARIES.items()},
    }
    with torch.device("meta"):  # what libraries import late they import once, not in each process
        small = transformers.LlamaConfig(hidden_size=64, num_hidden_layers=1, intermediate_size=64)
        loaded, tokens = transformers.LlamaModel(small), torch.zeros(4, 64, dtype=torch.int64)
    sparsify_within(loaded, Recipe(ratio=RATIO), tokens)
    for library, name in track(every, console=Console(stderr=True)):
        row = guarded(check, LIBRARIES[library][0], name)
        left_out.pop(f"{library} {name}", None)
        rows.pop((library, name), None)
        if "left_out" in row:
            left_out[f"{library} {name}"] = row["left_out"]
        else:
            rows[library, name] = {"library": library, "model": name, **row}
        document["left_out"] = dict(sorted(left_out.items()))
        write(args.out, {**document, "rows": [rows[key] for key in listed if key in rows]})
        shares = [row.get(key) for key in ("share_0.9", "share_within")]
        print(library, name, *shares, row.get("left_out") or row["faults"], flush=True)
    sys.exit(any(row["faults"] for row in rows.values()))


if __name__ == "__main__":
    main()
