"""Every page in a real browser, as a phone, a laptop (light and dark) and a printer show it.

Screenshots are left in book/_build/screenshots, a folder per view. A picture proves nothing: charts and formulas are
looked for in the document.
"""

from __future__ import annotations

import base64
import json

import book_pages
import pytest
from axe_core_python.selenium import Axe
from conftest import BOOK

# The rules of axe that a view is checked against: all, or those that the view can change, or none for paper.
VIEWS = {
    "phone": {"width": 375, "height": 812, "media": "", "theme": "light", "rules": ["scrollable-region-focusable"]},
    "laptop": {"width": 1280, "height": 800, "media": "", "theme": "light", "rules": "all"},
    "dark": {"width": 1280, "height": 800, "media": "", "theme": "dark", "rules": ["color-contrast"]},
    # A4 at 96 dots per inch, less margins of 1 cm.
    "print": {"width": 718, "height": 1047, "media": "print", "theme": "light", "rules": None},
}
# Looking at the colour behind every word of these takes a minute each, and other pages show the same markup.
LONG_REFERENCE = {"api/inside.html", "api/results.html", "genindex.html"}
PAGES = [str(path.relative_to(BOOK)) for path in book_pages.html_files(BOOK)]
SCREENSHOTS = BOOK.parent / "screenshots"

READY = """
const done = arguments[arguments.length - 1];
const drawn = () => [...document.querySelectorAll('.fa-chart [role=img]')].every(e => e.querySelector('svg.marks'));
(async () => {
  if (window.MathJax && MathJax.startup) await MathJax.startup.promise;
  for (let i = 0; i < 200 && !(document.readyState === 'complete' && drawn()); i++)
    await new Promise(r => setTimeout(r, 50));
  document.querySelectorAll('img[loading=lazy]').forEach(i => { i.loading = 'eager'; });
  done(true);
})();
"""

# Each returns a list of sentences; none means that all is well.
CHECKS = {
    "chart without marks": """
        const size = e => { const b = e.getBoundingClientRect(); return b.width + b.height; };
        return [...document.querySelectorAll('.fa-chart')].filter(chart => {
          const marks = chart.querySelectorAll('svg.marks .role-mark :is(path, line, text, image)');
          return ![...marks].some(m => size(m) > 0);
        }).map(chart => chart.querySelector('[role=img]').getAttribute('aria-label'));""",
    "chart or picture without text alternative": """
        const charts = [...document.querySelectorAll('.fa-chart [role=img]')].filter(e => !e.ariaLabel);
        const images = [...document.querySelectorAll('article img')].filter(e => !e.alt);
        return [...charts, ...images].map(e => e.outerHTML.slice(0, 120));""",
    "picture not loaded": """
        return [...document.images].filter(i => i.complete && i.naturalWidth === 0).map(i => i.src);""",
    "formula not rendered": """
        return [...document.querySelectorAll('.math')].filter(e =>
          !e.querySelector('mjx-container svg') || e.querySelector('[data-mml-node=merror]')
        ).map(e => e.textContent);""",
    "wider than the screen": """
        const width = document.documentElement.clientWidth;
        if (document.documentElement.scrollWidth <= width && document.body.scrollWidth <= width) return [];
        const wide = [...document.querySelectorAll('main *')].filter(
          e => e.getBoundingClientRect().right > width + 1 && !e.closest('pre, .bd-toc'));
        const found = wide.slice(0, 3).map(e => e.outerHTML.slice(0, 90));
        return [document.documentElement.scrollWidth + ' px: ' + found];""",
    "loaded from another host": """
        return performance.getEntriesByType('resource').map(e => e.name)
          .filter(n => !n.startsWith(location.origin) && !n.startsWith('data:') && !n.startsWith('blob:'));""",
    "raw markup on the page": r"""
        const text = document.querySelector('article')?.innerText ?? '';
        return text.match(/\{(cite|ref|code-cell|doc|math)\}|:::\{|<Figure size|altair\.\w+Chart\(/g) ?? [];""",
}


def show(browser, address: str, page: str, view: dict) -> None:
    """Open `page` as `view` sees it and wait until scripts have drawn everything."""
    command = browser.execute_cdp_cmd
    screen = {"width": view["width"], "height": view["height"], "mobile": view["width"] < 500, "deviceScaleFactor": 1}
    command("Emulation.setDeviceMetricsOverride", screen)
    command("Emulation.setEmulatedMedia", {"media": view["media"]})
    theme = {"source": f"localStorage.mode = localStorage.theme = '{view['theme']}'"}
    script = command("Page.addScriptToEvaluateOnNewDocument", theme)
    browser.get_log("browser")
    browser.get(address + page)
    command("Page.removeScriptToEvaluateOnNewDocument", script)
    browser.execute_async_script(READY)


def keep_screenshot(browser, page: str, name: str) -> None:
    path = SCREENSHOTS / name / (page.removesuffix(".html").replace("/", "-") + ".png")
    path.parent.mkdir(parents=True, exist_ok=True)
    size = browser.execute_cdp_cmd("Page.getLayoutMetrics", {})["cssContentSize"]
    # axe leaves the page scrolled: without the clip the picture would start where it stopped.
    picture = {"captureBeyondViewport": True, "clip": {**size, "x": 0, "y": 0, "scale": 1}}
    shot = browser.execute_cdp_cmd("Page.captureScreenshot", picture)
    path.write_bytes(base64.b64decode(shot["data"]))


