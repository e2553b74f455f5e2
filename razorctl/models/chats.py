"""Turns conversations into tokens of a language model, with labels for the learned parts."""

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import groupby
from threading import Thread
from typing import TYPE_CHECKING, Any, TypeVar

from razorctl import units
from razorctl.config.tasks import NO_LABEL
from razorctl.errors import DataError, RazorError, UsageError, lacks_memory, reason_of
from razorctl.models.rows import Progress
from razorctl.models.tokens import BATCH, are, around, stored
from razorctl.system import documents

if TYPE_CHECKING:
    from datasets import Dataset

T = TypeVar("T")
log = logging.getLogger(__name__)
LIMIT = 5.0  # seconds that a chat template may take for a conversation
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")  # marks the assistant's words in a template
THOUGHT = "</think>"  # templates may omit the text before it
THOUGHTS = ("reasoning_content", "thinking")  # keys for it as a separate field
# For tokenizers without a chat template: plain words, since the model knows no special tokens.
PLAIN = (
    "{% if tools %}### Tools:\n{{ tools | tojson }}{{ '\n\n' }}{% endif %}"
    "{% for message in messages %}{% if not loop.first %}{{ '\n\n' }}{% endif %}"
    "### {{ message.role | capitalize }}:\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function | tojson }}\n{% endfor %}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\n\n' }}### Assistant:\n{% endif %}"
)
WHOLE = "whole"  # the column with the number of tokens of an uncut conversation
SHOWN, QUOTED = 240, 60  # characters of a part of a sample, and of a question in an error


class Spoken:
    """The messages of a row in the form that chat templates take, and the tools, or None.

    unlearned: the indices of answers that are read but not learned.
    """

    def __init__(self, row: Mapping[str, Any]) -> None:
        self.messages: list[dict[str, Any]] = []
        self.tools: list[Any] | None = None
        self.unlearned: set[int] = set()
        for place, of in enumerate(row["messages"]):
            more = documents.parse(of.get("more") or "{}")
            self.tools = more.pop("tools", self.tools)
            if more.pop("weight", 1) == 0:
                self.unlearned.add(place)
            self.messages.append({"role": of["role"], "content": of["content"], **more})

    @property
    def name(self) -> str:
        """A description of the row for the user: its index here differs from the file's."""
        said = next(m["content"] for m in self.messages if m["role"] == "user")
        return f"the conversation that asks {_shortened(said.strip(), QUOTED)!r}"

    def text(self, tokenizer: Any, count: int | None = None, prompt: bool = False) -> str:
        """The first messages by the chat template; prompt: whether an answer begins after them."""
        messages = self.messages[:count]
        text: str = tokenizer.apply_chat_template(
            messages, self.tools, tokenize=False, add_generation_prompt=prompt
        )
        return text


def templated(tokenizer: Any) -> Any:
    """A tokenizer with a chat template: PLAIN if it had none.

    Raises UsageError if it has none and no token can end an answer.
    """
    if tokenizer.chat_template:
        return tokenizer
    if tokenizer.eos_token is None:
        raise UsageError(
            "the tokenizer has neither a chat template nor a token that ends an answer; choose a "
            "model made for chats."
        )
    begins = around(tokenizer)[0] == [tokenizer.bos_token_id]
    tokenizer.chat_template = ("{{ bos_token }}" if begins else "") + PLAIN
    return tokenizer


