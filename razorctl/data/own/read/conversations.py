"""The columns of conversations: messages, or prompts with answers, as ShareGPT, Alpaca and TRL do.

Columns are given, or found by their names. A `system` and the `tools` of a conversation may be in
columns beside it, and the `history` of a prompt. Lists may be JSON in texts, as in CSV.
"""

import re
from collections.abc import Sequence

from razorctl.data.own.read.sample import Sample
from razorctl.data.own.read.table import Table
from razorctl.data.own.read.table_columns import TableColumns

MESSAGES = ("messages", "conversations", "conversation")
ANSWER = ("output", "response", "answer", "completion")
SYSTEM = ("system", "system_prompt")
QUESTIONS = ("question", "query")
LIST = re.compile(r"\s*\[\s*\{")  # begins a list of messages, as JSON or as Python prints it
# The columns of a prompt, and the columns of its input.
FORMS: Sequence[tuple[Sequence[str], Sequence[str]]] = (
    (("instruction",), ("input", "context")),
    (("prompt",), ()),
    (QUESTIONS, ()),
)


def columns_of(table: Table, answered: bool = True) -> TableColumns | None:
    """The columns of conversations; None if there are none, or the user names others.

    answered: whether prompts need answers; without them an instruction alone is a conversation.
    """
    request, sample, first = table.request, table.sample, table.first
    text = request.text_column
    if request.label_column is not None or request.image_column is not None:
        return None
    called = [c for n in MESSAGES if (c := first([n]))] if text is None else [text]
    messages = next((column for column in called if _has_messages(sample, column)), None)
    beside = {"system": first(SYSTEM), "tools": first(["tools"])}
    if messages is not None:
        return TableColumns.of("causal-lm", messages=messages, **beside)
    for asked, more in FORMS if text is None else ():
        prompt, answer = first(asked), first(ANSWER)
        if prompt is None or (answer is None and (answered or not more)):
            continue
        # Answers to questions may be classes; answers to instructions are for a model that writes.
        sure = asked is not QUESTIONS and "causal-lm" in request.tasks
        added = first(more)
        texts = [prompt] if answer is None else [prompt, answer]
        # All rows may have one instruction, each with an input or an answer of its own.
        one = sure and any(sample.varied(c) for c in (*texts, added) if c is not None)
        if _are_chats(sample, prompt) or one or sample.varied(*texts):
            earlier = first(["history"])
            parts = {"history": earlier, "prompt": prompt, "input": added, "answer": answer}
            return TableColumns.of("causal-lm", **parts, **beside)
    return None


def _has_messages(sample: Sample, column: str) -> bool:
    return any(
        isinstance(value, list) or (isinstance(value, str) and LIST.match(value) is not None)
        for value in sample.values.get(column, ())
    )


def _are_chats(sample: Sample, column: str) -> bool:
    """Whether prompts are lists of messages."""
    values = sample.present(column)
    first = values[0] if values else None
    return isinstance(first, list) and bool(first) and isinstance(first[0], dict)
