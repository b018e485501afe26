"""Extracts the main text of a web page with trafilatura (Barbaresi, ACL 2021), and detects encodings with resiliparse.

trafilatura's "precision" mode includes the fewest menus, comments and teasers. If it finds too little text on a page, the usual
mode is tried as well. On the pages of the article extraction benchmark this has the best F1 of trafilatura's modes
(docs/data.md).
"""

from tilewright.data.document import Document, Removed
from tilewright.extras import needed

__all__ = ["Extract", "decode", "main_text"]


def decode(page: bytes) -> str:
    """Decode a page; its encoding is detected from its byte order mark, its declaration, or its bytes."""
    encoding = needed("resiliparse.parse.encoding", "data")
    name = encoding.detect_encoding(page, html5_compatible=True, from_html_meta=True) or "utf-8"
    text = encoding.bytes_to_str(page, name, errors="replace", fallback_encodings=("utf-8", "windows-1252"))
    return text.replace("\0", "")


def main_text(page: str, min_chars: int = 100) -> str:
    """The article or main content of an HTML page as plain text, "" if there is none.

    `min_chars`: if there is less text, trafilatura's usual mode is tried as well, and the longer result is used.
    """
    trafilatura = needed("trafilatura", "data")
    try:
        text = trafilatura.extract(page, include_comments=False, favor_precision=True) or ""
        if len(text) < min_chars:
            usual = trafilatura.extract(page, include_comments=False) or ""
            text = max(text, usual, key=len)
    except (ValueError, TypeError, AttributeError, RecursionError, AssertionError):  # lxml raises these on broken pages
        return ""
    return text.encode("utf-8", "replace").decode()


class Extract:
    """The step: extracts the text of documents that were read as HTML pages; others pass unchanged."""

    def __init__(self, *, max_bytes: int = 8 << 20, min_chars: int = 100) -> None:
        self.max_bytes = max_bytes
        self.min_chars = min_chars

    def __call__(self, document: Document) -> Document | Removed:
        page, document.html = document.html, None
        if page is None:
            return document
        if len(page) > self.max_bytes:
            return Removed("page too large", f"{len(page)} bytes, at most {self.max_bytes}")
        document.text = main_text(decode(page), self.min_chars)
        if not document.text.strip():
            return Removed("no main text")
        return document