def conversation_tokens(
    rows: "Dataset", tokenizer: Any, tokens: int, progress: Progress = lambda _: None
) -> "Dataset":
    """The tokens of conversations, `input_ids`, and `labels`, the tokens that an assistant says.

    All other labels are NO_LABEL. Answers are found by the mark `generation` of the chat template,
    or else by the text that the template adds for each answer. Conversations are cut after `tokens`
    tokens, and dropped without an answer to learn before that; a warning has the number of both.
    Raises UsageError for a tokenizer that cannot do this, and DataError for a conversation that its
    template refuses or omits in part, and if none is left.
    """
    templated(tokenizer)
    if not tokenizer.is_fast:
        raise UsageError("the tokenizer is not a fast one, which conversations need; choose one.")

    def tokenized() -> Iterator[dict[str, list[int]]]:
        for number, row in enumerate(rows.select_columns("messages")):
            if number % BATCH == 0:
                progress(f"tokenizing, {number:,} of {units.count(len(rows), 'conversation')}")
            ids, answered = _conversation(tokenizer, Spoken(row))
            if not any(answered[1:tokens]):  # the first token is never a label
                continue
            both = list(zip(ids, answered, strict=True))[:tokens]
            yield {
                "input_ids": [token for token, _ in both],
                "labels": [token if said else NO_LABEL for token, said in both],
                WHOLE: [len(ids)],
            }

    dataset = stored(tokenized(), ("input_ids", "labels", WHOLE), rows, tokenizer, tokens)
    if not len(dataset):
        raise DataError(
            "none of the conversations has an answer within "
            f"{units.count(tokens, 'token')}; give a larger input size."
        )
    whole = [length for (length,) in dataset[WHOLE]]
    cut, lost = sum(length > tokens for length in whole), len(rows) - len(dataset)
    if cut or lost:
        log.warning(
            "of %s, %s cut after %s, and %s left out, since no answer begins before that; a larger "
            "--input-size keeps more.",
            units.count(len(rows), "conversation"),
            are(cut),
            units.count(tokens, "token"),
            are(lost),
        )
    return dataset.remove_columns(WHOLE)


def _templated(what: str, use: Callable[[], T]) -> T:
    """The result of `use`, which applies the chat template, in a separate thread.

    Raises DataError if the template refuses its input, or takes longer than LIMIT.
    """
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(use())
        except BaseException as error:
            result.set_exception(error)

    # Not a pool's thread: Python would wait for that at exit.
    thread = Thread(target=run, daemon=True)
    thread.start()
    try:
        return result.result(LIMIT)
    except TimeoutError:
        if result.done():  # the template itself raised it
            raise
        import ctypes  # imported here: it would slow the start of every command

        # Ends loops of the template, but not a single operation of Python.
        ident, error_type = ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, error_type)
        reason = f"has not ended after {units.duration(LIMIT)} with {what}"
    except Exception as error:  # of Jinja, or of the Python that a template runs
        if isinstance(error, RazorError) or lacks_memory(error):
            raise
        reason = f"does not take {what} ({reason_of(error)})"
    raise DataError(
        f"the chat template of the model {reason}; correct that, or choose another model."
    ) from None


def check(tokenizer: Any) -> None:
    """Tries the chat template, if there is one, with made-up conversations.

    Raises DataError if it fails or takes longer than LIMIT. A message that the template raises
    itself is left for the real data.
    """
    from jinja2 import TemplateError

    def render(*spoken: tuple[str, str]) -> None:
        messages = [{"role": role, "content": content} for role, content in spoken]
        try:
            tokenizer.apply_chat_template(messages)
        except TemplateError as error:
            if type(error) is not TemplateError:
                raise

    asked = ("user", "a"), ("assistant", "b")
    for spoken in (asked, (("system", "c"), *asked)) if tokenizer.chat_template else ():
        _templated("a conversation", partial(render, *spoken))


def _conversation(tokenizer: Any, spoken: Spoken) -> tuple[list[int], list[bool]]:
    """The tokens of a conversation, and for each whether it belongs to an answer to learn."""
    what, messages, tools = spoken.name, spoken.messages, spoken.tools
    marks = GENERATION.search(tokenizer.get_chat_template(tools=tools))
    if marks and not spoken.unlearned:  # marks do not tell to which answer they belong
        marked = partial(tokenizer.apply_chat_template, return_assistant_tokens_mask=True)
        batch = _templated(what, lambda: marked(messages, tools, return_dict=True))
        text = _templated(what, lambda: spoken.text(tokenizer))
        _check_kept(spoken, text, {})
        return batch["input_ids"], [bool(said) for said in batch["assistant_masks"]]
    text, spans = _templated(what, lambda: _spans(tokenizer, spoken))
    _check_kept(spoken, text, spans)
    learned = [span for place, span in spans.items() if place not in spoken.unlearned]
    batch = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    offsets = batch["offset_mapping"]
    said = [any(first <= a < b <= last for first, last in learned) for a, b in offsets]
    return batch["input_ids"], said


