"""The dashboard in a real Chromium, against a live server with the built-in model: it is used as people use it.

Pictures of it are kept in the folder $TRUNKLINE_SCREENSHOTS, else in pytest's own: look at them.
"""

import base64
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest

from benchmarks.server import serve
from tests.api.serving import PATIENCE, Server

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.skipif(
        not (shutil.which("chromium") and shutil.which("chromedriver")),
        reason="there is no chromium and chromedriver on this machine (Debian: apt-get install chromium chromium-driver)",
    ),
]

WIDE, NARROW = (1280, 900), (390, 844)
SYSTEM = "You answer questions about our shop. Today is the 3rd of May, and we are open from nine to five."
QUESTION = "When do you open?"
# Every text whose colour is too near to what is behind it (WCAG 2.2, 1.4.3), as far as both are plain colours.
CONTRASTS = """
const parse = (text) => {
  const numbers = text.match(/[\\d.]+/g).map(Number);
  const scale = text.startsWith("color(") ? 255 : 1;
  return [...numbers.slice(0, 3).map((n) => n * scale), numbers[3] ?? 1];
};
const light = ([r, g, b]) => [r, g, b].map((n) => n / 255)
  .map((n) => (n <= 0.04045 ? n / 12.92 : ((n + 0.055) / 1.055) ** 2.4))
  .reduce((sum, n, i) => sum + n * [0.2126, 0.7152, 0.0722][i], 0);
const found = [];
for (const element of document.querySelectorAll("body *")) {
  const words = [...element.childNodes].filter((node) => node.nodeType === 3 && node.textContent.trim());
  if (!words.length || !element.checkVisibility() || element.closest(".skip, .hidden, noscript, option")) continue;
  const style = getComputedStyle(element);
  let behind = element;
  while (behind && parse(getComputedStyle(behind).backgroundColor)[3] < 1) behind = behind.parentElement;
  const [a, b] = [light(parse(style.color)), light(parse(getComputedStyle(behind ?? document.body).backgroundColor))];
  const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  const isLarge = parseFloat(style.fontSize) >= 24;
  const isTooLow = ratio < (isLarge ? 3 : 4.5);
  if (isTooLow) found.push(`${element.tagName}.${element.className} ${ratio.toFixed(2)}: ${words[0].textContent.trim().slice(0, 40)}`);
}
return found;
"""
# A tree of thousands of nodes, and how it is laid out.
LAYOUT = """
const done = arguments[arguments.length - 1];
import("./dashboard/tree_layout.js").then(({ forest, layout, scale }) => {
  const leaf = (i) => ({ text: `leaf ${i}`, num_tokens: 16 * (1 + (i % 7)), tokens_saved: i, hits: 1, children: [], left_out: 0 });
  const branch = (i) => ({ ...leaf(i), text: `branch ${i}`, children: Array.from({ length: 50 }, (_, j) => leaf(j)), left_out: 3 });
  const root = { tenant: "", cache_salt: "", adapter: "", left_out: 0, children: Array.from({ length: 100 }, (_, i) => branch(i)) };
  const items = layout(forest([root]), { maxRows: 36, order: () => 0 });
  const across = scale(items, 0);
  done(items.map((item) => ({ kind: item.kind, row: item.row, rows: item.rows, hidden: item.hidden ?? 0,
    text: item.entry.node.text ?? "", left: across.place(item.start), right: across.place(item.end) })));
});
"""

Found = TypeVar("Found")


