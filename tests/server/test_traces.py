"""Traces by OpenTelemetry: what spans there are, whose they are, and that a collector that is gone costs nothing."""

import json
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

pytest.importorskip("opentelemetry.sdk.trace", reason="pip install 'tilewright[traces]'")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.host.fakes import Makes
from tests.server.fake_engine import fake_engine
from tests.server.v2.running import double
from tilewright.host.config import ModelConfig
from tilewright.host.host import Host, Source
from tilewright.server.app import create_app
from tilewright.server.config import ServerConfig
from tilewright.server.logs import FIELDS
from tilewright.server.prompts import Served
from tilewright.server.serve import HttpServer, bind, url_of
from tilewright.server.traces import Tracer
from tilewright.server.v2.app import attach

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
INFER = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}


@contextmanager
def serving(config: ServerConfig) -> Iterator[tuple[str, FastAPI]]:
    """A language model and an ordinary one behind a port."""
    engine = fake_engine()
    app = create_app(engine, Served.of(engine, "letters"), config)
    attach(app, Host(sources={"m": Source(ModelConfig(source="a:b"), None)}, start=Makes(double)), config)
    listener = bind(config)
    server = HttpServer(app, listener)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        httpx.get(url_of(listener), timeout=30)
        yield url_of(listener), app
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


@contextmanager
def traced(share: float = 1.0) -> Iterator[tuple[str, InMemorySpanExporter, Tracer]]:
    """The same, whose spans stay here."""
    exporter = InMemorySpanExporter()
    with serving(ServerConfig(port=0, traces="http://127.0.0.1:9", trace_share=share)) as (url, app):
        counts = app.state.server.metrics.http
        counts.tracer = tracer = Tracer("http://127.0.0.1:9", share, exporter)
        yield url, exporter, tracer


def spans_of(exporter: InMemorySpanExporter, tracer: Tracer) -> dict[str, Any]:
    """Name -> span, of a request whose answer is there; its own span ends a moment later."""
    for _ in range(200):
        tracer.flush()
        found = {span.name: span for span in exporter.get_finished_spans()}
        if any(span.kind.name == "SERVER" for span in found.values()):
            break
        time.sleep(0.01)
    return found


