"""The report of a comparison in a real browser that has no network; its twins in JSON and Markdown, and its timeline."""

import csv
import json
import math
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.bench.compare.synthetic import NASTY, counting, resnet50
from tilewright.bench.compare import figures, report
from tilewright.bench.compare.charts import charts
from tilewright.bench.compare.charts.strip import strip
from tilewright.bench.compare.markdown import markdown
from tilewright.bench.compare.results import MOST_RATIO, Comparison, Interval
from tilewright.bench.compare.timeline import timeline

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-dev-shm-usage", "--no-first-run"]
LARGEST_BYTES = 6_000_000


# ------------------------------------------------------------------------------------------------------------------ the page


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed: pip install playwright")
    pytest.importorskip("vl_convert", reason="vl-convert-python is not installed: pip install 'tilewright[compare]'")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


class Opened:
    """A report in a browser without network; it must neither complain nor ask anybody for anything."""

    def __init__(self, browser: Any, path: Path):
        self.complaints: list[str] = []
        self.asked: list[str] = []
        self._context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme="light", offline=True)
        self.page = self._context.new_page()
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: request.url == path.as_uri() or self.asked.append(request.url))
        self.page.goto(path.as_uri())
        self.drawn()

    def drawn(self) -> None:
        """Wait for all charts."""
        self.page.wait_for_selector('html[data-drawn="4"]', timeout=60_000)

    def count(self, selector: str) -> int:
        return self.page.locator(selector).count()

    def attributes(self, selector: str, name: str) -> list[str]:
        return self.page.eval_on_selector_all(selector, f"found => found.map(one => one.getAttribute({name!r}))")

    def __enter__(self) -> "Opened":
        return self

    def __exit__(self, *_: object) -> None:
        self._context.close()
        assert self.complaints == []
        assert [url for url in self.asked if not url.startswith(("blob:", "data:"))] == []


def written(path: Path, comparison: Comparison) -> Path:
    report.write_html(comparison, path)
    return path


@pytest.fixture(scope="module")
def measured() -> Comparison:
    return counting(resnet50())


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, browser: object, measured: Comparison) -> Path:
    return written(tmp_path_factory.mktemp("report") / "plain.html", measured)


@pytest.fixture(scope="module")
def opened(browser: object, plain: Path) -> Iterator[Opened]:
    """One page for all tests that leave it as they found it: drawing it takes seconds."""
    with Opened(browser, plain) as opened:
        yield opened


def marks(measured: Comparison) -> dict[str, int]:
    """How many of which marks a page must have."""
    n = len(measured.segments)
    return {
        "#chart-strip .mark-symbol.role-mark path": n + 1,
        "#chart-strip .mark-rule.role-mark line": n + 2,  # whiskers, the whole model's, and the claim
        "#chart-waterfall .mark-rect.role-mark path": 2 * (n + 3),
        "#chart-roofline .mark-symbol.role-mark path": 2 * sum(segment.flops > 0 for segment in measured.segments),
        "#chart-roofline .mark-line path": 3,
        "#chart-runs .mark-symbol.role-mark path": len(measured.ours.runs) + len(measured.baseline.runs),
    }


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (390, "dark"), (390, "light")])
def test_every_chart_is_drawn_and_fits(opened: Opened, measured: Comparison, width: int, scheme: str) -> None:
    opened.page.set_viewport_size({"width": width, "height": 900})
    opened.page.emulate_media(color_scheme=scheme)
    opened.drawn()
    wanted = marks(measured)
    assert {selector: opened.count(selector) for selector in wanted} == wanted
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
    for box in opened.page.evaluate(
        "[...document.querySelectorAll('.chart svg.marks')].map(s => s.getBoundingClientRect().right)"
    ):
        assert width / 2 < box <= width
    # WCAG asks for a contrast of 4.5 between words and what they stand on.
    ink, paper = (luminance(opened.page.evaluate(f"getComputedStyle(document.body).{p}")) for p in ("color", "backgroundColor"))
    assert (max(ink, paper) + 0.05) / (min(ink, paper) + 0.05) > 4.5
    assert (paper < 0.1) == (scheme == "dark")


