"""A pytest plugin: what parser tests of another engine import, answered with tilewright's parsers.

`vllm` and every module below it exist while this plugin is loaded. A name that is in `ours` gives what stands here; every other
name is a `Stranger`: a test that uses it is skipped, with the name as its reason. Tokenizers of a hub are one stand-in that
keeps control tokens whole and cuts other text into short pieces: tilewright's parsers see text alone.
"""

import importlib
import importlib.abc
import importlib.machinery
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import transformers

from tests.server.tools.third_party.vllm_types import (
    ChatCompletionRequest,
    ChatCompletionToolsParam,
    DeltaFunctionCall,
    DeltaMessage,
    DeltaToolCall,
    ExtractedToolCallInformation,
    FunctionCall,
    FunctionDefinition,
    MistralTokenizer,
    Tokenizer,
    ToolCall,
    detokenize_incrementally,
    get_tokenizer,
)
from tilewright.server.tools import FORMATS, Event, Parser, parser_of
from tilewright.server.tools.asked import Answering, Asked
from tilewright.server.tools.channels import plain, thinking

TOOLS = {
    "Hermes2ProToolParser": "hermes",
    "Llama3JsonToolParser": "llama3_json",
    "MistralToolParser": "mistral",
    "OpenAIToolParser": "harmony",
    "DeepSeekV3ToolParser": "deepseek_v3",
    "DeepSeekV31ToolParser": "deepseek_v31",
    "PythonicToolParser": "pythonic",
    "Llama4PythonicToolParser": "pythonic",
    "Qwen3CoderToolParser": "qwen3_coder",
    "Qwen3EngineToolParser": "qwen3_coder",
    "Qwen3XMLToolParser": "qwen3_coder",
}
"""Class there -> format here."""
TOOL_NAMES = {
    "hermes": "hermes",
    "llama3_json": "llama3_json",
    "llama4_json": "llama3_json",
    "mistral": "mistral",
    "openai": "harmony",
    "deepseek_v3": "deepseek_v3",
    "deepseek_v31": "deepseek_v31",
    "pythonic": "pythonic",
    "llama4_pythonic": "pythonic",
    "qwen3_coder": "qwen3_coder",
    "qwen3_xml": "qwen3_coder",
}
THINKING = {"deepseek_r1": None, "holo2": None, "minimax_m2": None, "nemotron_v3": None, "qwen3": "<function=", "step3": None}
"""Reasoning parsers there for `<think>`, which the prompt has begun -> how a call goes on that ends the thoughts as well."""


class Missing(type):
    """Classes that stand for what tilewright has not."""

    def __call__(cls, *args: Any, **more: Any) -> Any:
        raise pytest.skip.Exception(f"not ours: {cls.__name__}", allow_module_level=True)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__") or name == "_pytestfixturefunction":
            raise AttributeError(name)
        raise pytest.skip.Exception(f"not ours: {cls.__name__}.{name}", allow_module_level=True)


class AnyName(dict[str, Any]):
    """Schemas of functions of every name: what a test means that gives no tools."""

    def __contains__(self, name: object) -> bool:
        return True

    def __bool__(self) -> bool:
        return True


def schemas(tools: Any) -> dict[str, Any]:
    """Function name -> schema, of tools in either API's form."""
    found = [getattr(tool, "function", tool) for tool in tools or []]
    return {tool.name: tool.parameters for tool in found} or AnyName()


