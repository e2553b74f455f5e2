"""Checkpoints on a disk that fails at any call, and runs that go on as if nothing had happened."""

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from razorctl import optimizer
from razorctl.config.job import Job
from razorctl.config.recipe import Recipe
from razorctl.errors import RazorError, UsageError
from razorctl.models.timm import micro
from razorctl.optimizer.slices import Slices
from razorctl.step import ByLogits
from razorctl.training import preparation, run_files, rundir
from razorctl.training import run as trainer
from razorctl.training.checkpoints import MARKER
from razorctl.training.feed import Feed
from razorctl.training.run import Run, finetune
from tests.forked import Forked
from tests.own import photos
from tests.training.runs import FULL, JOB, JOINT, begin, resume, same, steps, stop

pytestmark = pytest.mark.usefixtures("shallow", "warnings_are_seen")


CASES = {
    "full, AdamW, dropout, mixup": (FULL, {"optimizer": "adamw", "mixup": 0.5}),
    "razor, an average, frozen blocks": (Recipe(ratio=0.5), {"ema": 0.9, "freeze": "0"}),
    "razor, AdamW, two micro-batches": (
        Recipe("razor", 0.5),
        {"optimizer": "adamw", "accumulate": 2},
    ),
    "columns of a bandit, joint budget, dropout": (JOINT, {}),
    "state on the host": (
        Recipe(),
        {"optimizer": "adamw", "optimizer_state": "host", "weights": "bf16", "precision": "bf16"},
    ),
    "a linear schedule, few rows": (FULL, {"schedule": "linear", "max_rows": 20}),
    "razor, adapters, checkpointing": (
        Recipe(ratio=0.5, lora=True, activation_checkpointing=True),
        {"optimizer": "adamw"},
    ),
}


def test_a_step_that_fails_loses_none_before_it(tmp_path, monkeypatch):
    def fail(*_: Any) -> None:
        torch.rand(3)  # what was drawn for it is taken back
        raise OSError("the image is damaged")

    job = replace(JOB, evaluate_every=3, save_every=100)
    assert len([*begin(tmp_path / "whole", job, JOINT)]) == job.steps
    for place, taken in (((Feed, "trained"), 2), ((preparation, "evaluate"), 3)):
        out = tmp_path / str(taken)
        run = begin(out, job, JOINT, steps=2)
        with monkeypatch.context() as patch:
            patch.setattr(*place, fail)
            with pytest.raises(OSError, match="damaged"):
                next(run)
        assert run.lock is not None
        assert not run.lock.is_locked  # though the run is still there
        assert steps(out) == [taken]
        list(resume(out, job, JOINT))
        assert same(out / "model.safetensors", tmp_path / "whole/model.safetensors")


@pytest.mark.parametrize("case", CASES)
def test_a_run_killed_after_any_step_ends_with_the_same_bits(case, tmp_path, monkeypatch):
    if "dropout" in case:
        monkeypatch.setitem(micro.VIT_MICRO, "proj_drop_rate", 0.2)
        monkeypatch.setitem(micro.VIT_MICRO, "drop_path_rate", 0.2)
    recipe, settings = CASES[case]
    job = replace(JOB, **settings)
    run = begin(tmp_path / "run", job, recipe)
    killed = (1, 2, 3) if recipe == JOINT else (2,)  # that run has all that a state can hold
    for taken in run:
        if taken.step in killed:
            shutil.copytree(tmp_path / "run", tmp_path / str(taken.step))
    for step in killed:
        again = resume(tmp_path / str(step), job, recipe)
        assert [s.step for s in again.history] == list(range(1, step + 1))
        list(again)
        assert [s.loss for s in again.history] == [s.loss for s in run.history]
        assert same(tmp_path / str(step) / "model.safetensors", tmp_path / "run/model.safetensors")
        lines = (tmp_path / str(step) / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]


SMALL = partial(Slices, most=8192)  # of the weights of vit-micro some have six such slices
LEAN = replace(JOB, precision="bf16", weights="bf16", optimizer="adamw8bit")
LEAN = replace(LEAN, optimizer_in_backward=True)


def killed_between_slices() -> None:
    """Trains, and kills its process in step 3 after the update of one slice of several."""
    from torchao.optim import adam

    from tests.models import registered

    update = adam.single_param_adam

    def last(weight: torch.Tensor, gradient: torch.Tensor, step: torch.Tensor, *rest: Any) -> None:
        update(weight, gradient, step, *rest)
        if step == 3 and weight.shape == (8192,):
            os.kill(os.getpid(), signal.SIGKILL)

    adam.single_param_adam, optimizer.Slices = last, SMALL
    with registered(shallow=True), torch.compiler.set_stance("force_eager"):
        list(begin(Path("run"), LEAN))