def test_a_request_and_what_it_waits_for(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tilewright")
    carried = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    with traced() as (url, exporter, tracer):
        body = {"prompt": "abc", "max_tokens": 5, "temperature": 0}
        for stream in (False, True):
            exporter.clear()
            answer = httpx.post(f"{url}/v1/completions", json={**body, "stream": stream}, headers=carried)
            assert answer.status_code == 200
            found = spans_of(exporter, tracer)
            request, first, decode = (found[name] for name in ("POST /v1/completions", "first token", "decode"))
            assert (f"{request.context.trace_id:032x}", f"{request.parent.span_id:016x}") == (TRACE, PARENT)
            assert request.attributes["http.response.status_code"] == 200
            assert request.attributes["tilewright.request_id"] == answer.headers["x-request-id"]
            assert request.start_time <= first.start_time <= first.end_time == decode.start_time <= decode.end_time
            assert (first.attributes["prompt_tokens"], decode.attributes["tokens"]) == (3, 5)
            assert {span.parent.span_id for span in (first, decode)} == {request.context.span_id}
        # A small request goes past the framework, one to /predict through it: both have the same spans.
        for path, said, name in (
            ("/v2/models/m/infer", INFER, "POST /v2/models/*"),
            ("/predict/m", [[1, 2, 3, 4]], "POST /predict/*"),
        ):
            exporter.clear()
            assert httpx.post(f"{url}{path}", json=said, headers=carried).status_code == 200
            found = spans_of(exporter, tracer)
            request, queue, compute = found[name], found["queue"], found["compute"]
            assert (f"{request.context.trace_id:032x}", f"{request.parent.span_id:016x}") == (TRACE, PARENT)
            assert request.start_time <= queue.start_time <= queue.end_time == compute.start_time <= compute.end_time
            assert (queue.attributes["model"], compute.attributes["rows"]) == ("m", 1)
    lines = [record for record in caplog.records if hasattr(record, FIELDS)]
    assert {getattr(line, FIELDS).get("trace_id") for line in lines if getattr(line, FIELDS)["method"] == "POST"} == {TRACE}


def test_no_text_is_in_a_trace() -> None:
    with traced() as (url, exporter, tracer):
        httpx.post(f"{url}/v1/completions", json={"prompt": "a secret of mine", "max_tokens": 2, "user": "me"})
        httpx.get(f"{url}/v1/models/a-secret-name?key=secret")
        tracer.flush()
        said = " ".join(span.to_json() for span in exporter.get_finished_spans())
    assert "POST /v1/completions" in said
    assert "secret" not in said


@pytest.mark.parametrize(("share", "flags", "wanted"), [(0.0, None, 0), (0.0, "01", 1), (1.0, "00", 0), (1.0, None, 1)])
def test_the_client_says_whether_it_is_sampled(share: float, flags: str | None, wanted: int) -> None:
    headers = {} if flags is None else {"traceparent": f"00-{TRACE}-{PARENT}-{flags}"}
    with traced(share) as (url, exporter, tracer):
        exporter.clear()
        assert httpx.post(f"{url}/v2/models/m/infer", json=INFER, headers=headers).status_code == 200
        assert ("compute" in spans_of(exporter, tracer)) == bool(wanted)


@pytest.mark.parametrize("header", ["", "00", "zz-" + TRACE, f"00-{'0' * 32}-{PARENT}-01", "00-" + "f" * 4000, "\xff" * 8])
def test_a_parent_that_is_none_is_no_parent(header: str) -> None:
    with traced() as (url, exporter, tracer):
        answer = httpx.post(f"{url}/v2/models/m/infer", json=INFER, headers={b"traceparent": header.encode("latin-1")})
        assert answer.status_code == 200
        assert spans_of(exporter, tracer)["POST /v2/models/*"].parent is None


def test_failures_are_marked() -> None:
    with traced() as (url, exporter, tracer):
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "#", "max_tokens": 3}).status_code == 500
        request = spans_of(exporter, tracer)["POST /v1/completions"]
    assert request.status.status_code.name == "ERROR"


class Collector(BaseHTTPRequestHandler):
    """Takes OTLP over HTTP."""

    taken: list[Any]

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers["content-length"]))
        self.taken.append((self.path, ExportTraceServiceRequest.FromString(raw)))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *words: Any) -> None:
        """Nothing is written."""


def test_a_collector_gets_them_and_one_that_is_gone_costs_nothing() -> None:
    taken: list[Any] = []
    server = HTTPServer(("127.0.0.1", 0), type("Taking", (Collector,), {"taken": taken}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with serving(ServerConfig(port=0, traces=f"http://127.0.0.1:{server.server_port}")) as (url, app):
            assert httpx.post(f"{url}/v2/models/m/infer", json=INFER).status_code == 200
            app.state.server.metrics.http.tracer.flush()
            server.shutdown()
            server.server_close()
            for _ in range(20):
                assert httpx.post(f"{url}/v2/models/m/infer", json=INFER, timeout=10).status_code == 200
    finally:
        server.server_close()
    path, request = taken[0]
    assert path == "/v1/traces"
    names = {span.name for resource in request.resource_spans for scope in resource.scope_spans for span in scope.spans}
    assert {"queue", "compute", "POST /v2/models/*"} <= names
    resource = {one.key: one.value.string_value for one in request.resource_spans[0].resource.attributes}
    assert resource["service.name"] == "tilewright"


@pytest.mark.parametrize("fields", [{"traces": "collector:4318"}, {"traces": ""}, {"trace_share": 2.0}], ids=json.dumps)
def test_what_is_no_collector_is_a_sentence(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="wanted"):
        ServerConfig(**fields)