def accessibility_problems(browser, page: str, rules: str | list[str] | None) -> list[str]:
    if (page in LONG_REFERENCE and rules == ["color-contrast"]) or not rules:
        return []
    options = {"resultTypes": ["violations"], "rules": {}}
    if rules != "all":
        options["runOnly"] = rules
    elif page in LONG_REFERENCE:
        options["rules"]["color-contrast"] = {"enabled": 0}
    results = Axe().run(browser, options=options)
    return [
        f"{rule['id']} ({rule['impact']}): {node['target']} {node['html'][:150]} {node.get('failureSummary', '')[:200]}"
        for rule in results["violations"]
        if rule["impact"] in ("serious", "critical")
        for node in rule["nodes"][:3]
    ]


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("page", PAGES)
def test_page(browser, address, page, name):
    show(browser, address, page, VIEWS[name])
    problems = [f"console: {entry['message']}" for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    for problem, script in CHECKS.items():
        problems += [f"{problem}: {text}" for text in browser.execute_script(script)]
    problems += accessibility_problems(browser, page, VIEWS[name]["rules"])
    keep_screenshot(browser, page, name)
    assert problems == []


HOVER = """
const chart = document.querySelectorAll('.fa-chart')[arguments[0]];
const marks = [...chart.querySelectorAll('svg.marks .role-mark :is(path, line)')];
const step = Math.max(1, Math.floor(marks.length / 25));
return marks.filter((_, i) => i % step === 0).map(m => {
  m.scrollIntoView({block: 'center'});
  const b = m.getBoundingClientRect();
  return [b.left + b.width / 2, b.top + b.height / 2, scrollY];
});
"""


def has_tooltip(browser, chart: int) -> bool:
    """Whether resting on one of up to 25 marks of the chart opens its tooltip, with some text in it."""
    for x, y, scroll in browser.execute_script(HOVER, chart):
        browser.execute_script("scrollTo({top: arguments[0], behavior: 'instant'})", scroll)
        for shift in (0, 1):
            mouse = {"type": "mouseMoved", "x": x + shift, "y": y + shift}
            browser.execute_cdp_cmd("Input.dispatchMouseEvent", mouse)
        if browser.execute_script("return document.querySelector('#vg-tooltip-element.visible')?.innerText ?? ''"):
            return True
    return False


TURN = """
const s = arguments[0];
if (s.type === 'checkbox') s.click();
else {
  if (s.tagName === 'SELECT') s.selectedIndex = (s.selectedIndex + 1) % s.options.length;
  else s.value = s.value === s.max ? s.min : s.max;
  for (const name of ['input', 'change']) s.dispatchEvent(new Event(name, {bubbles: true}));
}"""
PICTURE = "return document.querySelectorAll('.fa-chart')[arguments[0]].querySelector('svg.marks').outerHTML"
SWITCHES = (
    "return [...document.querySelectorAll('.fa-chart')[arguments[0]].querySelectorAll('.fa-switches ' + arguments[1])]"
)


def switches_redraw(browser, chart: int) -> bool:
    """Whether each select, slider and checkbox of the chart, and one button of each group, changes its picture."""

    def changes(elements, act) -> bool:
        for element in elements:
            before = browser.execute_script(PICTURE, chart)
            act(element)
            browser.execute_async_script("setTimeout(arguments[0], 300)")
            if browser.execute_script(PICTURE, chart) == before:
                return False
        return True

    single = browser.execute_script(SWITCHES, chart, ":is(select, input:not([type=radio]))")
    buttons = browser.execute_script(SWITCHES, chart, "input[type=radio]:not(:checked)")
    return changes(single, lambda s: browser.execute_script(TURN, s)) and changes(
        buttons, lambda b: browser.execute_script("arguments[0].click()", b)
    )


@pytest.mark.parametrize("page", [page for page in PAGES if 'class="fa-chart"' in (BOOK / page).read_text()])
def test_tooltips_and_switches(browser, address, page):
    """Charts whose specification names a tooltip show it; a switch redraws its chart."""
    show(browser, address, page, VIEWS["laptop"])
    specs = browser.execute_script(
        "return [...document.querySelectorAll('.fa-chart')].map(c => c.querySelector('script').textContent)"
    )
    silent = [i for i, spec in enumerate(specs) if '"tooltip"' in spec and not has_tooltip(browser, i)]
    assert silent == [], "charts that show no tooltip"
    unmoved = [i for i in range(len(specs)) if not switches_redraw(browser, i)]
    assert unmoved == [], "charts with a switch that changes nothing"


def test_a_chart_is_seen_without_scripts(browser, address):
    """Without JavaScript the static picture stands where the chart would be."""
    page = next(page for page in PAGES if 'class="fa-chart"' in (BOOK / page).read_text())
    show(browser, address, page, VIEWS["laptop"])
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        browser.get(address + page)
        tree = browser.execute_cdp_cmd("DOM.getDocument", {"depth": 1})
        query = {"nodeId": tree["root"]["nodeId"], "selector": ".fa-chart noscript svg path"}
        marks = browser.execute_cdp_cmd("DOM.querySelectorAll", query)["nodeIds"]
        keep_screenshot(browser, page, "without-scripts")
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
    assert len(marks) > 10


def test_search_finds_a_word(browser, address):
    show(browser, address, "search.html?q=tiles", VIEWS["laptop"])
    count = "return document.querySelectorAll('#search-results li').length"
    browser.execute_async_script("setTimeout(arguments[0], 3000)")
    assert browser.execute_script(count) > 0
    assert json.dumps(browser.get_log("browser")).count("SEVERE") == 0
