"""What tests' own HTTP servers answer with: one whole body, and no line on stderr."""

from http.server import BaseHTTPRequestHandler


class PlainHandler(BaseHTTPRequestHandler):
    """For a server of the standard library; what it answers is its subclass's affair."""

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.send_header("retry-after", "0")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Quiet."""
