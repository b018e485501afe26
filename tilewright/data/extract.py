"""The main text of a web page, by trafilatura (Barbaresi, ACL 2021), with encodings found by resiliparse.

trafilatura's "precision" mode keeps least of menus, comments and teasers; where it finds nothing on a page, its usual mode is
asked. On the pages of the article extraction benchmark this gives the best F1 of its modes (docs/data.md).
"""

from tilewright.data.document import Document, Removed
from tilewright.extras import needed

__all__ = ["Extract", "decode", "main_text"]


def decode(page: bytes) -> str:
    """A page's characters: its byte order mark, what it declares, what its bytes look like."""
    encoding = needed("resiliparse.parse.encoding", "data")
    name = encoding.detect_encoding(page, html5_compatible=True, from_html_meta=True) or "utf-8"
    text = encoding.bytes_to_str(page, name, errors="replace", fallback_encodings=("utf-8", "windows-1252"))
    return text.replace("\0", "")


def main_text(page: str, min_chars: int = 100) -> str:
    """The article or main content of an HTML page as plain text, "" where there is none.

    `min_chars`: below this trafilatura's usual mode is asked as well, and the longer answer taken.
    """
    trafilatura = needed("trafilatura", "data")
    try:
        text = trafilatura.extract(page, include_comments=False, favor_precision=True) or ""
        if len(text) < min_chars:
            usual = trafilatura.extract(page, include_comments=False) or ""
            text = max(text, usual, key=len)
    except (ValueError, TypeError, AttributeError, RecursionError, AssertionError):  # what lxml's users meet on broken pages
        return ""
    return text.encode("utf-8", "replace").decode()


class Extract:
    """The step: documents that were read as pages get their text; the others pass unchanged."""

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
