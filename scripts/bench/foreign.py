"""Checks `razor` on models that nobody fitted it to: bytes, forward pass, gradients, `restore`.

    .venv/bin/python scripts/bench/foreign.py [--libraries LIBRARY ...] [--models MODEL ...] [--add]

The models are every class without a head that tiny.py can build of transformers, the smallest model
of each file of timm, layers of torch, models of torchvision, and adapters of PEFT. All are small
and of random weights. A row has the bytes that a step keeps for backward, of full's, at ratio 0.9
by `sparsify` and by `sparsify_within`, or the refusal of the latter; whether the forward pass is
stock's to the bit, in fp32 and under bf16 autocast; and the cosine of the gradient to the exact
one, at 0.5 and 0.9. Each model runs in a process of its own. The script writes results/foreign.json
and exits with 1 if a model has a fault. It needs the `bench` extra and takes half an hour on one
core.
"""

import json
import logging
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import architectures
import peft
import tiny
import torch
import torchvision
import transformers
from machine import device_name
from passes import Pass, cosine, equal, guarded, run
from record import head, options, reason, write
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from razorctl import Recipe, restore, sparsify
from razorctl.errors import UsageError
from razorctl.memory.saved import traced_bytes
from razorctl.surgery.byte_budget import sparsify_within

RATIO, LOOSE = 0.9, 0.5
COSINES = {RATIO: 0.98, LOOSE: 0.999}
REPEATED = 1 - 1e-9  # cosine of two passes of the stock model
BF16 = torch.bfloat16
Made = tuple[nn.Module, Any]  # a model in train mode, and its inputs


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


def attention_block(norm_first: bool) -> nn.Module:
    return nn.TransformerEncoderLayer(64, 4, 128, 0.0, batch_first=True, norm_first=norm_first)


