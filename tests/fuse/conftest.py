"""What makes torch.export faster in the hundreds of programs that are traced here."""

from collections.abc import Iterator

import pytest
import torch._export.utils


@pytest.fixture(scope="session", autouse=True)
def _operators_are_listed_once() -> Iterator[None]:
    """torch.export asks for all composite operators once for each of some thirty namespaces, a tenth of a tracing's time."""
    once = getattr(torch._export.utils, "_materialize_cpp_cia_ops", None)
    if once is None:  # another torch
        yield
        return
    once()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch._export.utils, "_materialize_cpp_cia_ops", lambda: None)
        yield
