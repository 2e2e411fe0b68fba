"""The page to look around in, in a real browser: what is clicked is what opens."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator

import pytest

from batchsim.scenario import load_scenario
from batchsim.study.curves.run import run_scenario
from batchsim.view.page_data import PageData
from batchsim.view.view_server import ViewServer
from tests.support.browser import CHROMIUM, Page, browser
from tests.unit.view.test_view import SCENARIO

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")]

LOAD = "Number(document.querySelector('#pick').selectedOptions[0].textContent.match(/at ([0-9.]+) req/)[1])"


@pytest.fixture(scope="module")
def page_data(tmp_path_factory: pytest.TempPathFactory) -> PageData:
    folder = tmp_path_factory.mktemp("clicks")
    path = folder / "small.yaml"
    path.write_text(SCENARIO.replace("9/s", "30/s"))
    return PageData(run_scenario(load_scenario(str(path)), out=folder / "results"), [folder])


@pytest.fixture(scope="module")
def url(page_data: PageData) -> Iterator[str]:
    with ViewServer(page_data, 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server.address
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("profile")) as page:
        yield page


def opened(tab: Page, url: str, width: int = 1280, *, dark: bool = False) -> None:
    tab.open(url, width, dark=dark)
    tab.until("document.querySelector('#requests canvas') && document.querySelector('#timeline canvas')")


def text(tab: Page, name: str) -> str:
    return str(tab.run(f"document.getElementById('{name}').textContent"))


def test_a_value_of_a_curve_opens_its_point(tab: Page, url: str, page_data: PageData) -> None:
    """The left end and the right end of the curves are the lower and the higher load."""
    opened(tab, url)
    over = "document.querySelectorAll('#curves .u-over')[1]"  # P99 TTFT
    for share, load in ((0.03, 6.0), (0.97, 30.0)):
        for tenth in range(10):  # somewhere down that end lies a value
            tab.click(over, (share, 0.05 + tenth / 10))
        tab.until(f"{LOAD} === {load}")


def test_a_stretch_dragged_over_is_zoomed_into_down_to_one_step(tab: Page, url: str) -> None:
    """And a double click, or the button, shows the whole run again."""
    opened(tab, url)
    whole = text(tab, "window")
    tab.click("document.querySelector('#timeline .u-over')", (0.4, 0.5), to=(0.6, 0.5))
    tab.until(f"document.getElementById('window').textContent !== {whole!r}")
    tab.click("document.getElementById('one')")
    tab.until("/: one step$/.test(document.getElementById('window').textContent)")
    tab.click("document.getElementById('whole')")
    tab.until(f"document.getElementById('window').textContent === {whole!r}")


def test_a_request_tells_its_life_and_leads_to_who_stood_in_its_way(tab: Page, url: str, page_data: PageData) -> None:
    """One of the slowest that queued behind another, then that other."""
    opened(tab, url)
    number = 1  # the policy of four slots at the higher load
    tab.run(f"document.getElementById('pick').value = {number}, document.getElementById('pick').onchange()")
    slowest = [row["request_id"] for row in page_data.requests(number, "ttft", None)["slowest"]]
    chapters = [page_data.request(number, request)["chapters"] for request in slowest]
    heads = [next((chapter["head"] for chapter in each if chapter["head"] is not None), None) for each in chapters]
    k = next(k for k, head in enumerate(heads) if head is not None)
    tab.click(f"document.querySelectorAll('#slowest button')[{k}]")
    tab.until(f"document.getElementById('request-title').textContent === 'Request {slowest[k]}'")
    assert text(tab, "sentence") == page_data.request(number, slowest[k])["sentence"]
    tab.click("document.querySelector('#chapters button')")
    tab.until(f"document.getElementById('request-title').textContent === 'Request {heads[k]}'")


def test_a_lane_is_clicked_or_chosen_by_keys(tab: Page, url: str, page_data: PageData) -> None:
    """The first and the last lane are of the first and the last request; the life leads back to its stretch of time."""
    opened(tab, url)
    tab.until("document.querySelector('#lanes canvas')")
    over = "document.querySelector('#lanes .u-over')"
    for share, number in ((0.01, 0), (0.99, 39)):
        tab.click(over, (0.5, share))
        tab.until(f"document.getElementById('request-title').textContent === 'Request {number}'")
    whole = text(tab, "window")
    tab.click("document.getElementById('its-time')")
    tab.until(f"document.getElementById('window').textContent !== {whole!r}")
    tab.until("document.activeElement.id === 'lanes'")
    assert "request 39" in text(tab, "lanes-keys")
    tab.call("Input.dispatchKeyEvent", type="keyDown", key="0")
    tab.until(f"document.getElementById('window').textContent === {whole!r}")
    tab.until("document.getElementById('lanes-said').textContent.includes('all 40')")
    for key in ("ArrowDown", "ArrowDown", "Enter"):
        tab.call("Input.dispatchKeyEvent", type="keyDown", key=key)
    tab.until("document.getElementById('request-title').textContent === 'Request 1'")


def test_points_are_compared_and_a_knob_is_changed(tab: Page, url: str) -> None:
    """The counts are of all requests; the knob's numbers are before and after."""
    opened(tab, url)
    tab.click("document.getElementById('pair')")
    tab.until("document.querySelector('#pairs canvas')")
    assert re.match(
        r"A is continuous at .*, seed 0\.B is preemptive at .*, seed 0\.TTFT of 40 requests: \d+ slower in B",
        text(tab, "compared"),
    )
    tab.until("document.querySelectorAll('#knobs input').length === 5")
    assert tab.run("document.getElementById('simulate').disabled")
    for key in ("policies.continuous.max_num_seqs", "cost_factor"):
        tab.click(f"document.getElementById('knob-{key}')", (0.75, 0.5))
    tab.until("!document.getElementById('simulate').disabled")
    moved = tab.run("[...document.querySelectorAll('#knobs output.moved')].map((each) => each.textContent)")
    assert len(moved) == 2
    tab.click("document.getElementById('simulate')")
    tab.until("document.querySelector('#queues canvas')")
    assert text(tab, "changed").startswith(f"max_num_seqs {moved[0]}, cost_factor {moved[1]}")
    assert text(tab, "error") == ""
    tab.click("document.getElementById('reset')")
    tab.until("document.getElementById('simulate').disabled")


