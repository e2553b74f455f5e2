"""The columns of conversations: messages, or prompts with answers, as ShareGPT, Alpaca and TRL do.

--text-column names the column of messages, or the two of prompts and answers; without it they have
usual names. Further columns may have the `system` text and the `tools` of a conversation, and the
`history` of a prompt. Lists may be JSON in texts, as in CSV.
"""

import re
from collections.abc import Sequence

from razorctl.data.own.read.column import Column
from razorctl.data.own.read.table import Table, parts_of
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
    """The columns of conversations; None if there are none, or options or names tell others.

    answered: whether prompts need answers; without them an instruction alone is a conversation.
    """
    request, first = table.request, table.first
    others = request.label_column is not None or request.image_column is not None
    if others or (answered and table.clear):
        return None
    name = request.text_column
    called = [first([key]) for key in MESSAGES] if name is None else [table.columns.get(name)]
    messages = next((column for column in called if column and _has_messages(column)), None)
    beside = {"system": first(SYSTEM), "tools": first(["tools"])}
    if messages is not None:
        return TableColumns.of("causal-lm", messages=messages, **beside)
    if named := _named(table, answered):
        asked_and_said = dict(zip(("prompt", "answer"), named, strict=False))
        return TableColumns.of("causal-lm", **asked_and_said, **beside)
    for asked, more in FORMS if name is None else ():
        prompt, answer, added = first(asked), first(ANSWER), first(more)
        if prompt is None or (answer is None and (answered or not more)):
            continue
        # Answers to questions may be classes; answers to instructions are for a model that writes.
        sure = asked is not QUESTIONS and "causal-lm" in request.tasks
        texts = [column for column in (prompt, answer) if column]
        # All rows may have one instruction, each with an input or an answer of its own.
        one = sure and any(column.varied for column in (*texts, added) if column)
        if _are_chats(prompt) or one or all(column.varied for column in texts):
            earlier = first(["history"])
            parts = {"history": earlier, "prompt": prompt, "input": added, "answer": answer}
            return TableColumns.of("causal-lm", **parts, **beside)
    return None


def _named(table: Table, answered: bool) -> tuple[Column, ...]:
    """The columns of prompts and answers that --text-column names; empty for other texts.

    Those are of a model that usually learns labels, or beside a column called a label. To predict
    by a run with such columns, the prompts are enough.
    """
    request = table.request
    if request.tasks[0] != "causal-lm":
        return ()
    texts = table.text_options
    trained = None if request.trained is None else request.trained.text_column
    pair = parts_of(trained, table.columns)
    if not answered and len(pair) == 2:
        prompts = table.columns.get(pair[0])
        return texts or ((prompts,) if prompts else ())
    if len(texts) != 2 or (request.task is None and table.labels(texts, by_name=True)):
        return ()
    return texts


def _has_messages(column: Column) -> bool:
    return any(
        isinstance(value, list) or (isinstance(value, str) and LIST.match(value) is not None)
        for value in column.values
    )


def _are_chats(prompts: Column) -> bool:
    """Whether prompts are lists of messages."""
    first = next(iter(prompts.present), None)
    return isinstance(first, list) and bool(first) and isinstance(first[0], dict)
