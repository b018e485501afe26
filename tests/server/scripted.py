"""A server whose model says what a test has written down, one byte a token, unless a grammar forbids it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tests.server.fake_engine import EOS, LetterRunner, Running, byte_backend, running
from tilewright.engine.blocks import BlockPool
from tilewright.engine.core import Engine
from tilewright.engine.request import Request
from tilewright.engine.schedule import Scheduler
from tilewright.engine.step import Step
from tilewright.engine.tokenizer import Tokenizer

HERMES = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools> Answer with <tool_call>{...}</tool_call>.{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<tool_call>{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}</tool_call>{% endfor %}"
    "{% if m.tool_call_id %}({{ m.tool_call_id }}){% endif %}{% endfor %}[assistant]"
    "{% if thinking %}<think>\n{% endif %}{# </think> #}"
)


class ScriptRunner(LetterRunner):
    """Says `script`, then ends the text."""

    script: bytes = b""
    hold_at = -1
    """The byte of the script that is not said before `go` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def launch(self, step: Step) -> Step:
        """Fails nowhere."""
        self.steps += 1
        return step

    def token(self, request: Request, position: int) -> int:
        """The next byte of the script; behind it what closes lists and objects, where a grammar wants them closed."""
        at = position - len(request.prompt_ids)
        if at == self.hold_at:
            assert self.go.wait(60), "what was said before has not arrived"
        end = EOS if request.params.grammar is None else ord("]")
        return self.script[at] if at < len(self.script) else end


@contextmanager
def scripted(template: str = HERMES, **config: object) -> Iterator[tuple[Running, ScriptRunner]]:
    """A running server and its runner, whose `script` may be changed between requests."""
    scheduler = Scheduler(blocks=BlockPool(1024, 4), max_seqs=8, max_tokens_per_step=256, max_model_len=4000, max_waiting=16)
    tokenizer = Tokenizer(byte_backend(), special_tokens={"eos_token": "<eos>", "bos_token": "<bos>"}, chat_template=template)
    runner = ScriptRunner()
    with running(Engine(runner, tokenizer, tokenizer.eos_ids, scheduler), **config) as server:
        yield server, runner
