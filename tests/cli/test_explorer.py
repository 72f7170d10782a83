"""`flexdilated explorer`: the page from the package, on a port of this machine."""

import _thread
import re
import socket
import struct
import webbrowser
from http.server import ThreadingHTTPServer
from urllib.request import urlopen

import pytest

from flexdilated.cli.explorer import FILES
from tests.commands import invoke, refused


def test_opens_the_page_and_ends_with_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}

    def open_in_browser(address: str) -> None:
        page, _, state = address.partition("#")
        for name in ("", "page.js"):
            with urlopen(page + name) as answer:
                found[name] = answer.read()
        found["state"] = state
        _thread.interrupt_main()

    monkeypatch.setattr(webbrowser, "open", open_in_browser)
    code, out, err = invoke("explorer", "#w=8&r=1")
    assert (code, err) == (0, "Ctrl-C ends the server.\n\n")
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/#w=8&r=1\n", out)
    assert found == {"": (FILES / "index.html").read_bytes(), "page.js": (FILES / "page.js").read_bytes(), "state": "w=8&r=1"}


def test_without_a_browser_prints_the_address_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ThreadingHTTPServer, "serve_forever", end)
    monkeypatch.setattr(webbrowser, "open", pytest.fail)
    code, out, _ = invoke("explorer", "--no-browser")
    assert code == 0
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\n", out)


def test_a_connection_that_the_browser_drops_is_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def drop(address: str) -> None:
        with socket.create_connection(("127.0.0.1", int(re.findall(r":(\d+)/", address)[0]))) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset when it closes
        urlopen(address).close()  # after which the server has seen the reset
        _thread.interrupt_main()

    monkeypatch.setattr(webbrowser, "open", drop)
    code, _, err = invoke("explorer")
    assert (code, err) == (0, "Ctrl-C ends the server.\n\n")


def test_refuses_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        message = rf"--port must be free on 127\.0\.0\.1, got {port} \(Address already in use\); 0 takes a free port\n"
        assert re.fullmatch(message, refused("explorer", "--port", port, "--no-browser"))


def test_every_file_that_the_page_names_is_beside_it() -> None:
    named = re.findall(r'(?:src|href)="(?!#|data:)([^"]+)"', (FILES / "index.html").read_text())
    assert {"page.js", "explorer.css"} < {*named}
    assert not [name for name in named if not (FILES / name).is_file()]
