"""Checks `sparsify` on a model of every file of models in timm: forward, gradients, `restore`.

    .venv/bin/python scripts/bench/architectures.py

Of each file the model with the fewest parameters is run, in train mode, on random images, with
`razor` at ratio 0.5. The forward pass has to equal that of the stock model to the bit. Every
parameter that gets a gradient in the stock model has to get a finite one. The cosine of all
gradients to the stock ones has to be at least 0.9995. `restore` has to bring the stock types back.
Each model runs in a process of its own, so that a crash is a row too. The script writes
results/architectures.json and exits with 1 if a model has a fault. It takes some ten minutes on one
core.
"""

import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

import timm
import torch
from machine import device_name
from passes import Pass, cosine, equal, guarded, run
from record import head, options, write
from rich.console import Console
from rich.progress import track
from rich.table import Table
from timm.models import list_modules
from torch import Tensor, nn
from worst import worst

from razorctl import Recipe, restore, sparsify
from razorctl.layers.base import RazorLayer

RECIPE = Recipe("razor", 0.5)
COSINE = 0.9995


@dataclass(frozen=True)
class Case:
    """A model of timm and its images.

    resized: whether timm has to be told the size of the images. options: arguments of timm for a
    smaller model, used where the smallest has over 80 million parameters and takes them.
    """

    model: str
    pixels: int = 96
    batch: int = 4
    resized: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def build(self) -> nn.Module:
        """A model in train mode with gradients for every parameter.

        Nothing is dropped. Parameters that start at or near zero, such as layer scales, are drawn
        anew, because no gradient would pass through them.
        """
        torch.manual_seed(0)
        size = {"img_size": self.pixels} if self.resized else {}
        model: nn.Module = timm.create_model(self.model, num_classes=10, **size, **self.options)
        for module in model.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd):
                module.p = 0.0
            if hasattr(module, "drop_prob"):
                module.drop_prob = 0.0
        for parameter in model.parameters():
            if parameter.detach().abs().max() <= 1e-4:
                nn.init.normal_(parameter, std=0.1)
        return model.train()

    def images(self) -> Tensor:
        """Random images [batch, 3, pixels, pixels]."""
        generator = torch.Generator().manual_seed(1)
        return torch.randn(self.batch, 3, self.pixels, self.pixels, generator=generator)


