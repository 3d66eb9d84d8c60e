"""The report and the live page in a real browser: Debian's Chromium, headless. Skipped where there is none.

A probe that is put into the page toggles a series, changes the theme and writes down what it saw; Chromium prints the
page as it then stands. On the live page it waits until there is news and the page has loaded anew.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from motley.report.material import gather

pytest.importorskip("plotly")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")

LISTEN = """
const told = { errors: [], violations: [] };
window.addEventListener("error", (event) => told.errors.push(event.message));
window.addEventListener("unhandledrejection", (event) => told.errors.push(String(event.reason)));
document.addEventListener("securitypolicyviolation", (event) => told.violations.push(event.blockedURI));
const loud = console.error;
console.error = (...words) => { told.errors.push(words.join(" ")); loud(...words); };
const later = (test, then, tries = 1000) =>
  test() || !tries ? then() : setTimeout(() => later(test, then, tries - 1), 50);
const tell = () => {
  told.requests = performance.getEntriesByType("resource").map((entry) => entry.name);
  document.body.dataset.told = JSON.stringify(told);
};
"""
TOGGLE = """
window.addEventListener("load", () => {
  const first = document.querySelector(".plot");
  const lines = () => first.querySelectorAll(".scatterlayer .js-line").length;
  const drawn = () => [...document.querySelectorAll(".plot")].filter((plot) => plot.data).length;
  later(() => lines() && drawn() >= 2, () => {
    told.drawn = drawn();
    told.before = lines();
    document.querySelector("#series input").click();
    later(() => lines() < told.before, () => {
      told.after = lines();
      const back = () => getComputedStyle(document.body).backgroundColor;
      told.back = [back()];
      document.getElementById("theme").click();
      told.back.push(back());
      told.wide = document.documentElement.scrollWidth - innerWidth;
      tell();
    });
  });
});
"""
WATCH = """
window.addEventListener("load", () => {
  const first = document.querySelector(".plot");
  later(() => first.data && first.querySelector(".js-line"), () => {
    const seen = JSON.parse(sessionStorage.seen ?? "[]");
    seen.push({ rounds: [...first.data.at(-1).x], errors: told.errors });
    sessionStorage.seen = JSON.stringify(seen);
    told.seen = seen;
    if (seen.length > 1) tell();
  });
});
"""


def probed(page: str, probe: str) -> str:
    """Return a page with a probe in it."""
    return page.replace("</head>", f"<script>{LISTEN}{probe}</script></head>")


def visit(address: str, folder: Path, width: int = 1200) -> dict[str, Any]:
    """Open an address and return what the probe in its page wrote down."""
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    command += [f"--window-size={width},2000", "--virtual-time-budget=120000", "--dump-dom", address]
    dump = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    found = re.search(r'data-told="([^"]*)"', dump)
    assert found, dump[-2000:]
    return json.loads(unescape(found[1]))


@pytest.mark.parametrize("width", [1200, 500])
def test_curves_toggles_and_themes(study: Path, tmp_path: Path, width: int) -> None:
    from motley.report.page import render

    file = tmp_path / "page.html"
    file.write_text(probed(render(gather([study]), "a study"), TOGGLE))
    told = visit(file.as_uri(), tmp_path, width)
    assert told["errors"] == []
    assert told["violations"] == []
    assert [request for request in told["requests"] if not request.startswith("data:")] == []
    assert told["drawn"] >= 2
    assert 0 < told["after"] < told["before"]
    assert len(set(told["back"])) == 2
    assert told["wide"] <= 0


def test_the_live_page_shows_a_new_round_by_itself(
    runs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the page asks for news for the second time, round 3 has just been written."""
    from motley.report import server as live

    folder = tmp_path / "run"
    shutil.copytree(runs[0], folder)
    *before, last = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(before))
    render, state, asked = live.render, live.state, []

    def news(path: Path) -> str:
        asked.append(path)
        if len(asked) == 2:
            with (path / "metrics.jsonl").open("a") as file:
                file.write(last)
        return state(path)

    monkeypatch.setattr(live, "state", news)
    monkeypatch.setattr(live, "render", lambda *given, **more: probed(render(*given, **more), WATCH))
    server = live.serve(folder, 0)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        address = f"http://127.0.0.1:{server.server_port}/"
        told = visit(address, tmp_path)
    finally:
        server.shutdown()
        server.server_close()
    assert [load["rounds"] for load in told["seen"]] == [[1, 2], [1, 2, 3]]
    assert [load["errors"] for load in told["seen"]] == [[], []] and told["errors"] == told["violations"] == []
    assert f"{address}plotly.js" in told["requests"]
    assert all(request.startswith((address, "data:")) for request in told["requests"])
