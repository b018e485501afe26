"""TF32 is off inside the scopes that forbid it, and afterwards settings are as they were, in either of torch's ways."""

import subprocess
import sys

_SCRIPT = """
import itertools, os, torch
from tilewright.hw.tf32 import allows_tf32, exact_float32
from tilewright.kernels.conv.cudnn import cudnn_choosing

get, put = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter
PLACES = [("generic", "all"), ("cuda", "all"), ("cuda", "conv"), ("cuda", "matmul")]
ABOVE = PLACES[:2]

def answers():
    "What counts, as it is and under whatever else may come above it."
    found = [get(*place) for place in PLACES]
    held = []
    for value in ("ieee", "tf32"):  # from the last place above to the first: what each lets through
        before = get("generic", "all")
        put("generic", "all", value)
        held += [get(*place) for place in PLACES]
        put("generic", "all", before)
    return found, held

def check(words):
    want = answers()
    with cudnn_choosing(deterministic=False):
        assert not allows_tf32("conv"), words
        with exact_float32():
            assert not allows_tf32("conv") and not allows_tf32("matmul"), words
        assert not allows_tf32("conv"), words
    assert answers() == want, (words, want, answers())

for name, setup in WAYS.items():
    if not os.fork():  # torch has no way back to what it starts with
        exec(setup)
        check(name)
        os._exit(0)
    _, status = os.wait()
    assert status == 0, name
"""
_WAYS = {
    "nothing set": "",
    "everything": "torch.backends.fp32_precision = 'tf32'",
    "everything exact": "torch.backends.fp32_precision = 'ieee'",
    "a card": "put('cuda', 'all', 'tf32')",
    "new then old": "torch.backends.cudnn.conv.fp32_precision = 'ieee'; torch.backends.cudnn.allow_tf32 = True",
    "old then new": "torch.backends.cudnn.allow_tf32 = False; torch.backends.cudnn.conv.fp32_precision = 'tf32'",
    "mixed": "torch.backends.cudnn.conv.fp32_precision = 'ieee'",
    "mixed products": "torch.backends.cuda.matmul.allow_tf32 = False; torch.backends.cuda.matmul.fp32_precision = 'tf32'",
    "old off under new on": "torch.backends.fp32_precision = 'tf32'; torch.backends.cudnn.allow_tf32 = False",
    "every combination": """
for values in itertools.product(("none", "ieee", "tf32"), repeat=4):
    for place, value in zip(PLACES, values):
        put(*place, value)
    check(values)
    # The places above are taken away one by one: what is below them is as it was.
    with exact_float32():
        pass
    for place in ABOVE:
        put(*place, "none")
    assert [get(*place) for place in PLACES[2:]] == list(values[2:]), values
""",
}


def test_settings_are_kept() -> None:
    script = f"WAYS = {_WAYS!r}\n{_SCRIPT}"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