class Text(str):
    """A text that equals another one if they differ in white space at their ends alone."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and self.strip() == other.strip()

    def __add__(self, other: str) -> "Text":
        return Text(str(self) + other)


texts: list[type[str]] = [str]
"""What contents and thoughts are handed out as."""


class Streams:
    """A parser of ours, behind their interface of growing texts: a stream begins where the text before is empty."""

    def __init__(self, make: Callable[[Any], Parser], tokenizer: Any, format: str | None = None):
        self.model_tokenizer, self._make, self._parser = tokenizer, make, None
        self._answering = Answering(asked=Asked(), format=format, reasoning=False, open_already=False)

    @property
    def vocab(self) -> dict[str, int]:
        return self.model_tokenizer.get_vocab()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return pytest.skip(f"not ours: {name} of a parser")

    def whole(self, text: str, request: Any) -> tuple[str | None, str | None, list[ToolCall]]:
        """(content, reasoning, calls) of an answer."""
        parser = self._make(request)
        message = self._delta(parser.push(text) + parser.finish()) or DeltaMessage()
        calls = [
            ToolCall(id=one.id or "", function=FunctionCall(name=one.function.name, arguments=one.function.arguments or ""))
            for one in message.tool_calls
            if one.function is not None
        ]
        return message.content, message.reasoning, calls

    def more(self, before: str, delta: str, request: Any) -> DeltaMessage | None:
        """What a piece of text adds."""
        if not before or self._parser is None:
            self._parser = self._make(request)
        return self._delta(self._parser.push(delta))

    def _delta(self, events: list[Event]) -> DeltaMessage | None:
        if not events:
            return None
        made, calls = DeltaMessage(), dict[int, DeltaToolCall]()
        for event in events:
            if event.kind == "call":
                calls[event.call] = DeltaToolCall(
                    index=event.call,
                    id=self._answering.call_id(),
                    type="function",
                    function=DeltaFunctionCall(name=event.text, arguments=""),
                )
            elif event.kind == "arguments":
                one = calls.setdefault(event.call, DeltaToolCall(index=event.call, function=DeltaFunctionCall(arguments="")))
                assert one.function is not None
                one.function.arguments = (one.function.arguments or "") + event.text
            elif event.kind == "content":
                made.content = (made.content or "") + event.text
            else:
                made.reasoning = (made.reasoning or "") + event.text
        made.content, made.reasoning = (None if one is None else texts[0](one) for one in (made.content, made.reasoning))
        made.tool_calls = list(calls.values())
        return made


def harmony_answer(ids: Sequence[int]) -> str:
    """What a model has written of a conversation: all that stands behind the beginning of the first answer."""
    harmony = importlib.import_module("openai_harmony")  # which the test has imported
    text = harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS).decode_utf8(list(ids))
    begin = "<|start|>assistant"
    return text.partition(begin)[2].removesuffix(begin)


class ToolParser(Streams):
    """Their interface of a parser of calls."""

    format = ""
    bot_token = "[TOOL_CALLS]"

    def __init__(self, tokenizer: Any, tools: Any = None, **more: Any):
        self.prev_tool_call_arr: list[Any] = []
        given = tools

        def make(request: Any) -> Parser:
            return parser_of(self.format, schemas(given or getattr(request, "tools", None)))

        super().__init__(make, tokenizer, self.format)

    @property
    def bot_token_id(self) -> int:
        return self.vocab[self.bot_token]

    def extract_tool_calls(
        self, model_output: str, request: Any = None, token_ids: Sequence[int] | None = None
    ) -> ExtractedToolCallInformation:
        """Of a whole answer."""
        content, _, calls = self.whole(model_output if token_ids is None else harmony_answer(token_ids), request)
        return ExtractedToolCallInformation(tools_called=bool(calls), tool_calls=calls, content=content)

    def extract_tool_calls_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int] = (),
        current_token_ids: Sequence[int] = (),
        delta_token_ids: Sequence[int] = (),
        request: Any = None,
    ) -> DeltaMessage | None:
        """Of a piece of it."""
        found = self.more(previous_text, delta_text, request)
        if found is not None:
            self.prev_tool_call_arr += [call for call in found.tool_calls if call.id is not None]
        return found


class ReasoningParser(Streams):
    """Their interface of a parser of thoughts; where they end is asked by giving one more piece of text."""

    call: str | None = None

    def __init__(self, tokenizer: Any, *args: Any, chat_template_kwargs: dict[str, Any] | None = None, **more: Any):
        said = chat_template_kwargs or {}
        thinks = said.get("enable_thinking", said.get("thinking", True))

        def make(request: Any) -> Parser:
            return Parser(thinking(plain, open_already=True, call=self.call) if thinks else plain)

        self._thinks = thinks
        super().__init__(make, tokenizer)

    def extract_reasoning(self, model_output: str, request: Any = None) -> tuple[str | None, str | None]:
        """Of a whole answer."""
        content, reasoning, _ = self.whole(model_output, request)
        return reasoning or ("" if self._thinks else None), content

    def extract_reasoning_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int] = (),
        current_token_ids: Sequence[int] = (),
        delta_token_ids: Sequence[int] = (),
    ) -> DeltaMessage | None:
        """Of a piece of it."""
        return self.more(previous_text, delta_text, None)

    def _over(self, ids: Sequence[int]) -> bool:
        parser = self._make(None)
        parser.push(self.model_tokenizer.decode(list(ids)) if ids else "")
        return any(event.kind != "reasoning" for event in parser.push("x"))

    def is_reasoning_end(self, ids: Sequence[int]) -> bool:
        """Whether what comes behind these tokens is content."""
        return self._over(ids)

    def is_reasoning_end_streaming(self, ids: Sequence[int], delta: Sequence[int]) -> bool:
        """The same."""
        return self._over(ids)

    def extract_content_ids(self, ids: list[int]) -> list[int]:
        """The tokens behind the thoughts."""
        first = next((at for at in range(len(ids) + 1) if self._over(ids[:at])), len(ids))
        return ids[first:]


class Harmony(ReasoningParser):
    """The same for harmony's channels."""

    def __init__(self, tokenizer: Any, *args: Any, **more: Any):
        super().__init__(tokenizer)
        self._make = lambda request: parser_of("harmony", {})


