"""Opens streams and reads them to their end, counting events: `python -m tilewright.bench.front_client PORT BODIES GAPS`.

BODIES has one request body per line. The program writes GAPS, float64 [events, 2]: the time of each event, and the seconds
since the previous event of its stream. It prints one line of JSON. It parses nothing, to use as little processor time as
possible.

`python -m tilewright.bench.front_client PORT idle COUNT` opens connections and reports that. When something is written to its
standard input, it sends a request on each of them, and prints how many were answered.
"""

import json
import resource
import select
import socket
import sys
import time
from array import array
from pathlib import Path

import numpy as np

__all__ = ["hold_connections", "more_files", "read_streams"]

TIMEOUT_S = 120.0
_HEAD = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: "
_HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


def more_files() -> None:
    """Raise the limit of open files of this process, and of processes that it starts, to the highest permitted one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def read_streams(port: int, bodies: list[bytes]) -> tuple[dict[str, float], np.ndarray]:
    """({events, whole, sent_s, first_s, begun_s, ending_s, last_s, cpu_s}, the gaps); times are those of the monotonic clock.

    whole: the number of complete streams; first_s and last_s: the first and the last event; begun_s: when all streams had an
    event; ending_s: when the first stream ended.
    """
    poller, by_number = select.epoll(), dict[int, socket.socket]()
    sent_s = time.monotonic()
    for body in bodies:
        one = socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S)
        one.sendall(f"{_HEAD}{len(body)}\r\n\r\n".encode() + body)
        one.setblocking(False)
        by_number[one.fileno()] = one
        poller.register(one, select.EPOLLIN)
    times, gaps, last = array("d"), array("d"), dict[int, float]()
    events = whole = 0
    begun_s = ending_s = now_s = 0.0
    while by_number:
        for number, _ in poller.poll():
            one = by_number[number]
            piece = one.recv(1 << 16)
            found = piece.count(b"data: {")
            if found:
                events += found
                now_s = time.monotonic()
                before_s = last.get(number)
                last[number] = now_s
                if before_s is not None:
                    times.append(now_s)
                    gaps.append(now_s - before_s)
                elif len(last) == len(bodies):
                    begun_s = now_s
            if not piece or b"data: [DONE]" in piece:
                whole += bool(piece)
                ending_s = ending_s or time.monotonic()
                poller.unregister(number)
                by_number.pop(number).close()
    first_s = times[0] - gaps[0] if times else now_s
    said = {"events": events, "whole": whole, "sent_s": sent_s, "first_s": first_s, "begun_s": begun_s, "ending_s": ending_s}
    return {**said, "last_s": now_s, "cpu_s": time.process_time()}, np.stack([np.array(times), np.array(gaps)], axis=1)


def hold_connections(port: int, count: int) -> int:
    """Open `count` connections that stay idle until standard input is written to; return how many still work then."""
    held = [socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) for _ in range(count)]
    print("open", flush=True)
    sys.stdin.readline()
    answered = 0
    for one in held:
        with one:
            try:
                one.sendall(_HEALTH)
                answered += one.recv(1 << 12).startswith(b"HTTP/1.1 200")
            except OSError:  # this connection is lost
                continue
    return answered


if __name__ == "__main__":
    more_files()
    if sys.argv[2] == "idle":
        print(hold_connections(int(sys.argv[1]), int(sys.argv[3])))
    else:
        said, pairs = read_streams(int(sys.argv[1]), Path(sys.argv[2]).read_bytes().splitlines())
        np.save(sys.argv[3], pairs)
        print(json.dumps(said))
