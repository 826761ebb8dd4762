"""Pages of a folder, each opened in headless Chromium in several widths and themes.

One page of this server, `/browse`, opens the others in a frame, one after the other,
and prints what it found; `--dump-dom` hands that over. No driver is needed.
"""

import contextlib
import functools
import html
import http.server
import json
import os
import re
import shutil
import signal
import subprocess
import threading
from pathlib import Path

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)

# Before any script of a page: what goes wrong in it, and its theme.
FIRST = """<script>
window.complaints = [];
addEventListener("error", event => complaints.push(
  event.message || "cannot load " + (event.target.src || event.target.href)), true);
addEventListener("unhandledrejection", event => complaints.push("" + event.reason));
console.error = (...words) => complaints.push(words.join(" "));
</script>"""

BROWSE = """<!doctype html><body style="margin:0"><iframe id="frame"></iframe>
<pre id="found"></pre><script>
const todo = TODO, found = [];
const frame = document.getElementById("frame");
const luminance = rgb => [...rgb].slice(0, 3).map(each => each / 255)
  .map(each => each <= 0.04045 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4)
  .reduce((sum, each, index) => sum + each * [0.2126, 0.7152, 0.0722][index], 0);
function contrast(one, other) {
  const [low, high] = [luminance(one), luminance(other)].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
}
const colour = text => text.match(/[\\d.]+/g).map(Number);

// How a picture looks on its page: whether its border is empty, and which part of what
// is drawn can be told from the page.
function looks(image, page) {
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [image.naturalWidth, image.naturalHeight];
  const context = canvas.getContext("2d");
  context.drawImage(image, 0, 0);
  const pixels = context.getImageData(0, 0, canvas.width, canvas.height).data;
  let drawn = 0, seen = 0;
  for (let at = 0; at < pixels.length; at += 4) {
    if (pixels[at + 3] < 200) continue;
    drawn += 1;
    seen += contrast(pixels.slice(at, at + 3), page) >= 2 ? 1 : 0;
  }
  const corners = [3, 4 * canvas.width - 1, pixels.length - 1];
  return {empty_corners: corners.every(at => pixels[at] < 30), seen: seen / drawn};
}

function wide(root, width) {
  const article = root.querySelector(".bd-article") || root;
  const parts = article.querySelectorAll("p code, li code, h1, h2, h3, dt, p > img");
  return [...parts].filter(part => part.offsetParent && !part.closest("table, pre")
    && part.getBoundingClientRect().right > width + 1).map(part => part.textContent);
}

async function look({page, width, theme}) {
  localStorage.setItem("mode", theme);
  localStorage.setItem("theme", theme);
  [frame.width, frame.height] = [width, 900];
  await new Promise(done => { frame.onload = done; frame.src = page; });
  const root = frame.contentDocument.documentElement;
  for (const image of root.querySelectorAll("img")) {
    image.loading = "eager";
    await image.decode();
  }
  const back = colour(frame.contentWindow.getComputedStyle(
    frame.contentDocument.body).backgroundColor);
  for (let turn = 0; page.includes("?q=") && turn < 50; turn += 1) {
    if (root.querySelector("#search-results li")) break;
    await new Promise(done => setTimeout(done, 100));
  }
  const texts = [...root.querySelectorAll(".cell_output svg text")].map(text =>
    [text.textContent,
     contrast(colour(frame.contentWindow.getComputedStyle(text).fill), back)]);
  found.push({page, width, theme, shown: root.dataset.theme, back,
    title: frame.contentDocument.title,
    results: [...root.querySelectorAll("#search-results li > a")].map(
      a => a.textContent),
    complaints: frame.contentWindow.complaints,
    scrolls: root.scrollWidth, wide: wide(root, width), texts,
    pictures: [...root.querySelectorAll(".cell_output img")].map(i => looks(i, back))});
}

(async () => {
  for (const each of todo) {
    try { await look(each); }
    catch (error) { found.push({...each, failed: "" + error}); }
  }
  document.getElementById("found").textContent = JSON.stringify(found);
  document.title = "done";
})();
</script>"""


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves a folder, with `FIRST` in each page, and `/browse`."""

    todo = []

    def do_GET(self):
        path = self.path.partition("?")[0]
        if path == "/browse":
            self.answer(BROWSE.replace("TODO", json.dumps(self.todo)))
        elif path.endswith(".html"):
            text = Path(self.translate_path(path)).read_text(encoding="utf-8")
            self.answer(text.replace("<head>", "<head>" + FIRST, 1))
        else:
            super().do_GET()

    def answer(self, text):
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *words):
        pass


def browse(folder, pages, widths, profile):
    """What each page was like: a dict for each page, width and theme."""
    todo = [
        {"page": f"/{page}", "width": width, "theme": theme}
        for page in pages
        for width in widths
        for theme in ("light", "dark")
    ]
    # Some at a time: one frame for all takes minutes on a busy machine.
    parts = [todo[start : start + 24] for start in range(0, len(todo), 24)]
    return [found for part in parts for found in _browsed(folder, part, profile)]


def _browsed(folder, todo, profile):
    handler = type("Of", (Handler,), {"todo": todo})
    serve = functools.partial(handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            dom = _dumped(server.server_address[1], profile)
        finally:
            server.shutdown()
            thread.join()
    return json.loads(html.unescape(re.search(r'id="found">(.*?)</pre>', dom, re.S)[1]))


def _dumped(port, profile):
    """The page `/browse` when it is done; virtual time waits for what it loads."""
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu"]
    command += [f"--user-data-dir={profile}", "--virtual-time-budget=600000"]
    command += ["--window-size=1400,1000", "--dump-dom"]
    command.append(f"http://127.0.0.1:{port}/browse")
    # A group of processes of its own: Chromium's helpers outlive it otherwise.
    browser = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        dom, messages = browser.communicate(timeout=300)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(browser.pid, signal.SIGKILL)
        browser.wait()
    assert 'id="found">[' in dom, messages[-3000:]
    return dom
