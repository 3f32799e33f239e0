"""The page in a real browser: it renders, asks the network for nothing, runs nothing, and fits a desk and a phone."""

from __future__ import annotations

import copy
import html
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from draftstill.evaluate.html import page
from draftstill.evaluate.sentences import headline

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium is installed: the page is not seen in a real browser")
HERE = Path(__file__).parent
SAMPLES = [json.loads((HERE / name).read_text()) for name in ("sample_score_2.json", "sample_score.json")]


@pytest.fixture
def caller() -> Iterator[tuple[str, list[str]]]:
    """An address that hostile text calls, and what was asked for there."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    server.server_close()
    thread.join()


def browse(path: Path, tmp_path: Path) -> tuple[str, str]:
    """The DOM after loading, and what the console said."""
    done = subprocess.run(
        [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-component-update",
         f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr", "--virtual-time-budget=4000", "--dump-dom", path.as_uri()],
        capture_output=True, text=True, timeout=90, check=True,
    )  # fmt: skip
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return done.stdout, "\n".join(console)


def hostile(score: dict[str, Any], url: str) -> dict[str, Any]:
    """Every text of the score tries to break out and to call."""
    text = f"</script></style></title><script>document.title='taken';fetch('{url}/script')</script><img src=\"{url}/img\" onerror=\"document.title='taken'\">" \
           f"<link rel=stylesheet href={url}/css><iframe src={url}/frame></iframe>\"'>"  # fmt: skip
    score = copy.deepcopy(score)
    for section in ("target", "draft", "corpus"):
        for key, value in score[section].items():
            if isinstance(value, str):
                score[section][key] = text
    for example in score["examples"]:
        example.update(
            prompt=text, prompt_id=text, pieces=[{"text": text, "kind": kind} for kind in ("accepted", "corrected", "bonus", "plain")]
        )
    for a in score["arms"]:
        for row in a["per_prompt"]:
            row["prompt"] = text
    for found in score.get("diagnosis", {}).values():
        for worst in found["worst"]:
            worst.update(prompt=text, pieces=[{"text": text, "kind": "corrected", "alpha": 0.1}])
    score["conditions"]["command"] = text
    return score


def test_hostile_text_neither_runs_nor_calls(tmp_path: Path, caller: tuple[str, list[str]]) -> None:
    url, asked = caller
    path = tmp_path / "report.html"
    path.write_text(page(hostile(SAMPLES[0], url)), encoding="utf-8", errors="replace")
    dom, console = browse(path, tmp_path)
    assert asked == [] and console == ""
    title = re.search(r"<title>(.*?)</title>", dom, re.S)
    assert title and title[1] != "taken" and "draft for" in title[1]
    assert "<img" not in dom and "<iframe" not in dom and "<link" not in dom and dom.count("<script") == 1


def test_the_same_text_unescaped_would_be_heard(tmp_path: Path, caller: tuple[str, list[str]]) -> None:
    """The test above can fail: without escape and policy the browser calls, and says that it is blocked where a policy stands."""
    url, asked = caller
    path = tmp_path / "open.html"
    path.write_text(f'<title>x</title><img src="{url}/img">')
    browse(path, tmp_path)
    assert asked == ["/img"]
    asked.clear()
    closed = page(SAMPLES[0]).replace("<h1>", f'<img src="{url}/img"><script>document.title="taken"</script><h1>')
    path.write_text(closed, encoding="utf-8", errors="replace")
    dom, console = browse(path, tmp_path)
    assert asked == [] and "Content Security Policy" in console and "<title>taken" not in dom


_HARNESS = """<!doctype html><meta charset=utf-8><body><script>
const pages = PAGES, found = [];
let left = 0;
for (const [name, text] of pages) for (const width of [420, 1100]) {
  left++;
  const frame = document.createElement('iframe');
  frame.style.cssText = `width:${width}px;height:900px;border:0`;
  frame.onload = () => {
    const d = frame.contentDocument, root = d.documentElement, h1 = d.querySelector('h1').getBoundingClientRect();
    const wide = [...d.querySelectorAll('body *')].filter(e => !e.closest('.scroll,svg,details') && e.getBoundingClientRect().right > width + 1);
    const clipped = [...d.querySelectorAll('.scroll')].filter(e => !e.closest('details') && e.scrollWidth > e.clientWidth + 1);
    found.push({name, width, scroll: root.scrollWidth, h1: h1.bottom, wide: wide.map(e => e.tagName + '.' + e.className),
                tables: clipped.map(e => e.textContent.slice(0, 40)), svg: d.querySelectorAll('svg').length, title: d.title,
                text: d.querySelector('h1').textContent});
    if (!--left) { document.body.textContent = JSON.stringify(found); document.body.id = 'done'; }
  };
  frame.srcdoc = text;
  document.body.append(frame);
}
</script>"""


def test_verdict_at_first_sight_and_nothing_wider_than_the_screen(tmp_path: Path) -> None:
    pages = [[f"schema {s['schema']}", page(s)] for s in SAMPLES]
    path = tmp_path / "harness.html"
    path.write_text(_HARNESS.replace("PAGES", json.dumps(pages).replace("<", "\\u003c")), encoding="utf-8", errors="replace")
    dom, _ = browse(path, tmp_path)
    found = json.loads(html.unescape(re.search(r'<body id="done">(.*)</body>', dom, re.S)[1]))  # type: ignore[index]
    assert len(found) == 4
    for seen in found:
        score = SAMPLES[[s["schema"] for s in SAMPLES].index(int(seen["name"][-1]))]
        assert seen["scroll"] <= seen["width"] and seen["wide"] == [], seen
        assert seen["text"] == headline(score) and seen["h1"] < 400, "the verdict stands on the first screen"
        assert seen["svg"] > 10 and score["target"]["name"] in seen["title"]
        if seen["width"] == 1100:
            assert seen["tables"] == [], "no table has to be moved on a desk"
