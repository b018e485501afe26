"""Parsers of tool calls and reasoning: what they make of an answer, however it is cut, and how long they take."""

import itertools
import json
import time
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.server.tools import FORMATS, Event, Parser, format_of, parser_of

TOOLS: dict[str, Any] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "exact": {"type": "boolean"},
            "tags": {"type": "array"},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "share": {"type": "float"},
        },
    },
    "now": {"type": "object", "properties": {}},
}
ARGUMENTS = '{"city": "Zürich \\"}{[", "days": 3}'
DS = {
    name: f"<\uff5ctool\u2581{name}\uff5c>"
    for name in ("calls\u2581begin", "call\u2581begin", "sep", "call\u2581end", "calls\u2581end")
}
DS_ALL, DS_ONE, DS_SEP, DS_END, DS_ALL_END = DS.values()


class Result(NamedTuple):
    """What a client has at the end."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()


def result(events: list[Event]) -> Result:
    calls: dict[int, list[str]] = {}
    for event in events:
        if event.kind == "call":
            assert event.call == len(calls), "calls are counted up"
            calls[event.call] = [event.text, ""]
        elif event.kind == "arguments":
            calls[event.call][1] += event.text
    texts = {kind: "".join(e.text for e in events if e.kind == kind) for kind in ("content", "reasoning")}
    return Result(texts["content"], texts["reasoning"], tuple((name, text) for name, text in calls.values()))


def parsed(parser: Parser, pieces: list[str]) -> Result:
    return result([event for piece in pieces for event in parser.push(piece)] + parser.finish())


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[a:b] for a, b in itertools.pairwise(ends)]


TWO = (("weather", ARGUMENTS), ("now", "{}"))
ONE = (("weather", ARGUMENTS),)
CASES: tuple[tuple[str, dict[str, Any], str, Result], ...] = (
    ("hermes", {}, "Just text <tool <b>.\n", Result("Just text <tool <b>.\n")),
    (
        "hermes",
        {},
        f'Let me see.\n\n<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
        '<tool_call>\n{"arguments": {}, "name": "now"}\n</tool_call>',
        Result("Let me see.", "", TWO),
    ),
    ("hermes", {}, '<tool_call>{"name": "now"}</tool_call>', Result("", "", (("now", "{}"),))),
    (
        "hermes",
        {},
        '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}</tool_call>',
        Result("", "", (("now", '{"a": 1}'),)),
    ),
    ("hermes", {}, '<tool_call>{"nom": [1]}</tool_call> so', Result('<tool_call>{"nom": [1]}</tool_call> so')),
    ("hermes", {}, "<tool_call>now</tool_call>", Result("<tool_call>now</tool_call>")),
    (
        "hermes",
        {},
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Zü',
        Result("", "", (("weather", '{"city": "Zü'),)),
    ),
    ("hermes", {}, '<tool_call>\n{"name": "wea', Result('<tool_call>\n{"name": "wea')),
    (
        "hermes",
        {"reasoning": True},
        '<think>\nOne <tool_call> two.\n</think>\n\nThree.<tool_call>{"name": "now", "arguments": {}}</tool_call>',
        Result("Three.", "One <tool_call> two.", (("now", "{}"),)),
    ),
    ("hermes", {"reasoning": True, "open_already": True}, "One.</think> Two.", Result("Two.", "One.")),
    (
        "qwen3_coder",
        {"reasoning": True, "open_already": True},
        "One. <tool_call> is a mark.\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        Result("", "One. <tool_call> is a mark.", (("now", "{}"),)),
    ),
    ("hermes", {"reasoning": True}, " One.</think> Two.", Result(" One.</think> Two.")),
    ("hermes", {"reasoning": True}, "<think>One. ", Result("", "One. ")),
    (
        "hermes",
        {"most_calls": 1},
        '<tool_call>{"name": "now", "arguments": {}}</tool_call>' * 2,
        Result("", "", (("now", "{}"),)),
    ),
    (
        "llama3_json",
        {},
        f'{{"name": "weather", "parameters": {ARGUMENTS}}}; {{"name": "now", "parameters": {{}}}}',
        Result("", "", TWO),
    ),
    ("llama3_json", {}, f'<|python_tag|>{{"name": "weather", "parameters": {ARGUMENTS}}}', Result("", "", ONE)),
    (
        "llama3_json",
        {},
        f'I look {{so}}: {{"name": "weather", "parameters": {ARGUMENTS}}} ; {{"parameters": {{}}, "name": "now"}} Well?',
        Result("I look {so}:Well?", "", TWO),
    ),
    ("llama3_json", {}, '{"name": "now"}', Result('{"name": "now"}')),
    (
        "llama3_json",
        {},
        '{"name": "Bob", "x": {"name": "now", "parameters": {}}}',
        Result('{"name": "Bob", "x": {"name": "now", "parameters": {}}}'),
    ),
    ("llama3_json", {}, '{"name": "Bob", "age": 3}', Result('{"name": "Bob", "age": 3}')),
    ("llama3_json", {}, 'Well, {"name": "now"}', Result('Well, {"name": "now"}')),
    ("llama3_json", {}, "{not json", Result("{not json")),
    (
        "mistral",
        {},
        f'So:[TOOL_CALLS] [{{"name": "weather", "arguments": {ARGUMENTS}}}, {{"name": "now", "arguments": {{}}}}]',
        Result("So:", "", TWO),
    ),
    ("mistral", {}, f"[TOOL_CALLS]weather[CALL_ID]abc[ARGS]{ARGUMENTS}[TOOL_CALLS]now{{}}", Result("", "", TWO)),
    ("mistral", {}, '[TOOL_CALLS] [{"x": 1}]', Result('[TOOL_CALLS][{"x": 1}]')),
    (
        "deepseek_v3",
        {},
        f"Hm{DS_ALL}{DS_ONE}function{DS_SEP}weather\n```json\n{ARGUMENTS}\n```{DS_END}\n"
        f"{DS_ONE}function{DS_SEP}now\n```json\n{{}}\n```{DS_END}{DS_ALL_END}",
        Result("Hm", "", TWO),
    ),
    (
        "deepseek_v31",
        {},
        f"{DS_ALL}{DS_ONE}weather{DS_SEP}{ARGUMENTS}{DS_END}{DS_ONE}now{DS_SEP}{{}}{DS_END}{DS_ALL_END}",
        Result("", "", TWO),
    ),
    (
        "qwen3_coder",
        {},
        'I look.\n<tool_call>\n<function=weather>\n<parameter=city>\nA "b"\n c\n</parameter>\n'
        "<parameter=days>\n3\n</parameter>\n<parameter=exact>\nTrue\n</parameter>\n<parameter=tags>\n['a', 1]\n</parameter>\n"
        "<parameter=note>\nnull\n</parameter>\n<parameter=other>\nx < y\n</parameter>\n</function>\n"
        "</tool_call>\n<function=now>\n</function>",
        Result(
            "I look.",
            "",
            (
                (
                    "weather",
                    '{"city": "A \\"b\\"\\n c", "days": 3, "exact": true, "tags": ["a", 1], "note": null, "other": "x < y"}',
                ),
                ("now", "{}"),
            ),
        ),
    ),
    (
        "qwen3_coder",
        {},
        "<tool_call>\n<function=weather>\n<parameter=days>\n3\n</parameter>\n<parameter=city>\nZür\n",
        Result("", "", (("weather", '{"days": 3, "city": "Zür\\n'),)),
    ),
    (
        "qwen3_coder",
        {},
        "<tool_call><function=no\n</function></tool_call><tool_call><function=now></function></tool_call>",
        Result("<function=no\n</function></tool_call>", "", (("now", "{}"),)),
    ),
    (
        "qwen3_coder",
        {},
        "<tool_call>\n<function=weather>\n<parameter=city>\nZug\n<parameter=other>\n<parameter=share>\n0.5\n"
        "<parameter=days>\n3\n</parameter>\n<parameter=note>\nx\n<parameter=days>\n</function>\n</tool_call> So.",
        Result(
            "So.",
            "",
            (("weather", '{"city": "Zug\\n<parameter=other>", "share": 0.5, "days": 3, "note": "x\\n<parameter=days>"}'),),
        ),
    ),
    ("qwen3_coder", {}, "<tool_call> no", Result("<tool_call> no")),
    (
        "pythonic",
        {},
        " [weather(city='a \"b\\' c', days=-3, tags=[1, {'k': (2, None)}]), now()]",
        Result("", "", (("weather", '{"city": "a \\"b\' c", "days": -3, "tags": [1, {"k": [2, null]}]}'), ("now", "{}"))),
    ),
    ("pythonic", {}, "[1] says so", Result("[1] says so")),
    ("pythonic", {}, "[weather of today]", Result("[weather of today]")),
    ("pythonic", {}, "[weather(days=3, city='Zü", Result("", "", (("weather", '{"days": 3, "city": \'Zü'),))),
    (
        "harmony",
        {},
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        f"<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{ARGUMENTS}<|call|>",
        Result("I look.", "Hm.", ONE),
    ),
    ("harmony", {}, f" to=functions.weather<|channel|>commentary json<|message|>{ARGUMENTS}", Result("", "", ONE)),
    (
        "harmony",
        {},
        "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>So. ",
        Result("So. ", "Hm"),
    ),
    ("harmony", {}, "<b>plain</b>", Result("<b>plain</b>")),
    ("hermes", {"named": "now"}, ' {"a": [1, "}"]} ', Result("", "", (("now", '{"a": [1, "}"]}'),))),
    (
        "hermes",
        {"required": True, "reasoning": True, "open_already": True},
        f'Hm.\n</think>\n\n[{{"name": "weather", "parameters": {ARGUMENTS}}}, {{"name": "now", "parameters": {{}}}}]',
        Result("", "Hm.", TWO),
    ),
)


@pytest.mark.parametrize(("format", "options", "text", "wanted"), CASES)
def test_an_answer_whole_and_cut_at_every_place(format: str, options: dict[str, Any], text: str, wanted: Result) -> None:
    assert parsed(parser_of(format, TOOLS, **options), [text]) == wanted
    assert parsed(parser_of(format, TOOLS, **options), list(text)) == wanted
    for place in range(len(text)):
        assert parsed(parser_of(format, TOOLS, **options), [text[:place], text[place:]]) == wanted
    for name, arguments in wanted.calls:
        if "Zü" not in text:
            assert isinstance(json.loads(arguments), dict), name


FRAGMENTS = sorted(
    {
        *("<tool_call>", "</tool_call>", "<function=", "<function=now>", "</function>", "<parameter=", "city>", "</parameter>"),
        *(
            "[TOOL_CALLS]",
            "[ARGS]",
            "[CALL_ID]",
            "<|python_tag|>",
            "<think>",
            "</think>",
            "now(",
            ")",
            "city=",
            "days=3",
            "'",
            "\\",
        ),
        *("<|channel|>", "<|message|>", "<|start|>assistant", "<|end|>", "<|call|>", "analysis", "final", " to=functions.now"),
        *(
            '"name"',
            '"arguments"',
            '"now"',
            '"',
            "{",
            "}",
            "[",
            "]",
            ":",
            ",",
            ";",
            " ",
            "\n",
            "\n```",
            "```json\n",
            "ab",
            "ü",
            "1",
        ),
        *('{"name": "now", "arguments": ', '{"name": "weather", "parameters": {"city": "', "function", *DS.values()),
    }
)


@given(
    format=st.sampled_from(sorted(FORMATS)),
    fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=25),
    places=st.lists(st.integers(0, 400), max_size=8),
    reasoning=st.booleans(),
    open_already=st.booleans(),
    choice=st.sampled_from([{}, {}, {"required": True}, {"named": "now"}]),
)
@settings(max_examples=500, deadline=None)
def test_no_cut_changes_anything(format, fragments, places, reasoning, open_already, choice) -> None:
    text = "".join(fragments)

    def parser() -> Parser:
        return parser_of(format, TOOLS, reasoning=reasoning, open_already=open_already, **choice)

    whole = parsed(parser(), [text])
    assert parsed(parser(), cut(text, places)) == whole
    assert parsed(parser(), list(text)) == whole


@given(
    format=st.sampled_from(["hermes", "llama3_json", "mistral", "deepseek_v31", "harmony"]),
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=12), lambda s: st.lists(s) | st.dictionaries(st.text(), s)
    ),
    places=st.lists(st.integers(0, 400), max_size=4),
)
@settings(max_examples=60, deadline=None)
def test_any_arguments_come_through_to_the_letter(format: str, value: Any, places: list[int]) -> None:
    written = json.dumps({"city": value}, ensure_ascii=False)
    if (format == "deepseek_v31" and DS_END in written) or (format == "harmony" and "<|" in written):
        return  # special tokens, which no text can spell
    text = {
        "hermes": f'<tool_call>{{"name": "weather", "arguments": {written}}}</tool_call>',
        "llama3_json": f'{{"name": "weather", "parameters": {written}}}',
        "mistral": f"[TOOL_CALLS]weather{written}",
        "deepseek_v31": f"{DS_ALL}{DS_ONE}weather{DS_SEP}{written}{DS_END}{DS_ALL_END}",
        "harmony": f"<|channel|>commentary to=functions.weather<|message|>{written}<|call|>",
    }[format]
    assert parsed(parser_of(format, TOOLS), cut(text, places)) == Result("", "", (("weather", written),))


LONG = 'x y\\n<{[\\"' * 10_000  # as it is written in JSON: 100 kB


@pytest.mark.parametrize("format", sorted(FORMATS))
def test_a_long_argument_takes_time_in_proportion(format: str) -> None:
    def seconds(times: int) -> float:
        string = LONG[: len(LONG) // 8 * times]
        written = f'{{"city": "{string}"}}'
        text = {
            "hermes": f'<tool_call>{{"name": "weather", "arguments": {written}}}</tool_call>',
            "llama3_json": f'{{"name": "weather", "parameters": {written}}}',
            "mistral": f"[TOOL_CALLS]weather{written}",
            "deepseek_v3": f"{DS_ALL}{DS_ONE}function{DS_SEP}weather\n```json\n{written}\n```{DS_END}{DS_ALL_END}",
            "deepseek_v31": f"{DS_ALL}{DS_ONE}weather{DS_SEP}{written}{DS_END}{DS_ALL_END}",
            "harmony": f"<|channel|>commentary to=functions.weather<|message|>{written}<|call|>",
            "pythonic": f"[weather(city='{string}')]",
            "qwen3_coder": f"<function=weather><parameter=city>{string}</parameter></function>",
        }[format]
        best = float("inf")
        for _ in range(3):
            parser, events = parser_of(format, TOOLS), []
            start_s = time.thread_time()
            for at in range(0, len(text), 4):
                events += parser.push(text[at : at + 4])
            best = min(best, time.thread_time() - start_s)
            name, arguments = result(events + parser.finish()).calls[0]
            assert (name, len(json.loads(arguments)["city"]) > len(string) // 2) == ("weather", True)
        return best

    assert seconds(8) < 4 * 8 * max(seconds(1), 1e-3)


def test_a_template_tells_its_format() -> None:
    assert format_of("{% if tools %}<tool_call>{{ x }}</tool_call>") == "hermes"
    assert format_of("<tool_call><function={{ f }}><parameter=...>") == "qwen3_coder"
    assert format_of("[AVAILABLE_TOOLS] [TOOL_CALLS]") == "mistral"
    assert format_of(f"{DS_ONE} ```json") == "deepseek_v3"
    assert format_of(f"{DS_ONE}") == "deepseek_v31"
    assert format_of("<|channel|>analysis<|message|>") == "harmony"
    assert format_of("{{ messages }}") is None
