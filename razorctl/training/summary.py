"""The summary of a finished run: its result.json."""

from dataclasses import asdict
from statistics import fmean, median
from typing import Any

from razorctl.system import devices, documents
from razorctl.training import rundir
from razorctl.training.preparation import PreparedRun


def summary_of(run: PreparedRun) -> dict[str, Any]:
    """The summary of a run under the stable keys of `finetune --json`.

    `epoch_seconds` and `step_seconds` are without the time of compiling, which `payoff` has, and of
    compiled steps if there are any. Bytes are of one process.
    """
    last, payoff, best = run.history[-1], run.trial.payoff, run.best()
    seconds = [step.seconds for step in run.history]
    per_epoch, compiling = run.steps_per_epoch, run.trial.compile_seconds / len(seconds)
    document = {
        "run_dir": str(run.out),
        "model": run.job.model,
        "dataset": run.job.dataset,
        "classes": list(run.classes),
        "recipe": asdict(run.recipe),
        "job": asdict(run.job),
        "steps": len(run.history),
        "stopped_early": run.stopped_early,
        "out_of_memory": run.recovery.relieved,
        "metric": run.metric,
        **_scores(run),
        "saved_bytes": run.saved_bytes,
        "full_saved_bytes": run.full_saved_bytes,
        "peak_bytes": run.peak_bytes,
        "step_seconds": median(run.trial.steady or seconds),
        "epoch_seconds": (fmean(seconds) - compiling) * per_epoch,
        "device": devices.name(run.device),
        "weights": str(run.out / (rundir.LAST if best else rundir.WEIGHTS)),
        "best_step": best.step if best else last.step,
        "best_accuracy": run.history[best.step - 1].accuracy if best else last.accuracy,
        "best_weights": str(run.out / rundir.WEIGHTS),
        "best_metrics": dict(run.best_figures),
        "by_class": run.by_class,
        "predicted": run.predicted,
        "compiled": run.trial.done,
        "payoff": payoff and asdict(payoff),
        "checksums": run.checksums,
    }
    return documents.sealed(document)


def _scores(run: PreparedRun) -> dict[str, Any]:
    """The figures of the last weights: of the test split if there is one, else of the validation.

    With both splits there are also the accuracy and the loss of the validation.
    """
    last = run.history[-1]
    figures, split = last.metrics or {}, run.feed.split
    validation = {}
    if run.tested is not None:
        validation = {"validation_accuracy": last.accuracy, "validation_loss": last.test_loss}
        figures, split = run.tested, "test"
    scores = {"accuracy": figures.get("accuracy"), "loss": figures["loss"], "split": split}
    return scores | {"metrics": dict(figures)} | validation