def luminance(colour: str) -> float:
    """Relative luminance of "rgb(1, 2, 3)", as WCAG 2 defines it."""
    linear = [
        v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4
        for v in (int(x) / 255 for x in re.findall(r"\d+", colour)[:3])
    ]
    return sum(weight * value for weight, value in zip((0.2126, 0.7152, 0.0722), linear))


def test_verdicts_differ_in_colour_and_in_shape(opened: Opened) -> None:
    marks = "#chart-strip .mark-symbol.role-mark path"
    colours = opened.attributes(marks, "fill")
    assert len(set(colours)) == 4  # pass, fail, undecided, the whole model
    # A path's letters are its shape, its numbers are its size.
    assert len({re.sub(r"[^A-Za-z]", "", path) for path in opened.attributes(marks, "d")}) >= 3
    opened.page.click("#theme")
    opened.drawn()
    assert set(opened.attributes(marks, "fill")).isdisjoint(colours)
    opened.page.click("#theme")
    opened.drawn()


def test_no_bound_leaves_the_scale_to_the_others() -> None:
    """A ratio that may be anything ends at the frame; the others would be a heap at the left if it made the scale."""
    bounded = resnet50()
    first = replace(bounded.segments[0], ratio=Interval(MOST_RATIO, 1.4, MOST_RATIO), verdict="undecided")
    ends = []
    for c in (bounded, replace(bounded, segments=[first, *bounded.segments[1:]])):
        axes = [layer["encoding"]["x"] for layer in strip(c).spec["layer"]]
        ends.append(next(x["scale"]["domain"][1] for x in axes if "scale" in x))
    assert ends[1] <= ends[0]


def test_a_mark_tells_its_numbers(opened: Opened, measured: Comparison) -> None:
    opened.page.locator("#chart-strip .mark-symbol.role-mark path").nth(1).hover()
    told = opened.page.locator("#vg-tooltip-element.visible").inner_text()
    assert "conv1" in told
    assert figures.ratio(measured.segments[0].ratio.value) in told


def test_every_chart_has_its_numbers_as_a_table(opened: Opened, measured: Comparison) -> None:
    for chart in charts(measured):
        assert opened.count(f"#{chart.key} tbody tr") == len(chart.rows) > 0
        assert opened.count(f"#{chart.key} thead th") == len(chart.columns)
    assert opened.count("#fairness tbody tr") == len(measured.card)
    assert opened.count("#fusions .map > li") == len({decision["anchor"] for decision in measured.fusions})
    assert opened.count("#fusions .chip.refused") == 2
    assert "a window of pixels spans tiles" in opened.page.locator("#fusions").inner_text()
    assert opened.count("#tuning tbody tr") == len(measured.tuning)
    segments, every = opened.page.locator("#counters table").all()
    assert segments.locator("tbody tr").count() == len(measured.segments) + 2
    assert set(segments.locator("tbody tr td:nth-child(4)").all_inner_texts()[: len(measured.segments)]) == {"1.10×, outside"}
    assert every.locator("tbody tr").count() == len(measured.baseline.counters)
    for words in ("The engine's own claim, not measured here", "enter no interval, no verdict", "ours: it would not say."):
        assert words in opened.page.locator("#counters").inner_text()


def test_all_data_can_be_downloaded(opened: Opened, measured: Comparison, tmp_path: Path) -> None:
    for kind in ("json", "runs", "segments"):
        with opened.page.expect_download() as waiting:
            opened.page.click(f"button[data-file={kind}]")
        waiting.value.save_as(tmp_path / kind)
    assert Comparison.from_json(json.loads((tmp_path / "json").read_text())) == measured
    runs = list(csv.DictReader((tmp_path / "runs").open()))
    assert sum(float(run["seconds"]) for run in runs) == pytest.approx(
        sum(run.seconds for side in (measured.ours, measured.baseline) for run in side.runs)
    )
    assert [row["verdict"] for row in csv.DictReader((tmp_path / "segments").open())] == [s.verdict for s in measured.segments]


