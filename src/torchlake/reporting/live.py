"""A run's page while it trains: written again every few seconds, and shown on 127.0.0.1.

Readers always find a whole page, because it is replaced in one step. The server has the pages of one run and nothing
else, answers requests of this machine only, and asks browsers to load the page again, so the page needs no script.
"""

import logging
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from torchlake.errors import PortTaken
from torchlake.reporting.report import report
from torchlake.runs.folder import RESULT
from torchlake.tables.record import local_output

log = logging.getLogger(__name__)

EVERY_S = 10.0
PAGES = {
    "/": ("report.html", "text/html; charset=utf-8"),
    "/report.html": ("report.html", "text/html; charset=utf-8"),
    "/report.json": ("report.json", "application/json"),
    "/eval/eval.html": ("eval/eval.html", "text/html; charset=utf-8"),
}
PAGE_OF_FOLD = re.compile(r"/(fold_\d+/eval/eval\.html)")
HOSTS = ("127.0.0.1", "localhost")


def watch(run: str | Path, *, every_s: float = EVERY_S, over: threading.Event | None = None) -> Path:
    """Write the report of a run again and again until it is complete, or `over` is set; return the path of the page.

    Raises the errors of `report`.
    """
    over, folder = over or threading.Event(), local_output(run)
    while True:
        complete = (folder / RESULT).is_file()  # before the page is written, so that the last page has everything
        page = report(folder)
        if complete or over.wait(every_s):
            return page


@contextmanager
def served(run: str | Path, port: int = 0) -> Iterator[str]:
    """Serve the pages of a run on 127.0.0.1 while the block runs; yield their address. Port 0: any that is free.

    Raises PortTaken.
    """
    folder = local_output(run)

    class Pages(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            fold = PAGE_OF_FOLD.fullmatch(path)
            name, kind = (fold[1], PAGES["/"][1]) if fold else PAGES.get(path, ("", ""))
            host = (self.headers.get("Host") or "").rpartition(":")[0] or self.headers.get("Host")
            if host not in HOSTS:  # a name of another site that leads here
                self.send_error(HTTPStatus.FORBIDDEN)
                return
            try:
                content = (folder / name).read_bytes() if name else None
            except OSError:
                content = None
            if content is None:
                self.send_error(HTTPStatus.NOT_FOUND)
                return
            self.send_response(HTTPStatus.OK)
            headers = {"Content-Type": kind, "Content-Length": str(len(content)), "Cache-Control": "no-store"}
            refresh = {} if (folder / RESULT).is_file() else {"Refresh": f"{EVERY_S:.0f}"}
            for header, value in {**headers, **refresh}.items():
                self.send_header(header, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            log.debug(format, *args)

    try:
        made = ThreadingHTTPServer(("127.0.0.1", port), Pages)
    except OSError as error:
        raise PortTaken(
            f"port {port} of 127.0.0.1 is taken ({error.strerror}); choose another one with --port"
        ) from None
    with made as server:
        thread = threading.Thread(target=server.serve_forever, name="report", daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()
