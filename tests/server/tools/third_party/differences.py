"""Where vLLM's tests expect another convention than tilewright's, part of a test's name -> why."""

__all__ = ["DIFFERENCES"]

CUT = "a call that is cut off is a call as far as it came, streamed or not; theirs is text where it is not streamed"
BESIDE = "text beside calls is kept; theirs drops it"
OPENED = "what has no </think> is thoughts where the prompt has begun them; it was content in v0.16, and is thoughts in v0.33"
MOVED = "an option of that model's template makes content of thoughts; tilewright hands on what the model wrote"
WRITTEN = "arguments are handed on as they are written; theirs are written anew"
DIFFERENCES: tuple[tuple[str, str], ...] = (
    ("test_hermes_parser_non_streaming_tool_call_invalid_json", CUT),
    ("test_llama3_json_tool_parser.py::test_extract_tool_calls_invalid_json", CUT),
    ("test_llama3_json_tool_parser.py::test_extract_tool_calls_simple", BESIDE),
    ("test_deepseekv31_tool_parser.py::test_extract_tool_calls_with_multiple_tools", BESIDE),
    ("test_qwen3_reasoning_parser.py::test_reasoning[without_think", OPENED),
    ("test_qwen3_reasoning_parser.py::test_reasoning[only_open_tag", OPENED),
    ("test_openai_tool_parser.py::test_extract_tool_calls_single_tool[{\\n", WRITTEN),
    ("moves_into_content", MOVED),
)