class Browser:
    """A page, and what people do with it. `look(name)` keeps a picture."""

    def __init__(self, driver: Any, pictures: Path) -> None:
        self.driver = driver
        self.pictures = pictures
        self.logged: list[dict[str, Any]] = []

    def open(self, url: str, size: tuple[int, int] = WIDE, colours: str = "light") -> None:
        width, height = size
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        features = [
            {"name": "prefers-color-scheme", "value": colours},
            {"name": "prefers-reduced-motion", "value": "reduce"},
        ]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        self.driver.get(url + "/")

    def all(self, selector: str) -> list[Any]:
        return [element for element in self.driver.find_elements("css selector", selector) if element.is_displayed()]

    def one(self, selector: str) -> Any:
        return self.until(lambda: (self.all(selector) or [None])[0], selector)

    def text(self, selector: str) -> str:
        return str(self.one(selector).text)

    def until(self, found: Callable[[], Found], what: str) -> Found:
        """The first answer that is true; elements may come and go meanwhile."""
        from selenium.common.exceptions import StaleElementReferenceException
        from selenium.webdriver.support.ui import WebDriverWait

        wait = WebDriverWait(self.driver, PATIENCE, 0.1, [StaleElementReferenceException])
        return wait.until(lambda _: found(), f"waited in vain for {what}")

    def click(self, selector: str) -> None:
        self.one(selector).click()

    def write(self, selector: str, text: str) -> None:
        field = self.one(selector)
        field.clear()
        field.send_keys(text)

    def script(self, script: str) -> Any:
        return self.driver.execute_script(script)

    def look(self, name: str, *, whole: bool = True) -> None:
        """The whole page, however long, or only what is in the window.

        What sticks to an edge of the window stands in the whole page where it is as long as nothing is scrolled.
        """
        options: dict[str, Any] = {"format": "png"}
        self.driver.execute_async_script(
            "requestAnimationFrame(() => requestAnimationFrame(arguments[0]))"
        )  # it is drawn
        if whole:
            self.script("scrollTo(0, 0)")
            size = self.driver.execute_cdp_cmd("Page.getLayoutMetrics", {})["cssContentSize"]
            clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
            options = {"format": "png", "captureBeyondViewport": True, "clip": clip}
        picture = self.driver.execute_cdp_cmd("Page.captureScreenshot", options)
        (self.pictures / f"{name}.png").write_bytes(base64.b64decode(picture["data"]))

    def send(self, message: str) -> None:
        """Send it from the playground, and wait until the answer is there with its report."""
        before = len(self.all(".facts .cached-line"))
        self.write("#play-message", message)
        self.click("#play-send")
        self.until(lambda: len(self.all(".facts .cached-line")) > before, "an answer")
        self.one("#play-send")

    def complaints(self) -> list[str]:
        """What the console has against the page."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] != "INFO"]

    def addresses(self) -> set[str]:
        """Everything that was asked for since the last call."""
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        sent = [event["params"] for event in events if event["method"] == "Network.requestWillBeSent"]
        return {request["request"]["url"] for request in sent if request["documentURL"].startswith("http")}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(os.environ.get("TRUNKLINE_SCREENSHOTS") or tmp_path_factory.mktemp("screenshots"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in (
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
        "--lang=en",
        "--window-size=1280,900",
    ):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    driver.set_script_timeout(PATIENCE)
    yield driver
    driver.quit()


@pytest.fixture
def browser(driver: Any, pictures: Path) -> Iterator[Browser]:
    """Without anything in its storage; whatever a test does, its page asks no other host, and the console is silent."""
    browser = Browser(driver, pictures)
    yield browser
    asked = browser.addresses()
    here = browser.script("return location.origin")
    assert asked and all(address.startswith(f"{here}/") for address in asked), asked
    browser.script("localStorage.clear(); sessionStorage.clear()")
    driver.get("about:blank")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The built-in model, and some requests that others have sent before."""
    with serve("--max-num-seqs", "4") as address:
        with httpx.Client(base_url=address, timeout=PATIENCE) as http:
            for number in range(6):
                prompt = f"{number}. Once upon a time there was a server that read everything twice, until one day"
                http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2}).raise_for_status()
            talk: list[dict[str, str]] = [{"role": "system", "content": "You are a patient teacher of geography."}]
            for question in ("What is the capital of France?", "And of Italy?"):
                talk.append({"role": "user", "content": question})
                answer = http.post("/v1/chat/completions", json={"messages": talk, "max_tokens": 12, "temperature": 0})
                talk.append(answer.raise_for_status().json()["choices"][0]["message"])
        yield address


