"""Turns texts into tokens, and tokens into inputs and labels of language models."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b, sha256
from itertools import islice
from typing import TYPE_CHECKING, Any
from zlib import crc32

from razorctl import units
from razorctl.config.tasks import NO_LABEL
from razorctl.errors import DataError, UsageError
from razorctl.models.joined_texts import Shape, layout, rounded
from razorctl.models.rows import Progress, Rows
from razorctl.system import hub
from razorctl.version import __version__

if TYPE_CHECKING:
    from datasets import Dataset

MASKED = 0.15  # share of the tokens, as in BERT
BATCH = 256  # texts that are tokenized at a time
SMALL = 8 << 20  # bytes of tokens that are kept in memory
LONGEST = 20  # characters of a token; few are longer
PIECE, GROUP = 1 << 16, 1 << 20  # characters tokenized by one thread, and in one call


def token_blocks(
    rows: "Dataset", tokenizer: Any, tokens: int, progress: Progress = lambda _: None
) -> "Dataset":
    """Blocks of exactly `tokens` tokens, `input_ids`, from all texts in a row.

    Each text ends with the tokenizer's end token, or with its separator. Each block is framed as
    the tokenizer frames a text, for example by [CLS] and [SEP]. The last tokens, which fill no
    block, are dropped. Large data are stored in the cache of `datasets`. Raises DataError if no
    block is full, and UsageError if no token can end a text.
    """
    end, before, after, room = _frame(tokenizer, tokens)

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

    return stored(blocks(), ("input_ids",), rows, tokenizer, tokens)


def single_texts(
    rows: "Dataset", tokenizer: Any, tokens: int, progress: Progress = lambda _: None
) -> "Dataset":
    """Texts of up to `tokens` tokens, `input_ids`, each alone; longer ones are split.

    They begin and end like the texts of `token_blocks`, which raises the same UsageError.
    """
    end, before, after, room = _frame(tokenizer, tokens)

    def texts() -> Iterator[dict[str, list[int]]]:
        pending: list[int] = []
        for ids in _tokenized(rows, tokenizer, end, progress):
            pending += ids
            if pending[-1] == end:
                for start in range(0, len(pending), room):
                    yield {"input_ids": [*before, *pending[start : start + room], *after]}
                pending = []

    return stored(texts(), ("input_ids",), rows, tokenizer, -tokens)


def _frame(tokenizer: Any, tokens: int) -> tuple[int, list[int], list[int], int]:
    """The end token, the tokens before and after a text, and the room between them.

    Raises UsageError if no token can end a text, or if there is no room.
    """
    end = tokenizer.sep_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    if end is None:
        raise UsageError(
            "the tokenizer has no token that ends a text; choose another model, or give it one."
        )
    before, after = around(tokenizer)
    room = tokens - len(before) - len(after)
    if room < 1:
        raise UsageError(f"input size {tokens} leaves no room for a text; give a larger one.")
    return end, before, after, room


def are(count: int) -> str:
    """A number with its verb."""
    return f"{count:,} {'is' if count == 1 else 'are'}"


def text_lengths(tokenizer: Any, tokens: int, rows: Rows) -> list[int]:
    """The tokens of texts, pairs of texts or lists of tokens.

    Only the beginning of a long text is counted: more than `tokens` tokens, unless it is blank.
    """
    most = LONGEST * tokens
    if "tokens" in rows:
        parts, split = [[words[: tokens + 1] for words in rows["tokens"]]], True
    else:
        names, split = [name for name in ("text", "text_pair") if name in rows], False
        parts = [[text[:most] for text in rows[name]] for name in names]
    batch = tokenizer(*parts, is_split_into_words=split, verbose=False)
    return [*map(len, batch["input_ids"])]


def text_id(text: str) -> int:
    """A number for a text, equal for equal texts, never 0."""
    digest = blake2b(text.strip().encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True) or 1


def around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The tokens that a tokenizer puts before and after a text."""
    if not tokenizer.num_special_tokens_to_add():
        return [], []
    batch = tokenizer("a", return_special_tokens_mask=True)
    ids, special = batch["input_ids"], batch["special_tokens_mask"]
    text = [place for place, added in enumerate(special) if not added]
    first, last = (text[0], text[-1] + 1) if text else (1, 1)
    return ids[:first], ids[last:]


def unframed(tokenizer: Any, before: list[int], after: list[int]) -> Callable[[str], str]:
    """A function that removes from a text the tokens `before` and `after`, if it has them already.

    Texts rendered by a chat template have them.
    """
    begin, end = ("".join(tokenizer.convert_ids_to_tokens(ids)) for ids in (before, after))
    return lambda text: text.removeprefix(begin).removesuffix(end)