def test_the_address_holds_what_is_looked_at(tab: Page, url: str) -> None:
    """A window, a request and a comparison are there again after a reload; Back goes the way that was come."""
    opened(tab, url)
    assert tab.run("location.hash") == ""  # a plain address stays one until something is chosen
    whole, counted = text(tab, "window"), text(tab, "counted")
    tab.click("document.querySelector('#timeline .u-over')", (0.1, 0.5), to=(0.6, 0.5))
    for name, before in (("window", whole), ("counted", counted)):
        tab.until(f"document.getElementById({name!r}).textContent !== {before!r}")
    window = text(tab, "window")
    tab.click("document.querySelector('#slowest button')")
    tab.until("/request=/.test(location.hash)")
    sentence = text(tab, "sentence")
    tab.click("document.getElementById('pair')")
    tab.until("/with=/.test(location.hash) && document.querySelector('#pairs canvas')")
    compared, address = text(tab, "compared"), tab.run("location.hash")
    tab.call("Page.reload")
    tab.until("window.batchsim && document.querySelector('#pairs canvas')")
    assert tab.run("location.hash") == address and text(tab, "error") == ""
    assert [text(tab, name) for name in ("window", "sentence", "compared")] == [window, sentence, compared]
    tab.run("history.back()")
    tab.until("!document.querySelector('#pairs canvas') && document.getElementById('compared').textContent === ''")
    assert not tab.run("document.getElementById('request').hidden") and text(tab, "window") == window
    tab.run("history.back()")
    tab.until("document.getElementById('request').hidden")
    assert text(tab, "window") == window
    tab.run("history.back()")
    tab.until(f"document.getElementById('window').textContent === {whole!r}")
    assert tab.run("location.hash") == ""


