"""The command line `tilewright`, with one module per command.

Heavy libraries are imported only when a command needs them, so that `--help` is immediate.
"""

import os
import sys

try:
    import tilewright.cli.asm
    import tilewright.cli.bench
    import tilewright.cli.bench_all
    import tilewright.cli.bench_extras
    import tilewright.cli.bench_front
    import tilewright.cli.bench_served
    import tilewright.cli.compare
    import tilewright.cli.configure
    import tilewright.cli.data
    import tilewright.cli.doctor
    import tilewright.cli.explain
    import tilewright.cli.export
    import tilewright.cli.hw
    import tilewright.cli.lab
    import tilewright.cli.load
    import tilewright.cli.merge
    import tilewright.cli.ops
    import tilewright.cli.optimize
    import tilewright.cli.place
    import tilewright.cli.quantize
    import tilewright.cli.rl
    import tilewright.cli.scaling
    import tilewright.cli.serve
    import tilewright.cli.train
    import tilewright.cli.train_plan
    import tilewright.cli.tune
    import tilewright.cli.tune_op
    import tilewright.cli.warmup  # noqa: F401 (a verb registers itself)
    from tilewright.cli.root import INTERRUPTED, app
except KeyboardInterrupt:  # the imports take about half a second; Ctrl-C then must not print a traceback either
    raise SystemExit(130) from None

__all__ = ["app", "main"]


def main() -> None:
    """Entry point of the `tilewright` command."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass  # one of stdin, stdout, stderr was closed: the next file that is opened must not take its place
    os.close(descriptor)
    try:
        app(prog_name="tilewright")
    except KeyboardInterrupt:  # before a verb has begun
        sys.exit(INTERRUPTED)
