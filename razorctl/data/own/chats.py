"""Conversations: turns each form of them into a list of messages, and finds faults.

A message has a `role`, a `content`, and `more`, a JSON object or None, for example
{"tool_calls": [...], "thinking": "..."}. In the first message `more` also has the `tools` of the
conversation. In an answer that is not learned it has a `weight` of 0.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from razorctl.data.own.labels import UNSAID, halved
from razorctl.data.own.raw import Reasons, is_text
from razorctl.errors import DataError
from razorctl.models.chats import THOUGHTS

if TYPE_CHECKING:
    import pyarrow as pa

# The roles of columns of conversations: messages, or a prompt with its input and answer.
PARTS = ("messages", "prompt", "input", "answer", "system", "tools", "history")
KEYS = ("role", "content")
MORE = "more"
SHARED = ("from", "value")  # the keys of ShareGPT
# A role of ShareGPT and others -> the role that templates know.
ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "function_call": "assistant",
    **dict.fromkeys(("observation", "function_response", "function"), "tool"),
    "developer": "system",
}
CALLS, CALLING = "function_call", "tool_calls"
WEIGHT = "weight"  # of OpenAI's answers; an answer of weight 0 is read and not learned
# Keys that go into `more`: of tool calls and results of tools, and of answers.
EXTRA = (CALLING, "tool_call_id", "name")
SPOKEN = (*THOUGHTS, WEIGHT)
CHAT_ROLES = ("system", "user", "assistant", "tool")
# Role -> the roles that may follow; "" stands before the first message.
FOLLOWING = {
    "": ("system", "user"),
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("tool", "assistant"),
}
ORDER = "roles do not alternate between user and assistant, after an optional system message"
GAP = "\n\n"  # between an instruction and its input

Parts = Mapping[str, Any]
Messages = list[dict[str, str | None]]


class MisshapenError(ValueError):
    """The fault of a value that is no conversation."""


def kind() -> "pa.DataType":
    """The type of conversations."""
    import pyarrow as pa

    return pa.list_(pa.struct([(key, pa.string()) for key in (*KEYS, MORE)]))


def of_line(parts: Parts) -> tuple[Messages | None, str | None]:
    """The messages of a conversation from its PARTS, and its fault."""
    try:
        return _joined(parts), None
    except MisshapenError as error:
        return None, str(error)


def of_arrays(parts: "Mapping[str, pa.Array]") -> tuple["pa.Array", Reasons | None]:
    """Conversations from columns of their PARTS, and the fault of each.

    Messages of roles and contents alone are returned unchanged. So are values of a type that
    `faults` refuses.
    """
    import pyarrow as pa

    messages = parts.get("messages")
    if messages is not None and not _has_messages(messages.type):
        return messages, None
    if messages is not None and len(parts) == 1 and _is_plain(messages.type):
        return messages, None
    columns = (array.to_pylist() for array in parts.values())
    rows = [of_line(dict(zip(parts, row, strict=True))) for row in zip(*columns, strict=True)]
    return pa.array([messages for messages, _ in rows], kind()), [fault for _, fault in rows]


def _joined(parts: Parts) -> Messages:
    if "messages" in parts:
        messages = _turns(parts["messages"])
    else:
        added = _text(parts.get("input"), "input")
        question = _said("user", parts.get("prompt"), "a prompt")
        if added and question:
            question[-1]["content"] = f"{question[-1]['content']}{GAP}{added}"
        earlier = _earlier(parts.get("history"))
        messages = [*earlier, *question, *_said("assistant", parts.get("answer"), "an answer")]
    system = _text(parts.get("system"), "system")
    if system and not (messages and messages[0]["role"] == "system"):
        messages.insert(0, {"role": "system", "content": system, MORE: None})
    if (tools := _tools(parts.get("tools"))) and messages:
        more = json.loads(messages[0][MORE] or "{}")
        messages[0][MORE] = json.dumps({**more, "tools": tools})
    return messages


def _said(role: str, value: Any, what: str) -> Messages:
    """The messages of a prompt or of an answer: a text, or a list of messages."""
    if isinstance(value, list):
        return _turns(value)
    if value is not None and not isinstance(value, str):
        raise MisshapenError(f"{what} is not text")
    written = value is not None and value.strip()
    return [{"role": role, "content": value, MORE: None}] if written else []


def _earlier(value: Any) -> Messages:
    """The messages before a prompt, from pairs of a question and its answer."""
    pairs = _parsed(value, "the history is") or ()
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise MisshapenError("the history is not a list of pairs of a question and an answer")
    roles = (("user", "a question"), ("assistant", "an answer"))
    return [
        message
        for pair in pairs
        for (role, what), said in zip(roles, pair, strict=True)
        for message in _said(role, said, what)
    ]


def _parsed(value: Any, what: str) -> Any:
    """A value, parsed if it is a text with JSON, as in CSV."""
    if not isinstance(value, str) or not value.strip():
        return value
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        raise MisshapenError(f"{what} not JSON") from None
    if fault := halved(parsed):
        raise MisshapenError(fault)
    return parsed


def _text(value: Any, column: str) -> str:
    if value is not None and not isinstance(value, str):
        raise MisshapenError(f"{column} is not text")
    return "" if value in UNSAID else (value or "").strip()


def _tools(value: Any) -> Any:
    """The schemas of the tools of a conversation."""
    value = _parsed(value, "tools are")
    if value and not (isinstance(value, list) and all(isinstance(one, Mapping) for one in value)):
        raise MisshapenError("tools are not a list of objects")
    return _without_nulls(value)


def _turns(value: Any) -> Messages:
    value = _parsed(value, "messages are")
    if not isinstance(value, list):
        raise MisshapenError("messages are not a list")
    return [_turn(message) for message in value]


def _turn(message: Any) -> dict[str, str | None]:
    if not isinstance(message, Mapping):
        raise MisshapenError("a message without role and content")
    shared = not message.keys() & {*KEYS} and message.keys() >= {*SHARED}
    word, content = (message.get(key) for key in (SHARED if shared else KEYS))
    more = {key: message[key] for key in EXTRA if message.get(key)}
    if word == CALLS and isinstance(content, str):
        more[CALLING], content = _called(content), ""
    if isinstance(content, list):
        content = _written(content)
    if content is None and CALLING in more:
        content = ""
    if not (isinstance(word, str) and isinstance(content, str)):
        raise MisshapenError("a message without role and content")
    if CALLING in more:
        more[CALLING] = _calls(more[CALLING])
    role = ROLES.get(word, word)
    if role != "tool" and CALLING not in more:
        more = {}  # the name of a user is for no template
    if role == "assistant":
        more |= _aside(message)
    return {"role": role, "content": content, MORE: json.dumps(more) if more else None}


def _aside(answer: Mapping[str, Any]) -> dict[str, Any]:
    """The thoughts behind an answer, and its weight if that is 0."""
    weight = answer.get(WEIGHT)
    if weight not in (None, 0, 1):
        raise MisshapenError(f"a weight of {weight!r}, neither 0 nor 1")
    said = {key: answer[key] for key in THOUGHTS if isinstance(answer.get(key), str)}
    kept: dict[str, Any] = {key: thought for key, thought in said.items() if thought.strip()}
    return {**kept, WEIGHT: 0} if weight == 0 else kept


def _written(content: list[Any]) -> str:
    """The text of a content in parts."""
    parts = [part if isinstance(part, Mapping) else {} for part in content]
    if other := [part.get("type") for part in parts if part.get("type") != "text"]:
        raise MisshapenError(
            f"a message with {other[0] or 'a part without a type'}, not with text alone"
        )
    return "".join(str(part.get("text", "")) for part in parts)


def _called(content: str) -> list[Any]:
    """The calls in a message of ShareGPT."""
    calls = _parsed(content, "a call of a tool is")
    return calls if isinstance(calls, list) else [calls]


def _calls(calls: Any) -> list[Any]:
    """Calls of tools in the form of templates: with arguments that are objects, not texts."""
    if not isinstance(calls, list) or not calls:
        raise MisshapenError("tool calls are not a list")
    converted = []
    for call in calls:
        plain = _without_nulls(call) if isinstance(call, Mapping) else {}
        function = plain.get("function", plain)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise MisshapenError("a call of a tool without a name")
        function = dict(function)
        if "arguments" in function:
            function["arguments"] = _parsed(function["arguments"], "arguments of a tool are") or {}
        identity = {"id": plain["id"]} if "id" in plain else {}
        converted.append({"type": "function", **identity, "function": function})
    return converted


def _without_nulls(value: Any) -> Any:
    """A value without its null keys, which Arrow adds if other rows have them."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _inner(values: "pa.DataType") -> dict[str, "pa.DataType"]:
    """The keys and types of lists of objects; empty for any other type."""
    import pyarrow as pa

    if not (pa.types.is_list(values) or pa.types.is_large_list(values)):
        return {}
    inner = values.value_type
    return {field.name: field.type for field in inner} if pa.types.is_struct(inner) else {}