def test_a_chat_is_cached_and_a_changed_prompt_is_explained(browser: Browser, url: str) -> None:
    browser.open(url)
    browser.until(lambda: browser.text("#state").startswith("Ready"), "the server")
    before = browser.until(lambda: len(browser.all("#tree-items .node")), "the tree")
    browser.click("#system-part summary")
    browser.write("#play-system", SYSTEM)

    browser.send(QUESTION)
    assert browser.text(".facts .cached-line").startswith("0 of ")
    browser.until(lambda: len(browser.all("#tree-items .node")) > before, "the tree to grow")
    browser.click("#play-clear")
    browser.send(QUESTION)
    cached, _, prompt, *_ = browser.text(".facts .cached-line").split()
    assert int(cached) == (int(prompt) - 1) // 16 * 16 > 0, "every whole page before the last token"
    assert browser.text(".facts summary") == "Cache report: complete"
    browser.until(lambda: int(browser.text("#tile-saved").replace(",", "")) >= int(cached), "the sums")
    node = browser.until(
        lambda: [node for node in browser.all("#tree-items .heat-4") if "our shop" in node.text], "the hit in the tree"
    )
    assert "1 hit" in node[0].get_attribute("aria-label")
    browser.until(lambda: f"{cached} / {prompt}" in browser.text("#request-list .done:first-child"), "its end")
    assert browser.text("#request-list li:first-child b") == "chat"
    stages = browser.one("#request-list li:first-child .timeline").get_attribute("aria-label")
    assert all(stage in stages for stage in ("read in", "queued", "prefill", "writing")), stages

    browser.click("#why-tab")
    browser.click("#why-take")
    assert browser.one("#why-system").get_attribute("value") == SYSTEM
    browser.write("#why-system", SYSTEM.replace("3rd", "4th"))
    browser.write("#why-user", QUESTION)
    browser.click("#why-ask")
    assert browser.text(".explanation h3") == "It differs from what is cached"
    assert (browser.text(".side.cached mark"), browser.text(".side.sent mark")) == ("3rd", "4th")
    assert browser.text(".side.sent .before").endswith("Today is the ")
    assert "at character 50 of messages[0] (system)" in browser.text(".explanation .sentence")
    browser.look("wide-light-why", whole=False)
    assert browser.complaints() == []


def test_a_schema_and_a_tool_from_the_playground(browser: Browser, url: str) -> None:
    browser.open(url)
    browser.click("#answer-as input[value=schema] + span")
    browser.write("#play-message", "Can I come on Sunday?")
    browser.send("Can I come on Sunday?")
    answer = json.loads(browser.text(".said.json"))
    assert answer.keys() == {"topic", "open_on_sunday", "confidence"}
    browser.look("wide-light-schema", whole=False)

    browser.click("#play-clear")
    browser.click("#answer-as input[value=tools] + span")
    browser.send("When are you open on Monday?")
    call = browser.text(".call")
    assert call.startswith("opening_hours({")
    browser.look("wide-light-tools", whole=False)
    browser.write(".result input", "from nine to five")
    browser.click(".result button")
    browser.until(lambda: len(browser.all(".facts .cached-line")) == 2, "the answer to the result")
    cached = int(browser.all(".facts .cached-line")[1].text.split()[0])
    assert cached >= 16, "the tools and the question were read before"

    browser.click("#answer-as input[value=schema] + span")
    browser.write("#play-schema", '{"type": ')
    browser.write("#play-message", "?")
    browser.click("#play-send")
    assert "this is no JSON" in browser.text(".conversation .error")
    assert browser.complaints() == []


