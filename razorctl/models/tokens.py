"""How texts and conversations become the inputs and labels of language models."""

import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from hashlib import sha256
from itertools import chain, islice
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, TypeVar
from zlib import crc32

from razorctl import units
from razorctl.errors import DataError, UsageError
from razorctl.models.rows import Progress, Rows
from razorctl.tasks import NO_LABEL
from razorctl.version import __version__

if TYPE_CHECKING:
    from datasets import Dataset

T = TypeVar("T")
log = logging.getLogger(__name__)
MULTIPLE = 8  # of tokens, which kernels of matrix products are made for
MASKED = 0.15  # of the tokens, as BERT's authors have it
BATCH = 256  # texts that are tokenized at a time
SMALL = 8 << 20  # bytes of tokens that are kept in memory
PIECE, GROUP = 1 << 16, 1 << 20  # characters that are tokenized by a thread, and by all at once
LIMIT = 5.0  # seconds that a chat template may take for a conversation
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")  # marks what an assistant says


def token_blocks(
    rows: "Dataset", tokenizer: Any, tokens: int, progress: Progress = lambda _: None
) -> "Dataset":
    """Blocks of exactly `tokens` tokens, `input_ids`, of the texts one after the other.

    Each text ends with the end token of the tokenizer, or with its separator. What the tokenizer
    puts around a text, such as [CLS] and [SEP], is around each block. The last tokens, which fill
    no block, are left out. Large data are stored in the cache of `datasets`. Raises DataError if no
    block is full, and UsageError if nothing can end a text.
    """
    end = tokenizer.sep_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    if end is None:
        raise UsageError(
            "the tokenizer has no token that ends a text; choose another model, or give it one."
        )
    before, after = _around(tokenizer)
    room = tokens - len(before) - len(after)
    if room < 1:
        raise UsageError(f"input size {tokens} leaves no room for a text; give a larger one.")

    def blocks() -> Iterator[dict[str, list[int]]]:
        pending: list[int] = []
        full = 0
        for ids in _tokenized(rows, tokenizer, end, progress):
            pending += ids
            starts = range(0, len(pending) - room + 1, room)
            for start in starts:
                yield {"input_ids": [*before, *pending[start : start + room], *after]}
            full += len(starts)
            del pending[: len(starts) * room]
        if not full:
            raise DataError(
                f"the texts have {units.count(len(pending), 'token')}, too few for a block of "
                f"{room:,}; add texts, or give an input size of at most "
                f"{len(pending) + tokens - room}."
            )

    return _stored(blocks(), ("input_ids",), rows, tokenizer, tokens)


