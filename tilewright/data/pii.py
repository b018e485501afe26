"""Masks e-mail addresses, IP addresses and telephone numbers.

IP addresses are distinguished from version numbers by the text around them. Telephone numbers without a country code are
recognised if they have a usual form (area code in brackets, three groups, a leading 0), or follow words such as "call" and
"tel". Numbers with a country code must be valid (phonenumbers, Google's libphonenumber).
"""

import ipaddress
import re

from tilewright.data.document import Document
from tilewright.extras import needed

__all__ = ["MaskPII", "find"]

_EMAIL = re.compile(
    r"(?<![\w.+%'-])[A-Za-z0-9_][A-Za-z0-9._%+'-]{0,63}@(?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?\.){1,8}[A-Za-z]{2,24}(?![\w@])"
)
_QUAD = re.compile(r"(?<![\w.])(?:(?:25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(?:25[0-5]|2[0-4]\d|1?\d?\d)(?![\w-])(?!\.\w)")
_HEX = re.compile(r"(?<![\w:.])(?:[0-9A-Fa-f]{0,4}:){2,7}[0-9A-Fa-f]{0,4}(?![\w:])")
_VERSION_BEFORE = re.compile(
    r"(?:versions?|release|build|firmware|driver|upgraded? (?:to|from)|v|ver|rev|section|chapter|§|[=<>~^!]=?|[\w)][/-])"
    r"[\s.:]*$",
    re.IGNORECASE,
)
_ADDRESS_NEAR = re.compile(
    r"\b(?:ip|ips|ipv4|hosts?|server|address|addr|ping|dns|from|gateway|client|peer|listen|ssh)\b", re.IGNORECASE
)
_PHONE = re.compile(
    r"(?<![\w.$€£#/:+-])"
    r"(?:\+\d{1,3}(?:[ .\-]?\(\d{1,4}\))?(?:[ .\-]?\d{1,5}){2,6}"  # +49 30 901820, +1 (212) 555-0100
    r"|(?:1[ .\-])?\(\d{2,5}\)[ .\-]?\d{2,4}[ .\-]?\d{3,5}(?:[ .\-]\d{2,4})?"  # (212) 555-0100
    r"|(?:1[ .\-])?[2-9]\d{2}([ .\-])\d{3}\1\d{4}"  # 212-555-0100
    r"|0\d{1,4}[ /\-]\d{2,4}(?:[ \-]?\d{2,5}){1,4}"  # 030 901820, 020 7946 0018
    r"|\d{10,11})"  # 2125550100, only after a word such as "tel"
    r"(?![\w%]|[.\-/:]\d)"
)
_PHONE_WORD = re.compile(
    r"\b(?:tel|telephone|phone|call|mobile|cell|fax|whatsapp|text|dial|telefon|handy|tél|ring)\b[\s.:)\w]{0,14}$", re.IGNORECASE
)
_DATE = re.compile(r"\d{1,2}[ ./\-]\d{1,2}[ ./\-](?:\d{2}|\d{4})|\d{4}[./\-]\d{1,2}[./\-]\d{1,2}")


def find(text: str) -> list[tuple[int, int, str]]:
    """(start, end, "email" | "ip" | "phone") of everything found, in order, without overlaps."""
    spans = [(*match.span(), "email") for match in _EMAIL.finditer(text)] if "@" in text else []
    spans += [(*match.span(), "ip") for match in _QUAD.finditer(text) if _is_ip4(text, match)]
    spans += [(*match.span(), "ip") for match in _HEX.finditer(text) if _is_ip6(match.group())]
    spans += [(*match.span(), "phone") for match in _PHONE.finditer(text) if _is_phone(text, match)]
    kept: list[tuple[int, int, str]] = []
    for span in sorted(spans):
        if not kept or span[0] >= kept[-1][1]:
            kept.append(span)
    return kept


def _is_ip4(text: str, match: re.Match[str]) -> bool:
    parts = [int(part) for part in match.group().split(".")]
    nobody = parts[0] == 0 or parts[:2] == [255, 255] or match.group() == "127.0.0.1"  # unspecified, masks, localhost
    if nobody or any(len(part) > 1 and part[0] == "0" for part in match.group().split(".")):
        return False
    before = text[max(0, match.start() - 40) : match.start()]
    if _VERSION_BEFORE.search(before):
        return False
    around = before + text[match.end() : match.end() + 12]
    # Four small numbers are usually a version or a section number. They count as an address only next to a word or a port.
    return max(parts) >= 32 or bool(_ADDRESS_NEAR.search(around)) or text[match.end() : match.end() + 1] in (":", "/")


def _is_ip6(found: str) -> bool:
    groups = [group for group in found.split(":") if group]
    if len(groups) < 3 or not any(map(str.isdigit, found)):
        return False
    try:
        return not ipaddress.IPv6Address(found).is_loopback
    except ValueError:
        return False


def _is_phone(text: str, match: re.Match[str]) -> bool:
    found = match.group()
    digits = sum(map(str.isdigit, found))
    if not 7 <= digits <= 15 or _DATE.fullmatch(found):
        return False
    if found.startswith("+"):
        phonenumbers = needed("phonenumbers", "data")
        try:
            return phonenumbers.is_possible_number(phonenumbers.parse(found, None))
        except phonenumbers.NumberParseException:
            return False
    if found.isdigit():
        return bool(_PHONE_WORD.search(text[max(0, match.start() - 24) : match.start()]))
    return digits >= 9


class MaskPII:
    """The step: replaces what is found by `[EMAIL]`, `[IP]` or `[PHONE]`. kinds: which of the three are masked."""

    def __init__(self, *, kinds: tuple[str, ...] = ("email", "ip", "phone")) -> None:
        if strange := sorted(set(kinds) - {"email", "ip", "phone"}):
            raise ValueError(f"pii: kinds contains {strange[0]!r}, wanted only email, ip and phone")
        self.kinds = frozenset(kinds)
        needed("phonenumbers", "data")

    def __call__(self, document: Document) -> Document:
        """The document with everything masked."""
        parts, at = [], 0
        for start, end, kind in find(document.text):
            if kind in self.kinds:
                parts += [document.text[at:start], f"[{kind.upper()}]"]
                at = end
                document.notes[kind] = document.notes.get(kind, 0) + 1
        document.text = "".join(parts) + document.text[at:]
        return document
