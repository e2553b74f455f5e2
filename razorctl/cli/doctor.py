"""`razorctl doctor`."""

from dataclasses import asdict

import typer

from razorctl.cli.options import Json
from razorctl.cli.views import common as views
from razorctl.cli.views import doctor as view


def doctor(json: Json = False) -> None:
    """Check this machine: versions, GPUs, kernels, folders and the hub.

    Kernels and attention run on a small model. The exit code is 1 if a check
    fails. A note marks a check that passes, but could be better.
    """
    with views.status("loading PyTorch") as at:
        from razorctl.training.doctor import diagnose

        checks = []
        for check in diagnose():
            checks.append(check)
            at(f"checked {check.group}")
    problems = sum(check.state == "problem" for check in checks)
    if json:
        views.print_json({"problems": problems, "checks": [asdict(check) for check in checks]})
    else:
        view.show(checks)
    if problems:
        raise typer.Exit(1)
