"""The inference engine: paged KV cache, continuous batching, text in and out. Start reading at core.py, then schedule.py.

request.py    sampling parameters, a request's state, deltas
blocks.py     pages: owners, prefix cache, eviction
schedule.py   which tokens run next
step.py       what a step is, and what runs it
core.py       Engine: step by step
deltas.py, reader.py   what a step brought, as arrays; their text
tokenizer.py, chat.py, stops.py    text
config.py, llm.py                  options, and LLM for programs
trial.py                           a chat template's first run
loading.py and what it imports     the model on a device: plan.py (memory), runner.py, batch.py, graphs.py, sampler.py
"""
