"""Is a worked answer right: the final answer is found by its mark and compared with the truth by math-verify.

The comparison is symbolic: 0.5, 1/2, 50 % and $\\frac12$ are one answer, and 1,000 is 1000. It runs untimed, so grade
in workers (`workers.py`), which have limits: an answer may ask for 9^9^9.
"""

import logging
import re
from typing import Any

from tilewright.extras import MissingExtra

__all__ = ["MARKS", "final_answer", "grade"]

MARKS = ("####", "A:", "answer is", "Answer:")
"""What may stand before a final answer, besides \\boxed{...}. The last mark in the text counts."""
_LONGEST = 200
"""Characters of a final answer; a longer one is no answer."""


def final_answer(text: str) -> str | None:
    """What stands after the last mark, up to the end of its line, or in the last \\boxed{}; None where there is no mark."""
    boxed, place = text.rfind("\\boxed{"), max(text.rfind(mark) for mark in MARKS)
    if boxed < 0 and place < 0:
        return None
    if boxed > place:
        return _braced(text, boxed + len("\\boxed{"))
    mark = next(mark for mark in MARKS if text.startswith(mark, place))
    found = text[place + len(mark) :].lstrip(" :").partition("\n")[0].strip()
    return found[:_LONGEST] if 0 < len(found) <= _LONGEST else None


def _braced(text: str, start: int) -> str | None:
    depth = 1
    for place in range(start, min(len(text), start + _LONGEST)):
        depth += (text[place] == "{") - (text[place] == "}")
        if not depth:
            return text[start:place] or None
    return None


def grade(answer: str, truth: str) -> bool:
    """Whether the final answer of `answer` equals that of `truth`; a truth without a mark is the answer itself.

    Raises:
        MissingExtra: math-verify is missing; the extra [rl] brings it.
    """
    said, wanted = final_answer(answer), final_answer(truth) or truth.strip()
    if said is None:
        return False
    if _plain(said) == _plain(wanted):
        return True
    verify = _math_verify()
    # Without timeouts of its own: those are signals, which only a main thread may set; a worker has limits anyway.
    parsed = [verify.parse(_latex(text), parsing_timeout=None, raise_on_error=False) for text in (wanted, said)]
    return bool(parsed[0] and parsed[1] and verify.verify(*parsed, timeout_seconds=None, raise_on_error=False))


def _plain(text: str) -> str:
    """A number without blanks, currency, separators of thousands and a full stop at its end."""
    return re.sub(r"(?<=\d),(?=\d{3})|[\s$]|\.$", "", text)


def _latex(text: str) -> str:
    return text if "$" in text.strip("$ ") else f"${_plain(text)}$"


def _math_verify() -> Any:
    try:
        import math_verify
    except ImportError as error:
        raise MissingExtra(f"grading mathematics needs math-verify: pip install 'tilewright[rl]' ({error})") from None
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns at every call that it is untimed
    return math_verify