class ToolParserManager:
    """Parsers by their name there."""

    @staticmethod
    def get_tool_parser(name: str) -> Any:
        """The class."""
        if name not in TOOL_NAMES:
            pytest.skip(f"not ours: the format {name}")
        return type(name, (ToolParser,), {"format": TOOL_NAMES[name]})


class ReasoningParserManager:
    """Parsers by their name there."""

    @staticmethod
    def get_reasoning_parser(name: str) -> Any:
        """The class."""
        if name not in THINKING:
            pytest.skip(f"not ours: the format {name}")
        return type(name, (ReasoningParser,), {"call": THINKING[name]})


ours: dict[str, Any] = {
    **{name: type(name, (ToolParser,), {"format": format}) for name, format in TOOLS.items()},
    **{
        one.__name__: one
        for one in (
            *(ChatCompletionRequest, ChatCompletionToolsParam, DeltaFunctionCall, DeltaMessage, DeltaToolCall, FunctionCall),
            *(ExtractedToolCallInformation, FunctionDefinition, MistralTokenizer, ReasoningParser, ReasoningParserManager),
            *(ToolCall, ToolParser, ToolParserManager, detokenize_incrementally, get_tokenizer),
        )
    },
    "DeepSeekR1ReasoningParser": type("DeepSeekR1ReasoningParser", (ReasoningParser,), {}),
    "GptOssReasoningParser": Harmony,
    "TokenizerLike": Tokenizer,
    "is_mistral_tokenizer": lambda tokenizer: isinstance(tokenizer, MistralTokenizer),
}
assert set(TOOLS.values()) == set(FORMATS), "every format here has a class there"


class Made(ModuleType):
    """A module that has whatever is asked of it."""

    def __init__(self, name: str):
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name not in ours:
            ours[name] = Missing(name, (), {})
        return ours[name]


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module of packages that are not here."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] in ("vllm", "xgrammar"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return Made(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


# Here and not in a hook: the tests' own conftest.py is imported before any hook runs.
sys.meta_path.insert(0, Finder())
transformers.AutoTokenizer = Tokenizer  # type: ignore[misc, assignment]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where results go, and whether white space at the ends of texts counts."""
    parser.addoption("--results", required=True)
    parser.addoption("--white-space-aside", action="store_true")


def pytest_configure(config: pytest.Config) -> None:
    """Their marks, and our options."""
    for mark in ("skip_global_cleanup", "cpu_test"):
        config.addinivalue_line("markers", f"{mark}: of theirs")
    if config.getoption("--white-space-aside"):
        texts[0] = Text
    config.pluginmanager.register(Results(Path(str(config.getoption("--results")))))


class Results:
    """Writes a line for each test: its name, what became of it, and why."""

    def __init__(self, path: Path):
        self._path = path

    def _write(self, name: str, outcome: str, why: str) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps([name, outcome, why]) + "\n")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test, or what it needs, has ended."""
        if report.when == "call" or (report.when == "setup" and not report.passed):
            why = report.longreprtext if not isinstance(report.longrepr, tuple) else str(report.longrepr[2])
            if report.skipped and hasattr(report, "wasxfail"):
                self._write(report.nodeid, "expected", report.wasxfail)
            elif why.startswith("[XPASS"):
                self._write(report.nodeid, "better", why)
            else:
                self._write(report.nodeid, report.outcome, why.removeprefix("Skipped: "))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file was not read."""
        if not report.passed:
            why = report.longreprtext if not isinstance(report.longrepr, tuple) else str(report.longrepr[2])
            self._write(report.nodeid, report.outcome, why.removeprefix("Skipped: "))
