"""The output of `export`."""

from typing import Any

from razorctl import units
from razorctl.cli.views import common as views


def show(result: dict[str, Any]) -> None:
    """Prints the files of `export` with their sizes, and where they were written."""
    table = views.facts_table("")
    table.columns[1].justify = "right"
    for name, size in result["files"].items():
        table.add_row(name, units.size(size))
    views.out.print(table)
    if result["onnx"] is not None:
        for group in ("inputs", "outputs"):
            tensors = result["onnx"][group].items()
            names = (f"{name} [{', '.join(map(str, axes))}]" for name, axes in tensors)
            views.line(f"{group}: {', '.join(names)}")
        difference = result["onnx"]["difference"]
        views.line(f"largest difference of a logit by onnxruntime: {difference:.2g}")
    if result["card"] is not None:
        views.line(f"\n{result['card']}")
    for address in filter(None, (result["out"], result["url"])):
        views.line(f"written: {address}")