def test_the_tree_by_the_keyboard_alone(browser: Browser, url: str) -> None:
    from selenium.webdriver import ActionChains, Keys

    def press(*keys: str) -> None:
        ActionChains(browser.driver).send_keys(*keys).perform()

    def focus(what: str) -> Any:
        return browser.script(f"return document.activeElement.{what}")

    browser.open(url)
    browser.until(lambda: browser.all("#tree-items .node"), "the tree")
    press(Keys.TAB)
    assert focus("className") == "skip"
    for _ in range(20):
        press(Keys.TAB)
        if focus("getAttribute('role')") == "treeitem":
            break
    assert browser.script("return getComputedStyle(document.activeElement).outlineStyle") == "solid", "it is seen"
    assert focus("ariaLevel") == "1"
    assert browser.text("#node-card pre").strip() != ""
    while focus("ariaExpanded") != "true":
        press(Keys.ARROW_DOWN)
    name = focus("ariaLabel")
    press(Keys.ARROW_RIGHT)
    assert focus("ariaLevel") == "2" and focus("ariaLabel") != name
    press(Keys.ARROW_LEFT)
    assert focus("ariaLabel") == name
    press(Keys.END)
    press(Keys.HOME)
    assert (focus("ariaLevel"), focus("ariaPosInSet")) == ("1", "1")

    while focus("ariaLabel") != name:
        press(Keys.ARROW_DOWN)
    num_all = len(browser.all("#tree-items [role=treeitem]"))
    press(Keys.ENTER)
    assert len(browser.all("#crumbs .crumb")) == 2
    assert 0 < len(browser.all("#tree-items [role=treeitem]")) < num_all
    assert focus("getAttribute('role')") == "treeitem", "the keyboard stays in the tree"
    browser.look("wide-light-zoomed", whole=False)
    press(Keys.ESCAPE)
    assert browser.all("#crumbs .crumb") == []
    browser.click("#why-tab")
    press(Keys.ARROW_LEFT)
    assert focus("id") == "playground-tab"
    assert browser.one("#play-message")
    assert browser.complaints() == []