def _around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The tokens that a tokenizer puts before and after a text."""
    if not tokenizer.num_special_tokens_to_add():
        return [], []
    found = tokenizer("a", return_special_tokens_mask=True)
    ids, special = found["input_ids"], found["special_tokens_mask"]
    own = [place for place, added in enumerate(special) if not added]
    first, last = (own[0], own[-1] + 1) if own else (1, 1)
    return ids[:first], ids[last:]


def _tokenized(
    rows: "Dataset", tokenizer: Any, end: int, progress: Progress
) -> Iterator[list[int]]:
    """The tokens of each text with the end token, in parts: long texts are cut at line breaks."""
    done = 0
    for batch in rows.select_columns("text").iter(BATCH):
        progress(f"tokenizing, {done:,} of {units.count(len(rows), 'text')}")
        pieces = (piece for text in batch["text"] for piece in _pieces(text))
        for group in _groups(pieces):
            found = tokenizer(
                [text for text, _ in group],
                add_special_tokens=False,
                return_attention_mask=False,
                return_token_type_ids=False,
                verbose=False,
            )
            for ids, (_, last) in zip(found["input_ids"], group, strict=True):
                yield [*ids, end] if last else ids
        done += len(batch["text"])


def _pieces(text: str) -> Iterator[tuple[str, bool]]:
    """Parts of a text, each with whether it is the last."""
    start = 0
    while len(text) - start > PIECE:
        after = text.rfind("\n", start, start + PIECE) + 1 or start + PIECE
        yield text[start:after], False
        start = after
    yield text[start:], True


def _groups(pieces: Iterable[tuple[str, bool]]) -> Iterator[list[tuple[str, bool]]]:
    """Lists of pieces with up to GROUP characters, so that tokenizing them takes little memory."""
    group: list[tuple[str, bool]] = []
    size = 0
    for piece in pieces:
        if group and size + len(piece[0]) > GROUP:
            yield group
            group, size = [], 0
        group.append(piece)
        size += len(piece[0])
    if group:
        yield group


def conversation_tokens(
    rows: "Dataset", tokenizer: Any, tokens: int, progress: Progress = lambda _: None
) -> "Dataset":
    """The tokens of conversations, `input_ids`, and `labels`: those that an assistant says.

    All other labels are NO_LABEL. Answers are found by the mark `generation` of the chat template,
    or else by what the template adds for each answer. Conversations are cut after `tokens` tokens;
    those without an answer before that are left out. A warning has the number of both. Raises
    UsageError for a tokenizer that cannot do this, and DataError for a conversation that its
    template cannot take, and if none is left.
    """
    _check_template(tokenizer)
    if not tokenizer.is_fast:
        raise UsageError("the tokenizer is not a fast one, which conversations need; choose one.")
    cut = lost = 0

    def tokenized() -> Iterator[dict[str, list[int]]]:
        nonlocal cut, lost
        for number, row in enumerate(rows.select_columns("messages")):
            if number % BATCH == 0:
                progress(f"tokenizing, {number:,} of {units.count(len(rows), 'conversation')}")
            messages = [{key: of[key] for key in ("role", "content")} for of in row["messages"]]
            ids, answered = _conversation(tokenizer, messages, number)
            cut += len(ids) > tokens
            if not any(answered[1:tokens]):  # the first token is never a label
                lost += 1
                continue
            both = list(zip(ids, answered, strict=True))[:tokens]
            yield {
                "input_ids": [token for token, _ in both],
                "labels": [token if said else NO_LABEL for token, said in both],
            }

    dataset = _stored(tokenized(), ("input_ids", "labels"), rows, tokenizer, tokens)
    if not len(dataset):
        raise DataError(
            "none of the conversations has an answer within "
            f"{units.count(tokens, 'token')}; give a larger input size."
        )
    if cut or lost:
        log.warning(
            "%s cut after %s; %s left out for want of an answer before that.",
            *(units.count(cut, "conversation"), units.count(tokens, "token"), f"{lost:,}"),
        )
    return dataset


def _check_template(tokenizer: Any) -> None:
    """Raises UsageError for a tokenizer without a chat template."""
    if not tokenizer.chat_template:
        raise UsageError(
            "the tokenizer has no chat template, which conversations need; choose a model made for "
            "chats, or give texts instead."
        )


def _templated(what: str, use: Callable[[], T]) -> T:
    """The result of `use`, which applies the chat template, in a thread of its own.

    Raises DataError if the template refuses its input, or takes longer than LIMIT.
    """
    from jinja2 import TemplateError

    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(use())
        except BaseException as error:
            result.set_exception(error)

    # Not a thread of a pool, which Python would wait for at its end.
    thread = Thread(target=run, daemon=True)
    thread.start()
    try:
        return result.result(LIMIT)
    except TemplateError as error:
        reason = f"does not take {what} ({error})"
    except TimeoutError:
        if result.done():  # the template itself raised it
            raise
        import ctypes  # here alone: it would slow the start of every command

        # Ends loops of the template, but not a single operation of Python.
        ident, error_type = ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, error_type)
        reason = f"has not ended after {units.duration(LIMIT)} with {what}"
    raise DataError(
        f"the chat template of the model {reason}; correct that, or choose another model."
    ) from None


def _conversation(
    tokenizer: Any, messages: list[dict[str, str]], number: int
) -> tuple[list[int], list[bool]]:
    """The tokens of a conversation, and of each whether an assistant says it."""
    what = f"conversation {number}"
    if GENERATION.search(tokenizer.get_chat_template()):
        marked = partial(tokenizer.apply_chat_template, return_assistant_tokens_mask=True)
        found = _templated(what, lambda: marked(messages, return_dict=True))
        return found["input_ids"], [bool(said) for said in found["assistant_masks"]]
    text, spans = _templated(what, lambda: _spans(tokenizer, messages))
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    offsets = found["offset_mapping"]
    said = [any(first <= a < b <= last for first, last in spans) for a, b in offsets]
    return found["input_ids"], said


def _spans(tokenizer: Any, messages: list[dict[str, str]]) -> tuple[str, list[tuple[int, int]]]:
    """A conversation as text, and where each answer of an assistant begins and ends in it."""

    def text(count: int, prompt: bool = False) -> str:
        made: str = tokenizer.apply_chat_template(
            messages[:count], tokenize=False, add_generation_prompt=prompt
        )
        return made

    whole = text(len(messages))
    spans = []
    for place, message in enumerate(messages):
        if message["role"] == "assistant":
            before, after = text(place, prompt=True), text(place + 1)
            if not (after.startswith(before) and whole.startswith(after)):
                raise UsageError(
                    "the chat template of the model writes earlier messages anew, so that answers "
                    "cannot be told; choose another model, or mark them with {% generation %} in "
                    "its template."
                )
            spans.append((len(before), len(after)))
    return whole, spans


def _stored(
    made: Iterable[Mapping[str, list[int]]],
    columns: tuple[str, ...],
    rows: "Dataset",
    tokenizer: Any,
    tokens: int,
) -> "Dataset":
    """Rows of lists of tokens: in memory, or, if they are large, in a file that is made once."""
    import datasets
    import pyarrow as pa

    schema = pa.schema([(column, pa.list_(pa.int32())) for column in columns])
    key = repr((__version__, rows._fingerprint, _described(tokenizer), columns, tokens))
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "razorctl"
    file = folder / f"{sha256(key.encode()).hexdigest()[:32]}.arrow"
    if file.exists():
        return datasets.Dataset.from_file(str(file))
    batches = _batches(made, schema)
    first: list[Any] = []
    while sum(batch.nbytes for batch in first) <= SMALL:
        batch = next(batches, None)
        if batch is None:
            return datasets.Dataset(pa.Table.from_batches(first, schema))
        first.append(batch)
    folder.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(f".{os.getpid()}")  # all processes of a run may make it at once
    try:
        with pa.ipc.new_stream(str(partial), schema) as sink:
            for batch in chain(first, batches):
                sink.write_batch(batch)
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)
    return datasets.Dataset.from_file(str(file))


def _batches(made: Iterable[Mapping[str, list[int]]], schema: Any) -> Iterator[Any]:
    import pyarrow as pa

    made = iter(made)
    while chunk := list(islice(made, BATCH)):
        yield pa.RecordBatch.from_pylist(chunk, schema)


def _described(tokenizer: Any) -> str:
    """The properties by which tokenizers differ in the tokens that they make."""
    fast = tokenizer.is_fast
    own = tokenizer.backend_tokenizer.to_str() if fast else sorted(tokenizer.get_vocab().items())
    return repr(
        (type(tokenizer).__name__, own, tokenizer.special_tokens_map, tokenizer.chat_template)
    )


def prompt(tokenizer: Any, row: Mapping[str, Any]) -> list[int]:
    """The tokens of a text to continue, or of a conversation to answer.

    A text begins as a block of `token_blocks` does. A conversation ends where the chat template
    begins an answer; an answer at its end is left out. Raises UsageError for a tokenizer without a
    chat template, and DataError for a conversation that the template cannot take.
    """
    if "messages" not in row:
        found = tokenizer(row["text"], add_special_tokens=False, verbose=False)
        return [*_around(tokenizer)[0], *found["input_ids"]]
    _check_template(tokenizer)
    messages = [{key: of[key] for key in ("role", "content")} for of in row["messages"]]
    if messages[-1]["role"] == "assistant":
        messages.pop()
    prompted = partial(tokenizer.apply_chat_template, add_generation_prompt=True)
    asked = _templated("a conversation", lambda: prompted(messages, return_dict=True))
    ids: list[int] = asked["input_ids"]
    return ids


def causal_inputs(tokenizer: Any, rows: Rows, *, tokens: int | None = None) -> Rows:
    """Inputs and labels for predicting the next token.

    rows: of `token_blocks` or `conversation_tokens`. The label of a place is the token after it, or
    NO_LABEL. Conversations are padded on the right to the longest, rounded up to MULTIPLE, and at
    most to `tokens`; padded ones have an `attention_mask` too.
    """
    import torch

    every = rows["input_ids"]
    longest = max(map(len, every))
    length = longest
    if "labels" in rows:
        length = max(longest, min(tokens or sys.maxsize, -(-longest // MULTIPLE) * MULTIPLE))
    padded = any(len(ids) < length for ids in every)
    filler = tokenizer.pad_token_id or 0
    found: Rows = {"inputs": [], "labels": []}
    for ids, own in zip(every, rows.get("labels", every), strict=True):
        more = length - len(ids)
        inputs = {"input_ids": torch.tensor([*ids, *[filler] * more])}
        if padded:
            inputs["attention_mask"] = torch.tensor([1] * len(ids) + [0] * more)
        found["inputs"].append(inputs)
        found["labels"].append(torch.tensor([*own[1:], *[NO_LABEL] * (more + 1)]))
    return found


def masked_inputs(tokenizer: Any, seeded: bool, rows: Rows) -> Rows:
    """Inputs and labels of rows of `token_blocks`, for predicting MASKED of the tokens like BERT.

    Of these tokens 80 % are the mask, 10 % random ones and 10 % themselves; all others have the
    label NO_LABEL. seeded: whether the draw depends on the row alone; otherwise it is from torch's
    default generator. Raises UsageError for a tokenizer without a mask.
    """
    import torch
    from transformers import DataCollatorForLanguageModeling

    if tokenizer.mask_token is None:
        raise UsageError(
            "the tokenizer has no mask token, which masked-lm needs; choose another model, or "
            "--task causal-lm."
        )
    draw = DataCollatorForLanguageModeling(tokenizer, mlm_probability=MASKED).torch_mask_tokens
    found: Rows = {"inputs": [], "labels": []}
    before = torch.get_rng_state()
    for row in rows["input_ids"]:
        ids = torch.tensor(row)
        if seeded:
            torch.default_generator.manual_seed(crc32(ids.numpy().tobytes()))
        inputs, labels = draw(ids[None])
        found["inputs"].append({"input_ids": inputs[0]})
        found["labels"].append(labels[0])
    if seeded:
        torch.set_rng_state(before)
    return found
