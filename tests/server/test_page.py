"""The playground in a real browser. Runs where Playwright and a Chromium are; nothing is fetched from anywhere else."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest

from tests.server.fake_engine import Running, fake_engine, running

ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-dev-shm-usage", "--no-first-run"]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

if CHROMIUM is None:
    pytest.skip("no Chromium on this machine: apt-get install chromium", allow_module_level=True)
playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed: pip install playwright")


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(fake_engine(delay_s=0.02, max_model_len=600, pages=200, page_size=16, max_seqs=4)) as server:
        yield server


class Page:
    """A page that must never complain, nor ask anybody else for anything."""

    def __init__(self, browser: object, url: str, **context: object):
        self.complaints: list[str] = []
        self.strangers: list[str] = []
        self._context = browser.new_context(**{"viewport": {"width": 1280, "height": 820}, **context})  # type: ignore[attr-defined]
        self.page = self._context.new_page()
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: request.url.startswith(url) or self.strangers.append(request.url))
        self.page.goto(url)

    def close(self) -> None:
        """Check and go."""
        assert self.complaints == []
        assert self.strangers == []
        self._context.close()


@pytest.fixture
def opened(browser: object, server: Running) -> Iterator[Page]:
    opened = Page(browser, server.url)
    playwright.expect(opened.page.locator("#model")).to_have_text("letters")
    yield opened
    opened.close()
    server.until_idle()


@pytest.fixture
def page(opened: Page) -> object:
    return opened.page


def expect(page: object, selector: str):
    return playwright.expect(page.locator(selector))  # type: ignore[attr-defined]


def test_a_completion_streams_and_says_how_fast(page) -> None:
    page.get_by_text("Complete").click()
    page.fill("#prompt", "ab")
    page.click("summary")
    page.fill("#knob-max_tokens", "30")
    page.fill("#knob-temperature", "0")
    page.keyboard.press("Tab")
    page.click("#go")
    expect(page, "#go").to_have_text("Stop")
    expect(page, ".turn").to_have_text("ab" + "cdefghijklmnopqrstuvwxyzabcdef")
    expect(page, "#go").to_have_text("Generate")
    expect(page, "#meta").to_contain_text("30 tokens")
    expect(page, "#meta").to_contain_text("ended by length")


def test_the_stop_button_and_escape_end_the_request(page, server: Running) -> None:
    page.get_by_text("Complete").click()
    for stop in (lambda: page.click("#go"), lambda: page.keyboard.press("Escape")):
        aborted = server.engine.stats().aborted
        page.fill("#prompt", "ab")
        page.keyboard.press("Control+Enter")
        expect(page, "#meta").to_contain_text("tokens ·")
        expect(page, "#requests em").to_have_text("yours")
        stop()
        expect(page, "#meta").to_contain_text("stopped")
        server.until_idle()
        assert server.engine.stats().aborted == aborted + 1


def test_it_says_that_the_server_drains(page, server: Running) -> None:
    expect(page, "#state").to_have_text("")
    server.server.draining = True
    try:
        expect(page, "#state").to_contain_text("Shutting down: running requests finish")
    finally:
        server.server.draining = False
    expect(page, "#state").to_have_text("")


def test_a_chat_keeps_its_turns(page) -> None:
    page.get_by_text("Chat").click()
    page.click("summary")
    page.fill("#knob-max_tokens", "3")
    for turns in (2, 4):
        page.fill("#prompt", "hi")
        page.keyboard.press("Control+Enter")
        expect(page, "#prompt").to_have_value("")
        expect(page, ".turn").to_have_count(turns)
    page.click("#clear")
    expect(page, ".turn").to_have_count(0)


def test_errors_are_shown(page, opened: Page) -> None:
    page.get_by_text("Complete").click()
    page.fill("#prompt", "#")
    page.keyboard.press("Control+Enter")
    expect(page, ".turn.error").to_contain_text("the device is on fire")
    page.click("summary")
    page.fill("#knob-temperature", "9")
    page.click("#go")
    expect(page, "#meta").to_have_text("Temperature is 9, wanted 0 to 2")
    (complaint,) = opened.complaints  # the browser's own, of the request that failed
    assert "status of 500" in complaint
    opened.complaints.clear()


def test_markup_from_the_model_or_the_user_stays_text(page) -> None:
    page.get_by_text("Chat").click()
    page.click("summary")
    page.fill("#knob-max_tokens", "2")
    page.fill("#prompt", "<img src=x onerror=alert(1)>")
    page.keyboard.press("Control+Enter")
    expect(page, ".turn.user").to_have_text("<img src=x onerror=alert(1)>")
    assert page.locator("#turns img").count() == 0


def test_the_engine_is_shown_at_work(page, server: Running) -> None:
    body = {"prompt": "a" * 40, "max_tokens": 400, "n": 6, "temperature": 0, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60):
        expect(page, "#requests tr").to_have_count(6)
        expect(page, "#requests tr.waiting").to_have_count(2)
        expect(page, "#requests-note").to_contain_text("4 running, 2 waiting")
        expect(page, "#requests tr:first-child").to_contain_text("/ 400")
        expect(page, "#hits").to_contain_text("%")
        expect(page, "#pool-words").to_contain_text("200 in all")
        page.hover("#pool", position={"x": 6, "y": 6})
        expect(page, "#tip").to_contain_text("page 0")
    expect(page, "#none").to_be_visible()


def test_steps_and_latencies_are_drawn(page, server: Running) -> None:
    body = {"prompt": "a" * 40, "max_tokens": 40, "temperature": 0}
    assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 200
    expect(page, "#steps-words").to_contain_text("1 decoding")
    expect(page, "#steps-note").to_contain_text("ms")
    for name in ("#ttft", "#itl"):
        expect(page, name).to_contain_text("ms")
        expect(page, f"{name}-note").to_contain_text("p99")
    expect(page, "#drafts-note").to_have_text("no drafts")
    steps = httpx.get(f"{server.url}/live", timeout=10).json()["steps"]
    assert [step[0] for step in steps] == list(range(steps[0][0], steps[0][0] + len(steps)))
    assert sum(step[2] for step in steps) >= 24, "the prompt's tokens, but for what the cache had"
    assert {step[3] for step in steps} >= {0, 1}


def test_a_system_prompt_a_schema_and_probabilities(page) -> None:
    page.get_by_text("Chat").click()
    page.locator("#boxes summary").click()
    page.fill("#system", "Be brief.")
    page.check("#probabilities")
    page.locator("#knobs summary").click()
    page.fill("#knob-max_tokens", "4")
    page.fill("#prompt", "hi")
    page.click("#go")
    expect(page, ".token").to_have_count(4)
    assert "60.7 %" in page.locator(".token").first.get_attribute("title")
    expect(page, "#boxes-note").to_have_text("· system prompt, probabilities")
    page.fill("#schema", "{")
    page.fill("#prompt", "hi")
    page.click("#go")
    expect(page, "#meta").to_contain_text("The schema is not JSON")
    page.fill("#schema", '{"enum": [1]}')
    page.uncheck("#probabilities")
    page.fill("#prompt", "hi")
    page.click("#go")
    expect(page, ".turn.live-text").to_have_count(0)
    expect(page, "#turns > .turn >> nth=-1").to_have_text("1")


def test_a_turn_is_edited_and_an_answer_made_again(page) -> None:
    page.get_by_text("Chat").click()
    page.locator("#knobs summary").click()
    page.fill("#knob-max_tokens", "3")
    for text in ("one", "two"):
        page.fill("#prompt", text)
        page.keyboard.press("Control+Enter")
        expect(page, "#prompt").to_have_value("")
    expect(page, ".turn").to_have_count(4)
    page.click("#again")
    expect(page, "#go").to_have_text("Send")
    expect(page, ".turn").to_have_count(4)
    expect(page, ".turn.user >> nth=1").to_have_text("two")
    page.locator(".edit").first.click()
    expect(page, ".turn").to_have_count(0)
    expect(page, "#prompt").to_have_value("one")


def test_a_request_is_copied_and_does_the_same(page, opened: Page, server: Running) -> None:
    opened._context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_text("Complete").click()
    page.locator("#knobs summary").click()
    page.fill("#knob-max_tokens", "5")
    page.fill("#knob-temperature", "0")
    page.fill("#knob-top_k", "9")
    page.fill("#prompt", "it's\n“ab”")
    said = {}
    for kind, run in (("curl", ["bash", "-c"]), ("python", [sys.executable, "-c"])):
        page.click(f"#copy-{kind}")
        expect(page, "#meta").to_have_text("Copied.")
        text = page.evaluate("navigator.clipboard.readText()")
        done = subprocess.run([*run, text], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        said[kind] = done.stdout
        page.fill("#prompt", "it's\n“ab”")
    answer = json.loads(said["curl"])["choices"][0]["text"]
    assert len(answer) == 5
    assert f"text={answer!r}" in said["python"]


def test_the_theme_can_be_chosen_and_stays(page) -> None:
    def paper() -> str:
        return page.locator("body").evaluate("e => getComputedStyle(e).backgroundColor")

    light = paper()
    page.click("#theme")
    page.click("#theme")
    expect(page, "#theme").to_have_text("Theme: dark")
    assert paper() != light
    page.reload()
    expect(page, "#theme").to_have_text("Theme: dark")


@pytest.mark.parametrize("width", [360, 800, 1600])
def test_nothing_is_wider_than_the_window(browser: object, server: Running, width: int) -> None:
    opened = Page(browser, server.url, viewport={"width": width, "height": 800})
    expect(opened.page, "#model").to_have_text("letters")
    assert opened.page.locator("html").evaluate("e => e.scrollWidth") <= width
    opened.close()


def test_a_phone_shows_one_room_at_a_time(browser: object, server: Running) -> None:
    opened = Page(browser, server.url, viewport={"width": 390, "height": 844})
    page = opened.page
    expect(page, "#model").to_have_text("letters")
    expect(page, "#prompt").to_be_visible()
    expect(page, "#live-title").to_be_hidden()
    page.get_by_role("button", name="Engine").click()
    expect(page, "#live-title").to_be_visible()
    expect(page, "#prompt").to_be_hidden()
    assert page.locator("#live-title").bounding_box()["y"] < 300, "without scrolling"
    assert page.locator("#requests-note").bounding_box()["y"] < 844, "the pool of pages leaves room for the requests"
    page.get_by_role("button", name="Playground").click()
    expect(page, "#prompt").to_be_visible()
    opened.close()


def test_parameters_that_open_come_into_sight(page) -> None:
    page.set_viewport_size({"width": 1280, "height": 640})
    page.locator("#knobs summary").click()
    expect(page, "#knob-stop").to_be_in_viewport()


def test_a_model_without_a_chat_template_completes(browser: object) -> None:
    with running(fake_engine(chat=False)) as server:
        opened = Page(browser, server.url)
        expect(opened.page, "#go").to_have_text("Generate")
        expect(opened.page, "input[value=chat]").to_be_disabled()
        opened.close()


def test_a_key_is_asked_for_and_used(browser: object) -> None:
    with running(api_key="sesame") as server:
        opened = Page(browser, server.url)
        expect(opened.page, "#key-dialog").to_be_visible()
        opened.page.fill("#key", "sesame")
        opened.page.keyboard.press("Enter")
        expect(opened.page, "#model").to_have_text("letters")
        expect(opened.page, ".dot").to_have_class("dot on")
        assert all("401" in complaint for complaint in opened.complaints), "the browser's own note on the refused requests"
        opened.complaints.clear()
        opened.close()