def _spans(tokenizer: Any, spoken: Spoken) -> tuple[str, dict[int, tuple[int, int]]]:
    """The rendered conversation, and {message index: (start, end)} of each answer in it."""
    text = partial(spoken.text, tokenizer)
    whole = text()
    spans = {}
    for place, message in enumerate(spoken.messages):
        if message["role"] == "assistant":
            before, after = text(place, prompt=True), text(place + 1)
            if not (after.startswith(before) and whole.startswith(after)):
                raise UsageError(
                    "the chat template of the model rewrites earlier messages, so answers "
                    "cannot be located; choose another model, or mark answers with "
                    "{% generation %} in its template."
                )
            spans[place] = (len(before), len(after))
    return whole, spans


def _check_kept(spoken: Spoken, text: str, spans: Mapping[int, tuple[int, int]]) -> None:
    """Raises DataError if the chat template omits a message, a call of a tool, or a tool.

    spans: the positions of answers in the text; other messages may be anywhere in it. A message
    that the template quotes is recognized by its longest word. Templates may omit the thoughts
    behind all answers except the last.
    """
    wanted: list[tuple[str, Any, str]] = []
    for place, message in enumerate(spoken.messages):
        part = text[slice(*spans.get(place, (None,)))]
        where = f"the {message['role']} message {place + 1}"
        wanted.append((where, message["content"].rsplit(THOUGHT, 1)[-1], part))
        for call in message.get("tool_calls", ()):
            name = call["function"]["name"]
            wanted.append((f"the call of {name!r} in {where}", name, part))
        if message is spoken.messages[-1]:
            wanted += [(f"the {key} of {where}", message.get(key), part) for key in THOUGHTS]
    for tool in spoken.tools or ():
        name = tool.get("function", tool).get("name")
        wanted.append((f"the tool {name!r}", name, text))
    for what, said, part in wanted:
        each = said.strip() if isinstance(said, str) else ""
        word = max(re.findall(r"\w+", each) or [each], key=len)
        if each not in part and word not in part:
            raise DataError(
                f"the chat template of the model leaves out {what} of {spoken.name}; correct the "
                "template, leave that out of the data, or choose another model."
            )


def prompt(tokenizer: Any, row: Mapping[str, Any]) -> list[int]:
    """The tokens of a text to continue, or of a conversation to answer.

    A text begins like a block of `token_blocks`. A conversation ends where the chat template begins
    an answer; an answer at its end is dropped. Raises UsageError for a tokenizer without a chat
    template, and DataError for a conversation that the template refuses.
    """
    if "messages" not in row:
        batch = tokenizer(row["text"], add_special_tokens=False, verbose=False)
        return [*around(tokenizer)[0], *batch["input_ids"]]
    if not tokenizer.chat_template:
        raise UsageError(
            "the tokenizer has no chat template, which conversations need; choose a run that was "
            "trained on conversations, or give texts instead."
        )
    spoken = Spoken(row)
    if spoken.messages[-1]["role"] == "assistant":
        spoken.messages.pop()
    prompted = partial(tokenizer.apply_chat_template, spoken.messages, spoken.tools)
    asked = _templated(
        "a conversation", lambda: prompted(add_generation_prompt=True, return_dict=True)
    )
    ids: list[int] = asked["input_ids"]
    return ids


def sample(tokenizer: Any, row: Mapping[str, Sequence[int]]) -> list[tuple[str, bool]]:
    """The parts of a row of `conversation_tokens` as text, each with whether it is trained.

    Long parts are shortened to SHOWN characters.
    """
    parts, start, before = [], 0, ""
    trained = [label != NO_LABEL for label in row["labels"]]
    for said, group in groupby(trained):
        start += sum(1 for _ in group)
        whole: str = tokenizer.decode(row["input_ids"][:start])
        parts.append((_shortened(whole[len(before) :]), said))
        before = whole
    return parts


def _shortened(text: str, most: int = SHOWN) -> str:
    half = most // 2
    return text if len(text) <= most else f"{text[:half]} ... {text[-half:]}"