def test_names_stay_text_and_an_open_point_withholds_the_headline(browser: object, tmp_path: Path) -> None:
    nasty = counting(resnet50(open_points=2, name=NASTY), NASTY)
    with Opened(browser, written(tmp_path / "nasty.html", nasty)) as opened:
        page = opened.page
        assert page.evaluate("window.hacked === undefined")
        assert opened.count("img, iframe, object, link[rel=stylesheet]") == 0
        assert opened.count("script") == 4
        assert f"conv1{NASTY}" not in page.title()
        for shown in (page.locator("#headline").inner_text(), page.title()):
            assert "Headline withheld, 2 points of the fairness card open: precision, clocks" in shown
            assert "as fast" not in shown
        listed = page.locator(".open").inner_text()
        assert "computes in bf16" in listed
        assert "The card slows itself down" in listed
        page.locator("#strip summary").click()
        assert NASTY in page.locator("#strip table").inner_text()
        page.locator("#counters summary").click()
        assert f"relu{NASTY}" in page.locator("#counters details table").inner_text()
        assert f"it would not say{NASTY}" in page.locator("#counters").inner_text()
        page.locator("#chart-strip .mark-symbol.role-mark path").nth(4).hover()
        assert NASTY in page.locator("#vg-tooltip-element.visible").inner_text()
        assert page.evaluate("window.hacked === undefined")


def test_the_file_is_small_and_alone(plain: Path) -> None:
    text = plain.read_text(encoding="utf-8")
    assert len(text) < LARGEST_BYTES
    markup = re.sub(r"(<script[^>]*>).*?</script>", r"\1", text, flags=re.S)
    assert {re.sub(r"[^:#]*$", "", url) for url in re.findall(r"(?:src|href)=[\"']?([^\s\"'>]+)", markup)} == {"#", "data:"}


def test_a_poor_comparison_is_drawn_too(browser: object, tmp_path: Path, measured: Comparison) -> None:
    silent = replace(measured.baseline, facts={}, runs=[], counters=[])
    nothing = {"fusions": [], "tuning": [], "ceilings": {}, "environment": {}, "card": []}
    poor = replace(resnet50(), segments=measured.segments[:1], baseline=silent, **nothing)
    with Opened(browser, written(tmp_path / "poor.html", poor)) as opened:
        assert opened.count("#chart-strip .mark-symbol.role-mark path") == 2
        assert "there is no fairness card" in opened.page.locator("#headline").inner_text()
        assert opened.count("#counters, nav a[href='#counters']") == 0


