"""The search: what is considered, measured, kept; candidates that misbehave; leaders that die; rows of other versions.

Nothing here needs a GPU: the measuring process is `tests.tune.fake_bench`, whose op runs on the CPU and whose times are told.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tests import conformance
from tests.tune.fake_bench import COMMAND, TIMES, task
from tests.tune.rows import row
from tilewright.asm.certificate import ConfigFacts, config_key
from tilewright.bench.dims import find_op
from tilewright.cli import app
from tilewright.cli.tune_op import print_report
from tilewright.tune import candidates as considering
from tilewright.tune import tolerance
from tilewright.tune.candidates import Task, candidates
from tilewright.tune.database import Database, DatabaseError
from tilewright.tune.measure import Timing
from tilewright.tune.measurer import Job, Measured, MeasureError, Measurer
from tilewright.tune.record import Row, versions
from tilewright.tune.search import Report, planned, search

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def compiler(inputs: Sequence[Any], device: Any, **limits: Any) -> Iterator[tuple[int, Any]]:
    """Stands for `compile_all`: "lost" does not compile, "spills" spills; answers come in another order."""
    for place in reversed(range(len(inputs))):
        impl, config, _ = inputs[place]
        how = config.get("how", impl.name)
        yield place, "no such type" if how == "lost" else {"spill_bytes": 64 if how == "spills" else 0, "registers": 40}


def tuned(path: Path, wanted: Task | None = None, *, command: Sequence[str] = COMMAND, **options: Any) -> Report:
    with Database(path) as database:
        return search(wanted or task(), database, command=command, workers=1, compiler=compiler, **{"limit_s": 2.0, **options})


def rows(path: Path, **equal: Any) -> list[Row]:
    with Database(path, read_only=True) as database:
        return list(database.rows(**equal))


def hows(found: Sequence[Row]) -> list[str]:
    return [row.config.get("how", row.impl) for row in found]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tune.sqlite"


def test_every_candidate_ends_as_a_row(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tuned(path, top=20)
    found = {row.config.get("how", row.impl): row for row in rows(path, verified=False)}
    assert {how: row.status for how, row in found.items()} == {
        "close": "ok", "fast": "ok", "slow": "ok", "library": "ok", "lost": "compile", "crash": "crash", "hang": "timeout",
        "wrong": "wrong", "forgets": "wrong", "writes": "wrong", "raises": "crash", "spills": "spills",
    }  # fmt: skip
    errors = {how: row.error for how, row in found.items() if row.status != "ok"}
    assert errors["crash"] == "ended with exit code 9"
    assert errors["hang"] == "sent no answer for 2 s"
    assert errors["lost"] == "no such type"
    assert errors["raises"] == "RuntimeError: no such?[31m luck"
    assert errors["spills"] == "64 bytes per thread"
    assert errors["writes"] == "it writes argument 0, which test_add_one does not declare as written"
    assert "largest error" in errors["wrong"]
    assert "inf" in errors["forgets"]
    verified = rows(path, verified=True)
    assert sorted(hows(verified)) == ["close", "fast", "library"]
    assert all(row.us == TIMES[how] for row, how in zip(verified, hows(verified), strict=True))
    assert verified[0].resources == {"spill_bytes": 0, "registers": 40}
    assert verified[0].dims == {"M": 64}
    assert [e.config for e in report.ranking[:2]] == ['{"how":"fast"}', '{"how":"close"}']
    rival, margin = report.verdict or pytest.fail("no rival")
    assert (rival.impl, round(margin.margin, 3), margin.clear) == ("library", 0.2, True)
    assert (report.how, report.considered, report.compiled) == ("search", 12, 12)
    print_report(report, path, as_json=False)
    out, err = capsys.readouterr()
    assert "kernel is ahead of library by 20.0%, noise 2.8%" in out
    assert "in turns" in out
    assert "ended with exit code 9" in out
    assert f"12 configs considered, 12 compiled, 4 measured; rows in {path}" in err
    print_report(report, path, as_json=True)
    said = json.loads(capsys.readouterr().out)
    assert (said["ranking"][0]["config"], said["margin"], said["clear"]) == ({"how": "fast"}, 0.2, True)
    assert {f["status"] for f in said["failed"]} == {"compile", "crash", "timeout", "wrong", "spills"}
    # The winner is known now, and no process is started.
    known = tuned(path, top=20, command=("false",))
    assert known.how == "known"
    assert known.rows == []
    assert known.ranking[0].config == '{"how":"fast"}'


def test_only_the_first_of_the_order_are_measured(path: Path) -> None:
    some = task(configs=("slow", "lost", "fast", "close"))
    assert [c.key for c in planned(some, top=1).first] == [
        ("kernel", '{"how":"slow"}'),
        ("library", "{}"),
        ("kernel", '{"how":"lost"}'),
    ]
    tuned(path, some, top=1)
    # One does not compile: the next takes its place.
    assert hows(rows(path, verified=False, status="ok")) == ["slow", "library", "fast"]
    assert len(planned(some, top=1, exhaustive=True).first) == 5


def test_certificates_decide_what_is_considered(monkeypatch: pytest.MonkeyPatch) -> None:
    def facts(spill_bytes: int = 0, error: str | None = None) -> ConfigFacts:
        return ConfigFacts(
            warps=4, registers=64, spill_bytes=spill_bytes, shared_bytes=0, blocks_per_sm=4, limiter="warps", error=error
        )

    held = {"close": facts(error="x"), "fast": facts(), "slow": facts(spill_bytes=8), "wrong": facts(error="too big")}
    known = {config_key({"how": how}): fact for how, fact in held.items()}
    monkeypatch.setattr(considering, "config_facts", lambda op, impl, arch: known if impl == "kernel" else {})
    found, dropped = candidates(task(configs=("close", "fast", "slow", "wrong", "raises")))
    assert [c.config.get("how") for c in found] == ["close", "fast", None], "the default stays, whatever is said of it"
    assert dropped == {"spills": 1, "does not compile": 1, "not certified": 1}


def test_a_leader_that_is_killed_loses_one_measurement(path: Path) -> None:
    wanted = task(configs=("close", "fast", "slow", "raises"))
    slow = (*COMMAND, "0.4")
    leader = os.fork()
    if not leader:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        tuned(path, wanted, command=slow)
        os._exit(0)
    until = time.monotonic() + 30
    while time.monotonic() < until and not (path.exists() and len(_quietly(path)) >= 2):
        time.sleep(0.05)
    child = int(Path(f"/proc/{leader}/task/{leader}/children").read_text().split()[0])
    os.kill(leader, signal.SIGKILL)
    os.waitpid(leader, 0)
    before = rows(path)
    assert 2 <= len(before) <= 3
    report = tuned(path, wanted)
    assert sorted(hows(rows(path, verified=False))) == ["close", "fast", "library", "raises", "slow"], "nothing twice"
    assert not set(hows(before)) & set(hows([row for row in report.rows if not row.verified]))
    assert report.ranking[0].verified
    assert not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text(), "its child outlives it"


def _quietly(path: Path) -> list[Row]:
    try:
        return rows(path)
    except DatabaseError:
        return []  # it is being made


def test_two_at_once_lose_nothing(path: Path) -> None:
    failed: list[BaseException] = []

    def run(m: int) -> None:
        try:
            tuned(path, task(m, configs=("close", "fast", "slow")), command=(*COMMAND, "0.05"))
        except BaseException as error:
            failed.append(error)
            raise

    threads = [threading.Thread(target=run, args=(m,)) for m in (8, 16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    for problem in ('["add",8]', '["add",16]'):
        assert sorted(hows(rows(path, problem=problem, verified=False))) == ["close", "fast", "library", "slow"]
        assert len(rows(path, problem=problem, verified=True)) == 3


def test_rows_of_other_versions_are_verified_again(path: Path) -> None:
    some = task(configs=("close", "fast", "slow", "wrong", "crash"))
    # Under the old triton "slow" was the best; "gone" is of a space that has been changed since.
    old = {"slow": 1.0, "gone": 1.5, "fast": 2.0, "close": 3.0, "wrong": None}
    with Database(path) as database:
        database.add_all(
            row(us, problem='["add",64]', op="test_add_one", impl="kernel", config={"how": how}, versions={"triton": "3.5.0"})
            for how, us in old.items()
        )
    report = tuned(path, some)
    assert report.how == "verified again"
    assert sorted(hows([r for r in report.rows if not r.verified])) == ["fast", "slow"], "no search"
    assert sorted(hows([r for r in report.rows if r.verified])) == ["fast", "slow"]
    assert {r.environment.triton for r in rows(path)} == {"3.5.0", versions()["triton"]}
    assert [e.config for e in report.ranking] == ['{"how":"fast"}', '{"how":"slow"}']
    assert tuned(path, some, command=("false",)).how == "known"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("false",), "does not start: it ended with exit code 1; the command was false"),
        (("sh", "-c", 'echo \'{"failed": "no GPU"}\''), "cannot do its work: no GPU"),
    ],
    ids=lambda v: v[0] if isinstance(v, tuple) else "",
)
def test_no_process_that_measures(path: Path, command: tuple[str, ...], words: str) -> None:
    with pytest.raises(MeasureError, match=words):
        tuned(path, command=command)


SCRIPT = """
import json, os, sys, time
say = lambda **words: print(json.dumps(words), flush=True)
say(ready=dict(card="c", sms=1, driver="", torch="", triton="", ptxas="", clocks="", policy=""))
for line in sys.stdin:
    job = json.loads(line)
    say(note="hm")
    if job["turns"]:
        os._exit(5)
    for number, candidate in enumerate(job["candidates"]):
        how = candidate["config"]["how"]
        if how == "before":
            os._exit(6)
        say(begin=number)
        if how == "half":
            print('{"end": 0, "sta', end="", flush=True)
            os._exit(7)
        lost = how == "lost"
        us = None if lost else 2.0
        say(end=number, status="crash" if lost else "ok", us=us, us_spread=us, error=how, compiled=1, alive=not lost)
        if lost:
            os._exit(3)
    say(done=True)