def test_a_move_before_all_is_drawn_is_in_the_address(tab: Page, url: str) -> None:
    """A stretch is dragged over while the lanes are not there yet: the address has it, and Back the whole run."""
    held = (
        "window.fetched = window.fetch; window.fetch = (path) => path.startsWith('/lanes?') && !window.freed"
        " ? new Promise((done) => (window.free = () => { window.freed = true; done(window.fetched(path)); }))"
        " : window.fetched(path);"
    )
    added = tab.call("Page.addScriptToEvaluateOnNewDocument", source=held)["identifier"]
    tab.open("about:blank", 1280)
    opened(tab, url)
    tab.call("Page.removeScriptToEvaluateOnNewDocument", identifier=added)
    whole = text(tab, "window")
    tab.click("document.querySelector('#timeline .u-over')", (0.1, 0.5), to=(0.6, 0.5))
    tab.until(f"document.getElementById('window').textContent !== {whole!r}")
    assert "from=" in tab.run("location.hash") and not tab.run("document.querySelector('#lanes canvas')")
    tab.run("window.free()")
    tab.until("document.querySelector('#lanes canvas')")
    assert "from=" in tab.run("location.hash")
    tab.run("history.back()")
    tab.until(f"document.getElementById('window').textContent === {whole!r}")


def test_an_address_that_names_what_is_not_there_says_so(tab: Page, url: str, page_data: PageData) -> None:
    """And shows the point that the page begins with."""
    tab.call("Page.navigate", url="about:blank")
    opened(tab, f"{url}#point=99&from=x")
    tab.until("!document.getElementById('error').hidden")
    assert text(tab, "error") == "The address says from=x, point=99, which this run has not."
    assert tab.run("Number(document.querySelector('#pick').value)") == page_data.curves()["first"]


def test_curves_and_the_header_say_what_their_numbers_are_of(tab: Page, url: str) -> None:
    """What is asked stands in the caption, off the curve; a metric and a part tell what they mean."""
    opened(tab, url)
    captions = tab.run("[...document.querySelectorAll('#curves figcaption')].map((each) => each.textContent)")
    assert captions[0].endswith("@ 99%, asked: 99 % (dashed)") and "P99 TTFT, asked: 300 ms (dashed)" in captions
    assert text(tab, "length").startswith("Whole run: 40 requests, ") and text(tab, "metrics").startswith(
        "Of all requests: "
    )
    tab.click("document.querySelector('#slowest button')")
    tab.until("document.querySelector('#parts .told')")
    titles = tab.run("[...document.querySelectorAll('#parts .told, #metrics .told')].map((each) => each.title)")
    assert len(titles) > 8 and all(titles)


BLACK = """
(() => {
  const over = document.querySelector('#curves .u-over'), canvas = document.querySelector('#curves canvas');
  const { offsetLeft: left, offsetTop: top, clientWidth: wide, clientHeight: high } = over;
  const rows = (left, top, wide, high) => {
    const { data } = canvas.getContext('2d').getImageData(left, top, wide, high);
    const black = (at) => data[at] + data[at + 1] + data[at + 2] < 150 && data[at + 3] > 200;
    const row = (y) => [...Array(wide).keys()].filter((x) => black(4 * (y * wide + x))).length;
    return [...Array(high).keys()].map(row);
  };
  const inside = rows(left, top, wide, high), beside = rows(left - 55, top - 8, 50, high + 16);
  return [inside.indexOf(Math.max(...inside)) / high, beside.filter((count, y) => count && !beside[y - 1]).length];
})()
"""
"""How far down the first chart its line of dashes lies, as a share of its height, and how many labels stand beside."""


def test_shares_stand_on_a_scale_of_nines(tab: Page, url: str) -> None:
    """What is asked, 99 %, lies half-way between none and 99.99 %, as in the report; six labels stand beside."""
    opened(tab, url)
    assert tab.run("devicePixelRatio") == 1
    assert tab.run(BLACK) == [pytest.approx(0.5, abs=0.03), 6]


def test_lanes_have_the_numbers_of_their_requests(tab: Page, url: str) -> None:
    """As many as have room, one every 14 pixels at most; each stands beside its own lane."""
    opened(tab, url)
    found = (
        "const of = (n) => window.batchsim.lanes({ id: [...Array(n).keys()].map((k) => 7 * k), lane: [] }, [], null,"
        " null, null); return [10, 40, 320].map((n) => of(n).numbered.map(of(n).name))"
    )
    ten, forty, many = tab.run(f"(() => {{ {found} }})()")
    assert ten == [str(7 * k) for k in range(10)] and forty == [str(7 * k) for k in range(40)]
    assert many == [str(28 * k) for k in range(80)]