CASES = {
    "beit": Case("beit_base_patch16_224", resized=True, options={"depth": 2}),
    "byoanet": Case("halonet_h1", pixels=256, batch=1),
    "byobnet": Case("test_byobnet", resized=True),
    "cait": Case("cait_xxs24_224", resized=True),
    "coat": Case("coat_tiny", pixels=64, resized=True),
    "convit": Case("convit_tiny", resized=True),
    "convmixer": Case("convmixer_768_32", pixels=64),
    "convnext": Case("test_convnext"),
    "cpubone": Case("cpubone_nano"),
    "crossvit": Case("crossvit_tiny_240", pixels=64),
    "csatv2": Case("csatv2"),
    "cspnet": Case("cs3darknet_focus_s"),
    "cspnext": Case("cspnext_tiny"),
    "davit": Case("davit_tiny"),
    "deepseek_vit": Case("deepseek_vit_412m", pixels=98, resized=True, options={"depth": 2}),
    "deit": Case("deit_tiny_patch16_224", resized=True),
    "densenet": Case("densenet121"),
    "dla": Case("dla46x_c"),
    "dpn": Case("dpn48b"),
    "edgenext": Case("edgenext_xx_small"),
    "efficientformer": Case("efficientformer_l1", pixels=224, resized=True),
    "efficientformer_v2": Case("efficientformerv2_s0", resized=True),
    "efficientnet": Case("test_efficientnet"),
    "efficientvim": Case("efficientvim_m1"),
    "efficientvit_mit": Case("efficientvit_b0"),
    "efficientvit_msra": Case("efficientvit_m0", resized=True),
    "eva": Case("vit_tiny_patch16_dinov3_qkvb", resized=True),
    "fasternet": Case("fasternet_t0"),
    "fastvit": Case("fastvit_t8"),
    "focalnet": Case("focalnet_tiny_srf"),
    "gcvit": Case("gcvit_xxtiny", resized=True),
    "gemma4_vit": Case("gemma4_vit_167m", resized=True, options={"depth": 2}),
    "ghostnet": Case("ghostnet_050"),
    "hardcorenas": Case("hardcorenas_b"),
    "hgnet": Case("hgnetv2_b0"),
    "hiera": Case("hiera_tiny_224", resized=True),
    "hieradet_sam2": Case("sam2_hiera_tiny"),
    "hrnet": Case("hrnet_w18_small"),
    "iformer": Case("iformer_t"),
    "inception_next": Case("inception_next_atto"),
    "inception_resnet_v2": Case("inception_resnet_v2", pixels=96),
    "inception_v3": Case("inception_v3"),
    "inception_v4": Case("inception_v4"),
    "lcnetv2": Case("lcnetv2_small"),
    "levit": Case("levit_128s", resized=True),
    "lowformer": Case("lowformer_b0"),
    "mambaout": Case("test_mambaout"),
    "maxxvit": Case("test_coatnet", resized=True),
    "metaformer": Case("poolformerv2_s12"),
    "mlp_mixer": Case("gmlp_ti16_224", resized=True),
    "mobilenetv3": Case("mobilenetv3_small_050"),
    "mobilenetv5": Case("mobilenetv5_300m", options={"channel_multiplier": 0.1}),
    "mobilevit": Case("mobilevit_xxs", resized=True),
    "mvitv2": Case("mvitv2_tiny", resized=True),
    "naflexvit": Case("naflexvit_base_patch16_parfac_gap", resized=True, options={"depth": 2}),
    "nasnet": Case("nasnetalarge", pixels=64),
    "nest": Case("nest_tiny", resized=True),
    "nextvit": Case("nextvit_small"),
    "nfnet": Case("test_nfnet"),
    "pit": Case("pit_ti_224", resized=True),
    "pnasnet": Case("pnasnet5large", pixels=64),
    "pvt_v2": Case("pvt_v2_b0"),
    "qwen3_vit": Case("qwen3_vit_88m", resized=True, options={"depth": 2}),
    "rdnet": Case("rdnet_tiny"),
    "regnet": Case("regnetx_002"),
    "repghost": Case("repghostnet_050"),
    "repvit": Case("repvit_m1", resized=True),
    "res2net": Case("res2next50"),
    "resnest": Case("resnest14d"),
    "resnet": Case("test_resnet"),
    "resnetv2": Case("resnetv2_18"),
    "rexnet": Case("rexnet_100"),
    "selecsls": Case("selecsls42"),
    "senet": Case("legacy_seresnet18"),
    "sequencer": Case("sequencer2d_s", resized=True),
    "shvit": Case("shvit_s1"),
    "sknet": Case("skresnet18"),
    "starnet": Case("starnet_s050"),
    "swiftformer": Case("swiftformer_xs", resized=True),
    "swin_transformer": Case("swin_tiny_patch4_window7_224", resized=True),
    "swin_transformer_v2": Case("swinv2_tiny_window16_256", resized=True),
    "swin_transformer_v2_cr": Case("swinv2_cr_tiny_224", resized=True),
    "tiny_vit": Case("tiny_vit_5m_224"),
    "tnt": Case("tnt_s_legacy_patch16_224", resized=True),
    "tresnet": Case("tresnet_m"),
    "twins": Case("twins_svt_small", resized=True),
    "vgg": Case("vgg11", pixels=64),
    "visformer": Case("visformer_tiny", resized=True),
    "vision_transformer": Case("test_vit", resized=True),
    "vision_transformer_hybrid": Case("vit_tiny_r_s16_p8_224", resized=True),
    "vision_transformer_relpos": Case("test_vit_relpos", resized=True),
    "vision_transformer_sam": Case("samvit_base_patch16_224", resized=True, options={"depth": 2}),
    "vitamin": Case("vitamin_small_224", resized=True),
    "volo": Case("volo_d1_224", resized=True),
    "vovnet": Case("ese_vovnet19b_slim_dw"),
    "xception": Case("legacy_xception"),
    "xception_aligned": Case("xception41p"),
    "xcit": Case("xcit_nano_12_p8_224", resized=True),
}