"""


def test_the_process_is_replaced_and_goes_on() -> None:
    def asked(*names: str) -> list[dict[str, Any]]:
        return [{"impl": "kernel", "config": {"how": how}} for how in names]

    job = Job("op", ["M=1"], "[]")
    with Measurer((sys.executable, "-S", "-c", SCRIPT), limit_s=5.0) as measurer:
        found = dict(measurer.measure(job, asked("a", "lost", "b", "half", "c")))
        assert {place: answer.status for place, answer in found.items()} == dict(
            enumerate(("ok", "crash", "ok", "crash", "ok"))
        )
        assert found[3].error == "ended with exit code 7"
        assert found[4] == Measured("ok", "c", Timing(2.0, 2.0), 1)
        assert measurer.notes == ["hm", "hm", "hm"]
        with pytest.raises(MeasureError, match="ended with exit code 5 while it compared the best in turns"):
            measurer.in_turns(job, asked("a"))
        assert [answer.status for _, answer in measurer.measure(job, asked("a"))] == ["ok"]
        with pytest.raises(MeasureError, match="op M=1: the measuring process ended with exit code 6 before a candidate ran"):
            list(measurer.measure(job, asked("before")))


def test_no_room_is_said_before_anything_is_measured(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Database(path), Database(path, read_only=True) as held, pytest.raises(DatabaseError, match="make it writable"):
        search(task(), held, command=("false",), workers=1)

    class Full:
        def __enter__(self) -> "Full":
            return self

        def __exit__(self, *_: object) -> None: ...

        def write(self, data: bytes) -> None:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("tilewright.tune.database.TemporaryFile", lambda **_: Full())
    with pytest.raises(DatabaseError, match=r"cannot be used: \[Errno 28\] No space left on device: choose another file"):
        tuned(path, command=("false",))


# ---- tolerance


def test_the_limits_are_those_of_conformance() -> None:
    assert tolerance.LIMITS == conformance.LIMITS


@pytest.mark.parametrize(
    ("dtype", "terms", "error", "right"),
    [
        (torch.bfloat16, 1, 0.002, True),
        (torch.bfloat16, 1, 0.05, False),
        (torch.float32, 1, 5e-6, False),
        (torch.float32, 8192, 5e-6, True),
        (torch.float32, 8192, 5e-5, False),
        (torch.float64, 8192, 5e-6, False),
    ],
)
def test_right_and_wrong(dtype: torch.dtype, terms: int, error: float, right: bool) -> None:
    want = torch.linspace(1, 2, 1000, dtype=torch.float64)
    got = (want * (1 + error * torch.where(torch.arange(1000) % 2 == 0, 1, -1))).to(dtype)
    some = task()
    fault = tolerance.wrong(some.op, some.op.impls[0], [got], [want], flops=2.0 * 1000 * terms)
    assert (fault is None) == right, fault


# ---- the command


def tune(*arguments: str | Path) -> Any:
    result = CliRunner().invoke(app, ["tune", *map(str, arguments)], prog_name="tilewright")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


SHAPE = ("linear", "M=512", "N=4096", "K=4096")


def test_a_dry_run_says_what_would_be_measured() -> None:
    said = json.loads(tune(*SHAPE, "--dry-run", "--card", "h100", "--top", "3", "--json").stdout)
    assert said["card"] == "H100 80GB"
    assert said["problem"]["k"] == 4096
    assert said["refused"]["gemv"]
    of_library = [c for c in said["candidates"] if c["impl"] == "vendor"]
    assert [c["facts"] for c in of_library] == [None]
    assert {c["impl"] for c in said["candidates"]} == {impl.name for impl in find_op("linear").impls} - set(said["refused"])
    chosen = [c for c in said["candidates"] if not c["kept"]]
    assert 3 <= len(chosen) <= 6
    assert [c["predicted_us"] for c in chosen] == sorted(c["predicted_us"] for c in chosen)
    for candidate in chosen:
        assert candidate["facts"]["registers"] > 0
        assert candidate["facts"]["spill_bytes"] == 0
    assert said["considered"] > 20
    text = tune(*SHAPE, "--dry-run", "--card", "a100").stdout
    assert "linear M=512 N=4096 K=4096 on A100 80GB" in text
    assert "vendor" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("lineer", "M=1"), "there is no operator 'lineer': did you mean linear"),
        (("exprot",), "did you mean `tilewright tune export`"),
        ((*SHAPE[:-1], "k=4"), "no dimension 'k': did you mean K"),
        (SHAPE[:-1], "K is missing"),
        ((*SHAPE, "--dry-run", "--card", "h10"), "no card called 'h10' is known"),
        ((*SHAPE, "--dry-run", "--card", "h100", "--invariant"), "leave out --invariant"),
    ],
)
def test_what_a_user_gets_wrong_is_one_line(arguments: tuple[str, ...], words: str) -> None:
    done = tune(*arguments)
    assert done.exit_code == 1
    assert done.stderr.count("\n") == 1
    assert words in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here to measure on")
@pytest.mark.parametrize("card", [(), ("--card", "a100")])
def test_without_a_gpu_it_says_what_can_be_done_instead(card: tuple[str, ...], path: Path) -> None:
    done = tune(*SHAPE, *card, "--database", path)
    assert done.exit_code == 1
    assert "this machine has no GPU to measure on" in done.stderr
    assert f"`tilewright tune linear M=512 N=4096 K=4096 --dry-run --card {'a100' if card else 'h100'}`" in done.stderr
    assert "tilewright tune import" in done.stderr
    assert not path.exists()