def test_a_line_beneath_another_is_wide(tab: Page, url: str, page_data: PageData) -> None:
    """Where half of two or more values of both are the same within 1 %; above the charts stands why not more."""
    opened(tab, url)
    lines = [[1, 2, None, 4], [1, 2.5, 3, None], [1.005, 2.51, 9, 9]]
    assert tab.run(f"window.batchsim.depths({json.dumps(lines)})") == [1, 1, 0]
    assert tab.run("window.batchsim.depths([[1, null, 1], [null, 2, 1]])") == [0, 0]
    assert text(tab, "reasons") == " ".join(page_data.curves()["decision"][1:])


def test_the_browser_blocks_nothing_and_fetches_nothing_from_elsewhere(tab: Page, url: str) -> None:
    """Nothing that the page does is against its own policy, and every request goes to its server."""
    noted = (
        "window.blocked = []; addEventListener('securitypolicyviolation', (e) => blocked.push(e.violatedDirective));"
    )
    added = tab.call("Page.addScriptToEvaluateOnNewDocument", source=noted)["identifier"]
    opened(tab, url)
    tab.click("document.querySelector('#slowest button')")
    tab.until("document.getElementById('sentence').textContent && document.querySelector('#lanes canvas')")
    tab.call("Page.removeScriptToEvaluateOnNewDocument", identifier=added)
    assert tab.run("blocked") == []
    fetched = tab.run("performance.getEntriesByType('resource').map((each) => each.name)")
    assert len(fetched) > 8 and all(name.startswith(url) for name in fetched)


def test_a_window_in_which_nobody_was_sent_says_so(tab: Page, url: str) -> None:
    """No empty chart stands there; the whole run brings it back."""
    opened(tab, url)
    tab.click("document.getElementById('one')")
    tab.until("/^(No request|None of)/.test(document.getElementById('counted').textContent)")
    assert tab.run("document.querySelector('#requests canvas') === null && !document.querySelector('#slowest button')")
    tab.until("document.querySelector('#lanes canvas')")
    assert tab.run("document.querySelector('#lanes .u-over').clientHeight") >= 24
    tab.click("document.getElementById('whole')")
    tab.until("document.querySelector('#requests canvas') && document.querySelector('#slowest button')")


def test_times_of_one_step_late_in_a_run_are_told_apart(tab: Page, url: str) -> None:
    """Its two ends, which differ in milliseconds after seconds."""
    opened(tab, url)
    tab.click("document.getElementById('one')")
    tab.until("/: one step$/.test(document.getElementById('window').textContent)")
    start, _, end = text(tab, "window").partition(":")[0].partition(" to ")
    assert start.endswith(" s") and end.endswith(" s") and 0.005 < float(end[:-2]) - float(start[:-2]) < 0.1


def test_a_dark_page_is_printed_light_with_two_charts_a_row(tab: Page, url: str) -> None:
    """What is folded is open then; afterwards the screen has its own again."""
    opened(tab, url, dark=True)
    tab.until("document.querySelector('#lanes canvas')")
    seen = (
        "[getComputedStyle(document.body).backgroundColor, document.querySelector('#timeline canvas').width,"
        " document.querySelector('#lanes canvas').width]"
    )
    on_screen = tab.run(seen)
    tab.run("dispatchEvent(new Event('beforeprint'))")
    tab.call("Emulation.setEmulatedMedia", media="print")
    assert tab.run(seen) == ["rgb(255, 255, 255)", 330, 680]
    assert tab.run("[...document.querySelectorAll('details')].every((each) => each.open)")
    assert tab.run("getComputedStyle(document.getElementById('change')).display") == "none"
    tab.call("Emulation.setEmulatedMedia", media="", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    tab.run("dispatchEvent(new Event('afterprint'))")
    assert on_screen[0] == "rgb(22, 24, 27)" and tab.run(seen) == on_screen


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("dark", [False, True])
def test_no_width_makes_the_page_scroll_sideways(tab: Page, url: str, width: int, dark: bool) -> None:
    """Nor does a theme leave text on its own colour."""
    opened(tab, url, width, dark=dark)
    tab.click("document.querySelector('#slowest button')")
    tab.until("document.getElementById('sentence').textContent")
    assert tab.run("document.documentElement.scrollWidth <= innerWidth")
    ink, back = (tab.run(f"getComputedStyle(document.body).{name}") for name in ("color", "backgroundColor"))
    assert ink == ("rgb(232, 232, 232)" if dark else "rgb(28, 28, 28)") and back != ink
