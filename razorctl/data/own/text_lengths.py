"""Whether the texts of a job are joined, several to a sequence, by how long they are."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

from razorctl.config.job import Job
from razorctl.data.source import Source
from razorctl.errors import MissingError, UsageError
from razorctl.models import Model
from razorctl.models.joined_texts import Gain, gain

SAMPLE = 1000  # rows that a plan tokenizes


@dataclass(frozen=True)
class TextLengths:
    """The lengths of texts.

    Args:
        tokens: of each text; empty if they are not known.
        most: the most tokens of a text.
        able: whether the model keeps texts of one sequence apart.
        share: the share of all texts that these are.
    """

    tokens: Sequence[int]
    most: int
    able: bool
    share: float = 1.0

    def resolve(self, job: Job) -> tuple[Job, Gain | None]:
        """A resolved job with `packing`, and what that gains, None if lengths are not known.

        Without lengths a job whose model is able to is packed. Raises UsageError if the job asks
        for what the model is not able to, or CUDA graphs, which take batches of one shape.
        """
        if not self.able:
            job = without_joining(job, asked=bool(job.packing))
        if job.cuda_graphs:
            if job.packing:
                raise UsageError(
                    "packed sequences make batches of several shapes, which CUDA graphs cannot "
                    "take; leave --packing or --cuda-graphs out."
                )
            job = replace(job, packing=False)
        gained = None
        if self.tokens:
            assert job.batch_size is not None
            part = gain(self.tokens, job.micro_batch, self.most, job.batch_size)
            gained = Gain(*(round(tokens / self.share) for tokens in astuple(part)))
        if job.packing is not None:
            return job, gained
        return replace(job, packing=self.able and (gained is None or gained.pays)), gained


def without_joining(job: Job, asked: bool) -> Job:
    """The job without joined texts, for a model that carries one text of a sequence into the next.

    Raises UsageError if the user has asked for it.
    """
    if asked:
        raise UsageError(
            f"{job.model} carries one text of a sequence into the next, so none are packed; leave "
            "--packing out."
        )
    return replace(job, packing=False)


def has_texts_apart(job: Job, source: Source) -> bool:
    """Whether each text or conversation is learned alone, and not in blocks of tokens."""
    return source.conversations or job.packing is not None


def have_one_shape(job: Job, family: Model, source: Source) -> bool:
    """Whether all micro-batches have the same shapes, as images and blocks of tokens do."""
    return family.fed(job.packing).padded is None and not has_texts_apart(job, source)


def of_rows(rows: Any, family: Model, job: Job) -> TextLengths:
    """The lengths of rows of `Model.sequences`."""
    import pyarrow.compute as pc

    assert family.longest is not None
    ids = rows.with_format("arrow")[:].column("input_ids")
    lengths: list[int] = pc.list_value_length(ids).to_pylist()
    return TextLengths(lengths, family.longest(job.input_size), family.packs())


def sample_lengths(job: Job, family: Model, source: Source) -> TextLengths | None:
    """The lengths of some training rows, which are tokenized; None if texts are not apart.

    They are not known of sets of the hub, which are not fetched for this, and without a tokenizer.
    """
    if not has_texts_apart(job, source):
        return None
    assert family.longest is not None
    unknown = TextLengths((), family.longest(job.input_size), family.packs())
    if job.dataset.startswith("hf:"):
        return unknown
    make = family.fed(job.packing).sequences
    assert make is not None
    rows: Any = source.load().train
    some = rows.select(range(0, len(rows), -(-len(rows) // SAMPLE)))
    try:
        made = make(some, job.input_size, lambda _: None)
    except MissingError:
        return unknown
    return replace(of_rows(made, family, job), share=len(some) / len(rows))
