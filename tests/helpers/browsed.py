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

function wide(root, width) {
  const article = root.querySelector(".bd-article") || root;
  const parts = article.querySelectorAll("p code, li code, h1, h2, h3, dt, p > img");
  return [...parts].filter(part => part.offsetParent && !part.closest("table, pre")
    && part.getBoundingClientRect().right > width + 1).map(part => part.textContent);
}

// A page that has been opened at the first width is made as wide as the others, as a
// phone is turned.
async function look({page, widths, theme}) {
  localStorage.setItem("mode", theme);
  localStorage.setItem("theme", theme);
  [frame.width, frame.height] = [widths[0], 900];
  await new Promise(done => { frame.onload = done; frame.src = page; });
  const root = frame.contentDocument.documentElement;
  for (const image of root.querySelectorAll("img")) {
    image.loading = "eager";
    await image.decode();
  }
  for (let turn = 0; page.includes("?q=") && turn < 50; turn += 1) {
    // Written when the last result stands there, with what its page says.
    const summary = root.querySelector("#search-results .search-summary");
    if (/found/.test(summary?.textContent)) break;
    await new Promise(done => setTimeout(done, 100));
  }
  for (const width of widths) {
    frame.width = width;
    await new Promise(done => setTimeout(done, 100));  // for `resize`
    found.push({page, width, theme, ...shown(root, width)});
  }
}

// What a page is like at one width.
function shown(root, width) {
  return {shown: root.dataset.theme,
    inner: frame.contentWindow.innerWidth,
    results: [...root.querySelectorAll("#search-results li > a")].map(
      a => a.textContent),
    complaints: [...frame.contentWindow.complaints],
    scrolls: root.scrollWidth, wide: wide(root, width)};
}

const looked = (each, width) => found.some(one => one.page == each.page
  && one.theme == each.theme && one.width == width);

(async () => {
  for (const each of todo) {
    try { await look(each); }
    catch (error) {
      const {page, theme} = each;
      found.push(...each.widths.filter(width => !looked(each, width)).map(
        width => ({page, width, theme, failed: "" + error})));
    }
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
        {"page": f"/{page}", "widths": widths, "theme": theme}
        for page in pages
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