def _has_messages(values: "pa.DataType") -> bool:
    """Whether values of this type may be messages: texts with JSON, or lists of such objects."""
    import pyarrow as pa

    names = _inner(values).keys()
    shared = names >= {*SHARED} and not names & {*KEYS}
    return shared or names >= {*KEYS} or pa.types.is_null(values) or is_text(values)


def _are_texts(inner: Mapping[str, "pa.DataType"]) -> bool:
    """Whether roles and contents are texts. inner: keys and types of messages."""
    return all(key in inner and is_text(inner[key]) for key in KEYS)


def _is_plain(values: "pa.DataType") -> bool:
    """Whether messages of this type have the keys of `KEYS`, texts, and none that `more` needs."""
    inner = _inner(values)
    return _are_texts(inner) and not {CALLING, *SPOKEN} & {*inner}


def faults(values: "pa.ChunkedArray", answered: bool) -> dict[int, str]:
    """Row -> the fault of its conversation.

    Raises DataError for another type than lists of roles and contents. answered: whether a
    conversation needs an answer, and not only a question.
    """
    if not _are_texts(_inner(values.type)):
        raise DataError(
            f"the column of messages has values of type {values.type}; give lists of role and "
            "content, or choose another column with --text-column."
        )
    rows = chain.from_iterable(chunk.to_pylist() for chunk in values.chunks)
    faults = ((row, _fault(messages or (), answered)) for row, messages in enumerate(rows))
    return {row: fault for row, fault in faults if fault is not None}


def _fault(messages: Sequence[Mapping[str, Any]], answered: bool) -> str | None:
    if not messages:
        return "no messages"
    before = ""
    for message in messages:
        role, content = message["role"], message["content"]
        if role not in CHAT_ROLES:
            return f"the role {role!r} is none of {', '.join(CHAT_ROLES)}"
        if role not in FOLLOWING[before]:
            return ORDER
        if not (content or "").strip() and role != "tool":
            if role != "assistant":
                return "an empty message"
            if CALLING not in json.loads(message.get(MORE) or "{}"):
                return "an empty answer"
        before = role
    roles = {message["role"] for message in messages}
    if answered:
        return None if "assistant" in roles else "no answer of an assistant"
    return None if "user" in roles else "no question"
