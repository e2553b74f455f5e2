"""Conversations in every form that files have them, and what is wrong with them."""

import csv
import json
import re
from pathlib import Path

import pandas as pd
import pytest
from datasets import Dataset

from razorctl import data
from razorctl.config.job import Job
from razorctl.data.own import in_memory
from razorctl.errors import DataError, UsageError
from tests.own import refuses

ASKED = ["What is 2 + 2?", "Name a color.", "Who wrote it?", "Why?"]
ANSWERS = ["It is four.", "Blue.", "Nobody knows.", "For no reason."]
TALKS = [
    [{"role": "user", "content": a}, {"role": "assistant", "content": b}]
    for a, b in zip(ASKED, ANSWERS, strict=True)
]
SHARED = [
    [{"from": "human", "value": a}, {"from": "gpt", "value": b}]
    for a, b in zip(ASKED, ANSWERS, strict=True)
]
INPUTS = ["", "the sky", "", ""]
# Form -> rows of it, all of which say TALKS, but for the input and the system turn of some.
FORMS = {
    "messages": [{"messages": talk} for talk in TALKS],
    "ShareGPT": [{"conversations": talk} for talk in SHARED],
    "parts": [
        {"messages": [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in talk]}
        for talk in TALKS
    ],
    "Alpaca": [
        {"instruction": a, "input": i, "output": b, "text": f"{a} {b}"}
        for a, i, b in zip(ASKED, INPUTS, ANSWERS, strict=True)
    ],
    "prompts": [{"prompt": a, "completion": b} for a, b in zip(ASKED, ANSWERS, strict=True)],
    "prompts of messages": [{"prompt": t[:1], "completion": t[1:]} for t in TALKS],
    "questions": [
        {"system_prompt": "Be kind.", "question": a, "response": b}
        for a, b in zip(ASKED, ANSWERS, strict=True)
    ],
}


