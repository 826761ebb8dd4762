"""A small HTTP server on the loopback that stands for somebody's API."""

import contextlib
import http.server
import json
import threading
import urllib.parse


class Answers:
    """What a server answers, and what it was asked."""

    def __init__(self, answer):
        self.answer = answer
        self.address = ""
        self.asked = []
        self.failures = []
        self.silent = False
        self.released = threading.Event()

    def __call__(self, method, url, headers, body):
        """Status, and what is sent as JSON or as text."""
        split = urllib.parse.urlsplit(url)
        query = dict(urllib.parse.parse_qsl(split.query))
        self.asked.append((split.path, query, headers, body))
        if self.silent:
            self.released.wait(30)
        if self.failures:
            status = self.failures.pop(0)
            return status, {"message": "it fails", "error": {"message": "it fails"}}
        return self.answer(method, split.path, query, body)


@contextlib.contextmanager
def served(answers, ssl_context=None):
    """`answers` at a free port of the loopback."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            length = int(self.headers.get("Content-Length", 0))
            body = self.rfile.read(length)
            status, sent = answers(self.command, self.path, self.headers, body)
            is_text = isinstance(sent, str)
            data = sent.encode() if is_text else json.dumps(sent).encode()
            # Who has given up waiting is gone.
            with contextlib.suppress(OSError):
                self.send_response(status)
                kind = "text/plain" if is_text else "application/json"
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(data)))
                self.send_header("Metadata-Flavor", "Google")
                self.end_headers()
                self.wfile.write(data)

        do_POST = do_GET

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if ssl_context is not None:
        server.socket = ssl_context.wrap_socket(server.socket, server_side=True)
    answers.address = f"127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield answers
    finally:
        answers.released.set()
        server.shutdown()
        thread.join()
        server.server_close()
