"""What runs in Flower's processes: a relay at each site, and beside the SuperLink a loop that carries letters.

Flower starts a new process for every message to a site; no JAX, no data and no state is here. The app that travels has
one line, which imports this module: sites have it installed.
"""

import json
import time
from collections.abc import Mapping
from pathlib import Path

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from nestfed.sites.link import Answers, LostSite, fetch_letters, relay

POLL = 0.25  # seconds; Flower waits a whole second where it is asked for an answer that has not arrived completely
CONNECT = 60.0  # seconds to wait for a site that is not connected
SLACK = 3.0  # seconds for an answer on its way, beyond those in which the worker must answer

client, server = ClientApp(), ServerApp()


@client.query()
def relay_letter(message: Message, context: Context) -> Message:
    """At a site: hand a letter to the worker and return its answer, or why there is none."""
    letter, worker = message.content.config_records["letter"], Path(str(context.node_config["worker"]))
    data, timeout = letter["bytes"], letter["timeout"]
    assert isinstance(data, bytes) and isinstance(timeout, float)
    try:
        content = ConfigRecord({"bytes": relay(worker, data, timeout)})
    except OSError as error:
        content = ConfigRecord({"reason": str(error)})
    return Message(RecordDict({"answer": content}), reply_to=message)


@server.main()
def carry_letters(grid: Grid, context: Context) -> None:
    """Beside the server: fetch letters at the coordinator's socket and carry them to the sites."""
    nodes = {site: int(node) for site, node in json.loads(str(context.run_config["nodes"])).items()}

    def carry(letters: Mapping[str, bytes], timeout: float) -> Answers:
        """One message a site, of one record: each record, and each array of one, costs requests of its own."""
        waiting, sent, began = dict(letters), {}, time.monotonic()
        deadline = began + timeout
        connected_by = min(deadline, began + CONNECT)
        while time.monotonic() < (deadline + SLACK if sent else connected_by if waiting else 0):
            if waiting and time.monotonic() < deadline:
                connected = set(grid.get_node_ids())
                ready = [site for site in waiting if nodes[site] in connected]
                left = deadline - time.monotonic()
                record = lambda site: ConfigRecord({"bytes": waiting[site], "timeout": left})
                messages = [
                    Message(RecordDict({"letter": record(site)}), dst_node_id=nodes[site], message_type="query")
                    for site in ready
                ]
                for number, site in zip(grid.push_messages(messages), ready, strict=True):
                    sent[number] = site
                    del waiting[site]
            for reply in grid.pull_messages(list(sent)) if sent else ():
                site = sent.pop(reply.metadata.reply_to_message_id)
                yield site, _read(reply)
            time.sleep(POLL)
        for site in waiting:
            yield site, LostSite(f"{site} is not connected to Flower's SuperLink")
        for site in sent.values():
            yield site, LostSite(f"Flower brought no answer of {site} within {timeout:g} s")

    fetch_letters(Path(str(context.run_config["letters"])), carry)


def _read(reply: Message) -> bytes | LostSite:
    if reply.has_error():
        return LostSite(f"Flower: {reply.error.reason}")
    answer = reply.content.config_records["answer"]
    data = answer.get("bytes")
    return data if isinstance(data, bytes) else LostSite(str(answer["reason"]))
