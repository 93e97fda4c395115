"""The report's page in a real Chromium: it fetches nothing, its switches work, and it fits a phone."""

import json
import shutil

import pytest
from records import METHODS, example
from shared import missing

from nestfed.report import page

GROUPS = ("White", "Black", "Asian-Pac-Islander", "<b>Other</b> & more", "Müller")


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    """A headless Chromium with an empty profile, with its logs switched on."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if not (browser and driver):
        missing("BROWSER", "chromium and chromedriver are not installed: the page is not tested in a browser")
    try:
        from selenium import webdriver
    except ImportError:
        missing("BROWSER", "selenium is not installed: the page is not tested in a browser")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for flag in (
        "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
        "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
        f"--user-data-dir={tmp_path_factory.mktemp('profile')}",
    ):  # fmt: skip
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    window = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield window
    window.quit()


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(page.render(example(groups=GROUPS)), encoding="utf-8")
    return path


class Visit:
    """A page as its reader sees it."""

    def __init__(self, window):
        self.window = window

    def run(self, script, *arguments):
        return self.window.execute_script(script, *arguments)

    def find(self, selector):
        return self.window.find_element("css selector", selector)

    def lines(self):
        """The drawn curves by method."""
        script = "[...document.querySelectorAll('#curves path.line')].map(p => [p.dataset.method, p.getAttribute('d')])"
        return dict(self.run(f"return {script}"))

    def choose(self, selector, value):
        self.find(f"{selector} option[value='{value}']").click()

    def options(self, selector):
        return self.run("return [...document.querySelector(arguments[0]).options].map(o => o.value)", selector)

    def words(self):
        """What stands in the picture of the curves."""
        return self.run("return [...document.querySelectorAll('#curves .plot > svg > text')].map(t => t.textContent)")


def open_page(window, path, *, width=1200, scripts=True):
    window.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": not scripts})
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    window.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    window.get("about:blank")
    for log in ("browser", "performance"):
        window.get_log(log)  # what came before is another test's
    window.get(path.as_uri())
    return Visit(window)


@pytest.fixture
def visit(chromium, report):
    return open_page(chromium, report)


def requests(window):
    events = [json.loads(entry["message"])["message"] for entry in window.get_log("performance")]
    return [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]


def test_nothing_is_fetched_and_nothing_fails(visit, report):
    assert set(visit.lines()) == set(METHODS)
    for value in ("bytes", "oracle_calls"):
        visit.find(f"#curves input[value={value}]").click()
    asked = requests(visit.window)
    assert asked[0] == report.as_uri()
    assert all(url.startswith("data:") for url in asked[1:])
    assert visit.window.get_log("browser") == []


def test_every_axis_draws_other_lines(visit):
    # FedAvg costs less than the others: against each cost its line ends elsewhere.
    seen, titles = [visit.lines()], [visit.words()]
    for value in ("bytes", "oracle_calls"):
        visit.find(f"#curves input[value={value}]").click()
        seen.append(visit.lines())
        titles.append(visit.words())
    assert len({lines["fedavg"] for lines in seen}) == 3
    for start, text in zip(("communication rounds", "bytes sent", "oracle calls"), titles, strict=True):
        assert any(entry.startswith(start) for entry in text)


def test_metric_and_logarithm_redraw(visit):
    before = visit.lines()
    visit.choose("#curves [data-role=metric]", "loss")
    chosen = visit.lines()
    visit.find("#curves [data-role=log]").click()
    logarithmic = visit.lines()
    for method in METHODS:
        assert len({before[method], chosen[method], logarithmic[method]}) == 3


def test_legend_hides_and_shows_a_method(visit):
    button = visit.find("#curves .legend button[data-method=fedminmax]")
    before = visit.lines()
    button.click()
    assert set(visit.lines()) == set(METHODS) - {"fedminmax"}
    assert button.get_attribute("aria-pressed") == "false"
    button.click()
    assert visit.lines() == before
    assert button.get_attribute("aria-pressed") == "true"


def test_hiding_everything_is_no_error(visit):
    for button in visit.window.find_elements("css selector", "#curves .legend button"):
        button.click()
    assert visit.lines() == {} and "Every method is hidden." in visit.words()
    assert visit.window.get_log("browser") == []


def test_stages_and_bands_are_drawn(visit):
    count = "return document.querySelectorAll(arguments[0]).length"
    assert visit.run(count, "#curves path.band") == 3
    assert visit.run(count, "#curves line.stage") == 1
    assert "fine-tuning" in visit.words()


def test_pointer_and_keys_read_values_out(visit):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    plot, readout = visit.find("#curves .plot"), visit.find("#curves .readout")
    assert not readout.is_displayed()
    ActionChains(visit.window).move_to_element(plot).perform()
    assert readout.is_displayed()
    assert readout.text.startswith("round ") and all(title in readout.text for title in METHODS.values())
    plot.send_keys(Keys.ESCAPE)
    assert not readout.is_displayed()
    plot.send_keys(Keys.ARROW_RIGHT)
    first = readout.text
    plot.send_keys(Keys.ARROW_RIGHT)
    assert readout.is_displayed() and readout.text != first
    assert "FedAvg 0." in visit.run("return document.querySelector('[data-role=spoken]').textContent")


def test_read_out_is_the_mean_that_was_given(visit):
    from selenium.webdriver.common.keys import Keys

    visit.find("#curves .plot").send_keys(Keys.ARROW_LEFT)  # begins at the right end
    first = example(groups=GROUPS).history
    last = first[(first["round"] == 300) & (first["method"] == "fedavg")]["accuracy"]
    assert f"{last.mean():.4f} ± {last.std(ddof=0):.4f}" in visit.find("#curves .readout").text


def test_bars_follow_their_switches(visit):
    bars = "return [...document.querySelectorAll('#parts .bar')].map(b => b.style.width)"
    names = "return [...document.querySelectorAll('#parts h4')].map(h => h.textContent)"
    assert visit.run(names) == list(GROUPS)  # text, not markup
    assert visit.run("return document.querySelector('#parts [data-role=split]').value") == "test"
    seen = [visit.run(bars)]
    assert len(seen[0]) == len(GROUPS) * len(METHODS)
    assert visit.options("#parts [data-role=metric]") == ["true_positive_rate", "accuracy"]
    for role, value in (("metric", "accuracy"), ("split", "validation"), ("kind", "client")):
        visit.choose(f"#parts [data-role={role}]", value)
        seen.append(visit.run(bars))
    assert len({tuple(widths) for widths in seen}) == 4
    assert visit.run(names) == ["client 0", "client 1", "client 2"]


def test_trade_off_follows_its_switches(visit):
    points = "return [...document.querySelectorAll('#trade-off circle')].map(c => c.getAttribute('cx'))"
    before = visit.run(points)
    visit.choose("#trade-off [data-role=across]", "loss")
    assert len(before) == 3 and visit.run(points) != before


def test_every_control_can_be_reached_and_has_a_name(visit):
    script = """return [...document.querySelectorAll('main select, main input, main button, main [tabindex]')].map(
        e => [e.tabIndex, (e.labels?.[0]?.textContent || e.getAttribute('aria-label') || e.textContent).trim()])"""
    controls = visit.run(script)
    assert len(controls) > 10
    assert all(index == 0 and name for index, name in controls)


@pytest.mark.parametrize("width", [360, 390, 768])
def test_no_sideways_scrolling_of_the_page(chromium, report, width):
    visit = open_page(chromium, report, width=width)
    visit.run("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    assert visit.run("return document.documentElement.scrollWidth <= innerWidth")
    assert visit.run("return innerWidth") == width
    assert visit.run("return document.querySelector('#curves svg').getBoundingClientRect().right <= innerWidth")


def test_tables_are_there_without_scripts(chromium, report):
    visit = open_page(chromium, report, scripts=False)
    try:
        table = visit.find("#headline").text
        assert all(title in table for title in METHODS.values()) and "±" in table
        assert not visit.find("#curves .controls").is_displayed()
        assert visit.find("#curves .script-less").is_displayed()
        assert len(visit.window.find_elements("css selector", "#holdings .holder")) == 3
    finally:
        chromium.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


def test_dark_follows_the_system(chromium, report):
    visit = open_page(chromium, report)
    grounds = []
    for scheme in ("light", "dark"):
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        grounds.append(visit.run("return getComputedStyle(document.body).backgroundColor"))
    chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    assert grounds == ["rgb(250, 250, 248)", "rgb(20, 23, 27)"]
