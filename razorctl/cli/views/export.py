"""The output of `export`."""

from typing import Any

from rich import box
from rich.table import Table

from razorctl import units
from razorctl.cli.views import common as views


def show(result: dict[str, Any]) -> None:
    """The table of the files of `export`, and where they are."""
    table = Table(box=box.SIMPLE_HEAD, show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    for name, size in result["files"].items():
        table.add_row(name, units.size(size))
    views.out.print(table)
    if result["onnx"] is not None:
        for what in ("inputs", "outputs"):
            each = (
                f"{name} [{', '.join(map(str, axes))}]"
                for name, axes in result["onnx"][what].items()
            )
            _line(f"{what}: {', '.join(each)}")
        _line(f"largest difference of a logit by onnxruntime: {result['onnx']['difference']:.2g}")
    if result["card"] is not None:
        _line(f"\n{result['card']}")
    for place in filter(None, (result["out"], result["url"])):
        _line(f"written: {place}")


def _line(text: str) -> None:
    views.out.print(text, soft_wrap=True, highlight=False, markup=False)