TORCH: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "TransformerEncoderLayer": (partial(attention_block, False), 1),
    "TransformerEncoderLayer, norm first": (partial(attention_block, True), 1),
    "TransformerDecoderLayer": (
        lambda: nn.TransformerDecoderLayer(64, 4, 128, 0.0, batch_first=True),
        2,
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
PIXELS = {"maxvit_t": 224}
OPTIONS = {"vit_b_16": {"image_size": 96}}
ADAPTED = ["q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"]
NORMS = ["input_layernorm", "post_attention_layernorm"]
# Adapter -> what it is told: ranks and blocks that divide a width of 64.
ADAPTERS: dict[str, dict[str, Any]] = {
    "LoraConfig": {},
    "LoraConfig, use_dora": {"use_dora": True},
    "AdaLoraConfig": {"total_step": 100},
    "BOFTConfig": {"boft_block_size": 4},
    "BeftConfig": {},
    "C3AConfig": {"block_size": 16},
    "DeftConfig": {},
    "DeloraConfig": {},
    "FourierFTConfig": {"n_frequency": 100},
    "FrodConfig": {},
    "GloraConfig": {},
    "GraloraConfig": {},
    "HRAConfig": {},
    "HiraConfig": {},
    "IA3Config": {"feedforward_modules": ["down_proj"]},
    "LNTuningConfig": {"target_modules": NORMS},
    "LilyConfig": {},
    "LoHaConfig": {},
    "LoKrConfig": {},
    "MissConfig": {},
    "OFTConfig": {"r": 0, "oft_block_size": 16},
    "OSFConfig": {},
    "PeanutConfig": {},
    "PsoftConfig": {},
    "PveraConfig": {},
    "RandLoraConfig": {},
    "RoadConfig": {"group_size": 16},
    "ShiraConfig": {"r": 4},
    "SupertuningConfig": {},
    "TinyLoraConfig": {},
    "UniLoraConfig": {},
    "VBLoRAConfig": {"vector_length": 16, "num_vectors": 32},
    "VeraConfig": {},
    "WaveFTConfig": {"n_frequency": 100},
}


def of_torch(name: str) -> Made:
    torch.manual_seed(0)
    layer, calls = TORCH[name]
    return Stack(layer, calls).train(), torch.randn(4, 64, 64)


def of_torchvision(name: str) -> Made:
    torch.manual_seed(0)
    model = torchvision.models.get_model(name, num_classes=10, **OPTIONS.get(name, {})).train()
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        if isinstance(module, torchvision.ops.StochasticDepth):
            module.p = 0.0
        for parameter in module.parameters(recurse=False):
            if parameter.detach().abs().max() <= 1e-4:
                nn.init.normal_(parameter, std=0.1)
    size = PIXELS.get(name, 96)
    return model, torch.randn(2, 3, size, size)


def of_peft(name: str) -> Made:
    kind, _, _ = name.partition(",")
    model = tiny.build("llama")
    inputs = tiny.inputs(model)
    options = {"target_modules": ADAPTED} | ADAPTERS[name]
    adapted: nn.Module = peft.get_peft_model(model, getattr(peft, kind)(**options))
    for parameter in adapted.parameters():
        if parameter.requires_grad and parameter.detach().abs().max() <= 1e-4:
            nn.init.normal_(parameter, std=0.02)
    return adapted.train(), inputs


def of_transformers(name: str) -> Made:
    model = tiny.build(name)
    return model, tiny.inputs(model)


def of_timm(name: str) -> Made:
    case = architectures.CASES[name]
    return case.build(), case.images()


LIBRARIES: dict[str, tuple[Callable[[str], Made], list[str]]] = {
    "torch": (of_torch, list(TORCH)),
    "peft": (of_peft, list(ADAPTERS)),
    "torchvision": (of_torchvision, list(TORCHVISION)),
    "transformers": (
        of_transformers,
        sorted(CONFIG_MAPPING_NAMES.keys() & tiny.MODEL_MAPPING_NAMES, key=lambda k: (len(k), k)),
    ),
    "timm": (of_timm, list(architectures.CASES)),
}


class Warnings(logging.Handler):
    """A handler of logs that keeps the warnings of razorctl."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def faults(got: Pass, want: Pass, ratio: float | None) -> list[str]:
    """The faults of a pass, in words.

    Args:
        got: of the sparsified model.
        want: of the stock model, at the same precision.
        ratio: whose cosine it has to reach; None for any.
    """
    every = {
        "the forward pass is not stock's": not equal(got, want),
        "other parameters have gradients": got.gradients.keys() != want.gradients.keys(),
        "a gradient is not finite": not all(g.isfinite().all() for g in got.gradients.values()),
        "the cosine is low": ratio is not None and not cosine(got, want) >= COSINES[ratio],
    }
    return [fault for fault, there in every.items() if there]


def check(make: Callable[[str], Made], name: str) -> dict[str, Any]:
    """A row of the result; `left_out` says why a model could not be made or run."""
    torch.set_num_threads(1)  # here, since its pool of threads would not outlive a fork
    start = time.perf_counter()
    try:
        model, inputs = make(name)
        run(model, inputs)  # the first pass of some models chooses an attention
        want, again = run(model, inputs), run(model, inputs)
    except Exception as error:
        return {"left_out": reason(error)}
    if not (equal(want, again) and cosine(want, again) > REPEATED):  # NaN too
        return {"left_out": "the stock model does not repeat itself, or its gradients are infinite"}
    full, types = traced_bytes(model, inputs), [type(m) for m in model.modules()]
    row: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters()), "full": full}
    wrong, said = [], Warnings()
    logging.getLogger("razorctl").addHandler(said)
    for ratio in COSINES:
        with suppress(UsageError):  # it knows no layer of the model
            sparsify(model, Recipe(ratio=ratio))
            got = run(model, inputs)
            row |= {
                f"share_{ratio}": traced_bytes(model, inputs) / full,
                f"cosine_{ratio}": cosine(got, want),
            }
            wrong += [f"ratio {ratio}: {fault}" for fault in faults(got, want, ratio)]
            restore(model)
    row["warnings"] = list(dict.fromkeys(said.said))
    try:
        sparsify_within(model, Recipe(ratio=RATIO), inputs)
        got = run(model, inputs)
        row |= {"share_within": traced_bytes(model, inputs) / full, "refusal": None}
        row["cosine_within"] = cosine(got, want)
        wrong += [f"within: {fault}" for fault in faults(got, want, RATIO)]
    except UsageError as refusal:
        row |= {"share_within": None, "refusal": str(refusal), "cosine_within": None}
    restore(model)
    row["faults"] = wrong + under_autocast(model, inputs)
    if types != [type(module) for module in model.modules()]:
        row["faults"].append("restore left other types")
    return row | {"seconds": time.perf_counter() - start}


def under_autocast(model: nn.Module, inputs: Any) -> list[str]:
    """The faults of a step in bf16, but for its cosine: bf16 itself rounds."""
    try:
        want, again = run(model, inputs, BF16), run(model, inputs, BF16)
    except RuntimeError:  # the stock model has no such step
        return []
    if not equal(want, again):
        return []
    try:
        sparsify(model, Recipe(ratio=RATIO))
    except UsageError:
        return []
    wrong = [f"bf16: {fault}" for fault in faults(run(model, inputs, BF16), want, None)]
    restore(model)
    return wrong


def earlier(file: Path, again: set[tuple[str, str]]) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The rows of a result and what it left out, without the models that are to run again."""
    document = json.loads(file.read_text())
    rows = [row for row in document["rows"] if (row["library"], row["model"]) not in again]
    names = {f"{library} {name}" for library, name in again}
    return rows, {name: why for name, why in document["left_out"].items() if name not in names}


def main() -> None:
    parser = options(__doc__, "foreign")
    parser.add_argument("--libraries", nargs="+", choices=list(LIBRARIES), default=list(LIBRARIES))
    parser.add_argument("--models", nargs="+", help="by name; default: all")
    parser.add_argument(
        "--add", action="store_true", help="keep earlier rows; without --models, run only the rest"
    )
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    every = [
        (library, make, name)
        for library in args.libraries
        for make, names in [LIBRARIES[library]]
        for name in names
        if args.models is None or name in args.models
    ]
    with torch.device("meta"):  # what libraries import late they import once, not in each process
        small = transformers.LlamaConfig(hidden_size=64, num_hidden_layers=1, intermediate_size=64)
        loaded, tokens = transformers.LlamaModel(small), torch.zeros(4, 64, dtype=torch.int64)
    sparsify_within(loaded, Recipe(ratio=RATIO), tokens)
    rows, left_out = list[dict[str, Any]](), dict[str, str]()
    if args.add:
        again = {(library, name) for library, _, name in every if args.models}
        rows, left_out = earlier(args.out, again)
        before = {(row["library"], row["model"]) for row in rows}
        every = [way for way in every if (way[0], way[2]) not in before]
        every = [way for way in every if f"{way[0]} {way[2]}" not in left_out]
    for library, make, name in track(every, console=Console(stderr=True)):
        row = guarded(check, make, name)
        if "left_out" in row:
            left_out[f"{library} {name}"] = row["left_out"]
            continue
        rows.append({"library": library, "model": name, **row})
        document = {
            **head(f"1 of {device_name()}", "torch", *LIBRARIES),
            "ratio": RATIO,
            "cosines_at_least": {str(ratio): least for ratio, least in COSINES.items()},
            "left_out": left_out,
            "rows": rows,
        }
        rows.sort(key=lambda row: list(LIBRARIES).index(row["library"]))
        write(args.out, document)
        print(library, name, row.get("share_0.9"), row.get("share_within"), row["faults"])
    sys.exit(any(row["faults"] for row in rows))


if __name__ == "__main__":
    main()
