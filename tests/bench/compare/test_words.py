"""What a comparison comes down to in words: headline, claims, what stands below it."""

from dataclasses import replace

import pytest

from tests.bench.compare.synthetic import passing, resnet50
from tilewright.bench.compare import figures
from tilewright.bench.compare.charts import charts
from tilewright.bench.compare.charts.strip import strip
from tilewright.bench.compare.markdown import markdown
from tilewright.bench.compare.results import MOST_RATIO, Claim, Comparison, Interval


@pytest.fixture(scope="module")
def measured() -> Comparison:
    return resnet50()


def together(c: Comparison) -> Comparison:
    """With all layers as one segment, as `--whole` measures them."""
    return replace(c, segments=[replace(c.segments[0], layers=[layer for s in c.segments for layer in s.layers])])


def alone(c: Comparison) -> Comparison:
    """With every layer a segment of its own."""
    return replace(c, segments=[s for s in c.segments if len(s.layers) == 1])


EQUAL = Claim(
    engine="graph:fp16", precision="fp16", launch="CUDA graph", seconds=Interval(1.4e-3, 1.3e-3, 1.5e-3),
    ratio=Interval(1.4, 1.35, 1.45), equal=True, words="equal precision and launch mode",
)  # fmt: skip
UNEQUAL = Claim(
    engine="eager", precision="fp32", launch="calls", seconds=Interval(4e-3, 3.9e-3, 4.1e-3), ratio=Interval(4.0, 3.9, 4.1),
    equal=False, words="not equal: fp32 against fp16, calls against CUDA graph",
)  # fmt: skip

HEADLINES = {
    "all pass": (lambda c: passing(alone(c)), "Every layer is at least 1.5× as fast, fp16 against fp32 (tf32 convolutions)"),
    "some joined": (
        lambda c: passing(c),
        "Every segment, with 8 layers not shown by themselves, is at least 1.5× as fast, fp16 against fp32 (tf32 convolutions)",
    ),
    "one precision": (
        lambda c: passing(alone(replace(c, baseline=replace(c.baseline, facts={"precision": "fp16"})))),
        "Every layer is at least 1.5× as fast",
    ),
    "an equal engine beside": (
        lambda c: passing(alone(replace(c, claims=[EQUAL, UNEQUAL]))),
        "1.40× as fast as graph:fp16 at equal precision and launch mode. Every layer is at least 1.5× as fast as eager, "
        "fp16 against fp32 (tf32 convolutions)",
    ),
    "one undecided": (
        lambda c: replace(c, verdict="undecided"),
        "Undecided whether every layer is 1.5× as fast, fp16 against fp32 (tf32 convolutions): "
        "1 of 52 segments (layer “fc”) stays open",
    ),
    "one that is called 6, failed": (
        lambda c: replace(
            c, verdict="fail", segments=[replace(c.segments[0], name="6", verdict="fail"), *passing(c).segments[1:]]
        ),
        "Not every layer is 1.5× as fast, fp16 against fp32 (tf32 convolutions): 1 of 52 segments (layer “6”) falls short",
    ),
    "one segment, passed": (
        lambda c: passing(together(c)),
        "The whole model is at least 1.5× as fast, fp16 against fp32 (tf32 convolutions)",
    ),
    "one segment, failed": (
        lambda c: replace(together(c), verdict="fail"),
        "The whole model is not 1.5× as fast, fp16 against fp32 (tf32 convolutions)",
    ),
    "one segment, undecided": (
        lambda c: replace(together(c), verdict="undecided"),
        "Undecided whether the whole model is 1.5× as fast, fp16 against fp32 (tf32 convolutions)",
    ),
    "no card": (lambda c: replace(passing(c), card=[]), "Headline withheld, there is no fairness card"),
    "an open point": (
        lambda c: replace(passing(c), card=[replace(c.card[0], open=True), *c.card[1:]]),
        "Headline withheld, 1 point of the fairness card open: precision",
    ),
}


@pytest.mark.parametrize("name", HEADLINES)
def test_the_headline_says_what_was_found_and_no_more(measured: Comparison, name: str) -> None:
    change, wanted = HEADLINES[name]
    assert figures.headline(change(measured)) == wanted


def test_the_fair_claim_is_read_first(measured: Comparison) -> None:
    text = markdown(replace(measured, claims=[EQUAL, UNEQUAL]))
    fair, other = (
        text.index("as fast as graph:fp16; equal precision"),
        text.index("as fast as eager; not equal: fp32 against fp16"),
    )
    assert fair < other < text.index("## Fairness card")
    assert figures.subline(replace(measured, claims=[UNEQUAL])).endswith(
        "No engine of our precision and launch mode was measured."
    )
    assert "No engine" not in figures.subline(replace(measured, claims=[EQUAL, UNEQUAL]))


def test_layers_of_a_segment_are_not_shown_by_themselves(measured: Comparison) -> None:
    passing_alone, joined, every = figures.shown_alone(measured)
    assert joined > 1
    assert every == sum(len(s.layers) for s in measured.segments)
    assert passing_alone == sum(s.verdict == "pass" for s in measured.segments if len(s.layers) == 1)
    assert markdown(measured).count("not shown by itself") == joined
    assert sum(row[3] == "not shown by itself" for row in strip(measured).rows) == joined


def test_the_sum_of_the_layers_stands_beside_the_whole(measured: Comparison) -> None:
    for place, side in enumerate((measured.ours, measured.baseline), start=1):
        rows = figures.sums(measured)
        assert sum(row[place] for row in rows) == pytest.approx(side.whole.value)
    assert "| sum of the layers |" in markdown(measured)


def test_what_is_not_drawn_has_no_legend(measured: Comparison) -> None:
    by_key = {chart.key: chart for chart in charts(replace(measured, ceilings={}))}
    assert not any(meaning == "measured ceiling" for _, _, meaning in by_key["roofline"].legend)
    without_products = charts(replace(measured, ceilings={"bytes_per_s": 3e12}))
    roofs = next(chart for chart in without_products if chart.key == "roofline")
    assert not roofs.spec["datasets"]["roofs"]
    assert not any(meaning == "measured ceiling" for _, _, meaning in roofs.legend)
    assert any("no roof is drawn" in note for note in roofs.notes)
    verdicts = {segment.verdict for segment in measured.segments}
    told = {meaning for _, _, meaning in strip(measured).legend}
    assert verdicts <= told
    assert not ({"pass", "fail", "undecided"} - verdicts) & told
    open_ended = replace(measured.segments[0], ratio=Interval(2.0, 0.0, MOST_RATIO))
    drawn = strip(replace(measured, segments=[open_ended, *measured.segments[1:]]))
    assert open_ended.name not in [row["name"] for row in drawn.spec["datasets"]["segments"]]
    assert any(open_ended.name in note and "no bounds" in note for note in drawn.notes)


def test_layers_that_do_not_add_up_are_said_beside_the_headline(measured: Comparison) -> None:
    loose = replace(measured.baseline, additive=False)
    assert figures.subline(measured).endswith("segments at once with 95% confidence.")
    wanted = f"confidence, wider because nothing shows that the layers add up on {loose.engine}."
    assert figures.subline(replace(measured, baseline=loose)).endswith(wanted)
    assert wanted in " ".join(markdown(replace(measured, baseline=loose)).replace("\\", "").split())
    both = replace(measured, ours=replace(measured.ours, additive=False), baseline=loose)
    assert figures.subline(both).endswith("add up on either side.")
    assert "add up" not in figures.subline(replace(measured, baseline=loose, segments=measured.segments[:1]))
