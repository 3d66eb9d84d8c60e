"""The report and the live page in a real browser, headless Chromium, if it is installed.

A script that is added to the page (the probe) toggles a series, changes the theme and stores its
observations in the page, which Chromium prints at the end. On the live page, the probe waits until
the page has reloaded itself after a change.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
import threading
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from motley.report.report_data import gather

pytest.importorskip("plotly")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")

LISTEN = """
const told = { errors: [], violations: [] };
window.addEventListener("error", (event) => told.errors.push(event.message));
window.addEventListener("unhandledrejection", (event) => told.errors.push(String(event.reason)));
document.addEventListener("securitypolicyviolation", (event) => {
  told.violations.push(event.blockedURI);
});
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


def allowed(policy: str, probe: str) -> str:
    """Return a Content-Security-Policy that also allows the probe."""
    digest = base64.b64encode(hashlib.sha256(f"{LISTEN}{probe}".encode()).digest()).decode()
    return policy.replace("script-src ", f"script-src 'sha256-{digest}' ")


def probed(page: str, probe: str) -> str:
    """Return a page with the probe added."""
    page = page.replace("</head>", f"<script>{LISTEN}{probe}</script></head>")
    return allowed(page, probe)


def visit(address: str, folder: Path, width: int = 1200) -> dict[str, Any]:
    """Open an address and return the observations of the probe in its page."""
    command = [
        str(CHROMIUM),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={folder / 'profile'}",
        f"--window-size={width},2000",
        "--virtual-time-budget=120000",
        "--dump-dom",
        address,
    ]
    dump = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    match = re.search(r'data-told="([^"]*)"', dump)
    assert match, dump[-2000:]
    return json.loads(unescape(match[1]))


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
    """Round 3 is written just before the page asks for changes for the second time."""
    from motley.report import server as live

    folder = tmp_path / "run"
    shutil.copytree(runs[0], folder)
    *before, last = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(before))
    render, state = live.render, live.state
    requests = 0

    def state_with_new_round(path: Path) -> str:
        nonlocal requests
        requests += 1
        if requests == 2:
            with (path / "metrics.jsonl").open("a") as file:
                file.write(last)
        return state(path)

    def render_with_probe(*arguments: Any, **options: Any) -> str:
        return probed(render(*arguments, **options), WATCH)

    monkeypatch.setattr(live, "state", state_with_new_round)
    policy = allowed(live.content_policy(live=True), WATCH)
    monkeypatch.setattr(live, "render", render_with_probe)
    monkeypatch.setattr(live, "content_policy", lambda live: policy)
    server = live.serve(folder, 0)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        address = f"http://127.0.0.1:{server.server_port}/"
        told = visit(address, tmp_path)
    finally:
        server.shutdown()
        server.server_close()
    assert [load["rounds"] for load in told["seen"]] == [[1, 2], [1, 2, 3]]
    assert [load["errors"] for load in told["seen"]] == [[], []]
    assert told["errors"] == told["violations"] == []
    assert f"{address}plotly.js" in told["requests"]
    assert all(request.startswith((address, "data:")) for request in told["requests"])
