"""What a run leaves to look at: its curves, and held-out rows with predictions."""

import logging
from typing import TYPE_CHECKING

from razorctl.cli.views import common as views
from razorctl.errors import lacks_memory, reason_of
from razorctl.training.rundir import CURVES, PREDICTIONS

if TYPE_CHECKING:
    from razorctl.training.run import Run

log = logging.getLogger(__name__)


def leave(run: "Run") -> None:
    """Writes the pictures of a finished run into its directory.

    If one cannot be written, it gives a warning, since the run itself is complete.
    """
    from razorctl.cli.views import examples as view
    from razorctl.cli.views import report
    from razorctl.system.atomic import atomic_file
    from razorctl.training.predicting import examples

    try:
        with views.status("drawing curves and predictions"):
            with atomic_file(run.out / CURVES, replace=True) as file:
                report.write_curves(run.out, file)
            if (found := examples.worst(run)) is None:
                return
            images = "image" in found.rows.column_names
            with atomic_file(run.out / PREDICTIONS[images], replace=True) as file:
                if images:
                    view.picture(found).save(file, format="PNG")
                else:
                    file.write_text(view.page(found), "utf-8")
    except Exception as error:
        what = "out of memory" if lacks_memory(error) else reason_of(error)
        log.warning("%s lacks a picture (%s); the run is complete.", run.out, what)
