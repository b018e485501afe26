"""The inference engine: paged KV cache, continuous batching, text in and out. Start reading at core.py, then schedule.py.

request.py    sampling parameters, a request's state, deltas
blocks.py     pages: owners, prefix cache, eviction
schedule.py   which tokens run next
step.py       a step, and the interface of runners
core.py       Engine: runs step after step
deltas.py, reader.py   the results of a step as arrays; conversion to text
tokenizer.py, chat.py, stops.py    text
config.py, llm.py                  options, and LLM for programs
trial.py                           a chat template's first run
loading.py and its imports         the model on a device: plan.py (memory), runner.py, batch.py, graphs.py, sampler.py
"""
