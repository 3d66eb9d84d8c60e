"""The report in a real browser: Debian's Chromium, headless. Skipped where there is none.

A probe that is put into the page toggles a series, changes the theme and writes down what it saw; Chromium prints the
page as it then stands.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from motley.report.material import gather

pytest.importorskip("plotly")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")

PROBE = """
<script>
const told = { errors: [], violations: [] };
window.addEventListener("error", (event) => told.errors.push(event.message));
window.addEventListener("unhandledrejection", (event) => told.errors.push(String(event.reason)));
document.addEventListener("securitypolicyviolation", (event) => told.violations.push(event.blockedURI));
const loud = console.error;
console.error = (...words) => { told.errors.push(words.join(" ")); loud(...words); };
const later = (test, then, tries = 100) =>
  test() || !tries ? then() : setTimeout(() => later(test, then, tries - 1), 50);
window.addEventListener("load", () => {
  const first = document.querySelector("figure");
  const lines = () => first.querySelectorAll(".scatterlayer .js-line").length;
  later(lines, () => {
    told.drawn = [...document.querySelectorAll("figure")].filter((figure) => figure.data).length;
    told.before = lines();
    document.querySelector("#series input").click();
    later(() => lines() < told.before, () => {
      told.after = lines();
      const back = () => getComputedStyle(document.body).backgroundColor;
      told.back = [back()];
      document.getElementById("theme").click();
      told.back.push(back());
      told.wide = document.documentElement.scrollWidth - innerWidth;
      told.requests = performance.getEntriesByType("resource").map((entry) => entry.name);
      document.body.dataset.told = JSON.stringify(told);
    });
  });
});
</script>
"""


def visit(page: str, folder: Path, width: int = 1200) -> dict[str, Any]:
    """Open a page with the probe in it and return what the probe wrote down."""
    file = folder / "page.html"
    file.write_text(page.replace("</head>", PROBE + "</head>"))
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    command += [f"--window-size={width},2000", "--virtual-time-budget=20000", "--dump-dom", file.as_uri()]
    dump = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    found = re.search(r'data-told="([^"]*)"', dump)
    assert found, dump[-2000:]
    return json.loads(unescape(found[1]))


@pytest.mark.parametrize("width", [1200, 500])
def test_curves_toggles_and_themes(study: Path, tmp_path: Path, width: int) -> None:
    from motley.report.page import render

    told = visit(render(gather([study]), "a study"), tmp_path, width)
    assert told["errors"] == []
    assert told["violations"] == []
    assert [request for request in told["requests"] if not request.startswith("data:")] == []
    assert told["drawn"] >= 2
    assert 0 < told["after"] < told["before"]
    assert len(set(told["back"])) == 2
    assert told["wide"] <= 0
