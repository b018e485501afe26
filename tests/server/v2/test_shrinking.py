"""A client's file that changes its size while a model's process reads it, and the server writes it."""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from tests.server.v2.running import Server, serving
from tests.server.v2.test_shared_memory import (
    MODELS,
    WIDE,
    InferenceServerException,
    file_of,
    http,
    memory,
    placed,
    theirs,
    wanted,
)


@pytest.fixture
def server() -> Iterator[Server]:
    with serving({"wide": MODELS["wide"]}, processes=True, shared_memory=True) as found:
        yield found


def test_a_file_that_shrinks_while_it_is_read_or_written_hurts_nobody(server: Server) -> None:
    """Mapped memory whose file shrinks ends the process that touches it (SIGBUS); nothing of a client is mapped."""
    x = np.full((8, WIDE), 0.5, np.float32)
    stats, stop = server.host.models["wide"].versions[1].stats, threading.Event()
    with memory(2 * x.nbytes) as (key, _), memory(x.nbytes) as (other, victim):
        theirs.set_shared_memory_region(victim, [x])
        with http.InferenceServerClient(f"127.0.0.1:{server.port}") as c:
            c.register_system_shared_memory("shrinks", key, 2 * x.nbytes)
            c.register_system_shared_memory("whole", other, x.nbytes)

        def shrinks() -> None:
            while not stop.is_set():
                for size in (0, x.nbytes // 2, 2 * x.nbytes):
                    os.truncate(file_of(key), size)

        def ask(region: str) -> Any:
            outputs = [wanted(http, "output", "shrinks", x.nbytes, x.nbytes)] if region == "shrinks" else None
            with http.InferenceServerClient(f"127.0.0.1:{server.port}") as own:
                try:
                    answer = own.infer("wide", [placed(http, "x", x, "FP32", region)], outputs=outputs)
                    return None if outputs else answer.as_numpy("output")
                except InferenceServerException as error:
                    return error

        thread = threading.Thread(target=shrinks)
        thread.start()
        try:
            with ThreadPoolExecutor(4) as pool:
                found = list(pool.map(ask, ("shrinks", "whole", "shrinks", "whole") * 8))
        finally:
            stop.set()
            thread.join()
        for error in found[::2]:
            assert error is None or "region 'shrinks' is shorter than it was" in str(error), error
        assert any(error is not None for error in found[::2])
        assert all(np.array_equal(one, 2 * x) for one in found[1::2])
        assert stats.restarts == 0
        with http.InferenceServerClient(f"127.0.0.1:{server.port}") as c:
            c.unregister_system_shared_memory()