@pytest.mark.parametrize("colours", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
def test_it_can_be_read(browser: Browser, url: str, size: tuple[int, int], colours: str) -> None:
    browser.open(url, size, colours)
    browser.until(lambda: browser.all("#tree-items .node") and browser.all("#request-list li"), "the data")
    name = f"{'wide' if size == WIDE else 'narrow'}-{colours}"
    browser.look(name)
    browser.one("#tree-items .node").click()
    browser.one("#node-card pre")
    browser.script("document.getElementById('tree').scrollIntoView()")
    browser.look(f"{name}-tree", whole=False)
    assert browser.script("return document.documentElement.scrollWidth <= innerWidth"), "nothing is cut at the right"
    assert browser.script(CONTRASTS) == []
    for tab in ("#playground-tab", "#why-tab"):
        browser.click(tab)
        assert browser.script(CONTRASTS) == []
        if size == NARROW:
            browser.script("document.getElementById('workbench').scrollIntoView()")
            browser.look(f"{name}{tab.replace('#', '-').removesuffix('-tab')}", whole=False)
    assert browser.complaints() == []


def test_the_colours_can_be_chosen_and_stay(browser: Browser, url: str) -> None:
    def paper() -> str:
        return str(browser.script("return getComputedStyle(document.body).backgroundColor"))

    browser.open(url, colours="light")
    light = paper()
    browser.click("#theme")
    assert (browser.text("#theme"), paper()) == ("Light", light)
    browser.click("#theme")
    assert browser.text("#theme") == "Dark"
    dark = paper()
    assert dark != light
    browser.driver.refresh()
    assert (browser.text("#theme"), paper()) == ("Dark", dark)
    browser.click("#theme")
    assert (browser.text("#theme"), paper()) == ("Auto", light)


def test_requests_are_seen_while_they_wait_and_run(browser: Browser, url: str) -> None:
    """Six at once, of which four can run."""
    browser.open(url)
    browser.one("#request-list li")
    prompts = [f"Number {number} of six stories about a browser that looks on begins like this:" for number in range(6)]
    browser.driver.execute_script(
        """
        for (const prompt of arguments[0])
          fetch("v1/completions", { method: "POST", headers: { "content-type": "application/json" },
            body: JSON.stringify({ prompt, max_tokens: 150, ignore_eos: true }) });
        """,
        prompts,
    )
    browser.until(lambda: browser.all(".request.waiting") and browser.all(".request.running"), "the six")
    assert browser.text(".request.waiting .told") != "", "why it waits"
    browser.until(lambda: "tokens so far" in browser.text(".request.running .told"), "a first token")
    browser.look("wide-light-busy")
    browser.until(lambda: browser.text("#requests-note") == "0 running, 0 waiting", "their end")
    assert browser.complaints() == []


def test_thousands_of_nodes_take_no_more_room_than_there_is(browser: Browser, url: str) -> None:
    browser.open(url)
    items = browser.driver.execute_async_script(LAYOUT)
    assert max(item["row"] + item["rows"] for item in items) <= 36
    assert len(items) < 100
    assert all(0 <= item["left"] <= item["right"] <= 1 for item in items)
    nodes = [item for item in items if item["kind"] == "node"]
    assert "branch 99" in [node["text"] for node in nodes], "what has saved most is drawn"
    hidden = sum(item["hidden"] for item in items)
    assert hidden > 0 and [item for item in items if item["kind"] == "more"]
    covered = [(item["row"], item["left"]) for item in items]
    assert len(covered) == len(set(covered)), "no two stand at one place"


def test_a_server_with_keys_asks_for_one(browser: Browser, tiny: Path) -> None:
    flags = ["--api-key", "key-a", "key-b", "--admin-api-key", "root", "--kv-cache-memory", "16MiB"]
    with Server(tiny, *flags) as server:
        server.wait_ready()
        for key, text in (("key-a", "what the first of two tenants sends"), ("key-b", "and what the other one does")):
            body = {"prompt": text, "max_tokens": 2, "ignore_eos": True}
            httpx.post(f"{server.url}/v1/completions", json=body, headers={"x-api-key": key}).raise_for_status()
        browser.open(server.url)
        assert browser.text("#key-title") == "This server wants an API key"
        assert browser.all("#tree-items .node") == []
        browser.look("wide-light-key", whole=False)
        browser.write("#key", "not one of them")
        browser.click("#key-form button")
        browser.until(lambda: "none of the keys" in browser.text("#key-note"), "what is wrong")

        browser.write("#key", "key-a")
        browser.click("#key-form button")
        node = browser.one("#tree-items .node")
        assert "the first of two" in node.get_attribute("aria-label")
        assert len(browser.all("#tree-items .node")) == len(browser.all("#request-list li")) == 1
        assert browser.all("#tenant-choice") == [], "only an admin looks at others"
        browser.driver.refresh()
        browser.one("#tree-items .node")
        assert browser.script("return [localStorage.length, Object.values(sessionStorage)]") == [0, ["key-a"]]

        browser.click("#change-key")
        browser.write("#key", "root")
        browser.click("#key-form button")
        browser.until(lambda: len(browser.all("#tree-items .node")) == 2, "both tenants")
        assert len(browser.all("#tree-items .root")) == 2
        browser.until(lambda: len(browser.all("#tenant option")) == 4, "the tenants to choose from")
        browser.look("wide-light-admin")
        browser.all("#tenant option")[2].click()
        browser.until(lambda: len(browser.all("#tree-items .node")) == 1, "one of them")
        assert "the other one" in browser.one("#tree-items .node").get_attribute("aria-label")
        assert [line for line in browser.complaints() if "401 (Unauthorized)" not in line] == []
