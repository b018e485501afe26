"""Opens streams and reads them to their end, counting events: `python -m tilewright.bench.front_client PORT STREAMS TOKENS`.

Prints one line of JSON. It parses nothing, so that it costs as little as a client can.
"""

import json
import selectors
import socket
import sys
import time

__all__ = ["read_streams"]


def read_streams(port: int, streams: int, tokens: int) -> dict[str, float]:
    """{events, whole, first_s, last_s, cpu_s}; times by the monotonic clock, of the first and the last event."""
    body = json.dumps({"prompt": "a b", "max_tokens": tokens, "stream": True, "ignore_eos": True}).encode()
    asked = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    asked += f"content-length: {len(body)}\r\n\r\n".encode() + body
    selector, events, whole = selectors.DefaultSelector(), 0, 0
    for _ in range(streams):
        one = socket.create_connection(("127.0.0.1", port), timeout=120)
        one.sendall(asked)
        one.setblocking(False)
        selector.register(one, selectors.EVENT_READ, one)
    first_s = last_s = 0.0
    open_now = streams
    while open_now:
        for key, _ in selector.select():
            piece = key.data.recv(1 << 16)
            last_s = time.monotonic()
            first_s = first_s or last_s
            events += piece.count(b"data: {")
            done = b"data: [DONE]" in piece
            whole += done
            if done or not piece:
                selector.unregister(key.data)
                key.data.close()
                open_now -= 1
    return {"events": events, "whole": whole, "first_s": first_s, "last_s": last_s, "cpu_s": time.process_time()}


if __name__ == "__main__":
    print(json.dumps(read_streams(*map(int, sys.argv[1:4]))))
