"""Letters on their way: each site once, late and lost ones named, a job that is restarted is asked again."""

import contextlib
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from nestfed.sites.link import (
    GRACE,
    JobLink,
    LinkError,
    LoopbackLink,
    LostSite,
    fetch_letters,
    listen_at,
    receive_bytes,
    send_bytes,
)


def soon():
    return time.monotonic() + 30


@pytest.fixture
def folder():
    with tempfile.TemporaryDirectory() as name:  # pytest's own folders have paths too long for a socket
        yield Path(name)


def serve(path: Path, answer):
    """A worker that answers each letter by a function."""
    listener = listen_at(path)

    def run():
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):  # who asked may not wait for the answer
                reply = answer(receive_bytes(connection, soon()))
                if reply is not None:
                    send_bytes(connection, reply, soon())

    threading.Thread(target=run, daemon=True).start()
    return listener


def test_loopback_names_who_is_late_or_gone(folder):
    release = threading.Event()
    open_ones = [
        serve(folder / "a", lambda letter: letter[::-1]),
        serve(folder / "b", lambda letter: release.wait(30) and b""),
        serve(folder / "c", lambda letter: None),
    ]
    link = LoopbackLink({name: folder / name for name in "abcd"})
    answers = dict(link.ask({name: b"letter" for name in "abcd"}, 0.3))
    release.set()
    assert answers["a"] == b"rettel"
    lost = {name: answer.reason for name, answer in answers.items() if isinstance(answer, LostSite)}
    assert set(lost) == {"b", "c", "d"}
    assert "nobody answers" in lost["d"] and "closed" in lost["c"]
    for one in open_ones:
        one.close()


def test_only_the_owner_may_speak_to_a_worker(folder):
    listener = listen_at(folder / "worker")
    assert (folder / "worker").stat().st_mode & 0o777 == 0o600
    listener.close()
    with pytest.raises(LinkError, match="shorter folder"):
        listen_at(folder / ("long" * 40))


def test_announced_sizes_are_bounded():
    here, there = socket.socketpair()
    with here, there, pytest.raises(LinkError, match="at most"):
        here.sendall((1 << 60).to_bytes(8, "big"))
        receive_bytes(there, soon())


def run_job(path, carry):
    job = threading.Thread(target=fetch_letters, args=(path, carry), daemon=True)
    job.start()
    return job


def test_job_fetches_letters_and_ends_with_the_coordinator(folder):
    link = JobLink(folder / "letters")
    job = run_job(link.path, lambda letters, timeout: iter([(site, text + b"!") for site, text in letters.items()]))
    for number in range(3):
        letters = {"a": b"%d" % number, "b": b"x" * 3_000_000}
        assert dict(link.ask(letters, 30)) == {site: text + b"!" for site, text in letters.items()}
    link.close()
    job.join(30)
    assert not job.is_alive()


def test_restarted_job_is_asked_for_what_is_missing(folder):
    link, asked = JobLink(folder / "letters"), []

    def breaks(letters, timeout):
        asked.append(sorted(letters))
        yield "a", b"of the first job"
        raise ConnectionError("the job is killed")

    def works(letters, timeout):
        asked.append(sorted(letters))
        return ((site, b"of the second job") for site in letters)

    first = run_job(link.path, breaks)
    answers = link.ask({"a": b"", "b": b""}, 30)
    assert next(answers) == ("a", b"of the first job")
    first.join(30)
    run_job(link.path, works)
    assert list(answers) == [("b", b"of the second job")]
    assert asked == [["a", "b"], ["b"]]
    link.close()


def test_no_job_is_a_lost_site_in_time(folder):
    link = JobLink(folder / "letters")
    began = time.monotonic()
    assert dict(link.ask({"a": b""}, 0.1)) == {"a": LostSite("no answer within 0.1 s")}
    assert time.monotonic() - began < GRACE
    assert not link.wait_for_job(0)
    link.close()


def test_link_needs_the_standard_library_only():
    """Frameworks load it where there is no numpy."""
    code = "import sys; import nestfed.sites.link; print({'numpy', 'jax', 'pandas'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