def test_a_missing_chart_library_is_named(monkeypatch: pytest.MonkeyPatch, measured: Comparison) -> None:
    def absent(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    report._library.cache_clear()
    monkeypatch.setattr(report.importlib, "import_module", absent)
    with pytest.raises(ImportError, match=r"pip install 'tilewright\[compare\]'"):
        report.html(measured)


# ----------------------------------------------------------------------------------------------------------------- the twins


def test_json_comes_back_whole(tmp_path: Path, measured: Comparison) -> None:
    assert any(math.isinf(segment.ratio.high) for segment in measured.segments), "an unbounded interval must be among them"
    report.write_json(measured, tmp_path / "it.json")
    assert Comparison.from_json(json.loads((tmp_path / "it.json").read_text())) == measured


def test_json_from_before_there_were_counters(measured: Comparison) -> None:
    old = measured.to_json()
    for side in ("ours", "baseline"):
        del old[side]["counters"], old[side]["counters_note"]
    assert Comparison.from_json(old) == resnet50()


FAULTS: dict[str, tuple[Any, str]] = {
    "a list": ([], "got list"),
    "another format": ({"format": 99}, "format 1, got 99"),
    "nothing in it": ({"format": 1}, "model: Field required"),
    "an interval of two": ({"format": 1, "ratio": [1.0, 2.0]}, "ratio"),
    "no verdict that there is": ({"format": 1, "verdict": "perhaps"}, "verdict"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_json_that_is_no_comparison_is_refused(measured: Comparison, name: str) -> None:
    data, says = FAULTS[name]
    if isinstance(data, dict) and name not in ("nothing in it", "another format"):
        data = {**measured.to_json(), **data}
    with pytest.raises(ValueError, match=re.escape(says)):
        Comparison.from_json(data)


def test_markdown_says_verdict_table_and_card(measured: Comparison, tmp_path: Path) -> None:
    report.write_markdown(measured, tmp_path / "it.md")
    text = (tmp_path / "it.md").read_text(encoding="utf-8")
    assert text.startswith(
        "# resnet50@32: Not every layer is 1.5× as fast, fp16 against fp32 (tf32 convolutions): 2 of 52 segments"
    )
    assert sum(line.endswith("pass |") for line in text.splitlines()) == sum(s.verdict == "pass" for s in measured.segments)
    assert sum("| closed |" in line for line in text.splitlines()) == len(measured.card)
    assert "**The engine's own claim, not measured here.**" in text
    assert sum(line.endswith("| 1.10×, outside |") for line in text.splitlines()) >= len(measured.segments)
    assert "\n- ours: it would not say.\n" in text
    assert "What the engines say" not in markdown(resnet50())
    report.write_markdown(counting(resnet50(open_points=1, name=NASTY), NASTY), tmp_path / "nasty.md")
    nasty = (tmp_path / "nasty.md").read_text(encoding="utf-8")
    assert "<" not in nasty
    assert "**open**" in nasty
    table = [line for line in nasty.splitlines() if line.startswith("| ")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in table} == {5, 6, 7}


def test_the_timeline_has_both_engines_and_all_runs(measured: Comparison, tmp_path: Path) -> None:
    report.write_trace(measured, tmp_path / "it.trace.json")
    events = json.loads((tmp_path / "it.trace.json").read_text())["traceEvents"]
    assert events == timeline(measured)["traceEvents"]
    for track, side in ((1, measured.ours), (2, measured.baseline)):
        layers = [e for e in events if (e["ph"], e["pid"], e.get("tid")) == ("X", 1, track)]
        assert [e["name"] for e in layers] == ["overhead", *side.layers]
        assert sum(e["dur"] for e in layers) * 1e-6 == pytest.approx(
            side.overhead.value + sum(time.value for time in side.layers.values())
        )
        for before, after in pairwise(layers):
            assert after["ts"] == pytest.approx(before["ts"] + before["dur"])
        assert sum((e["ph"], e["pid"], e.get("tid")) == ("X", 2, track) for e in events) == len(side.runs)


NUMBERS = [
    (figures.seconds(1.23456e-5), "12.3 µs"),
    (figures.seconds(9.996e-7), "1.00 µs"),
    (figures.seconds(0.9999), "1.00 s"),
    (figures.seconds(123.4), "123 s"),
    (figures.seconds(-4.2e-6), "-4.20 µs"),
    (figures.seconds(0.0), "0 µs"),
    (figures.seconds(math.inf), "not known"),
    (figures.amount(3.019e12, "B/s"), "3.02 TB/s"),
    (figures.amount(999.9e9, "FLOP/s"), "1.00 TFLOP/s"),
    (figures.amount(0.5, "B"), "0.50 B"),
    (figures.ratio(1.5), "1.50×"),
    (figures.ratio(12.34), "12.3×"),
    (figures.ratio(math.inf), "∞"),
    (figures.between(Interval(MOST_RATIO, 0.5, MOST_RATIO)), "0.50× to ∞"),
]


@pytest.mark.parametrize(("got", "wanted"), NUMBERS)
def test_numbers_have_three_digits_and_a_unit(got: str, wanted: str) -> None:
    assert got == wanted