def written(rows, kind):
    if kind == "jsonl":
        Path("a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    elif kind == "json":
        Path("a.json").write_text(f"\ufeff{json.dumps(rows, indent=1)}\n")
    elif kind == "csv":  # lists are JSON in texts
        with Path("a.csv").open("w", newline="") as stream:
            table = csv.DictWriter(stream, rows[0])
            table.writeheader()
            table.writerows(
                {k: v if isinstance(v, str) else json.dumps(v) for k, v in row.items()}
                for row in rows
            )
    elif kind == "lines of json":
        Path("a.json").write_text("\n".join(map(json.dumps, rows)))
        kind = "json"
    else:
        Dataset.from_list(rows).to_parquet("a.parquet")
    return f"a.{kind}"


def load(name, **settings):
    source = data.source_of(Job("gpt2", name, validation=0.25, **settings))
    assert (source.task, source.conversations) == ("causal-lm", True)
    splits = source.load()
    rows = [*splits.train, *splits.validation]
    return sorted((row["messages"] for row in rows), key=str)


def said(messages):
    return [(message["role"], message["content"]) for message in messages]


@pytest.mark.parametrize("kind", ["jsonl", "json", "lines of json", "parquet", "csv"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_becomes_messages(form, kind):
    if (form, kind) == ("prompts of messages", "csv"):
        return  # a prompt may be any text, JSON too
    found = load(written(FORMS[form], kind))
    expected = [said(talk) for talk in TALKS]
    if form == "Alpaca":
        expected[1][0] = ("user", "Name a color.\n\nthe sky")
    if form == "questions":
        expected = [[("system", "Be kind."), *talk] for talk in expected]
    assert sorted(map(said, found)) == sorted(expected)
    assert all(message.get("more") is None for talk in found for message in talk)


def test_columns_of_any_name_are_prompts_and_answers():
    named = {"text_column": "frage,antwort"}
    rows = [
        {"antwort": b, "nr": n, "frage": a, "system": "Be kind."}
        for n, (a, b) in enumerate(zip(ASKED, ANSWERS, strict=True))
    ]
    expected = sorted([("system", "Be kind."), *said(talk)] for talk in TALKS)
    for name in (written(rows, "csv"), str(in_memory.stored(pd.DataFrame(rows)))):
        assert sorted(map(said, load(name, **named))) == expected
    several = "the text, antwort, frage, .*; choose with --text-column, of prompts and answers both"
    refuses(UsageError, several, "gpt2", "a.csv")
    absent = (
        "no column antwrt, only antwort, nr, frage, system; name one of them with --text-column"
    )
    refuses(UsageError, absent, "gpt2", "a.csv", text_column="frage,antwrt")
    refuses(UsageError, "does not name one or two", "gpt2", "a.csv", text_column="frage,antwort,nr")
    labeled = written([{**row, "label": "ab"[n % 2]} for n, row in enumerate(rows)], "jsonl")
    assert data.source_of(Job("gpt2", labeled, **named)).task == "classification"
    assert load(labeled, task="causal-lm", **named)


TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
CALL = {"name": "weather", "arguments": {"city": "Rome"}}
CALLED = {
    "messages": [
        {"role": "system", "content": "Use tools."},
        {"role": "user", "content": "Is it warm in Rome?"},
        {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {
            "name": "weather", "arguments": json.dumps({"city": "Rome"})}}]},
        {"role": "tool", "name": "weather", "content": "31"},
        {"role": "assistant", "content": "Yes, it is."},
    ]
}  # fmt: skip
SHARED_CALLED = {
    "system": "Use tools.",
    "conversations": [
        {"from": "human", "value": "Is it warm in Rome?"},
        {"from": "function_call", "value": json.dumps(CALL)},
        {"from": "observation", "value": "31"},
        {"from": "gpt", "value": "Yes, it is."},
    ],
}


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("row", [CALLED, SHARED_CALLED], ids=["messages", "ShareGPT"])
def test_turns_of_system_and_tools_are_kept(row, kind):
    tools = TOOLS if kind == "jsonl" else json.dumps(TOOLS)
    found = load(written([{**row, "tools": tools}] * 4, kind))
    for talk in found:
        roles = ["system", "user", "assistant", "tool", "assistant"]
        assert [message["role"] for message in talk] == roles
        more = [json.loads(message["more"] or "{}") for message in talk]
        assert more[0] == {"tools": TOOLS}
        assert more[2] == {"tool_calls": [{"type": "function", "function": CALL}]}
        assert talk[3]["content"] == "31"


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_earlier_turns_of_an_instruction_are_kept(kind):
    rows = [{**row, "history": [["Are you there?", "Yes."]]} for row in FORMS["Alpaca"]]
    rows[0]["history"] = []
    found = load(written(rows, kind))
    assert [len(talk) for talk in found] == [4, 4, 4, 2]
    assert said(found[0][:2]) == [("user", "Are you there?"), ("assistant", "Yes.")]


def test_what_answers_have_beside_is_kept():
    answers = [{**TALKS[0][1], "weight": n % 2, "reasoning_content": f"{n}"} for n in range(4)]
    rows = [{"messages": [TALKS[0][0], answer]} for answer in answers]
    for kind in ("jsonl", "parquet"):
        more = [json.loads(found[1]["more"]) for found in load(written(rows, kind))]
        weighed = [
            {"reasoning_content": f"{n}", **({} if n % 2 else {"weight": 0})} for n in range(4)
        ]
        assert sorted(more, key=str) == sorted(weighed, key=str)


def talk(*turns):
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


ASK, ANSWER = ("user", "Why?"), ("assistant", "So.")
BAD = {
    "an empty answer": talk(ASK, ("assistant", "\n")),
    "no answer of an assistant": talk(ASK),
    "an empty message": talk(("user", ""), ANSWER),
    "roles do not alternate between user and assistant": talk(
        ASK, ANSWER, ("system", "Be kind."), ASK
    ),
    "roles do not alternate": talk(ANSWER, ASK),
    "roles do": talk(ASK, ("tool", "31"), ANSWER),
    "the role 'critic' is none of system, user, assistant, tool": talk(ASK, ("critic", "no")),
    "a message without role and content": talk(ASK, ("assistant", 4)),
    "a message with image_url, not with text alone": talk(
        ("user", [{"type": "image_url", "image_url": "a.png"}]), ANSWER
    ),
    "a call of a tool without a name": {
        "messages": [*talk(ASK)["messages"], {"role": "assistant", "tool_calls": [{"f": 1}]}]
    },
    "arguments of a tool are not JSON": {
        "messages": [
            *talk(ASK)["messages"],
            {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]},
        ]
    },
    "tools are not JSON": {**talk(ASK, ANSWER), "tools": "weather()"},
    "system is not text": {**talk(ASK, ANSWER), "system": 4},
    "messages are not JSON": {"messages": "[{'role': 'user', 'content': 'Why?'}]"},
    "a weight of 0.5, neither 0 nor 1": {
        "messages": [*talk(ASK)["messages"], {"role": "assistant", "content": "So.", "weight": 0.5}]
    },
}


def test_bad_conversations_are_named():
    rows = [*FORMS["messages"], *BAD.values()]
    with pytest.raises(DataError) as caught:
        load(written(rows, "json"))
    assert caught.value.exit_code == 5
    splits = data.source_of(Job("gpt2", "a.json", skip_bad=True)).load()
    for number, (line, reason) in enumerate(zip(splits.skipped, BAD, strict=True), 5):
        assert line.startswith(f"a.json, object {number} ({reason}")
    assert len(splits.train) + len(splits.validation) == 4


def test_instructions_without_an_answer_are_named():
    rows = [*FORMS["Alpaca"], {"instruction": "Why?", "input": "", "output": " "}]
    rows += [{**rows[0], "history": history} for history in ([["Why?"]], "[")]
    with pytest.raises(DataError, match=r"line 5 \(no answer of an assistant\)") as caught:
        load(written(rows, "jsonl"))
    assert "line 6 (the history is not a list of pairs of a question and" in str(caught.value)
    assert "line 7 (the history is not JSON)" in str(caught.value)


DOCUMENTS = {
    '[{"messages": []},\n {"messages": [}]': "a.json is not JSON in line 2 (Expecting value)",
    '[{"messages": []} {}]': "a.json is not JSON in line 1 (Expecting ',' delimiter)",
    '[{"messages": []},]': "a.json is not JSON in line 1 (",  # Python 3.13 has another reason
    '[{"messages": []}][]': "a.json has text after its JSON array",
    "[]": "a.json has no rows that can be read",
    '[{"messages": []}': "a.json is not JSON in line 1",
}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_wrong_json_is_named_with_its_line(document):
    Path("a.json").write_text(document)
    refuses(DataError, re.escape(DOCUMENTS[document]), "gpt2", "a.json")
