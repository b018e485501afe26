"""The OpenAI-compatible server: `create_app` in app.py creates the app, and `run_server` in serve.py runs it.

Reading order: protocol.py (parsing requests), worker.py (the engine's thread), stream.py and reply.py (the answer), app.py.
Then the modules that protect the server from misbehaving clients and other faults, and the log: connections.py, gate.py,
access.py, logs.py, watchdog.py, serve.py.
"""
