"""Whether the texts of a job are joined, several to a sequence, by how long they are."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

from razorctl.config.job import Job
from razorctl.data.source import Source
from razorctl.errors import MissingError, UsageError
from razorctl.models import Model
from razorctl.models.joined_texts import (
    FEW,
    Gain,
    Shape,
    drawn,
    few_shapes,
    few_widths,
    gain,
)

SAMPLE = 1000  # rows that a plan tokenizes


@dataclass(frozen=True)
class TextLengths:
    """The lengths of texts, or of a sample of them.

    Args:
        tokens: of each text; empty if they are unknown.
        most: the most tokens of a text.
        able: whether the model separates the texts of one sequence.
        share: of all texts that are in `tokens`.
    """

    tokens: Sequence[int]
    most: int
    able: bool
    share: float = 1.0

    def resolve(self, job: Job) -> tuple[Job, Gain | None]:
        """A resolved job with `packing`, and the gain of joining texts; None without lengths.

        Without lengths texts are joined if the model separates them. Raises UsageError if the job
        asks for joined texts, and the model does not.
        """
        if not self.able:
            job = without_joining(job, asked=bool(job.packing))
        gained = None
        if self.tokens:
            assert job.batch_size is not None
            sizes = job.micro_batch, self.most, job.batch_size
            part = gain(self.tokens, *sizes, graphs=bool(job.cuda_graphs))
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


def of_rows(rows: Any, family: Model, job: Job) -> TextLengths:
    """The lengths of rows of `Model.sequences`."""
    import pyarrow.compute as pc

    ids = rows.with_format("arrow")[:].column("input_ids")
    lengths: list[int] = pc.list_value_length(ids).to_pylist()
    return TextLengths(lengths, family.longest(job.input_size), family.packs())


def shapes_of(rows: Any, family: Model, job: Job) -> Sequence[Shape]:
    """The shapes of micro-batches of texts that are compiled or captured.

    rows: of training, as of `Model.sequences`. job: a resolved one, whose model `pads`.
    """
    most = family.longest(job.input_size)
    if job.packing is None:
        lengths: Sequence[int] = [most]
        if not job.compile:
            some = drawn(family.lengths(sample(rows), job.input_size), job.micro_batch, most)
            lengths = [most, *map(max, some)]
    else:
        lengths = of_rows(rows, family, job).tokens
    if job.packing:
        some, few = drawn(lengths, job.micro_batch, most), 1 if job.compile else FEW
        return few_shapes(some, min(max(lengths), most), most, few)
    widths = few_widths([max(lengths)] if job.compile else lengths, most)
    return [(job.micro_batch, width) for width in widths]


def sample(rows: Any) -> Any:
    """Some rows, at most SAMPLE."""
    return rows.select(range(0, len(rows), -(-len(rows) // SAMPLE)))


def sample_lengths(job: Job, family: Model, source: Source) -> TextLengths | None:
    """The lengths of some training rows, which are tokenized; None for blocks of tokens.

    They are unknown without a tokenizer, and for sets of the hub, which are not fetched for this.
    """
    if not has_texts_apart(job, source):
        return None
    unknown = TextLengths((), family.longest(job.input_size), family.packs())
    if job.dataset.startswith("hf:"):
        return unknown
    rows: Any = source.load().train
    some = sample(rows)
    try:
        made = family.fed(job).sequences(some, job.input_size, lambda _: None)
    except MissingError:
        return unknown
    return replace(of_rows(made, family, job), share=len(some) / len(rows))