def _tokenized(
    rows: "Dataset", tokenizer: Any, end: int, progress: Progress
) -> Iterator[list[int]]:
    """The tokens of each text and its end token, in parts: long texts are split at line breaks."""
    done, bare = 0, unframed(tokenizer, around(tokenizer)[0], [end])
    for batch in rows.select_columns("text").iter(BATCH):
        progress(f"tokenizing, {done:,} of {units.count(len(rows), 'text')}")
        pieces = (piece for text in batch["text"] for piece in _pieces(bare(text)))
        for group in _groups(pieces):
            batch_of_ids = tokenizer(
                [text for text, _ in group],
                add_special_tokens=False,
                return_attention_mask=False,
                return_token_type_ids=False,
                verbose=False,
            )
            for ids, (_, last) in zip(batch_of_ids["input_ids"], group, strict=True):
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


def stored(
    blocks: Iterable[Mapping[str, list[int]]],
    columns: tuple[str, ...],
    rows: "Dataset",
    tokenizer: Any,
    tokens: int,
) -> "Dataset":
    """Rows of lists of tokens: in memory, or in a cached file if they are large."""
    import pyarrow as pa

    schema = pa.schema([(column, pa.list_(pa.int32())) for column in columns])
    key = repr((__version__, rows._fingerprint, _described(tokenizer), columns, tokens))
    file = hub.cached(f"{sha256(key.encode()).hexdigest()[:32]}.arrow")
    return hub.stored_batches(file, schema, _batches(blocks, schema), SMALL)


def _batches(blocks: Iterable[Mapping[str, list[int]]], schema: Any) -> Iterator[Any]:
    import pyarrow as pa

    blocks = iter(blocks)
    while chunk := list(islice(blocks, BATCH)):
        yield pa.RecordBatch.from_pylist(chunk, schema)


def _described(tokenizer: Any) -> str:
    """A text with the properties of a tokenizer that determine its tokens."""
    fast = tokenizer.is_fast
    rules = tokenizer.backend_tokenizer.to_str() if fast else sorted(tokenizer.get_vocab().items())
    return repr(
        (type(tokenizer).__name__, rules, tokenizer.special_tokens_map, tokenizer.chat_template)
    )


def causal_inputs(
    tokenizer: Any,
    rows: Rows,
    *,
    tokens: int | None = None,
    packing: bool | None = None,
    shapes: Sequence[Shape] = (),
) -> Rows:
    """Inputs and labels for predicting the next token.

    rows: of `token_blocks`, `single_texts` or `chats.conversation_tokens`. The label at a position
    is the next token, or NO_LABEL. Rows of several lengths are padded on the right to the longest,
    `rounded` to a width of `shapes` or to MULTIPLE, and at most to `tokens`; they then have an
    `attention_mask`. With `packing` a sequence holds several rows, and has `position_ids`; there
    are fewer sequences than rows, as `layout` says.
    """
    import torch

    every = rows["input_ids"]
    labels = [[*of[1:], NO_LABEL] for of in rows.get("labels", every)]
    lengths = [*map(len, every)]
    groups, length = [[row] for row in range(len(every))], max(lengths)
    most = tokens or sys.maxsize
    if packing:
        groups, length = layout(lengths, most, shapes)
    elif shapes or "labels" in rows or packing is not None:
        length = rounded(length, most, [width for _, width in shapes])
    padded = not packing and (bool(shapes) or any(short < length for short in lengths))
    filler = tokenizer.pad_token_id or 0
    joined: Rows = {"inputs": [], "labels": []}
    for group in groups:
        used = sum(lengths[row] for row in group)
        more = length - used
        ids = [token for row in group for token in every[row]]
        inputs = {"input_ids": torch.tensor([*ids, *[filler] * more])}
        if padded:
            inputs["attention_mask"] = torch.tensor([1] * used + [0] * more)
        if packing:
            parts = [*(lengths[row] for row in group), more]
            inputs["position_ids"] = torch.cat([torch.arange(part) for part in parts])
        targets = [label for row in group for label in labels[row]]
        joined["inputs"].append(inputs)
        joined["labels"].append(torch.tensor([*targets, *[NO_LABEL] * more]))
    return joined


def masked_inputs(tokenizer: Any, seeded: bool, rows: Rows) -> Rows:
    """Inputs and labels of rows of `token_blocks`, for predicting MASKED of the tokens like BERT.

    Of these tokens 80 % become the mask, 10 % random tokens, and 10 % stay. All other tokens have
    the label NO_LABEL. seeded: whether the draw depends only on the row; otherwise it comes from
    torch's default generator. Raises UsageError for a tokenizer without a mask.
    """
    import torch
    from transformers import DataCollatorForLanguageModeling

    if tokenizer.mask_token is None:
        raise UsageError(
            "the tokenizer has no mask token, which masked-lm needs; choose another model, or "
            "--task causal-lm."
        )
    draw = DataCollatorForLanguageModeling(tokenizer, mlm_probability=MASKED).torch_mask_tokens
    masked: Rows = {"inputs": [], "labels": []}
    before = torch.get_rng_state()
    for row in rows["input_ids"]:
        ids = torch.tensor(row)
        if seeded:
            torch.default_generator.manual_seed(crc32(ids.numpy().tobytes()))
        inputs, labels = draw(ids[None])
        masked["inputs"].append({"input_ids": inputs[0]})
        masked["labels"].append(labels[0])
    if seeded:
        torch.set_rng_state(before)
    return masked