def test_a_run_killed_between_two_slices_ends_with_the_same_bits(tmp_path, monkeypatch):
    pytest.importorskip("torchao")
    code, *_ = Forked(killed_between_slices, folder=tmp_path).ended()
    assert code == -signal.SIGKILL
    monkeypatch.setattr(optimizer, "Slices", SMALL)
    with torch.compiler.set_stance("force_eager"):
        again = resume(tmp_path / "run", LEAN)
        assert len(again.history) == 2
        list(again)
        list(begin(tmp_path / "whole", LEAN))
    assert same(tmp_path / "run/model.safetensors", tmp_path / "whole/model.safetensors")


def test_the_newest_and_the_best_are_kept(tmp_path, accuracies):
    accuracies(0.5, 0.7, 0.7, 0.6, 0.1)
    job = replace(JOB, steps=5, evaluate_every=1, save_every=None, learning_rate=0.5)
    run = begin(tmp_path / "run", job)
    kept, weights = [], []
    for _ in run:
        kept.append(steps(tmp_path / "run"))
        weights.append({name: p.detach().clone() for name, p in run.model.named_parameters()})
    assert kept == [[1], [2], [3], [3, 4], [3, 5]]
    result = run.result()
    assert (result["best_step"], result["best_accuracy"]) == (3, 0.7)
    assert result == json.loads((tmp_path / "run/result.json").read_text())
    for name, step in (("model", 3), ("last/model", 5)):
        exported = load_file(tmp_path / f"run/{name}.safetensors")
        assert all(torch.equal(exported[k], v) for k, v in weights[step - 1].items())
    assert not (tmp_path / "run/checkpoints").exists()


def test_images_that_were_exchanged_between_two_steps_are_refused(tmp_path):
    one, other = photos(tmp_path / "d", 6) / "car/0.jpg", tmp_path / "d/tram/0.jpg"
    job = replace(JOB, dataset=str(tmp_path / "d"), batch_size=4)
    stop(begin(tmp_path / "run", job, steps=2))
    contents = one.read_bytes(), other.read_bytes()
    for first, second, refused in ((*contents[::-1], True), (*contents, False)):
        one.write_bytes(first)
        other.write_bytes(second)
        if refused:
            with pytest.raises(UsageError, match="d has changed since"):
                resume(tmp_path / "run", job)
    stop(resume(tmp_path / "run", job))


def test_the_best_adapters_are_merged_too(tmp_path, accuracies):
    accuracies(0.9, 0.1)
    job = replace(JOB, steps=2, evaluate_every=1, optimizer="adamw", learning_rate=0.1)
    list(begin(tmp_path / "run", job, Recipe("lora")))
    best, last = (
        load_file(tmp_path / f"run/{name}.safetensors") for name in ("model", "last/model")
    )
    assert best.keys() == last.keys() == micro.vit_micro(10, pretrained=False).state_dict().keys()
    assert not torch.equal(best["blocks.0.attn.qkv.weight"], last["blocks.0.attn.qkv.weight"])
    adapters = [
        load_file(tmp_path / "run" / folder / "adapter/adapter_model.safetensors")
        for folder in (".", "last")
    ]
    assert not all(torch.equal(adapters[0][name], adapters[1][name]) for name in adapters[0])


def test_saves_are_as_rare_as_asked_for_but_the_best_is_one(tmp_path, accuracies):
    accuracies(0.5, 0.4, 0.6, 0.2, 0.2)
    job = replace(JOB, steps=5, evaluate_every=1, save_every=4, keep_checkpoints=True)
    run = begin(tmp_path / "run", job)
    assert [steps(tmp_path / "run") for _ in run] == [[1], [1], [3], [3, 4], [3, 5]]
    assert (tmp_path / "run/result.json").exists()
    assert steps(tmp_path / "run") == [3, 5]


