"""What runs in NVIDIA FLARE's job processes: a relay at each site, and beside the server a loop that carries letters.

No JAX, no data and no state is here, and no code travels: a job is a configuration that names these two classes, which
a site has installed with nestfed and allows by name.
"""

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from nvflare.collab import CollabCallError, collab

from nestfed.sites.link import Answers, ask_each, fetch_letters, relay

WORKER = "NESTFED_WORKER"  # the variable of a site's own processes that has the path of the worker's socket
NOT_REACHED = "FLARE does not reach"  # how the reason begins where not even the relay has answered
LOOK = 5.0  # seconds without an answer, until the site is asked whether it lives; and seconds for it to say so
DEAD = 2  # such questions without an answer, in a row
SLACK = 2.0  # seconds for the way between server and site, beyond those that the worker may take


class Relay:
    """At a site: hands a letter of the server to the site's worker and returns (its answer, why there is none)."""

    @collab.publish
    def ask(self, letter: bytes, timeout: float) -> tuple[bytes | None, str]:
        if collab.caller != "server":  # FLARE lets the sites of a job call each other
            raise PermissionError(f"{collab.caller} has no business here")
        try:
            return relay(Path(os.environ[WORKER]), letter, timeout), ""
        except OSError as error:
            return None, str(error)

    @collab.publish
    def show_life(self) -> None:
        """A worker may take long; that there is nobody any more should show sooner."""


class Post:
    """Beside the server: fetches letters at the coordinator's socket and carries them to the sites."""

    def __init__(self, coordinator: str):
        self.coordinator = coordinator

    @collab.main
    def carry_letters(self) -> None:
        sites, context = {site.name: site for site in collab.clients}, collab.context
        threads = ThreadPoolExecutor(len(sites) + 1)

        def ask_site(site: str, letter: bytes, timeout: float) -> bytes:
            if site not in sites:
                raise OSError(f"{NOT_REACHED} {site}: the running job began without it")
            call = threads.submit(sites[site](timeout=timeout + SLACK).ask, letter, timeout)
            failures = 0
            while True:
                try:
                    answer, reason = call.result(LOOK)
                    break
                except TimeoutError:  # only of the waiting here: a worker may take long
                    failures = 0 if shows_life(site) else failures + 1
                    if failures == DEAD:
                        raise OSError(f"{NOT_REACHED} {site}: its relay shows no life") from None
                except CollabCallError as error:
                    if context.is_aborted():  # the job ends, and the next one is asked: this is no answer
                        raise SystemExit from error
                    raise OSError(f"{NOT_REACHED} {site}: {error}") from error
            if answer is None:
                raise OSError(reason)
            return answer

        def shows_life(site: str) -> bool:
            try:
                sites[site](timeout=LOOK).show_life()
                return True
            except CollabCallError:
                return False

        def carry(letters: Mapping[str, bytes], timeout: float) -> Answers:
            return ask_each(lambda site, letter: ask_site(site, letter, timeout), letters, timeout + 2 * SLACK)

        fetch_letters(Path(self.coordinator), carry)
