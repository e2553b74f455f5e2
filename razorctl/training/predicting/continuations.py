"""Texts that a causal language model continues, and conversations that it answers."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from razorctl import models, units
from razorctl.errors import DataError
from razorctl.step import autocast
from razorctl.training.loading import PRIME
from razorctl.training.predicting.inference import RowOfFile, check_finite

if TYPE_CHECKING:
    from razorctl.data.own.whole import UnlabeledRows
    from razorctl.models.transformers.writing import Writer
    from razorctl.training.predicting.inference import Trained


@dataclass(frozen=True)
class Continuation(RowOfFile):
    """The continuation of a text, or the answer to a conversation."""

    text: str


@dataclass(frozen=True)
class Prompt(RowOfFile):
    """The tokens of a row; answered: whether the row is a conversation."""

    ids: Sequence[int]
    answered: bool


def continue_texts(
    trained: "Trained",
    parts: Iterable["UnlabeledRows"],
    new: int,
    temperature: float = 0.0,
    seed: int = 0,
) -> Iterator[Continuation]:
    """The continuations of the rows of files, in their order, batch by batch.

    The tokens of a row depend on the seed and the number of rows before it, not on its batch.
    Before the first one, raises DataError for a text that is too long for the model, and what
    `chats.prompt` raises.

    new: the most tokens of a continuation. temperature: of the draws; 0 takes the most probable
    token. seed: of the draws.
    """
    writer = _writer(trained)
    prompts = [prompt for part in parts for prompt in _prompts(writer, part, new)]
    return _batches(trained, writer, prompts, new, temperature, seed)


class Dialog:
    """A conversation with a causal language model, or without a chat template one long text.

    templated: whether the tokenizer has a chat template. Others as for `continue_texts`.
    """

    def __init__(self, trained: "Trained", new: int, temperature: float, seed: int) -> None:
        self.trained, self.new, self.temperature, self.seed = trained, new, temperature, seed
        self.writer, self.turns = _writer(trained), 0
        self.templated = bool(self.writer.tokenizer.chat_template)
        self.messages: list[dict[str, str]] = []

    def answer(self, text: str, write: Callable[[str], object]) -> None:
        """Calls `write` with each piece of the answer to a text, as soon as it is known.

        The oldest messages are forgotten where the model has no room for all. An answer that an
        exception ends counts up to there. Raises DataError for a text that is too long, which is
        then forgotten.
        """
        pieces: list[str] = []

        def note(piece: str) -> None:
            pieces.append(piece)
            write(piece)

        ids = self._prompt(text)
        drawn = _drawing([self.turns], self.temperature, self.seed)
        drawn = _checked(drawn, [("the conversation", None)])
        trained = self.trained
        try:
            with trained.in_memory(), torch.no_grad(), autocast(trained.device, trained.job):
                self.writer.continued([ids], self.new, drawn, note)
        finally:
            self.messages.append({"role": "assistant", "content": "".join(pieces)})
            self.turns += 1

    def _prompt(self, text: str) -> Sequence[int]:
        """The tokens of the messages, with a new one of the user."""
        longest, ids = self.writer.longest, list[int]()
        messages = [*self.messages, {"role": "user", "content": text}]
        while messages:
            whole = "\n".join(each["content"] for each in messages)
            ids = self.writer.prompt({"messages": messages} if self.templated else {"text": whole})
            if ids and (longest is None or len(ids) + self.new <= longest):
                self.messages = messages
                return ids
            del messages[:2]  # a question and its answer
        raise DataError(
            f"the text has {units.count(len(ids), 'token')}, and with {self.new:,} new ones that "
            f"does not fit the model's {longest or 0:,}; shorten it, or lower --max-new-tokens."
        )


def _writer(trained: "Trained") -> "Writer":
    # From the weights of the run, since its pretrained model may be deleted.
    return models.find(str(trained.weights.parent), trained.job.task).writer(trained.model)


def _batches(
    trained: "Trained",
    writer: "Writer",
    prompts: Sequence[Prompt],
    new: int,
    temperature: float,
    seed: int,
) -> Iterator[Continuation]:
    for start in range(0, len(prompts), trained.job.micro_batch):
        batch = prompts[start : start + trained.job.micro_batch]
        drawn = _drawing(range(start, start + len(batch)), temperature, seed)
        drawn = _checked(drawn, [(prompt.file, prompt.row) for prompt in batch])
        with trained.in_memory(), torch.no_grad(), autocast(trained.device, trained.job):
            texts = writer.continued([prompt.ids for prompt in batch], new, drawn)
        for prompt, text in zip(batch, texts, strict=True):
            answer = text.strip() if prompt.answered else text
            yield Continuation(prompt.file, prompt.row, answer)


def _prompts(writer: "Writer", part: "UnlabeledRows", new: int) -> Iterator[Prompt]:
    """The tokens of the rows of a file; raises DataError for a row with no or too many tokens."""
    for row, (file, number), stored in zip(part.data, part.places, part.good, strict=True):
        ids, place = writer.prompt(row), part.place(int(stored))
        if not ids:
            raise DataError(f"{place} has no tokens to continue; give it a text that has some.")
        if writer.longest is not None and len(ids) + new > writer.longest:
            room = writer.longest - len(ids)
            less = f", or give --max-new-tokens at most {room}" if room > 0 else ""
            raise DataError(
                f"{place} has {units.count(len(ids), 'token')}, and "
                f"with {new:,} new ones that is more than the model's {writer.longest:,}; "
                f"shorten it{less}."
            )
        yield Prompt(file, number, ids, "messages" in row)


def _drawing(rows: Iterable[int], temperature: float, seed: int) -> Callable[[Tensor], Tensor]:
    """A function of the logits [rows, vocabulary], whose greatest values are the drawn tokens.

    It adds Gumbel noise: the greatest value is then a draw from the softmax (Gumbel, 1954). Each
    row has its own generator.
    """
    if temperature == 0:
        return lambda logits: logits
    generators = [torch.Generator().manual_seed(seed * PRIME + row) for row in rows]

    def drawn(logits: Tensor) -> Tensor:
        size = logits.shape[-1]
        noise = torch.stack(
            [-torch.empty(size).exponential_(generator=each).log() for each in generators]
        )
        return logits / temperature + noise.to(logits.device)

    return drawn


def _checked(
    drawn: Callable[[Tensor], Tensor], places: Sequence[tuple[str, int | None]]
) -> Callable[[Tensor], Tensor]:
    """`drawn` with a check that raises DataError for logits that are not finite."""

    def checked(logits: Tensor) -> Tensor:
        check_finite(logits, places)
        return drawn(logits)

    return checked
