"""The OpenAI-compatible server: `create_app` in app.py makes it, `serve` in serve.py runs it.

Reading order: protocol.py (what may be asked), worker.py (the engine's thread), stream.py and reply.py (the answer), app.py;
then what keeps clients and surroundings from hurting it: connections.py, gate.py, access.py, logs.py, watchdog.py, serve.py.
"""