def lowest(got: Pass, want: Pass) -> dict[str, Any]:
    """The parameter whose gradient has the lowest cosine, of those with a hundredth of the norm.

    Some exact gradients are zero, such as that of a bias before batch norm; they are only rounding.
    """
    norms = {name: grad.double().norm().item() for name, grad in want.gradients.items()}
    whole = sum(norm**2 for norm in norms.values()) ** 0.5
    cosines = {
        name: torch.cosine_similarity(
            got.gradients[name].flatten().double(), want.gradients[name].flatten().double(), 0
        ).item()
        for name, norm in norms.items()
        if norm >= 0.01 * whole and name in got.gradients
    }
    name = min(cosines, key=cosines.__getitem__)
    return {"parameter": name, "cosine": cosines[name]}


def check(case: Case) -> dict[str, Any]:
    """A row of the result; `faults` says what is wrong with it, in words."""
    start = time.perf_counter()
    model, images = case.build(), case.images()
    want, again = run(model, images), run(model, images)
    types = [type(module) for module in model.modules()]
    names = sparsify(model, RECIPE)
    kinds = Counter(m.kind for m in model.modules() if isinstance(m, RazorLayer))
    got = run(model, images)
    restore(model)
    closeness = cosine(got, want)
    faults = {
        "the forward pass is not stock's": not equal(got, want),
        "other parameters have gradients": got.gradients.keys() != want.gradients.keys(),
        "a gradient is not finite": not all(g.isfinite().all() for g in got.gradients.values()),
        f"the cosine is below {COSINE}": not closeness >= COSINE,
        "restore left other types": types != [type(module) for module in model.modules()],
    }
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "swapped": len(names),
        "kinds": dict(sorted(kinds.items())),
        "stock_repeats_itself": equal(again, want) and cosine(again, want) > 1 - 1e-12,
        "cosine": closeness,
        "lowest": lowest(got, want),
        "worst": worst(got.gradients, want.gradients),
        "seconds": time.perf_counter() - start,
        "faults": [fault for fault, there in faults.items() if there],
    }


def off(worst: dict[str, Any]) -> str:
    """The worst parameter in words, empty if it was not measured."""
    if not worst:
        return ""
    return f"{worst['relative_error']:.3f}, {worst['signs']:.1%} of {worst['parameter']}"


def report(rows: list[dict[str, Any]]) -> Table:
    """A table of the rows."""
    heads = ("module", "model", "swapped", "cosine", "lowest, of", "error, signs of the worst")
    table = Table(*heads, "faults")
    for row in rows:
        low = row.get("lowest")
        table.add_row(
            row["module"],
            row["model"],
            str(row.get("swapped", "")),
            f"{row['cosine']:.6f}" if low else "",
            f"{low['cosine']:.4f}, {low['parameter']}" if low else "",
            off(row.get("worst") or {}),
            "; ".join(row["faults"]),
        )
    return table


def main() -> None:
    parser = options(__doc__, "architectures")
    parser.add_argument("--modules", nargs="+", choices=list(CASES), default=list(CASES))
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for module in track(args.modules, console=Console(stderr=True)):
        case = CASES[module]
        rows.append({"module": module, **asdict(case), **guarded(check, case)})
    document = {
        **head(f"1 of {device_name()}", "torch", "timm"),
        "recipe": {"method": RECIPE.method, "ratio": RECIPE.ratio},
        "cosine_at_least": COSINE,
        "modules_left_out": sorted(set(list_modules()) - set(CASES)),
        "rows": rows,
    }
    write(args.out, document)
    Console().print(report(rows))
    sys.exit(any(row["faults"] for row in rows))


if __name__ == "__main__":
    main()