def spoil(path: Path) -> None:
    """One bit of one file flips, as on a bad disk."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("how", ["flipped", "torn", "unmarked"])
def test_a_damaged_newest_checkpoint_is_skipped(how, tmp_path, accuracies, caplog):
    accuracies(0.9, *[0.1] * 6)
    job = replace(JOB, evaluate_every=1)
    run = begin(tmp_path / "run", job, steps=2)
    stop(run)
    newest = tmp_path / "run/checkpoints/step-00000002"
    if how == "flipped":
        spoil(newest / "model.safetensors")
    elif how == "torn":
        os.truncate(newest / "state.safetensors", 1000)
    else:
        (newest / MARKER).unlink()
    again = resume(tmp_path / "run", job)
    assert f"{newest} is incomplete or damaged; continuing from step 1." in caplog.text
    assert len(again.history) == 1
    assert (tmp_path / "run/metrics.jsonl").read_text().count("\n") == 1
    list(again)
    list(run)
    assert [s.loss for s in again.history] == [s.loss for s in run.history]


def test_without_a_valid_checkpoint_a_run_begins_again(tmp_path, caplog):
    reference = begin(tmp_path / "reference")
    list(reference)
    stop(begin(tmp_path / "run", steps=2))
    spoil(tmp_path / "run/checkpoints/step-00000002/state.json")
    run = resume(tmp_path / "run")
    assert "continuing from the beginning" in caplog.text
    assert not run.history
    list(run)
    assert same(tmp_path / "run/model.safetensors", tmp_path / "reference/model.safetensors")


def test_another_number_of_threads_is_noted_and_the_first_one_stays_on_record(tmp_path):
    stop(begin(tmp_path / "run", steps=1))
    config = tmp_path / "run/config.toml"
    had = f"threads = {torch.get_num_threads()}"
    config.write_text(config.read_text().replace(had, "threads = 7"))
    again = resume(tmp_path / "run")
    assert [note for note in again.notes if "was started with 7 threads" in note]
    assert "threads = 7" in config.read_text()
    stop(again)


def test_another_format_is_refused(tmp_path):
    stop(begin(tmp_path / "run", steps=1))
    marker = tmp_path / "run/checkpoints/step-00000001" / MARKER
    marker.write_text(json.dumps(json.loads(marker.read_text()) | {"format": 2}))
    with pytest.raises(UsageError, match="has format 2, and this razorctl reads 1"):
        resume(tmp_path / "run")


def test_a_second_process_is_refused(tmp_path):
    run = begin(tmp_path / "run", steps=1)
    with pytest.raises(UsageError, match="another process trains in"):
        resume(tmp_path / "run")
    list(run)  # which it has not disturbed
    assert (tmp_path / "run/model.safetensors").exists()
    with pytest.raises(UsageError, match="holds a finished run"):
        resume(tmp_path / "run")


def test_the_kernel_frees_the_directory_of_a_killed_process(tmp_path):
    code = (
        "import os, sys; from pathlib import Path; from razorctl.training import rundir\n"
        "with rundir.claimed(Path(sys.argv[1]), resume=True):\n"
        "    child = os.fork()\n"  # such as one that loads data
        "    if not child:\n"
        "        print('held', flush=True)\n"  # the child runs, and has given the lock back
        "        os.close(1); os.read(0, 1); os._exit(0)\n"
        "    os.read(0, 1)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "run")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    ) as holder:
        assert holder.stdout.readline() == b"held\n"
        with (
            pytest.raises(UsageError, match="another process trains in"),
            rundir.claimed(tmp_path / "run", resume=True),
        ):
            pass
        holder.kill()
        holder.wait()
        with rundir.claimed(tmp_path / "run", resume=True):  # while the child still runs
            pass


def test_an_epoch_goes_on_where_it_was(tmp_path):
    job = Job("vit-micro", "digits", batch_size=400, steps=7, accumulate=4)
    loading = finetune(job, FULL, out=tmp_path / "run", device="cpu").feed.loading
    read: list[int] = []

    class Rows:
        def __getitem__(self, row: int) -> int:
            read.append(row)
            return row

    from torch.utils.data import DataLoader

    loading.loader = DataLoader(Rows(), batch_sampler=loading.order, collate_fn=list)  # type: ignore[arg-type]

    def rows(taken: int, number: int) -> list[list[int]]:
        batches = loading.batches(taken)
        return [[row for part in next(batches) for row in part] for _ in range(number)]

    whole = rows(0, 7)
    assert [len(step) for step in whole] == [400] * 7
    assert len({*whole[0], *whole[1], *whole[2]}) == 1200
    assert whole[0] != whole[3]
    for taken in (1, 3, 4, 5):
        read.clear()
        assert rows(taken, 7 - taken) == whole[taken:]
        assert read == [row for step in whole[taken:] for row in step]  # no row that is skipped


class TestDivergence:
    """The loss is NaN at step 3, until the learning rate is lower."""

    @pytest.fixture
    def run(self, tmp_path, monkeypatch) -> Run:
        take, loss = trainer.Learner.step, F.cross_entropy

        def step(learner: Any, micro_batches: Any, total=None) -> Any:
            bad = learner.scheduler.last_epoch == 2 and learner.job.learning_rate > 0.1
            with monkeypatch.context() as patch:
                if bad:
                    patch.setattr(F, "cross_entropy", lambda *x, **k: loss(*x, **k) * torch.nan)
                return take(learner, micro_batches)

        monkeypatch.setattr(trainer.Learner, "step", step)
        return begin(tmp_path / "run", replace(JOB, save_every=4), JOINT, steps=2)

    def test_leaves_all_as_it_was(self, run, tmp_path):
        before = {name: p.clone() for name, p in run.model.state_dict().items()}
        state = torch.get_rng_state()
        with pytest.raises(RazorError, match=r"loss is nan at step 3, and step 2 is saved; lower"):
            next(run)
        assert all(torch.equal(p, before[name]) for name, p in run.model.state_dict().items())
        assert torch.equal(torch.get_rng_state(), state)
        assert steps(tmp_path / "run") == [2]

    def test_goes_on_with_a_lower_learning_rate_alone(self, run, tmp_path):
        with pytest.raises(RazorError) as caught:
            next(run)
        assert "--lr 0.1`" in str(caught.value)
        stop(run)
        for lr in (0.3, 0.25):
            with pytest.raises(UsageError, match=r"learning rate 0\.2"):
                resume(tmp_path / "run", replace(JOB, save_every=4, learning_rate=lr), JOINT)
        job = replace(JOB, save_every=4, learning_rate=0.1)
        list(resume(tmp_path / "run", job, JOINT))
        lines = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
        rates = [line["learning_rate"] for line in lines]
        shares = [run.job.decay(step) for step in range(4)]
        assert rates == [lr * share for lr, share in zip((0.2, 0.2, 0.1, 0.1), shares, strict=True)]


class TestSpoiledWeights:
    """A weight is NaN after step 3, until the learning rate is lower."""

    @pytest.fixture(autouse=True)
    def spoiled(self, monkeypatch):
        take = trainer.Learner.step

        def step(learner: Any, *args: Any) -> Any:
            taken = take(learner, *args)
            if learner.scheduler.last_epoch == 3 and learner.job.learning_rate > 0.1:
                next(learner.model.parameters()).data[0] = torch.nan
            return taken

        monkeypatch.setattr(trainer.Learner, "step", step)

    def test_are_not_saved_where_they_are_evaluated(self, tmp_path):
        out = tmp_path / "run"
        run = begin(out, replace(JOB, evaluate_every=1), steps=2)
        before = {file: file.read_bytes() for file in out.rglob("step-00000002/*.safetensors")}
        sentence = (
            r"loss of the evaluation is not finite at step 3, and step 2 is saved; lower --lr"
        )
        with pytest.raises(RazorError, match=sentence) as caught:
            next(run)
        assert caught.value.exit_code == 1
        assert steps(out)[-1] == 2
        assert before == {file: file.read_bytes() for file in before}
        stop(run)
        list(resume(out, replace(JOB, evaluate_every=1, learning_rate=0.1)))
        assert (out / "result.json").exists()

    def test_are_not_saved_where_they_are_not_evaluated(self, tmp_path, caplog):
        run = begin(tmp_path / "run", steps=3)
        assert "step 3 is not saved, since a weight is not finite" in caplog.text
        assert steps(tmp_path / "run") == [2]
        with pytest.raises(RazorError, match=r"loss is nan at step 4, and step 2 is saved; lower"):
            next(run)
        assert steps(tmp_path / "run") == [2]
        stop(run)
        list(resume(tmp_path / "run", replace(JOB, learning_rate=0.1)))

    def test_are_not_saved_by_a_signal(self, tmp_path):
        run = begin(tmp_path / "run", replace(JOB, save_every=4), steps=3)
        run.stop = KeyboardInterrupt
        with pytest.raises(KeyboardInterrupt):
            next(run)
        assert steps(tmp_path / "run") == []

    def test_leave_no_checkpoint_to_go_on_from_at_the_start(self, tmp_path):
        run = begin(tmp_path / "run", replace(JOB, save_every=4, evaluate_every=3), steps=2)
        with pytest.raises(RazorError, match="step 3, and no step is saved; train again"):
            next(run)


def test_a_last_evaluation_that_is_not_finite_writes_no_result(tmp_path, monkeypatch):
    job = Job("vit-micro", str(photos(tmp_path / "d" / "train", 8).parent), batch_size=4, steps=2)
    photos(tmp_path / "d" / "test", 2)
    out, scored = tmp_path / "run", ByLogits.scored
    run = begin(out, job, steps=2)

    def infinite(*args: Any) -> Any:
        output, loss = scored(*args)
        return output, loss * torch.inf if args[-1] == "sum" else loss

    monkeypatch.setattr(ByLogits, "scored", infinite)
    with pytest.raises(RazorError, match="loss of the evaluation is not finite; train again with"):
        next(run)
    assert steps(out)[-1] == 2
    assert not {file.name for file in out.iterdir()} & {"result.json", "model.safetensors"}


def test_only_folders_of_checkpoints_are_ever_removed(tmp_path):
    foreign = tmp_path / "elsewhere"
    foreign.mkdir()
    (foreign / MARKER).write_text("{}")
    mine = ("step-final", "step-2", "step-0000001x", "step-00000009.bak", "step-00000007.partial.")
    folder = tmp_path / "run/checkpoints"
    run = begin(tmp_path / "run", steps=1)
    for name in mine:
        (folder / name).mkdir()
        (folder / name / "keep").write_text("mine")
    (folder / "step-00000005").symlink_to(foreign)
    (folder / "step-00000006").write_text("a file")
    (folder / "step-00000003.partial").mkdir()
    next(run)
    kept = {*mine, "step-00000005", "step-00000006"}
    assert {path.name for path in folder.iterdir()} == {*kept, "step-00000002"}
    list(run)
    assert {path.name for path in folder.iterdir()} == kept
    assert (foreign / MARKER).read_text() == "{}"


@pytest.mark.parametrize("when", ["before", "between"])
def test_a_linked_folder_of_checkpoints_is_refused(when, tmp_path):
    theirs = tmp_path / "theirs/step-00000001"
    theirs.mkdir(parents=True)
    run = begin(tmp_path / "run")
    folder = tmp_path / "run/checkpoints"
    if when == "before":
        stop(run)
        folder.symlink_to(theirs.parent)
        with pytest.raises(UsageError, match="checkpoints is a link; remove it"):
            resume(tmp_path / "run")
    else:
        next(run)
        folder.rename(tmp_path / "run/old")
        folder.symlink_to(theirs.parent)
        with pytest.raises(UsageError, match="checkpoints is a link; remove it"):
            next(run)
    assert [path.name for path in theirs.parent.iterdir()] == [theirs.name]


@pytest.mark.parametrize(
    ("how", "end"), [("renamed", True), ("removed", False), ("replaced", True)]
)
def test_a_directory_that_is_not_the_runs_own_any_more_ends_it(how, end, tmp_path):
    out = tmp_path / "run"
    run = begin(out, steps=1)
    if end:
        while len(run.history) < JOB.steps:
            next(run)
    if how == "removed":
        shutil.rmtree(out)
    else:
        out.rename(tmp_path / "moved")
    if how == "replaced":
        other = begin(out, steps=1)
        stop(other)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    with pytest.raises(RazorError, match=r"is not the directory of this run any more: .*; put it"):
        next(run)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    assert out.exists() == (how == "replaced")
    if how == "renamed":
        (tmp_path / "moved").rename(out)
        assert len(resume(out).history) == (JOB.steps if end else 1)


def test_a_directory_that_took_the_place_of_one_that_failed_stays(tmp_path):
    out = tmp_path / "run"
    with pytest.raises(RazorError), rundir.claimed(out):  # noqa: PT012
        out.rename(tmp_path / "moved")
        with rundir.claimed(out) as other:
            raise RazorError
    assert not out.exists()  # that of the other, which made it
    assert (tmp_path / "moved").exists()
    assert not other.is_locked


@pytest.mark.parametrize(("name", "weights"), [("optimizer_state", True), ("learning_rate", False)])
def test_a_run_with_another_state_can_start_from_the_weights(name, weights, tmp_path):
    with pytest.raises(UsageError, match=f"started with {name.replace('_', ' ')} 1;") as refused:
        run_files.refuse_others(tmp_path, {name: 1, "seed": 0}, {name: 2, "seed": 0})
    assert (f"start from its weights, with {tmp_path} as MODEL" in str(refused.value)) is weights
